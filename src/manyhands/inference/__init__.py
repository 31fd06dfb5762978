"""A trained model at work on all workers: `predict` and `evaluate`.

The command imports this; nothing that trains does. How rows come back is `data/row_pieces.py` and `engines/driver/`.
"""
