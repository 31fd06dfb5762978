"""A random state of one's own, swapped in while somebody's code runs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from manyhands.rng import mixed


class RngScope:
    """`with own:` runs code under CPU generators (torch, numpy, Python) that go on where they stood at the last `with
    own:`.

    Outside, the process's generators stand as if that code had not run. A swap costs tens of microseconds, for once a
    batch.
    """

    def __init__(self, key: tuple[int, ...]) -> None:
        """Seeded by `key`, whole numbers of at least 0."""
        self._seed = mixed(key)
        self._state: tuple[Any, Any, Any] | None = None
        self._outside: list[tuple[Any, Any, Any]] = []

    @classmethod
    def from_here(cls) -> RngScope:
        """One that goes on from where the process's generators stand now."""
        own = cls(())
        own._state = _capture()
        return own

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, the process's generators go a way of their own, and not the one that is drawn from here a second
        time.

        Afterwards, if nobody else drew from them, they go on from where this state stands, as if there had been one.
        """
        _seed(mixed((int(torch.randint(2**62, ()).item()),)))
        before = _capture()
        try:
            yield
        finally:
            if self._state is not None and _equal(_capture(), before):
                _restore(self._state)

    def __enter__(self) -> None:
        self._outside.append(_capture())
        if self._state is None:
            _seed(self._seed)
        else:
            _restore(self._state)

    def __exit__(self, *error: object) -> None:
        self._state = _capture()
        _restore(self._outside.pop())


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed CUDA too, which is not put back
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _capture() -> tuple[Any, Any, Any]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _equal(one: tuple[Any, Any, Any], other: tuple[Any, Any, Any]) -> bool:
    arrays = zip(one[1], other[1], strict=True)
    return torch.equal(one[0], other[0]) and one[2] == other[2] and all(np.array_equal(a, b) for a, b in arrays)


def _restore(state: tuple[Any, Any, Any]) -> None:
    torch.set_rng_state(state[0])
    np.random.set_state(state[1])
    random.setstate(state[2])
