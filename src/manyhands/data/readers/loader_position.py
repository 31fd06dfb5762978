"""Where a DataLoader stands that can go on by itself, as a checkpoint keeps it: torchdata's StatefulDataLoader, and any with
its two methods, `state_dict` and `load_state_dict`."""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.utils.data import DataLoader

from manyhands import rng
from manyhands.data.source import Reading
from manyhands.errors import BadInput


def can_go_on(loader: DataLoader[Any]) -> bool:
    """Whether it can be asked where it stands, and put there."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


@dataclass(frozen=True, kw_only=True)
class LoaderPosition:
    """What the loader says, and the random numbers that its code draws next."""

    epoch: int
    batches: int
    """Of this epoch, that are out."""
    processes: int
    """Its `num_workers`: its state is of these."""
    state: Any
    random: tuple[dict[str, torch.Tensor], dict[str, Any]]

    @classmethod
    def of(cls, loader: DataLoader[Any], epoch: int, batches: int) -> Self:
        """Of a loader that has given so many batches, by the process's generators."""
        state = loader.state_dict()  # type: ignore[attr-defined]
        return cls(epoch=epoch, batches=batches, processes=loader.num_workers, state=state, random=rng.capture())

    def text(self) -> str:
        """For a checkpoint's JSON. BadInput for a state that cannot be written."""
        made = io.BytesIO()
        try:
            torch.save(vars(self), made)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise _not_kept(error) from error
        return base64.b64encode(made.getvalue()).decode()

    @classmethod
    def read(cls, text: str) -> Self:
        """What `text` gave. Only tensors and plain values are read: BadInput for others."""
        try:
            return cls(**torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True))
        except pickle.UnpicklingError as error:
            raise _not_kept(error) from error

    def fits(self, loader: DataLoader[Any], reading: Reading) -> bool:
        """Whether this loader can go on here, at the first batch of a reading."""
        there = self.epoch, self.batches, self.processes
        return can_go_on(loader) and there == (reading.epoch, reading.first_tick, loader.num_workers)

    def restored(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """The batches that follow; the process's generators stand as they did."""
        loader.load_state_dict(self.state)  # type: ignore[attr-defined]
        batches = iter(loader)
        tensors, values = self.random
        rng.restore({name: state for name, state in tensors.items() if name != "cuda"}, values)
        return batches


def _not_kept(error: Exception) -> BadInput:
    first = str(error).splitlines()[0]
    return BadInput(
        f"state_dict() of the DataLoader holds what no checkpoint keeps ({first}): let it, and that of its dataset, give numbers, texts and tensors, and "
        "lists, tuples and dicts of them; or train without a run directory"
    )
