"""What an operation is, as one number: ranks compare it, and a message names both sides where they differ."""

from __future__ import annotations

import torch

from manyhands.errors import BadInput
from manyhands.transport.frame import DTYPES

OPERATIONS = (
    "mean_",
    "all_reduce_",
    "all_gather",
    "reduce_scatter",
    "broadcast_",
    "barrier",
    "all_gather_json",
    "send",
)
_OPERATION = {name: number for number, name in enumerate(OPERATIONS)}
_DTYPE = {dtype: number for number, dtype in enumerate(DTYPES)}


def signature(operation: str, dtype: torch.dtype = torch.uint8, source: int = 0) -> int:
    """One number for (operation, dtype, source). BadInput for a dtype that cannot travel."""
    number = _DTYPE.get(dtype)
    if number is None:
        names = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
        raise BadInput(f"{operation} takes tensors of {names}; got {dtype}: convert or view it as one of these first")
    return _OPERATION[operation] | number << 8 | source << 16


def describe(number: int, n: int) -> str:
    """The operation of a signature on n elements, in words."""
    operation = OPERATIONS[number & 0xFF]
    if operation in ("barrier", "all_gather_json"):
        return operation
    dtype = str(DTYPES[number >> 8 & 0xFF]).removeprefix("torch.")
    source = f" from worker {number >> 16}" if operation == "broadcast_" else ""
    return f"{operation}{source} of {n} {dtype}"


def itemsize(number: int) -> int:
    """Bytes an element of a signature's dtype."""
    return DTYPES[number >> 8 & 0xFF].itemsize
