"""A worker's copy of the model, as strategies see it: flat vectors, optimizer state, evaluation, and what must be equal
on all workers.

It knows groups and data; it knows no strategy and no engine.
"""
