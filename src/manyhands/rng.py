"""The random state of a process (torch, numpy, Python): seed it, save it, put it back; draw alike on all ranks, or from
a state of one's own."""

from __future__ import annotations

import random
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyhands.comm.group import Group


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


def digest() -> int:
    """Of the states of all generators on the CPU: another one, if somebody drew."""
    found = zlib.crc32(torch.get_rng_state().numpy().data)
    _, keys, position, *_ = np.random.get_state()
    found = zlib.crc32(np.asarray(keys).tobytes() + bytes(str(position), "ascii"), found)
    _, internal, gauss = random.getstate()
    return zlib.crc32(array("Q", internal).tobytes() + bytes(str(gauss), "ascii"), found)


@contextmanager
def kept() -> Iterator[None]:
    """Whatever is drawn or seeded inside, the state afterwards is the one before."""
    tensors, values = capture()
    try:
        yield
    finally:
        restore(tensors, values)


def take_first(group: Group) -> None:
    """From here on every rank's generators go on as rank 0's. A collective."""
    tensors, values = capture()
    tensors.pop("cuda", None)
    for state in tensors.values():
        group.broadcast_(state, 0)
    values = group.all_gather_json(values if group.rank == 0 else None)[0]
    if group.rank:
        restore(tensors, values)


@contextmanager
def drawn_alike(group: Group, generators: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Within, every rank draws rank 0's numbers. Rank 0's generators, and all of `generators`, have then moved on as in
    one process; the other ranks' global ones are as before. A collective.
    """
    tensors, values = capture()
    tensors.pop("cuda", None)  # orders are drawn on the CPU
    own = [generator.get_state() for generator in generators]
    for state in [*tensors.values(), *own]:
        group.broadcast_(state, 0)
    values = group.all_gather_json(values if group.rank == 0 else None)[0]
    for generator, state in zip(generators, own, strict=True):
        generator.set_state(state)
    with kept() if group.rank else nullcontext():
        if group.rank:
            restore(tensors, values)
        yield


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
        own._state = _cpu_state()
        return own

    def copy(self) -> RngScope:
        """One that goes on from where this one stands now."""
        made = RngScope(())
        made._seed, made._state = self._seed, self._state
        return made

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, the process's generators go a way of their own, and not the one that is drawn from here a second
        time.

        Afterwards, if nobody else drew from them, they go on from where this state stands, as if there had been one.
        """
        _seed_cpu(mixed((int(torch.randint(2**62, ()).item()),)))
        before = _cpu_state()
        try:
            yield
        finally:
            if self._state is not None and _equal(_cpu_state(), before):
                _set_cpu_state(self._state)

    def __enter__(self) -> None:
        self._outside.append(_cpu_state())
        if self._state is None:
            _seed_cpu(self._seed)
        else:
            _set_cpu_state(self._state)

    def __exit__(self, *error: object) -> None:
        self._state = _cpu_state()
        _set_cpu_state(self._outside.pop())


class TorchScope:
    """`with own:` draws torch's numbers, on the CPU and on the GPU at hand, from states of this rank's own; for those
    outside it is as if one number had been drawn, whatever is drawn within.

    That number and `rank` seed what is drawn within, so that it follows from the generators' states alone.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._outside: list[tuple[torch.Generator, Tensor]] = []

    def __enter__(self) -> None:
        drawn = int(torch.randint(2**62, ()).item())
        self._outside = [(generator, generator.get_state()) for generator in _generators()]
        for number, (generator, _) in enumerate(self._outside):
            generator.manual_seed(mixed((drawn, self._rank, number)))

    def __exit__(self, *error: object) -> None:
        for generator, outside in self._outside:
            generator.set_state(outside)
        self._outside = []


def _generators() -> list[torch.Generator]:
    """Those that torch's functions draw from in this process: the CPU's, and the GPU's that is at hand."""
    found = [torch.default_generator]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return found


def _seed_cpu(seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed CUDA too, which is not put back
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _cpu_state() -> tuple[Any, Any, Any]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _equal(one: tuple[Any, Any, Any], other: tuple[Any, Any, Any]) -> bool:
    arrays = zip(one[1], other[1], strict=True)
    return torch.equal(one[0], other[0]) and one[2] == other[2] and all(np.array_equal(a, b) for a, b in arrays)


def _set_cpu_state(state: tuple[Any, Any, Any]) -> None:
    torch.set_rng_state(state[0])
    np.random.set_state(state[1])
    random.setstate(state[2])
