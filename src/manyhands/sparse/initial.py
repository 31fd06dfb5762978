"""How a row begins: numbers that depend on the seed, the table, the key and the column alone, wherever they are made."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.sparse.rows import Rows

_CHUNK = 1 << 20  # numbers at once: what is computed in between stays in the cache
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def initial_rows(rows: Rows, name: str, seed: int, keys: NDArray[np.int64] | range) -> NDArray[Any]:
    """[len(keys), dim]: how the rows of these keys of the table `name` begin."""
    kind, number = rows.initial_number()
    found = np.zeros((len(keys), rows.dim), rows.dtype)
    if kind == "constant":
        found += number
    if kind in ("zeros", "constant"):
        return found
    numbers = np.asarray(keys, np.uint64)
    step = max(1, _CHUNK // rows.dim)
    for start in range(0, len(numbers), step):
        bits = _bits(name, seed, numbers[start : start + step], rows.dim)
        found[start : start + step] = _DRAWN[kind](bits, number)
    return found


def mix64(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64-bit numbers after which neighbours have nothing in common.

    Source: the finalizer of SplitMix64, in Fast Splittable Pseudorandom Number Generators, Guy L. Steele Jr., Doug Lea,
    Christine H. Flood, 2014.
    """
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def _bits(name: str, seed: int, keys: NDArray[np.uint64], dim: int) -> NDArray[np.uint64]:
    """[len(keys), dim] of 64 random bits each."""
    table = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    base = mix64(np.array([table ^ (seed % 2**64)], np.uint64))
    by_key = mix64(base + mix64(keys + GOLDEN))
    return mix64(by_key[:, None] + np.arange(1, dim + 1, dtype=np.uint64) * GOLDEN)


def _uniform(bits: NDArray[np.uint64], most: float) -> Any:
    return (_from_0_to_1(bits) * 2 - 1) * most


def _normal(bits: NDArray[np.uint64], deviation: float) -> Any:
    """By the method of Box and Muller (A Note on the Generation of Random Normal Deviates, 1958)."""
    radius = np.sqrt(-2 * np.log1p(-_from_0_to_1(bits)))
    return deviation * radius * np.cos(2 * np.pi * _from_0_to_1(mix64(bits)))


def _positive(bits: NDArray[np.uint64], most: float) -> Any:
    return _from_0_to_1(bits) * most


def _from_0_to_1(bits: NDArray[np.uint64]) -> Any:
    """In [0, 1)."""
    return (bits >> np.uint64(11)) * 2.0**-53


_DRAWN = {"uniform": _uniform, "positive": _positive, "normal": _normal}
