"""How each format's files are read, one a file; `base.py` is the contract. Only `data/shards` imports them."""
