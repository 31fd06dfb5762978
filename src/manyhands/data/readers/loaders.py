"""The user's DataLoaders keep their sampler, collate function and processes; each worker loads its share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, cast

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler
from typing_extensions import override

from manyhands import rng
from manyhands.data.batch import Collate
from manyhands.data.readers.datasets import RowLoader, RowSource, set_epoch
from manyhands.data.readers.streams import LoadedStream
from manyhands.data.sharding import ticks
from manyhands.data.source import BY_OPTION, Loading, Picks, Reading, Source, nonempty, spread
from manyhands.errors import BadInput

_BY_NUMBER = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers that name rows by numbers in range(len(dataset)); one of the user's own may name them as it likes."""


def open_loader(loader: DataLoader[Any], collate: Collate | None = None, processes: int = 0) -> Source:
    """The source that a DataLoader is. BadInput for a DistributedSampler: manyhands deals the rows out itself."""
    refuse_distributed(loader)
    if collate is not None:
        raise BadInput(
            "collate was given with a DataLoader, which has a collate_fn: give collate_fn to the DataLoader, or give "
            "its dataset as the data"
        )
    return Loader(loader, processes) if is_indexed(loader) else LoadedStream(loader)


def unshared(data: Any) -> Any:
    """All rows of a DataLoader that `prepare` shares in place; anything else as it is."""
    return data.plain if getattr(type(data), "shared_in_place", False) else data


def is_indexed(loader: DataLoader[Any]) -> bool:
    """Whether its batches are what its sampler, dataset and collate function make, so that any of their rows can be
    loaded alone.

    A subclass that iterates in a way of its own (accelerate's, torchdata's) is to be iterated.
    """
    kind = type(loader)
    iterates_itself = kind.__iter__ is not DataLoader.__iter__ or kind._get_iterator is not DataLoader._get_iterator
    return not (iterates_itself or isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None)


def refuse_distributed(loader: DataLoader[Any]) -> None:
    """Raise BadInput if the loader shares rows out already."""
    for sampler in samplers_of(loader):
        if isinstance(sampler, DistributedSampler):
            raise BadInput(
                "the DataLoader has a DistributedSampler, and manyhands already gives each worker its part of every "
                "batch: leave the sampler out, and use shuffle=True instead"
            )


class Loader(RowSource):
    """A DataLoader over a map-style dataset: `batch_size` is its own (a batch sampler's largest) and counts as global.

    Its sampler is iterated once an epoch with all generators (its own, torch's, numpy's, Python's) seeded by (seed,
    epoch) and put back afterwards, so that every worker sees the same batches and a resumed run the same order. Rows
    load as `RowLoader` says; `persistent_workers` is not kept: processes start with each epoch and end with it.
    """

    rows: int
    batch_size: int

    def __init__(self, loader: DataLoader[Any], processes: int = 0) -> None:
        self._loader = loader
        self._sampler = cast(Any, loader.batch_sampler)  # torch's, or anything that gives lists of indices
        self._batches = length_of(self._sampler)
        self._looked: list[int] | None = (
            None  # sizes of the batches of a user's own sampler in one epoch; others may differ
        )
        if type(self._sampler) is not BatchSampler:
            with _seeded(loader, 0, 0):
                self._looked = [len(batch) for batch in islice(self._sampler, self._batches)]
        size = loader.batch_size or getattr(self._sampler, "batch_size", None)
        self.batch_size = size if isinstance(size, int) else max(self._looked or [0])
        self.rows = nonempty(self._count(self.batch_size), "the DataLoader")
        self.reader = reader_of(loader, loader.num_workers or processes)
        if not isinstance(self.reader, _TensorRows):
            self.loading = Loading(self.reader.processes, "num_workers" if loader.num_workers else BY_OPTION)

    @override
    def epoch_rows(self, reading: Reading) -> int:
        if reading.order is not None:
            raise BadInput(
                "order was given with a DataLoader, whose sampler sets the order: give the DataLoader another sampler, "
                "or give its dataset as the data"
            )
        return self._count(reading.batch_size)

    @override
    def samples(self, count: int) -> Sequence[Any] | None:
        by_number = type(self._sampler) is BatchSampler and type(self._sampler.sampler) in _BY_NUMBER
        return spread(length_of(self._loader.dataset), count) if by_number else None

    @override
    def ticks(self, reading: Reading) -> int:
        self.epoch_rows(reading)
        return self._batches if self._keeps(reading) else self._recut_ticks(reading.batch_size)

    @override
    def picks(self, reading: Reading) -> Picks:
        for part in (self._loader.dataset, *samplers_of(self._loader)):
            set_epoch(part, reading.epoch)
        batches = self._plan(reading)
        return Picks(batches.__getitem__, len(batches), reading.size)

    def _plan(self, reading: Reading) -> list[list[Any]]:
        """The epoch's global batches as lists of what the sampler gives: indices, or keys of the user's own."""
        with _seeded(self._loader, reading.seed, reading.epoch):
            if not self._keeps(reading):
                order, size = list(self._sampler.sampler), reading.batch_size
                return [order[i * size : (i + 1) * size] for i in range(self._recut_ticks(size))]
            batches = list(islice(self._sampler, self._batches + 1))
        if len(batches) != self._batches:
            more = "more" if len(batches) > self._batches else f"only {len(batches)}"
            raise BadInput(
                f"len() of the DataLoader's batch sampler is {self._batches}, and it gave {more}: make both equal"
            )
        return batches

    def _keeps(self, reading: Reading) -> bool:
        """Whether the loader's own batches are taken; another batch size re-cuts the order of a plain BatchSampler."""
        if reading.batch_size == self.batch_size:
            return True
        if type(self._sampler) is BatchSampler:
            return False
        raise BadInput(
            f"batch_size={reading.batch_size} was given, and the DataLoader's own batch sampler makes batches of "
            f"{self.batch_size}: leave batch_size out, or change the sampler"
        )

    def _recut_ticks(self, size: int) -> int:
        rows = length_of(self._sampler.sampler)
        return rows // size if self._sampler.drop_last else ticks(rows, size)

    def _count(self, size: int) -> int:
        """Rows an epoch."""
        if self._looked is not None:
            return sum(self._looked)
        rows = length_of(self._sampler.sampler)
        return rows // size * size if self._sampler.drop_last else rows


def reader_of(loader: DataLoader[Any], processes: int) -> RowLoader:
    """What loads rows as this DataLoader does: its dataset, collate function and options, with so many processes."""
    dataset, collate = loader.dataset, loader.collate_fn
    if type(dataset) is TensorDataset and collate is default_collate and processes == 0:
        return _TensorRows(dataset)
    return RowLoader(dataset, collate, processes, options_of(loader))


def options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """The options of how this DataLoader loads, as arguments of another; not what it loads, nor in which order."""
    options = {
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "prefetch_factor": loader.prefetch_factor,
    }
    return {name: value for name, value in options.items() if value}


class _TensorRows(RowLoader):
    """What default_collate makes of a TensorDataset, the same bits, gathered at once instead of row by row."""

    @override
    def take(self, indices: Any) -> list[torch.Tensor]:
        return [tensor[torch.tensor(indices, device=tensor.device)] for tensor in self.dataset.tensors]


def samplers_of(loader: DataLoader[Any]) -> list[Any]:
    """Everything in the loader that decides the order."""
    candidates = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    return list({id(sampler): sampler for sampler in candidates if sampler is not None}.values())


def generators_of(loader: DataLoader[Any]) -> list[torch.Generator]:
    """The user's own that a pass draws from."""
    owners = [loader, *samplers_of(loader)]
    found = [g for owner in owners if isinstance(g := getattr(owner, "generator", None), torch.Generator)]
    return list({id(g): g for g in found}.values())


def length_of(sampler: Any) -> int:
    """Its len(), or BadInput where it has none."""
    try:
        return len(sampler)
    except TypeError as error:
        raise BadInput(
            f"the DataLoader's {type(sampler).__name__} has no len(): give it a __len__, so that all workers know how "
            "many steps an epoch has"
        ) from error


@contextmanager
def _seeded(loader: DataLoader[Any], seed: int, epoch: int) -> Iterator[None]:
    """Generators that a sampler may draw from, seeded by (seed, epoch) inside and put back afterwards."""
    own = generators_of(loader)
    before = [(generator, generator.get_state()) for generator in own]
    with rng.kept():
        rng.seed_all(rng.mixed((seed, epoch)))
        for generator in own:
            generator.manual_seed(rng.mixed((seed, epoch)))
        try:
            yield
        finally:
            for generator, state in before:
                generator.set_state(state)
