"""`train()`: its configuration, the worker loop and its parts, the run directory.

The command, adapters and everything that measures import this.
"""
