"""Whether each row is handed out once, and whether N workers' slices are cut from what one worker reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Subset

from manyhands.data.batch import columns, slice_rows
from manyhands.data.feed import Slice
from manyhands.data.sharding import slice_of
from manyhands.data.source import Planned
from manyhands.evidence.check import source_locations
from manyhands.evidence.check.copies import Copies, data_made
from manyhands.evidence.check.findings import BREAKS, NOTE, Finding, SourceLocation
from manyhands.evidence.check.reading import alike, draws, read, rows_of_batch, source_of
from manyhands.evidence.check.recording import Trace
from manyhands.evidence.check.trial_config import TrialConfig, arranged
from manyhands.task import Task

TICKS = 2
"""Global batches that are compared with their slices."""

_UNSEEDED = (
    "Two equal copies of the data, read in the same order with the same seeds, gave other rows: something in it is "
    "seeded by the time, or by nothing. Every worker has a copy of its own, so no two read the same data. Seed it by "
    "the task's seed and the row."
)
_RANDOM = (
    "{at} is not what one worker reads there: rows draw random numbers when they are read (augmentation), and each "
    "worker draws its own. So N workers equal one in distribution only, as with dropout. For the same rows draw from "
    "a generator that is seeded by the row's index."
)
_SHARDS = (
    "{at} is not cut from what one worker reads: the stream can be cut into shards, so each worker reads its own, and "
    "global batches hold other rows than on one worker. Every row is read once all the same; for the same batches "
    "give data with a length."
)
_COLLATE = (
    "{at} is not a part of the batch that one worker makes of the same rows: what collate makes of a row depends on "
    "the rows beside it (padding to the longest, say), and the loss sees the difference. Pad to a fixed length, or "
    "mask what is padded."
)
_ORDER = (
    "{at} holds other values than on one worker, for the same row numbers: what a row holds depends on which rows "
    "were read before it, or how often. A worker reads its own rows only, so it gets others. Make a row depend on "
    "its number alone."
)
_NOT_ONCE = (
    "Of {rows:,} rows that one worker takes in the first epoch, {workers} workers leave out {missing:,}, and take "
    "{more:,} others, or once more: the order is not the same on all of them. Each asks for it by itself, so it may "
    "depend on seed and epoch alone: draw it from a generator that is seeded by them, or leave it to manyhands "
    "(shuffle=True)."
)
_SORTED = (
    "shuffle=False, and the first {batches} batches hold one class each: rows are sorted. N workers equal one all the "
    "same, but one learns badly from them, and strategies that average parameters suffer more. Leave shuffle=True."
)


@dataclass
class Data:
    """The training data of a task, looked at through copies of it."""

    copies: Copies
    setting: TrialConfig
    workers: int

    def own(self) -> Task:
        """A task of one's own for this setting."""
        return arranged(self.copies.fresh(), self.setting)

    def batches(self, ticks: int) -> tuple[Any, ...]:
        """The first global batches."""
        return tuple(part.batch for part in read(self.own(), ticks))

    # -- each row once -----------------------------------------------------------------------------------------------

    def once(self, proofs: Sequence[Sequence[Trace]]) -> tuple[list[Finding], list[str]]:
        """(findings, what held) of what one worker took in the first epoch, and then each of N; of each proof."""
        held = []
        for alone, *ranks in proofs:
            if alone.handed_out is None or not ranks:
                continue
            expected = Counter(alone.handed_out)
            got = Counter(row for rank in ranks for row in rank.handed_out or ())
            if expected != got:
                missing, more = (expected - got).total(), (got - expected).total()
                return [self._not_once(missing=missing, more=more, rows=expected.total(), workers=len(ranks))], []
            held.append(expected)
        if not held:
            return [], []
        said = [_counted(one, source_of(self.copies.fresh()).rows) for one in held]
        return [], [f"every row of the order is handed out once an epoch ({'; '.join(said)})"]

    def _not_once(self, **numbers: int) -> Finding:
        text = _NOT_ONCE.format(**numbers)
        return Finding(kind="rows-not-once", severity=BREAKS, text=text, places=self._order_places(), numbers=numbers)

    def _order_places(self) -> tuple[SourceLocation, ...]:
        task = self.copies.fresh()
        if task.order is not None:
            return source_locations.as_tuple(source_locations.of_function(task.order))
        data = task.train_data
        samplers = (data.sampler, data.batch_sampler) if isinstance(data, DataLoader) else ()
        found = (source_locations.of_method(sampler, "__iter__") for sampler in samplers)
        return source_locations.as_tuple(next((place for place in found if place is not None), None)) or _places_of(
            data
        )

    # -- the same rows -----------------------------------------------------------------------------------------------

    def same(self) -> tuple[list[Finding], list[str]]:
        """(findings, what held): the slices of N workers, each with a copy of its own, are cut from the batches of one."""
        whole, again = (read(self.own(), TICKS) for _ in range(2))
        if not all(alike(a.batch, b.batch) for a, b in zip(whole, again, strict=False)):
            return [_finding("data-order", _UNSEEDED, self._places(changing=True))], []
        ranks = [read(self.own(), TICKS, rank, self.workers) for rank in range(self.workers)]
        differs = self._first_other(whole, ranks)
        if differs is None:
            return [], ["slices are cut from the batches that one worker reads"]
        return [self._why(*differs, shards=any(part.global_rows is None for part in ranks[0]))], []

    def made_alike(self, sent: Copies) -> list[Finding]:
        """A finding where a function gives other data when it is called again. sent: copies of the task with its functions."""
        again = data_made(sent)
        if again is None or alike(_first(self.own()), _first(arranged(again, self.setting))):
            return []
        return [_finding("data-order", _UNSEEDED, _places_of(sent.fresh().train_data, changing=True))]

    def _first_other(self, whole: Sequence[Slice], ranks: Sequence[Sequence[Slice]]) -> tuple[int, int] | None:
        """(tick, rank) of the first slice that is not what one worker has there."""
        for tick, one in enumerate(whole):
            for rank, parts in enumerate(ranks):
                start, stop = slice_of(one.rows, rank, self.workers)
                own = parts[tick].batch if tick < len(parts) else None
                if not alike(slice_rows(one.batch, start, stop) if stop > start else None, own):
                    return tick, rank
        return None

    def _why(self, tick: int, rank: int, shards: bool) -> Finding:
        at = f"Batch {tick + 1} of worker {rank}"
        if draws(self.own()):
            return _finding("random-rows", _RANDOM.format(at=at), self._places())
        if shards:
            return _finding("data-order", _SHARDS.format(at=at), self._places())
        if self._rows_alike(tick, rank):
            return _finding("collate", _COLLATE.format(at=at), self._collate_places())
        return _finding("data-order", _ORDER.format(at=at), self._places(changing=True))

    def _rows_alike(self, tick: int, rank: int) -> bool:
        """Whether the rows themselves are the same, before they are made a batch."""
        whole = rows_of_batch(self.own(), tick, 0, 1)
        if whole is None:
            return False
        start, stop = slice_of(len(whole), rank, self.workers)
        return alike(whole[start:stop], rows_of_batch(self.own(), tick, rank, self.workers))

    def _collate_places(self) -> tuple[SourceLocation, ...]:
        task = self.copies.fresh()
        data = task.train_data
        return source_locations.as_tuple(
            source_locations.of_function(data.collate_fn if isinstance(data, DataLoader) else task.collate)
        )

    def _places(self, changing: bool = False) -> tuple[SourceLocation, ...]:
        return _places_of(self.copies.fresh().train_data, changing)

    def sorted_targets(self) -> list[Finding]:
        """A note where rows come in their own order, and that is class by class."""
        task = self.copies.fresh()
        shuffled = task.shuffle or task.order is not None or isinstance(task.train_data, DataLoader)
        if shuffled or not isinstance(source_of(task), Planned):
            return []
        parts = read(self.own(), TICKS)
        if any(_only_class(part.batch) is None for part in parts):
            return []
        return [_finding("sorted-data", _SORTED.format(batches=len(parts)), self._places(), NOTE)]


def _finding(kind: str, text: str, where: tuple[SourceLocation, ...], severity: str = BREAKS) -> Finding:
    return Finding(kind=kind, severity=severity, text=text, places=where)


def _first(task: Task) -> Any:
    return read(task, 1)[0].batch


def _counted(handed_out: Counter[Any], rows: int | None) -> str:
    """`41`, or `23 of 41` where the order leaves rows out, or `60, 37 different of 41` where it repeats some."""
    total, distinct = handed_out.total(), len(handed_out)
    repeats = "" if distinct == total else f", {distinct:,} different"
    return f"{total:,}{repeats}" + ("" if rows is None or distinct == rows else f" of {rows:,}")


def _places_of(data: Any, changing: bool = False) -> tuple[SourceLocation, ...]:
    """Where rows are made; `changing`: the line there that changes the object itself."""
    while isinstance(data, DataLoader | Subset):
        data = data.dataset
    find = source_locations.of_change if changing else source_locations.of_method
    found = find(data, "__getitem__", "__getitems__", "__iter__")
    return source_locations.as_tuple(
        found if found is not None or not callable(data) else source_locations.of_function(data)
    )


def _only_class(batch: Any) -> int | None:
    """The one class of a batch whose last column holds whole numbers; None where there are several, or none."""
    leaves = [column for _, column in columns(batch) if isinstance(column, Tensor)]
    if len(leaves) < 2 or leaves[-1].dim() != 1 or leaves[-1].is_floating_point() or len(leaves[-1]) < 2:
        return None
    return int(leaves[-1][0]) if bool((leaves[-1] == leaves[-1][0]).all()) else None
