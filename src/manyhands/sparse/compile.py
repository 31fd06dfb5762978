"""numba, in one place: functions that run as machine code. Import this where the first kernel is made.

How to write such a function is in docs/sparse.md: indices unsigned, no slices in inner loops, dimensions as arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from manyhands.errors import Unsupported

try:
    import numba
    from llvmlite import ir
    from numba.extending import intrinsic
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
    return _compiled(function, _FAST_MATH)


def compiled_exact(function: Callable[..., Any]) -> Callable[..., Any]:
    """Likewise, with each operation as it is written: sums keep their order, and a quotient is rounded once."""
    return _compiled(function, set())


def _compiled(function: Callable[..., Any], fast_math: set[str]) -> Callable[..., Any]:
    options: dict[str, Any] = {"nogil": True, "fastmath": fast_math, "error_model": "numpy", "boundscheck": False}
    try:
        return numba.njit(cache=True, **options)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # numba found no folder for its cache
        return numba.njit(cache=False, **options)(function)  # type: ignore[no-any-return]


def _prefetch(context: Any, array: Any, index: Any) -> Any:
    """Types and code of `prefetch`, as numba asks for them."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        byte, whole = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, whole, whole, whole])
        load = builder.module.declare_intrinsic("llvm.prefetch", (byte,), kind)
        address = builder.bitcast(builder.gep(data, [arguments[1]]), byte)
        builder.call(load, [address, whole(0), whole(3), whole(1)])  # to read, into all caches, data
        return context.get_dummy_value()

    return numba.types.void(array, index), generate


prefetch: Any = intrinsic(_prefetch)
"""prefetch(array, index), in compiled functions: begin to load the cache line of this element of a flat array, and go on
meanwhile. Rows come in random order, and each would wait for memory: load those that come a few rows later."""
