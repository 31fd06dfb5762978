"""Files whose rows are read while a run trains, instead of before: where they lie, how each format is read, what a host
keeps of them. `shards()` in `source.py` is the entry; only `data` imports the rest.
"""
