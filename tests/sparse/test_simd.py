"""sparse/simd.py: each vector instruction, in compiled functions, beside NumPy."""

from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="module")
def functions() -> tuple[Any, Any]:
    """(dot product, sum of multiples), compiled; numba takes a second to import."""
    global prefetch, add, every, fma, lanes, load, store, total, zeros
    from manyhands.sparse.compile import compiled, prefetch
    from manyhands.sparse.simd import add, every, fma, lanes, load, store, total, zeros

    @compiled
    def dot(a: Any, b: Any, first: int, dim: int) -> Any:
        found = zeros(a)
        for j in range(np.uint64(0), dim, lanes(a)):
            prefetch(b, first + j)
            found = fma(load(a, first + j, dim - j), load(b, first + j, dim - j), found)
        return total(found)

    @compiled
    def axpy(a: Any, b: Any, factors: Any, which: int, first: int, dim: int) -> None:
        """b = factors[which] · a + a + b from `first` on."""
        for j in range(np.uint64(0), dim, lanes(a)):
            own = load(a, first + j, dim - j)
            moved = fma(every(factors, which), own, add(own, load(b, first + j, dim - j)))
            store(b, first + j, moved, dim - j)

    return dot, axpy


def test_rows_of_any_length_at_any_place(functions: tuple[Any, Any]) -> None:
    """What stands before and behind is neither read nor written."""
    dot, axpy = functions
    for dtype, close in ((np.float32, 1e-5), (np.float64, 1e-12)):
        for dim in (1, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 100):
            a, b = np.random.default_rng(dim).normal(size=(2, dim + 6)).astype(dtype)
            for edge in (slice(None, 3), slice(dim + 3, None)):
                a[edge] = np.nan
            row = slice(3, dim + 3)
            first, length = np.uint64(3), np.uint64(dim)
            assert np.allclose(dot(a, b, first, length), a[row] @ b[row], rtol=close, atol=close), (dtype, dim)
            moved, factors = b.copy(), np.array([7, -0.5], dtype)
            axpy(a, moved, factors, np.uint64(1), first, length)
            assert np.allclose(moved[row], b[row] + a[row] / 2, rtol=close, atol=close), (dtype, dim)
            assert np.array_equal(moved[:3], b[:3]), (dtype, dim)
            assert np.array_equal(moved[dim + 3 :], b[dim + 3 :]), (dtype, dim)
