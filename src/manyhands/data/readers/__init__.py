"""Readers of data, one kind a module: tensors and arrays, datasets, loaders, streams, tables, files.

Only `data.sources` chooses among them.
"""
