"""Groups: the workers' collectives, and the codecs that compress what they exchange.

Engines make groups; strategies, replicas and training use the contract in `group.py`. Knows nothing of tasks.
"""
