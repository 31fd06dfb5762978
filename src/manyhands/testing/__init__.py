"""Conformance suites for groups, servers, strategies and engines, and the tools that they use. For tests, also of third
parties.
"""
