"""Downpour SGD: workers step alone, and every few steps add what they did to the center, and take it over."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from typing_extensions import override

from manyhands.errors import BadInput
from manyhands.replica.flat_vector import FlatVector
from manyhands.server.base import ServerSpec
from manyhands.server.rules.outer import ELEMENTWISE
from manyhands.strategies import compression, server_strategy
from manyhands.strategies.base import Needs, StepResult, Strategy, Traits
from manyhands.strategies.compression import CompressedOverlapState, CompressOptions
from manyhands.strategies.server_strategy import AsyncOptions, Outgoing, OverlapOptions
from manyhands.worker import Worker

if TYPE_CHECKING:
    from manyhands.replica.replica import Replica


@dataclass(kw_only=True)
class DownpourState(CompressedOverlapState):
    """What this worker did that the server does not have yet."""

    start: FlatVector  # where the parameters stood at the last pull or push
    accrued: FlatVector  # gradients since the last push; or updates that a pull interrupted, if `interrupted`
    interrupted: bool = False
    ticks: int = 0  # of this epoch: pulls and pushes are due by them
    steps: int = 0  # since the last push
    weight: float = 0.0  # that they counted
    stale: bool = True  # a pull is due

    @override
    def merge(self, others: list[DownpourState], rank: int, size: int) -> DownpourState:
        """With another number of ranks, all start at the center: unpushed updates are lost, except residuals."""
        if len(others) == size:
            return self.follow(others[rank])
        self.accrued.zero_()
        residual = self.shared(others, size, adds=True)
        return replace(self, residual=residual, interrupted=False, ticks=0, steps=0, weight=0.0, stale=True)


@dataclass(frozen=True, kw_only=True)
class Downpour(AsyncOptions, CompressOptions, OverlapOptions, Strategy):
    """Asynchronous SGD with a parameter server.

    Source: Large Scale Distributed Deep Networks, Jeffrey Dean, Greg Corrado, Rajat Monga, Kai Chen, Matthieu Devin,
    Mark Mao, Marc'Aurelio Ranzato, Andrew Senior, Paul Tucker, Ke Yang, Quoc Le, Andrew Ng, 2012 (DistBelief).

    1. Every `pull_every` steps, pull the center into the parameters.
    2. Compute the gradient there, and take a step of the worker's own optimizer.
    3. Accrue what it did: the update (rule `add`), or the gradient (rule `adagrad`, the paper's).
    4. Every `push_every` steps, push what accrued, and begin to accrue anew.

    N workers move the center N times as far as one: the paper adds, it does not average.

    Deviations: pushing updates is the default, so that any optimizer's step reaches the center as it is; for plain SGD
    that is the paper's sum of gradients times its rate. A pull that comes before a push leaves the own unpushed updates
    in the parameters, where the paper overwrites them: a worker always sees what it did. (Gradients are no updates:
    with `adagrad` such a pull overwrites.) After a push without a pull the worker steps on from where it is, as in the
    paper. Momentum and moments stay with the worker when it pulls. What an epoch's end finds accrued is pushed. A step
    waits for its pull and its push, where the paper's client fetches and pushes in threads beside it: `overlap` does
    so. What it begins in a step is over when the next gradient is computed.
    """

    push_every: int = 1
    """Steps between pushes. Raise it if exchange takes long, lower it if accuracy falls; the paper uses 1."""
    pull_every: int = 1
    """Steps between pulls. Raise it together with push_every: a center that is pulled late is stale."""
    rule: str = "add"
    """What the server does with a push: add the update; `adagrad` takes gradients, as the paper does, where the rate is
    hard to choose; any elementwise torch optimizer (sgd, adam, …) takes a step along the update, where adding is
    unstable; a rule of your own, file.py:Name, gets the update."""
    outer_rate: float | None = None
    """The rate of that rule; none is 1 for sgd (with which it adds), and torch's own default for the others (adagrad:
    0.01). Lower it when the loss explodes; `add` has none."""
    outer_momentum: float = 0.0
    """Momentum of rule sgd or rmsprop. Raise it if progress is slow and steady; staleness acts like momentum."""

    name: ClassVar[str] = "downpour"
    source: ClassVar[str] = (
        "Large Scale Distributed Deep Networks, Dean, Corrado, Monga, Chen, Devin, Mao, Ranzato, Senior, Tucker, Yang, Le, Ng, 2012"
    )
    summary: ClassVar[str] = "accumulated updates every `push_every` steps, or gradients (rule adagrad)"
    consistency: ClassVar[str] = "async / bounded"
    needs: ClassVar[Needs] = Needs(before_gradient=True)
    traits: ClassVar[Traits] = Traits(period="push_every and pull_every", adds=True)

    def __post_init__(self) -> None:
        server_strategy.check_whole(self.name, push_every=self.push_every, pull_every=self.pull_every)
        server_strategy.check_pace(self.name, self.bound, self.warmup)
        server_strategy.check_overlap(self.name, self.overlap, self.bound)
        compression.check(self.name, self)
        rate = self.outer_rate
        if rate is not None and not (rate > 0 and math.isfinite(rate)):
            raise BadInput(f"strategy downpour: outer_rate must be a number above 0, or none; not {rate!r}")
        if not 0 <= self.outer_momentum < 1:
            raise BadInput(
                f"strategy downpour: outer_momentum must be 0 or more and below 1, not {self.outer_momentum!r}"
            )
        self._check_rule()

    def _check_rule(self) -> None:
        known = ("add", "adagrad", *(name.lower() for name in ELEMENTWISE if name != "Adagrad"))
        own = ".py:" in self.rule
        if self.rule not in known and not own:
            raise BadInput(
                f"strategy downpour: rule must be one of {', '.join(known)}, or your own, file.py:Name; not {self.rule!r}"
            )
        if (self.rule == "add" or own) and (self.outer_rate is not None or self.outer_momentum):
            raise BadInput(
                f"strategy downpour: rule {self.rule} has no outer_rate and no outer_momentum: leave them out, or use rule=sgd"
            )
        if self.outer_momentum and self.rule not in ("sgd", "rmsprop"):
            raise BadInput(
                f"strategy downpour: rule {self.rule} has no outer_momentum: leave it out, or use rule=sgd or "
                "rule=rmsprop"
            )

    @override
    def exchanges_gradients(self) -> str:
        return "with rule=adagrad sends gradients to its server" if self.rule == "adagrad" else ""

    @override
    def overlaps(self) -> bool:
        return self.overlap

    @override
    def server(self) -> ServerSpec:
        if self.rule == "add" or ".py:" in self.rule:
            return ServerSpec(rule=self.rule, bound=self.bound, compress=self.compress)
        if self.rule == "adagrad":
            return ServerSpec(rule="adagrad", bound=self.bound, options={"rate": self._rate()}, compress=self.compress)
        options = {"optimizer": _optimizer(self.rule), "rate": self._rate(), "momentum": self.outer_momentum}
        return ServerSpec(rule="outer", bound=self.bound, options=options, compress=self.compress)

    @override
    def rate_factor(self, workers: int) -> float:
        """For rules of adaptive rates a count of steps: of their own length, one for each push."""
        if self.rule != "sgd":
            return float(workers)
        factor = self._rate() / (1 - self.outer_momentum)
        return (
            factor if self.bound == 0 else factor * workers
        )  # in step, the pushes of all are one step along their mean

    @override
    def start(self, replica: Replica, worker: Worker) -> DownpourState:
        memory = compression.remembered(self, replica, worker)
        overlap = server_strategy.overlapping(replica, self.overlap)
        return DownpourState(start=replica.zeros(), accrued=replica.zeros(), **memory, **overlap)

    @override
    def before_backward(self, replica: Replica, worker: Worker, state: DownpourState) -> None:
        if state.stale:
            self._take_center(replica, state, lambda: compression.pull(self, replica, worker))
            state.stale = False

    @override
    def exchange(self, replica: Replica, worker: Worker, state: DownpourState) -> StepResult:
        if not state.steps:
            state.note_center(worker)
        applied = self.step_alone(replica, worker, state)
        state.ticks += 1
        push, pull = state.ticks % self.push_every == 0, state.ticks % self.pull_every == 0
        if state.outgoing is not None:
            self._land(replica, worker, state)
            self._start(replica, worker, state, state.outgoing, push, pull)
            return StepResult(applied=applied)
        if push:
            self._push(replica, worker, state)
        state.stale = pull
        return StepResult(applied=applied)

    @override
    def step_alone(self, replica: Replica, worker: Worker, state: DownpourState, *, extra: bool = False) -> bool:
        weight, applied = replica.weight, replica.apply(extra=extra)
        if applied:
            state.steps += 1
            state.weight += weight
            if self.rule == "adagrad":
                state.accrued.add_(replica.gradients)  # as they were applied: clipped, where the task clips
        return applied

    @override
    def steps_since_round(self, state: DownpourState) -> int:
        return state.ticks % self.push_every

    @override
    def settle(self, replica: Replica, worker: Worker, state: DownpourState) -> None:
        state.arrive(worker)

    @override
    def finish(self, replica: Replica, worker: Worker, state: DownpourState) -> None:
        self._land(replica, worker, state)
        self._push(replica, worker, state)
        state.ticks, state.stale = 0, True

    @override
    def consensus(self, replica: Replica, worker: Worker, state: DownpourState) -> FlatVector:
        return compression.center(self, replica, worker)

    def _rate(self) -> float:
        if self.outer_rate is not None:
            return self.outer_rate
        if self.rule == "sgd":
            return 1.0
        return float(inspect.signature(getattr(torch.optim, _optimizer(self.rule))).parameters["lr"].default)

    def _take_center(self, replica: Replica, state: DownpourState, receive: Callable[[], None]) -> None:
        """`receive` puts the center into the parameters; updates that it does not have yet stay on top."""
        keep = state.steps > 0 and self.rule != "adagrad"
        if keep:
            state.accrued.add_(replica.parameters).sub_(state.start)
            state.interrupted = True
        receive()
        state.start.copy_(replica.parameters)
        if keep:
            replica.parameters.add_(state.accrued)
            state.start.copy_(replica.parameters)

    def _push(self, replica: Replica, worker: Worker, state: DownpourState) -> None:
        if not state.steps:
            return
        update = self._update(replica, state, state.start)
        compression.push(self, replica, worker, state, update, state.weight, since=state.since)
        self._begin_anew(replica, state)

    def _start(
        self, replica: Replica, worker: Worker, state: DownpourState, outgoing: Outgoing, push: bool, pull: bool
    ) -> None:
        """Begin what is due; the next step lands it."""
        if push and state.steps:
            update = self._update(replica, state, outgoing.update)
            if update is not outgoing.update:
                outgoing.update.copy_(update)
            compression.start_exchange(self, replica, worker, state, outgoing.update, state.weight, pull=pull)
            self._begin_anew(replica, state)
        elif pull:
            compression.start_exchange(self, replica, worker, state, None, pull=True)

    def _land(self, replica: Replica, worker: Worker, state: DownpourState) -> None:
        """What the step before began is over: the center is this worker's, with what it has not pushed on top."""
        state.arrive(worker)
        if state.has_come:
            self._take_center(replica, state, lambda: compression.take_center(self, replica, state))

    def _update(self, replica: Replica, state: DownpourState, memory: FlatVector) -> FlatVector:
        """What is pushed: what accrued, or in `memory` what was done since the last push."""
        if self.rule == "adagrad":
            return state.accrued
        update = memory.subtract_(replica.parameters, state.start)
        return update.add_(state.accrued) if state.interrupted else update

    def _begin_anew(self, replica: Replica, state: DownpourState) -> None:
        """All that was done is pushed."""
        state.start.copy_(replica.parameters)
        if self.rule == "adagrad" or state.interrupted:
            state.accrued.zero_()
        state.interrupted, state.steps, state.weight = False, 0, 0.0


def _optimizer(rule: str) -> str:
    """The name of the torch optimizer that a rule is."""
    return next(name for name in ELEMENTWISE if name.lower() == rule)
