"""A script of one process on many workers, of which each one's loop sees its rows of every batch."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from manyhands import rng
from manyhands.errors import BadInput, Line, ManyhandsError, Unsupported, calling_line
from manyhands.own_loop.observed.drift import DriftCheck
from manyhands.own_loop.observed.modules import outermost_modules, replaced, stepped_by
from manyhands.own_loop.prepare import prepare_slices
from manyhands.own_loop.prepared_loader import PreparedLoader
from manyhands.own_loop.rank_zero import RankZeroLines
from manyhands.own_loop.session import AtHand, Pair, Session
from manyhands.strategies.base import Strategy

_iterate: Callable[[Any], Iterator[Any]] = DataLoader.__iter__
_make = torch.optim.Optimizer.__init__
_FIRST_PARTS = 3  # batches after which an error is not that of their slices


class SlicedScript:
    """Optimizers and the modules that they step become prepared pairs, DataLoaders prepared loaders.

    A DataLoader that is iterated with autograd on gives slices, and each of its passes must train. Without autograd
    it gives all rows to each worker.
    """

    def __init__(self, session: Session, strategy: Strategy, *, own_batches: bool = False) -> None:
        """own_batches: each worker draws batches of its own, which together are one; there is no DataLoader."""
        self.session, self.strategy, self.own_batches = session, strategy, own_batches
        self.worker, self.group = session.worker, session.worker.group
        self.begins: Callable[[], None] = _nothing
        """Called once the first optimizers are about to be prepared."""
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []  # not prepared yet
        self._passes: dict[Line, tuple[WeakSet[Pair], int]] = {}  # by line: the pairs that trained there, passes so far
        self._open: list[PreparedLoader] = []
        self._drift = DriftCheck(self.group)
        self._alike = True  # all ranks draw worker 0's numbers
        self._diverged = 0
        self._say = RankZeroLines(self.worker.rank)
        self._loading = False  # what is iterated now is not the script's iterating
        self._given: Line | None = None  # with own batches: where a loader is iterated

    # -- what is replaced in torch -------------------------------------------------------------------------------------

    def install(self) -> None:
        """From now on, until `leave`. A collective."""

        def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
            return _iterate(loader) if self._loading else self._iterated(loader)

        @wraps(_make)
        def make(optimizer: torch.optim.Optimizer, *given: Any, **named: Any) -> None:
            _make(optimizer, *given, **named)
            self._optimizers.append(weakref.ref(optimizer))
            if self.own_batches and self._alike:  # models are made alike, batches are not
                self._draw_own()

        self.session.sliced = self
        self._take_first_draws()
        self._seed = int(self.group.all_gather_json(torch.initial_seed())[0])
        DataLoader.__iter__ = iterate  # type: ignore[method-assign,assignment]
        torch.optim.Optimizer.__init__ = make  # type: ignore[method-assign,assignment]
        watching = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _leave(watching()))  # a process of the script is no worker

    def leave(self) -> None:
        """The script is over, or shares nothing any more."""
        DataLoader.__iter__ = _iterate  # type: ignore[method-assign,assignment]
        torch.optim.Optimizer.__init__ = _make  # type: ignore[method-assign]
        self.session.sliced = None

    def finish(self, *, all_: bool = False) -> None:
        """What passes left by `break` have open is finished; all_: of others, too. A collective."""
        over = [loader for loader in self._open if all_ or not loader.under_way]
        self._open = [loader for loader in self._open if loader not in over]
        for loader in over:
            loader.finish()

    def explain(self, error: Exception) -> str | None:
        """Why an error of the script is a refusal, if it is one that slices of a batch made."""
        shapes = (RuntimeError, ValueError, IndexError, AssertionError)
        few = 0 < self.session.batches <= _FIRST_PARTS
        if isinstance(error, ManyhandsError) or not few or not isinstance(error, shapes):
            return None
        return (
            f"the script failed on a slice of a batch ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}): each worker's loop "
            "gets its rows, so the batch size must not be fixed (use len(rows), or view(-1, ...)), or give --batches whole"
        )

    # -- passes --------------------------------------------------------------------------------------------------------

    def _iterated(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """The script begins a pass."""
        line, trains = calling_line(), torch.is_grad_enabled()
        if self.own_batches:
            return self._evaluated(loader, line if trains else self._given)
        if self.session.pass_under_way is None:
            self.finish()
            self.prepare()
            self._take_first_draws()
        if not trains:
            return _iterate(loader)
        _check_dataset(loader.dataset)
        shared = PreparedLoader(loader, self.session)
        shared.pairs, shared.passes = self._passes.get(line, (shared.pairs, 0))
        self._open.append(shared)
        self._loading = True
        try:
            passing = iter(shared)
        finally:
            self._loading = False
        return self._walk(passing, shared, line)

    def _evaluated(self, loader: DataLoader[Any], line: Line | None) -> Iterator[Any]:
        """With own batches a loader is for evaluation."""
        before, self._given = self._given, line
        try:
            yield from _iterate(loader)
        finally:
            self._given = before

    def _walk(self, batches: Iterator[Any], shared: PreparedLoader, line: Line) -> Iterator[Any]:
        """The batches; what loads them is not the script's iterating."""
        try:
            while True:
                if self.session.pass_under_way is None:
                    self.prepare()
                if self._alike:
                    self._draw_own()
                self._loading = True
                try:
                    batch = next(batches, _OVER)
                finally:
                    self._loading = False
                if batch is _OVER:
                    break
                yield batch
        finally:
            batches.close()  # type: ignore[attr-defined]
            self._passes[line] = shared.pairs, shared.passes
        self._open = [one for one in self._open if one is not shared]
        if self.session.pass_under_way is None:
            self._take_first_draws()

    # -- pairs ---------------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """The optimizers that were made since become pairs. A collective where there are any, of all ranks alike."""
        if not self._optimizers:
            return
        fresh = [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]
        self._optimizers = []
        for optimizer in replaced(fresh):
            fresh.remove(optimizer)
            optimizer.register_step_pre_hook(_refuse_second)
        if not fresh:
            return
        if not self.session.prepared:
            self.begins()
        roots, held = outermost_modules(), set[int]()
        for optimizer, modules in zip(fresh, stepped_by(fresh, roots), strict=True):
            given: Any = modules[0] if len(modules) == 1 else modules
            prepare_slices(self.session, given, optimizer, *self._schedulers_of(optimizer), strategy=self.strategy)
            held.update(id(p) for module in modules for p in module.parameters())
            self._say(f"{type(optimizer).__name__} steps {', '.join(type(module).__name__ for module in modules)}")
        self._drift.watch(module for module in roots if any(id(p) not in held for p in module.parameters()))

    def _schedulers_of(self, optimizer: torch.optim.Optimizer) -> list[LRScheduler]:
        """Where workers go at their own pace, and schedulers are stepped by the rows of all."""
        if self.strategy.leasing() is None:
            return []
        found = [one for one in gc.get_objects() if issubclass(type(one), LRScheduler)]
        return [one for one in found if one.optimizer is optimizer]

    # -- draws ---------------------------------------------------------------------------------------------------------

    def _take_first_draws(self) -> None:
        """From here on all ranks draw worker 0's numbers. A collective."""
        rng.take_first(self.group)
        self._alike = True

    def _draw_own(self) -> None:
        """From here on other ranks draw noise of their own."""
        self._alike, self._diverged = False, self._diverged + 1
        if self.worker.rank:
            rng.seed_all(self._seed, self.worker.rank * 1_000_003 + self._diverged)

    # -- backward ------------------------------------------------------------------------------------------------------

    def begins_backward(self, at_hand: AtHand | None) -> None:
        """A backward begins. Raises Unsupported where nobody knows which rows it is of, or who steps."""
        if self.own_batches:
            if self._given is not None:
                raise BadInput(
                    f"--own-batches is for a loop that draws its batches itself, and the DataLoader of {self._given} feeds this backward: leave it out"
                )
            self.prepare()
        elif at_hand is None and not self.session.has_weight:
            raise Unsupported(
                "a backward follows no DataLoader's batch, so nobody knows which rows it is of: give --batches whole. Or share the batch "
                "(rows = mh.share(rows), of one process's batch), or give --own-batches: each worker then draws its own, and the batch is "
                f"{self.worker.size} times as large"
            )
        if not self.session.prepared:
            raise Unsupported(
                "no torch.optim.Optimizer steps what this backward computes gradients for, and workers agree where an optimizer steps: use one, "
                "torch.optim.SGD say, in place of updates by hand, or give --batches whole"
            )

    def stepped(self, pair: Pair) -> None:
        """A pair has made a step."""
        self._drift.stepped(pair)


_OVER = object()


def _nothing() -> None:
    pass


def _leave(script: SlicedScript | None) -> None:
    if script is not None:
        script.leave()


def _check_dataset(dataset: Any) -> None:
    """Unsupported for data that is shared out already: its rows would be shared twice."""
    library = type(dataset).__module__.partition(".")[0]
    if library in ("webdataset", "streaming") or getattr(dataset, "_distributed", None) is not None:
        raise Unsupported(
            f"the dataset {type(dataset).__name__} gives each worker a part of its rows already, and manyhands shares the batches: iterate a plain "
            "DataLoader over all rows"
        )


def _refuse_second(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    raise Unsupported(
        f"two optimizers step the same parameters, and {type(optimizer).__name__} was made before the other one: give each optimizer parameters of its "
        "own, or make the second one where the first is done"
    )
