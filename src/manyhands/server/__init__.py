"""The parameter server: a shared, versioned, sharded store of parameters, its rules, its service and its clients.

Engines start it; strategies use the contract in `base.py`. Knows nothing of tasks.
"""
