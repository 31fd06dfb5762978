"""Map-style datasets: rows that the user's own code loads, one by one, in this process or in loader processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate
from typing_extensions import override

from manyhands import rng
from manyhands.data.batch import Collate
from manyhands.data.source import BY_OPTION, Indexed, Loading, Pick, Picks, Planned, Reading, Slice, Slices, nonempty


@dataclass(frozen=True)
class RowLoader:
    """Turns row indices into batches by calling the user's dataset and collate function.

    Without processes, rows load in the caller's thread and draw from its generators, as in a plain loop, so that random
    augmentation stays bit-equal to one; no thread reads ahead. With processes, each slice is loaded with generators
    seeded by (seed, epoch, part, tick): what a row draws depends neither on timing nor on how many processes there are,
    and a resumed epoch draws the same. Only a `worker_init_fn` of the user's own takes that over.
    """

    dataset: Any
    collate: Collate = default_collate
    processes: int = 0
    options: dict[str, Any] = field(default_factory=dict)  # further arguments of the DataLoader that loads

    def take(self, indices: Sequence[Any]) -> Any:
        """The batch of these rows, loaded here and now."""
        return self.collate(fetch(self.dataset, [_plain(i) for i in indices]))

    def slices(self, picks: Iterator[Pick], reading: Reading) -> Slices:
        """Load what is picked, in that order."""
        if self.processes == 0:
            for pick in picks:
                yield pick.load(self.take)
            return
        plan = list(picks)
        batches = iter(self._loader([pick for pick in plan if len(pick.own)], reading))
        try:
            for pick in plan:
                yield pick.load(lambda own: next(batches))
        finally:
            end_processes(batches)

    def load_here(self, pick: Pick, reading: Reading) -> Slice:
        """One slice, loaded in this process: the same bits as of `slices`."""
        if not self.processes:
            return pick.load(self.take)
        with rng.kept():  # as a loader process would
            rng.seed_all(rng.mixed(_key(pick, reading)))
            return pick.load(self.take)

    def _loader(self, plan: list[Pick], reading: Reading) -> DataLoader[Any]:
        own = "worker_init_fn" in self.options
        batches = [[_plain(i) for i in pick.own] for pick in plan]
        if not own:
            batches = [[_key(pick, reading), *batch] for pick, batch in zip(plan, batches, strict=True)]
        return DataLoader(
            self.dataset if own else _Seeded(self.dataset),
            batch_sampler=batches,
            collate_fn=self.collate,
            num_workers=min(self.processes, max(1, len(plan))),
            generator=torch.Generator().manual_seed(  # else the DataLoader draws from the global one
                rng.mixed((reading.seed, reading.epoch, reading.rank))
            ),
            **self.options,
        )


class RowSource(Planned):
    """A source whose rows a RowLoader loads."""

    reader: RowLoader

    @override
    def load(self, picks: Iterator[Pick], reading: Reading) -> Slices:
        return self.reader.slices(picks, reading)

    @override
    def load_here(self, pick: Pick, reading: Reading) -> Slice:
        return self.reader.load_here(pick, reading)


class DatasetRows(RowSource, Indexed):
    """A torch Dataset, a list of rows, or anything else with `__len__` and `__getitem__`."""

    def __init__(
        self, dataset: Any, collate: Collate | None = None, processes: int = 0, what: str = "the dataset"
    ) -> None:
        self.rows = nonempty(len(dataset), what)
        self.reader = RowLoader(dataset, collate or default_collate, processes)
        self.loading = Loading(processes, BY_OPTION)

    @override
    def take(self, indices: Sequence[Any]) -> Any:
        return self.reader.take(indices)

    @override
    def picks(self, reading: Reading) -> Picks:
        set_epoch(self.reader.dataset, reading.epoch)
        return super().picks(reading)


def fetch(dataset: Any, indices: list[Any]) -> list[Any]:
    """These rows of a dataset, at once where it offers that, as torch's own DataLoader asks for them."""
    if hasattr(dataset, "__getitems__") and dataset.__getitems__:
        return list(dataset.__getitems__(indices))
    return [dataset[i] for i in indices]


def set_epoch(data: Any, epoch: int) -> None:
    """Tell a dataset or sampler that wants to know (PyTorch's and Hugging Face's custom) which epoch begins."""
    if callable(getattr(data, "set_epoch", None)):
        data.set_epoch(epoch)


def end_processes(batches: Iterator[Any]) -> None:
    """End a DataLoader iterator's processes now. Dropping it does so only once no traceback holds it."""
    if hasattr(batches, "_shutdown_workers"):
        batches._shutdown_workers()


def _key(pick: Pick, reading: Reading) -> tuple[int, ...]:
    """What a slice's generators are seeded by in loader processes."""
    return (reading.seed, reading.epoch, pick.part, pick.index)


def _plain(index: Any) -> Any:
    return int(index) if isinstance(index, np.integer) else index


class _Seeded(Dataset[Any]):
    """The user's dataset. The key in front of a batch's indices seeds the process's generators before its rows load."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, keyed: list[Any]) -> list[Any]:
        rng.seed_all(rng.mixed(keyed[0]))
        return fetch(self._dataset, keyed[1:])

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset":
            raise AttributeError(name)  # while unpickling, before there is one
        return getattr(self._dataset, name)
