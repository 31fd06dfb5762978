"""Where a DataLoader stands that can go on by itself, as a checkpoint keeps it: torchdata's StatefulDataLoader, and any with
its two methods, `state_dict` and `load_state_dict`."""

from __future__ import annotations

import base64
import copy
import io
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.utils.data import DataLoader

from manyhands import rng
from manyhands.errors import BadInput
from manyhands.rng import RngScope


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
    random: RngScope

    @classmethod
    def of(cls, loader: DataLoader[Any], epoch: int, batches: int, own: RngScope) -> Self:
        """Of a loader that has given so many batches, by these generators."""
        with own:
            state = copy.deepcopy(loader.state_dict())  # type: ignore[attr-defined]  # it may change as the loader goes on
        return cls(epoch=epoch, batches=batches, processes=loader.num_workers, state=state, random=own.copy())

    def text(self) -> str:
        """For a checkpoint's JSON. BadInput for a state that cannot be written."""
        made = io.BytesIO()
        with self.random.copy():
            random = rng.capture()
        try:
            torch.save({**vars(self), "random": random}, made)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise _not_kept(error) from error
        return base64.b64encode(made.getvalue()).decode()

    @classmethod
    def read(cls, text: str) -> Self:
        """What `text` gave. Only tensors and plain values are read: BadInput for others."""
        try:
            found = torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
        except pickle.UnpicklingError as error:
            raise _not_kept(error) from error
        tensors, values = found["random"]
        random = RngScope(())
        with random:
            rng.restore({name: state for name, state in tensors.items() if name != "cuda"}, values)
        return cls(**{**found, "random": random})

    def fits(self, loader: DataLoader[Any], epoch: int, batches: int) -> bool:
        """Whether this loader can go on by it after so many batches."""
        return can_go_on(loader) and (self.epoch, self.batches, self.processes) == (epoch, batches, loader.num_workers)

    def restored(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """The batches that follow. They come by generators that stand as `random`."""
        loader.load_state_dict(self.state)  # type: ignore[attr-defined]
        return iter(loader)


def _not_kept(error: Exception) -> BadInput:
    first = str(error).splitlines()[0]
    return BadInput(
        f"state_dict() of the DataLoader holds what no checkpoint keeps ({first}): let it, and that of its dataset, give numbers, texts and tensors, and "
        "lists, tuples and dicts of them; or train without a run directory"
    )
