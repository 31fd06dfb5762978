"""What the prepared models and loaders of one process share: the weight of the batch at hand, and who exchanges when."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch

from manyhands import rng
from manyhands.engines.driver.run_monitor import USER
from manyhands.errors import BadInput
from manyhands.own_loop.first_steps import FirstLosses
from manyhands.worker import Worker

if TYPE_CHECKING:
    from manyhands.own_loop.pair import Pair


class Iteration:
    """One pass over a prepared loader, under way: the pairs that took a step during it."""

    def __init__(self) -> None:
        self.used: set[Pair] = set()


class Session:
    """Shared by all pairs and loaders that were prepared for one Worker.

    Pairs and iterations are held weakly: what the user drops is gone. Only an open iteration keeps its pairs, so that
    which rounds are finished, a collective, never depends on when a process collects its garbage.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.pairs: WeakSet[Pair] = WeakSet()
        self.iterations: WeakSet[Iteration] = WeakSet()
        self.counts_weights = worker.size > 1 or worker.shares_process
        """Alone, a weight matters only once the user states one; where time is simulated, rows are what a gradient costs."""
        self.told_alike = False
        self._first_losses = FirstLosses(self)
        self._prepared = 0
        self._began = False
        self._rows: dict[Iteration, float | None] = {}  # of each open pass's batch at hand, the newest last
        self._stated: float | None = None  # by `mh.weight`
        self._stated_used = False
        self._stand_ins: set[Iteration] = set()  # whose batch at hand is a stand-in
        self._pending: dict[int, set[Pair]] = {}  # backward under way -> the pairs that it reached

    def add(self, pair: Pair) -> int:
        """Take a new pair in; its place in the order of preparation."""
        self.pairs.add(pair)
        self._prepared += 1
        return self._prepared

    @property
    def prepared_before(self) -> bool:
        """Whether a pair was prepared already, be it gone or not."""
        return self._prepared > 0

    def remove(self, pair: Pair) -> None:
        """Forget a pair that was prepared anew."""
        self.pairs.discard(pair)
        for iteration in self.iterations:
            iteration.used.discard(pair)

    def begin(self) -> None:
        """Training begins: from here on other ranks than the first draw numbers of their own (dropout, noise)."""
        if not self._began and self.worker.rank:
            rng.seed_all(torch.initial_seed(), self.worker.rank)
        self._began = True

    # -- weights -----------------------------------------------------------------------------------------------------

    @property
    def weight(self) -> float:
        """Of a backward now: 0 on a stand-in batch, else as stated, else the batch's rows, else 1."""
        if self._stand_ins:
            return 0.0
        if self._stated is not None:
            return self._stated
        newest = next(reversed(self._rows.values()), None)
        return 1.0 if newest is None else newest

    @property
    def counted_rows(self) -> float | None:
        """Of the batch at hand that a prepared loader gave, where they are the weight."""
        return None if self._stated is not None else next(reversed(self._rows.values()), None)

    @property
    def weight_known(self) -> bool:
        """Whether a prepared loader or the user says what a backward now counts."""
        return self._stated is not None or bool(self._rows)

    def state_weight(self, weight: float) -> None:
        """What `mh.weight` says; holds until the next step or batch."""
        if not 0 <= weight < math.inf:
            raise BadInput(f"a weight is a finite number of at least 0, not {weight}: what the loss's mean divides by")
        self._stated, self._stated_used = weight, False
        if not self.counts_weights:
            self.counts_weights = True
            for pair in self.pairs:
                pair.watch()
        self._silence()

    def begin_batch(self, iteration: Iteration, rows: float | None, *, stand_in: bool = False) -> None:
        """A loader is about to yield a batch of so many rows of this worker's; None: nobody counts them."""
        self._rows.pop(iteration, None)
        self._rows[iteration] = rows
        self._stated = None
        if stand_in:
            self._stand_ins.add(iteration)
            for pair in self.pairs:
                pair.silence.keep_buffers()
        self._silence()

    def end_batch(self, iteration: Iteration) -> None:
        """The loop body is done with the batch: what a stand-in did to buffers is undone."""
        if iteration in self._stand_ins:
            self._stand_ins.remove(iteration)
            for pair in self.pairs:
                pair.silence.forget_buffers()
            self._silence()

    def end_pass(self, iteration: Iteration) -> None:
        """A loop ended, by `break` or an error too: its last batch weighs no longer."""
        self.end_batch(iteration)
        self._rows.pop(iteration, None)
        self._silence()

    def _silence(self) -> None:
        silent = self.weight == 0
        for pair in self.pairs:
            pair.silence.turn(silent)

    # -- backward ----------------------------------------------------------------------------------------------------

    def reached(self, task: int, pair: Pair) -> None:
        """Backward number `task` gave a gradient to a parameter of `pair`; at its end the pair hears of it."""
        if task not in self._pending:
            self._pending[task] = set()
            self.worker.driver.after_backward(lambda: self._after_backward(task))
        self._pending[task].add(pair)

    def _after_backward(self, task: int) -> None:
        self.begin()
        pairs = in_order(self._pending.pop(task))
        self._first_losses.backward_over()
        if self.worker.shares_process:
            self._take_time(pairs[0].replica.step)
        with torch.no_grad():
            for pair in pairs:
                pair.after_backward(self.weight)
        self._stated_used = True

    def _take_time(self, step: int) -> None:
        """Of simulated workers, computing a gradient takes virtual time here."""
        rows = next(reversed(self._rows.values()), None)
        line = self.worker.driver
        line.progress("compute", step)
        line.computed(0 if self._stand_ins else 1 if rows is None else round(rows))
        line.progress(USER, step)

    # -- step and finish ---------------------------------------------------------------------------------------------

    def check_weight_used(self) -> None:
        """Raise BadInput if a stated weight came too late for its backward."""
        if self._stated is not None and not self._stated_used:
            raise BadInput(
                "mh.weight(...) was called after backward(), when the gradient had its weight already: call it before"
            )

    def after_step(self, pair: Pair) -> None:
        """A pair has stepped: stated weights end, open iterations remember it."""
        self._stated = None
        self._pending.clear()  # of a backward that raised
        self._silence()
        if self.worker.size > 1:
            for iteration in self.iterations:
                iteration.used.add(pair)

    def finish(self, pairs: Iterable[Pair]) -> None:
        """Close the open rounds of these pairs; a collective."""
        for pair in in_order(pairs):
            pair.finish()


def in_order(pairs: Iterable[Pair]) -> list[Pair]:
    """As they were prepared, the same on all ranks."""
    return sorted(pairs, key=lambda pair: pair.number)
