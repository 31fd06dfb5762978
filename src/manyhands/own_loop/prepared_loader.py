"""A prepared loader: this worker's share of each global batch of the user's own loader, in rank 0's random order."""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from typing_extensions import override

from manyhands import rng
from manyhands.data.batch import columns, digest_of, map_columns, rows_of, slice_rows
from manyhands.data.leases import Lease, Segment, foreseen
from manyhands.data.readers.datasets import RowLoader, set_epoch
from manyhands.data.readers.loaders import (
    generators_of,
    is_indexed,
    length_of,
    reader_of,
    refuse_distributed,
    samplers_of,
    unshared,
)
from manyhands.data.sharding import slice_of
from manyhands.data.source import COMPARED, Picks, Reading, check_digests
from manyhands.engines.driver.run_monitor import USER
from manyhands.errors import BadInput, Unsupported
from manyhands.own_loop.own_pace_schedule import PassProgress
from manyhands.own_loop.session import Iteration, Pair, Session, in_order
from manyhands.task import named
from manyhands.worker import Worker

_IDLE = (
    "no optimizer took a step in a pass over a prepared loader, and each of the {size} workers got its part of the rows only. For validation and "
    "statistics iterate a loader that was not prepared (its `plain` gives all rows), or average what each worker finds: mh.mean(value, weight=rows)"
)
_NOT_TRAINED = (
    "no optimizer took a step in a pass over a DataLoader, of which each worker got its slices: iterate it under torch.no_grad(), where workers get all "
    "rows, or give --batches whole"
)
_WHOLE_ITEMS = (
    "the DataLoader has batch_size=None, so each item of its dataset counts as a batch whose rows are its first dimension, and workers share those. If an "
    "item is one row (a sequence, an image), give the DataLoader batch_size=1 or more"
)


@dataclass(frozen=True)
class Share:
    """What one worker gets of one global batch."""

    batch: Any
    rows: int | None  # how many of them count; None: nobody asks (one worker, or a batch that has no rows)
    stand_in: bool = False  # the batch is there only so that the loop body runs


_Planned = tuple[list[list[Any]], Reading]  # (the sampler's items of each batch, how this worker reads them)


class PreparedLoader(Iterable[Any]):
    """Iterates this worker's share of each global batch of `plain`, the user's own loader, whose batch size is global.

    With one worker it gives what `plain` gives. With several, rank r of N gets rows [r·b//N, (r+1)·b//N) of each batch
    of b rows: a DataLoader over a map-style dataset loads these rows alone; a stream, a DataLoader without automatic
    batches or with an `__iter__` of its own, and any other iterable of batches is read whole by every worker, and each
    batch is cut: as long as the loop itself draws no random numbers, these are one process's batches, also where the
    loader draws them. Workers whose first batches of a pass differ raise BadInput. All workers get equally many batches
    in rank 0's random order. A worker without rows gets a stand-in of two rows of the batch, of weight 0.

    Under a strategy whose workers go at their own pace these slices are leased, each once: the worker that is free gets
    the next one, so that each may get another number of batches, none of them a stand-in; `len()` counts the global
    batches. Of what is read whole, each gets slice r of N. All meet at the end of the pass.

    Once exhausted, the open rounds of all models that took a step during the pass are finished, and these models hold
    the consensus, on all workers. After a `break` nothing is finished yet: the next pass does it first, or `finish()`.
    What is not named here (`dataset`, `batch_size`, `sampler`, …) is the plain loader's.
    """

    def __init__(self, plain: Iterable[Any], session: Session) -> None:
        self.plain, self.session = plain, session
        self.pairs = WeakSet[Pair]()  # whose models it trains: those that it was prepared with, then as seen in a pass
        self._open: Iteration | None = None
        self.passes = 0
        self._warmup = 0  # slices that worker 0 trains alone in the pass under way
        self._idle_told = False
        check_loader(plain, session.worker.size)

    @property
    def under_way(self) -> bool:
        """Whether a pass goes on, which was not left."""
        return self._open is not None and self._open.is_open

    def __len__(self) -> int:
        """Batches in a pass, the same on every worker."""
        return len(self.plain)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "plain":
            raise AttributeError(name)  # while unpickling, before there is one
        return getattr(self.plain, name)

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset and samplers that want to know which epoch begins."""
        parts: list[Any] = [self.plain]
        if isinstance(self.plain, DataLoader):
            parts += [self.plain.dataset, *samplers_of(self.plain)]
        for part in parts:
            set_epoch(part, epoch)

    def __iter__(self) -> Iterator[Any]:
        """One pass. Begin it on all workers alike, and go on to the same batch; collective with several workers."""
        self.finish()
        session = self.session
        if session.pass_under_way is not None:
            raise Unsupported(
                "two prepared loaders are under way at once, and workers that go at their own pace can share out the rows of one: "
                "iterate the other one as it was before prepare (its `plain`), or use a strategy in step (allreduce, local-sgd)"
            )
        iteration = Iteration(self.session.pairs & self.pairs)
        self.passes += 1
        shares = self._shares(iteration)  # before the first batch is asked for, as a DataLoader draws its numbers
        session.begin()
        self._open = iteration
        session.iterations.add(iteration)
        for pair in in_order(iteration.pairs):
            pair.enter(self._warmup)
        return self._run(shares, iteration)

    def finish(self) -> None:
        """Finish the rounds that a pass left by `break` has opened; nothing otherwise. A collective of all workers."""
        if self._open is not None:
            self._close(self._open)

    def _run(self, shares: Iterator[Share], iteration: Iteration) -> Iterator[Any]:
        session = self.session
        try:
            for share in shares:
                session.begin_batch(iteration, share.rows, clear=_has_its_rows(share), stand_in=share.stand_in)
                yield share.batch
                session.end_batch(iteration)
            session.end_pass(iteration)
        finally:
            session.leave_pass(iteration)
            if iteration.progress is not None and session.own_pace is not None:
                session.own_pace.deactivate()  # also after a `break`: the others go on
        self._close(iteration)

    def _close(self, iteration: Iteration) -> None:
        if self._open is iteration:
            self._open = None
        pairs, iteration.used = iteration.used, set()
        self.session.iterations.discard(iteration)
        if iteration.progress is not None:
            anybody, pair = self._meet(iteration.progress, bool(pairs)), self.session.own_pace
            pairs = {pair} if anybody and pair is not None else set()
        self.pairs = WeakSet(pairs)
        if not pairs and self.session.prepared and self.session.worker.size > 1 and not self._idle_told:
            self._idle_told = True
            if self.session.unchanged:
                raise Unsupported(_NOT_TRAINED)
            if self.session.worker.rank == 0:
                warnings.warn(_IDLE.format(size=self.session.worker.size), stacklevel=3)
        for pair in in_order(pairs):
            pair.finish()

    def _meet(self, progress: PassProgress, used: bool) -> bool:
        """At their own pace, the end of a pass for all: whether any of them has made a step; a collective."""
        session = self.session
        session.worker.driver.progress("wait", 0)
        calls = [schedule.calls for schedule in session.schedules]
        everyone = session.worker.group.all_gather_json([used, progress.own, progress.handed, calls])
        own, handed = sum(one[1] for one in everyone), max(one[2] for one in everyone)
        if session.own_pace is not None:  # else torch's schedulers warn of a wrong order where this worker had no rows
            session.own_pace.replica.optimizer._opt_called = True  # type: ignore[attr-defined]
        for number, schedule in enumerate(session.schedules):
            made = sum(one[3][number] for one in everyone)
            schedule.end_pass(made * handed // (own * progress.parts) if own else 0)
        return any(one[0] for one in everyone)

    # -- shares ------------------------------------------------------------------------------------------------------

    def _shares(self, iteration: Iteration) -> Iterator[Share]:
        if self.session.worker.size == 1:
            return (Share(batch, None) for batch in iter(self.plain))
        if self.session.own_pace is not None:
            iteration.progress = PassProgress(self.session.worker.size)
        if isinstance(self.plain, DataLoader) and is_indexed(self.plain):
            return self._loaded(self.plain, iteration.progress)
        return self._cut(iteration.progress)

    def _loaded(self, loader: DataLoader[Any], progress: PassProgress | None) -> Iterator[Share]:
        """Load own rows only. Rank 0's numbers are drawn when `loader` would draw them: the sampler's come with the first
        batch, unless processes load ahead, or workers may only meet here."""
        own_pace, drawn = self.session.own_pace, _Drawn(loader)
        with rng.drawn_alike(self.session.worker.group, generators_of(loader)):
            batches = _batches_of(loader)
            drawn.note(0)
        if own_pace is not None and progress is not None:
            self._warmup = self.session.worker.group.all_gather_json(own_pace.warmup())[0]
            plan, reading = self._planned(loader, batches, drawn)
            reader = reader_of(loader, loader.num_workers)
            return drawn.along(self._loaded_at_own_pace(reader, plan, reading, own_pace, progress))
        if loader.num_workers:
            return self._loaded_in_step(loader, batches, drawn)
        return _begun_with_the_first(lambda: self._loaded_in_step(loader, batches, drawn))

    def _loaded_in_step(self, loader: DataLoader[Any], batches: Iterator[list[Any]], drawn: _Drawn) -> Iterator[Share]:
        plan, reading = self._planned(loader, batches, drawn)
        return drawn.along(_load(reader_of(loader, loader.num_workers), plan, reading))

    def _planned(self, loader: DataLoader[Any], batches: Iterator[list[Any]], drawn: _Drawn) -> _Planned:
        """All batches of the pass, and how this worker reads them. A collective: BadInput where workers have other data."""
        worker = self.session.worker
        with rng.drawn_alike(worker.group, generators_of(loader)):
            plan = _plan_of(batches, loader, drawn)
            with rng.kept():
                seed = int(torch.randint(2**62, ()).item())
        mine = [len(plan), sum(len(batch) for batch in plan)]
        known = _known_rows(loader.dataset) if self.passes == 1 else None
        everyone = worker.group.all_gather_json([mine, known])
        for rank, (theirs, rows) in enumerate(everyone):
            if rows != everyone[0][1]:
                raise BadInput(
                    f"all workers must have the same data, and the training rows of worker {rank} are not those of worker 0: make a random split or "
                    "random data alike on all of them, by a seed (torch.Generator().manual_seed(0), random.seed(0), numpy.random.default_rng(0))"
                )
            if theirs != mine:
                (a, x), (b, y) = sorted([(worker.rank, mine), (rank, theirs)])
                raise BadInput(
                    f"all workers must iterate the same data, and they do not (rank {a}: rows {x[1]}, batches {x[0]}; "
                    f"rank {b}: rows {y[1]}, batches {y[0]}): give every worker the whole dataset, and manyhands "
                    "shares it out"
                )
        return plan, Reading(rank=worker.rank, size=worker.size, seed=seed, epoch=self.passes - 1)

    def _loaded_at_own_pace(
        self, reader: RowLoader, plan: list[list[Any]], reading: Reading, own_pace: Pair, progress: PassProgress
    ) -> Iterator[Share]:
        segment = Segment(
            epoch=self.session.passes,
            first=0,
            until=len(plan),
            parts=reading.size,
            size=reading.size,
            rank0_warmup_ticks=self._warmup,
        )
        self.session.passes += 1
        return _leased(reader, plan, reading, segment, lambda: self._lease(own_pace, segment, progress))

    def _lease(self, pair: Pair, segment: Segment, progress: PassProgress) -> Lease | None:
        """The next slice that is this worker's; None: the pass is over."""
        worker, step = self.session.worker, pair.replica.step
        worker.driver.progress("wait" if segment.rank0_warmup_ticks else "input", step)
        answer = worker.lease(segment)
        worker.driver.progress(USER, step)
        if not isinstance(answer, Lease):
            progress.handed = segment.slices
            return None
        pair.activate()  # it has waited until now, while worker 0 trained alone
        progress.own, progress.handed = progress.own + 1, answer.handed + 1
        return answer

    def _cut(self, progress: PassProgress | None) -> Iterator[Share]:
        """Read everything, keep the own rows. The source's code draws rank 0's numbers on all workers."""
        worker = self.session.worker
        loader = self.plain if isinstance(self.plain, DataLoader) else None
        with rng.drawn_alike(worker.group, generators_of(loader) if loader is not None else []):
            batches = iter(self.plain)
            first, own = next(batches, None), rng.RngScope.from_here()
        self._compare(first)
        shares = self._cut_each(first, batches, own)
        return shares if progress is None else _counted(shares, progress)

    def _cut_each(self, first: Any, batches: Iterator[Any], own: rng.RngScope) -> Iterator[Share]:
        """Rank 0's generators end where one process's would, unless the loop itself drew numbers."""
        rank, size = self.session.worker.rank, self.session.worker.size
        with own.in_place() if rank == 0 else nullcontext():
            batch, compared = first, 1
            while batch is not None:
                yield cut_rows(batch, rank, size)
                with own:
                    batch = next(batches, None)
                if compared < COMPARED:
                    self._compare(batch)
                    compared += 1

    def _compare(self, batch: Any) -> None:
        """A collective."""
        check_digests(self.session.worker.group.all_gather_json(None if batch is None else digest_of(batch)))


class SharedDataLoader(DataLoader[Any]):
    """The class of a DataLoader that was prepared in place, before its own: whoever holds it gets this worker's share.

    One class for each such loader. `plain` has the loader's own class, and one state with it.
    """

    shared_in_place: ClassVar[bool] = True
    _prepared: ClassVar[PreparedLoader]
    _kind: ClassVar[type[DataLoader[Any]]]

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        """`type(loader)(…)` makes a loader of the user's class, which nobody shares."""
        return cls._kind(*arguments, **options)

    @property
    def plain(self) -> Iterable[Any]:
        """As it was before: all rows."""
        return self._prepared.plain

    @override
    def __iter__(self) -> Any:
        """See `PreparedLoader`, as for the others."""
        return iter(self._prepared)

    def finish(self) -> None:
        self._prepared.finish()

    def set_epoch(self, epoch: int) -> None:
        self._prepared.set_epoch(epoch)

    @override
    def __reduce__(self) -> Any:
        return copy.copy, (self.plain,)  # elsewhere nobody shares it


def share(loader: Iterable[Any], session: Session, pair: Pair | None = None) -> Iterable[Any]:
    """What gives this worker's share of the loader's batches: a DataLoader itself, else a PreparedLoader of it.

    One that was prepared before is taken as it is, for another session anew. pair: that it was prepared with.
    """
    shared = _share(loader, session)
    prepared = shared._prepared if isinstance(shared, SharedDataLoader) else shared
    assert isinstance(prepared, PreparedLoader)
    if pair is not None:
        prepared.pairs.add(pair)
    return shared


def _share(loader: Iterable[Any], session: Session) -> Iterable[Any]:
    if isinstance(loader, PreparedLoader):  # shared by several pairs, or a notebook's cell run again
        return loader if loader.session is session else PreparedLoader(loader.plain, session)
    if not isinstance(loader, DataLoader) or session.worker.shares_process:  # others may hold it, too
        return PreparedLoader(unshared(loader), session)
    if isinstance(loader, SharedDataLoader):
        if loader._prepared.session is not session:
            type(loader)._prepared = PreparedLoader(loader.plain, session)
        return loader
    kind = type(loader)
    plain: DataLoader[Any] = object.__new__(kind)
    object.__setattr__(plain, "__dict__", vars(loader))
    own = {"_prepared": PreparedLoader(plain, session), "_kind": kind, "__module__": kind.__module__}
    try:
        loader.__class__ = type(kind.__name__, (SharedDataLoader, kind), own)
    except TypeError:  # a class that cannot be derived from like this
        return PreparedLoader(loader, session)
    return loader


class _Drawn:
    """The states of a loader's own generators after so many batches were asked of its sampler.

    The sampler is asked for the whole pass at once. A pass that is left early must leave the generators where one
    process's does, which asks for a batch at a time, and for some more where processes load them.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._generators = generators_of(loader)
        self._ahead = loader.num_workers * (loader.prefetch_factor or 0)
        self._states: dict[int, list[Tensor]] = {}  # where they change: {batches asked for: states from then on}

    def note(self, asked: int) -> None:
        """The sampler was asked for so many batches."""
        states = [generator.get_state() for generator in self._generators]
        newest = next(reversed(self._states.values()), None)
        if newest is None or not all(map(torch.equal, states, newest)):
            self._states[asked] = states

    def along(self, shares: Iterator[Share]) -> Iterator[Share]:
        """The shares; the generators go along with them."""
        changes = sorted(self._states.items())
        self._reach(changes, self._ahead)
        return self._follow(shares, changes)

    def _follow(self, shares: Iterator[Share], changes: list[tuple[int, list[Tensor]]]) -> Iterator[Share]:
        with closing(shares):  # type: ignore[type-var]
            for number, share in enumerate(shares, start=1):
                self._reach(changes, self._ahead + number)
                yield share
        if changes:
            self._reach(changes, changes[-1][0])

    def _reach(self, changes: list[tuple[int, list[Tensor]]], asked: int) -> None:
        states = None
        while changes and changes[0][0] <= asked:
            states = changes.pop(0)[1]
        if states is not None:
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)


def _batches_of(loader: DataLoader[Any]) -> Iterator[list[Any]]:
    """The sampler's items of each global batch; draws the numbers that `iter(loader)` would draw."""
    return iter(DataLoader(_Keys(), batch_sampler=loader.batch_sampler, collate_fn=list, generator=loader.generator))


def _plan_of(batches: Iterator[list[Any]], loader: DataLoader[Any], drawn: _Drawn) -> list[list[Any]]:
    """All of the pass's batches; draws the numbers that `loader` would draw."""
    expected, plan = length_of(loader.batch_sampler), list[list[Any]]()
    for batch in batches:
        plan.append(batch)
        drawn.note(len(plan))
        if len(plan) > expected:
            raise BadInput(
                f"len() of the DataLoader's batch sampler is {expected}, and it gave more batches: make its __len__ "
                "return the number of batches"
            )
    drawn.note(len(plan) + 1)
    return plan


def _known_rows(dataset: Any) -> str | None:
    """A digest of which rows a dataset has, as far as that is seen without running code of the user's; None: not known."""
    if isinstance(dataset, Subset):
        indices = hashlib.sha256(np.asarray(dataset.indices).tobytes()).hexdigest()
        return f"{indices} of {_known_rows(dataset.dataset)}"
    if isinstance(dataset, TensorDataset):
        rows = len(dataset)
        return digest_of([dataset[i] for i in {0, rows // 2, rows - 1}]) if rows else None
    return None


class _Keys(Dataset[Any]):
    """In place of the dataset: gives the sampler's own indices, or keys, back."""

    def __getitems__(self, keys: list[Any]) -> list[Any]:
        return keys


def _begun_with_the_first(begin: Callable[[], Iterator[Share]]) -> Iterator[Share]:
    """What `begin` gives, which is called when the first one is asked for."""
    yield from begin()


def _load(reader: RowLoader, plan: list[list[Any]], reading: Reading) -> Iterator[Share]:
    """This worker's slice of each batch."""
    picks = Picks(plan.__getitem__, len(plan), reading.size)
    with closing(reader.slices((picks.at(i, reading.rank) for i in range(len(plan))), reading)) as coming:
        for batch, part in zip(plan, coming, strict=True):
            if part.rows:
                yield Share(part.batch, part.rows)
            else:
                yield Share(reader.take([batch[0], batch[min(1, len(batch) - 1)]]), 0, stand_in=True)


def _leased(
    reader: RowLoader, plan: list[list[Any]], reading: Reading, segment: Segment, lease: Callable[[], Lease | None]
) -> Iterator[Share]:
    """The slices that this worker leases. Loader processes read its own queue ahead, without leasing it: of what others
    took meanwhile the rows were loaded in vain."""
    picks = Picks(plan.__getitem__, len(plan), segment.parts)
    own = (picks.at(one.index, one.part) for one in foreseen(segment, reading.rank))
    coming = reader.slices(own, reading) if reader.processes else None
    try:
        while (one := lease()) is not None:
            if coming is not None and segment.owner(one.part) == reading.rank:
                part = next(slice for slice in coming if (slice.index, slice.part) == (one.index, one.part))
            else:
                if coming is not None:  # its own queue is empty
                    coming.close()
                part = reader.load_here(picks.at(one.index, one.part), reading)
            if part.rows:
                yield Share(part.batch, part.rows)
    finally:
        if coming is not None:
            coming.close()


def _counted(shares: Iterator[Share], progress: PassProgress) -> Iterator[Share]:
    """At their own pace, of what each reads for itself: without stand-ins, and as if the others were as far."""
    for share in shares:
        progress.own, progress.handed = progress.own + 1, progress.handed + progress.parts
        if not share.stand_in:
            yield share


def _has_its_rows(share: Share) -> bool:
    """Whether one of the first two dimensions of its columns counts the rows that were read, as far as anybody asks."""
    if share.rows is None or share.stand_in:
        return True
    counts = {n for _, column in columns(share.batch) for n in getattr(column, "shape", [len(column)])[:2]}
    return not counts or share.rows in counts


def _taken(column: Any, rows: list[int]) -> Any:
    if isinstance(column, list | tuple):
        return type(column)(column[i] for i in rows)
    return column[rows]


def cut_rows(batch: Any, rank: int, size: int) -> Share:
    """A worker's share of a batch that was read whole."""
    rows = rows_of(batch)
    start, stop = slice_of(rows, rank, size)
    if stop > start:
        return Share(slice_rows(batch, start, stop), stop - start)
    if not rows:
        raise BadInput("the loader gave an empty batch, and every worker needs rows in each step: skip empty batches")
    return Share(map_columns(batch, lambda column: _taken(column, [0, min(1, rows - 1)])), 0, stand_in=True)


def warn_of_whole_items(plain: Any, worker: Worker) -> None:
    """Where a DataLoader hands out the items of a dataset as batches, which may be rows: rank 0 warns."""
    if worker.size == 1 or worker.rank or not isinstance(plain, DataLoader):
        return
    if plain.batch_sampler is None and not isinstance(plain.dataset, IterableDataset):
        warnings.warn(_WHOLE_ITEMS, stacklevel=4)  # the user's prepare()


def check_loader(plain: Any, size: int) -> None:
    """Raise BadInput for what cannot be shared over so many workers."""
    if isinstance(plain, Tensor | str | bytes) or not isinstance(plain, Iterable):
        raise BadInput(
            f"prepare takes (model, optimizer, *loaders): a loader must be a DataLoader or another iterable of batches, not {named(plain)}"
            + ("; a strategy is given by its name, strategy=..." if isinstance(plain, str) else "")
        )
    if isinstance(plain, Iterator):
        raise BadInput(
            f"prepare needs a loader that can be read again in each epoch, and a {type(plain).__name__} can be read "
            "only once: give the DataLoader, not iter(loader)"
        )
    if isinstance(plain, DataLoader):
        refuse_distributed(plain)
        rows = plain.batch_size or getattr(plain.batch_sampler, "batch_size", None)
        if isinstance(rows, int) and rows < size:
            raise BadInput(
                f"the DataLoader's batch_size={rows} is for all workers together and leaves some of the {size} workers "
                f"without a row: raise it to at least {size}, or use fewer workers"
            )
