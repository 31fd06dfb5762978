"""The random state of a process (torch, numpy, Python): seed it, save it, put it back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_all(seed: int, rank: int = 0) -> None:
    """Seed all generators; rank 0 gets `seed` itself, so that it draws what a plain script with this seed draws."""
    own = seed if rank == 0 else mixed((seed, rank))
    torch.manual_seed(own)
    np.random.seed(own % 2**32)
    random.seed(own)


def mixed(key: tuple[int, ...]) -> int:
    """One seed in [0, 2^63) from several whole numbers, without collisions between neighbours."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)


def capture() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, JSON values) that hold the whole random state."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        tensors["cuda"] = torch.cuda.get_rng_state()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    tensors["numpy"] = torch.from_numpy(np.asarray(keys).astype(np.int64))
    version, internal, gauss = random.getstate()
    return tensors, {"numpy": [str(kind), position, has_gauss, cached], "python": [version, list(internal), gauss]}


def restore(tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    """Put back what `capture` gave."""
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
    kind, position, has_gauss, cached = values["numpy"]
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, cached))
    version, internal, gauss = values["python"]
    random.setstate((version, tuple(internal), gauss))


def generator_states() -> dict[str, str]:
    """{torch, numpy, python: the generator's state}, to compare with a later one: they differ if somebody drew."""
    tensors, values = capture()
    return {
        "torch": tensors["torch"].numpy().tobytes().hex(),
        "numpy": f"{values['numpy']} {tensors['numpy'].numpy().tobytes().hex()}",
        "python": str(values["python"]),
    }


@contextmanager
def kept() -> Iterator[None]:
    """Whatever is drawn or seeded inside, the state afterwards is the one before."""
    tensors, values = capture()
    try:
        yield
    finally:
        restore(tensors, values)
