"""A lock for each number of a table, for what is compared with steps without locks.

    acquire(locks, key)    # in compiled functions; locks: int32, 0 where nobody holds it, in memory that workers share
    release(locks, key)

numba has no atomic operations for CPUs: these are LLVM's own, compare-and-swap and a store that releases.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from manyhands.sparse.compile import compiled

Array = NDArray[Any]


def _take(context: Any, locks: Any, key: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        free, held = ir.IntType(32)(0), ir.IntType(32)(1)
        swap = builder.cmpxchg(builder.gep(data, [arguments[1]]), free, held, "acquire", "monotonic")
        return builder.extract_value(swap, 1)

    return numba.types.boolean(locks, key), generate


def _load(context: Any, locks: Any, key: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.load_atomic(builder.gep(data, [arguments[1]]), "acquire", 4)

    return numba.types.int32(locks, key), generate


def _store(context: Any, locks: Any, key: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        number = context.cast(builder, arguments[2], signature.args[2], numba.types.int32)
        builder.store_atomic(number, builder.gep(data, [arguments[1]]), "release", 4)
        return context.get_dummy_value()

    return numba.types.void(locks, key, value), generate


def _yield(context: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return numba.types.void(), generate


take: Any = intrinsic(_take)
"""take(locks, key): whether the lock was free, and is held now."""
load: Any = intrinsic(_load)
"""load(numbers, key): int32, read anew each time; what its writer did before is seen."""
store: Any = intrinsic(_store)
"""store(numbers, key, value): by the only one who may write it now."""
yield_processor: Any = intrinsic(_yield)
"""yield_processor(): another process may go on here, the system's sched_yield."""


_SPINS = 1000  # about a microsecond: longer, and whoever is waited for may have no processor


@compiled
def give_way(tries: int) -> int:
    """After so many tries in vain: another process may have this processor. Returns the number of the next try."""
    if tries >= _SPINS:
        yield_processor()
        return 0
    return tries + 1


@compiled
def acquire(locks: Array, key: int) -> None:
    """Wait until the lock is free, and hold it. Who needs several takes them in one order, always the same."""
    tries = 0
    while not take(locks, np.uint64(key)):
        while load(locks, np.uint64(key)):  # reads alone: the cache line stays where it is
            tries = give_way(tries)


@compiled
def release(locks: Array, key: int) -> None:
    """By who holds it."""
    store(locks, np.uint64(key), 0)
