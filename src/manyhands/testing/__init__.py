"""Conformance suites for groups, servers, strategies, engines and step executors, and the tools that they use. For tests,
also of third parties.
"""
