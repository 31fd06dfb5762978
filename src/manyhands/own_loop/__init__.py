"""The user's own training loop on many workers: `prepare`, `launch`, and what they return.

The command and `training` (output of rank zero alone) import this.
"""
