"""Conformance suites for groups, servers, strategies and engines, for third parties, too."""
