"""Data: sources of rows, readers of formats, and which worker reads which rows (sharding, leases).

Training, the user's own loop, engines and evidence import this; it knows no model.
"""
