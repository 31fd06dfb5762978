"""numba, in one place: functions that run as machine code. Import this where the first kernel is made.

How to write such a function is in docs/sparse.md: indices unsigned, no slices in inner loops, dimensions as arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from manyhands.errors import Unsupported

try:
    import numba
except ImportError as error:
    raise Unsupported(
        "kernels are compiled by numba, which is not installed: pip install 'manyhands[sparse]'"
    ) from error

_FAST_MATH = {"reassoc", "contract", "arcp", "nsz"}
"""What may change: the order of sums, a multiplication and an addition as one, division by a reciprocal, the sign of
zero. Not nnan and ninf, which delete checks for what is not finite."""


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as machine code, compiled for the types of its first call and kept on the disk for the next process.

    It runs on one thread, without the interpreter's lock. Where no folder can be written to, nothing is kept.
    """
    options: dict[str, Any] = {"nogil": True, "fastmath": _FAST_MATH, "error_model": "numpy", "boundscheck": False}
    try:
        return numba.njit(cache=True, **options)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # numba found no folder for its cache
        return numba.njit(cache=False, **options)(function)  # type: ignore[no-any-return]
