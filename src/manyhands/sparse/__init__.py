"""Tables of rows that are found by a key, and kernels: compiled steps that change such rows in place.

What stands here is the contracts, how a row begins, and numba. The algorithms are in `kernels/`. Replicas and tasks
import from here.
"""
