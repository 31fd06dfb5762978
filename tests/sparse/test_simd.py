"""sparse/simd.py: each vector instruction, in compiled functions, beside NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from manyhands.sparse.compile import compiled, prefetch
from manyhands.sparse.simd import add, every, fma, lanes, load, store, total, zeros

Array = NDArray[Any]


@compiled
def _dot(a: Array, b: Array, first: int, dim: int) -> Any:
    found = zeros(a)
    for j in range(np.uint64(0), dim, lanes(a)):
        prefetch(b, first + j)
        found = fma(load(a, first + j, dim - j), load(b, first + j, dim - j), found)
    return total(found)


@compiled
def _axpy(a: Array, b: Array, factors: Array, which: int, first: int, dim: int) -> None:
    """b = factors[which] · a + a + b from `first` on."""
    for j in range(np.uint64(0), dim, lanes(a)):
        own = load(a, first + j, dim - j)
        moved = fma(every(factors, which), own, add(own, load(b, first + j, dim - j)))
        store(b, first + j, moved, dim - j)


@pytest.mark.parametrize("dim", [1, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 100])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_of_any_length_at_any_place(dim: int, dtype: Any) -> None:
    """What stands before and behind is neither read nor written."""
    random = np.random.default_rng(dim)
    a, b = random.normal(size=(2, dim + 6)).astype(dtype)
    for edge in (slice(None, 3), slice(dim + 3, None)):
        a[edge] = np.nan
    row = slice(3, dim + 3)
    close = {"rtol": 1e-5 if dtype == np.float32 else 1e-12, "atol": 1e-5 if dtype == np.float32 else 1e-12}
    assert np.allclose(_dot(a, b, np.uint64(3), np.uint64(dim)), a[row] @ b[row], **close)
    moved, factors = b.copy(), np.array([7, -0.5], dtype)
    _axpy(a, moved, factors, np.uint64(1), np.uint64(3), np.uint64(dim))
    assert np.allclose(moved[row], b[row] + a[row] / 2, **close)
    assert np.array_equal(moved[:3], b[:3])
    assert np.array_equal(moved[dim + 3 :], b[dim + 3 :])
