"""The rules by which a server merges a push into the center: one algorithm a module, over the contract in `base`.

Only the store calls them.
"""
