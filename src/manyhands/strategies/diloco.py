"""DiLoCo: many inner steps on every worker, then one outer Nesterov step along the mean of where they went.

Over the group: streaming.py. Over a server: decoupled.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from typing_extensions import override

from manyhands.errors import BadInput
from manyhands.replica.flat_vector import FlatVector
from manyhands.server.base import ServerSpec
from manyhands.strategies import compression, decoupled, server_strategy, streaming
from manyhands.strategies.base import Change, Leasing, Needs, State, StepResult, Strategy, Traits
from manyhands.strategies.compression import CompressOptions
from manyhands.strategies.streaming import Schedule
from manyhands.worker import Worker

if TYPE_CHECKING:
    from manyhands.replica.replica import Replica

OVERLAP, MIXING = 1, 0.5  # the defaults with streaming; mixing where there is overlap
GRACE = 1


@dataclass(frozen=True, kw_only=True)
class DiLoCo(CompressOptions, Strategy):
    """Distributed low-communication training.

    Source: DiLoCo: Distributed Low-Communication Training of Language Models, Arthur Douillard, Qixuan Feng, Andrei A.
    Rusu, Rachita Chhaparia, Yani Donchev, Adhiguna Kuncoro, Marc'Aurelio Ranzato, Arthur Szlam, Jiajun Shen, 2023.

    1. Every worker takes `period` steps of its own optimizer, whose state it keeps, from one center.
    2. The pseudo-gradient is the weighted mean over workers of center - parameters.
    3. The center takes one step of SGD with Nesterov momentum along it, and all workers go on from there.

    With outer_rate=1 and outer_momentum=0 it is local SGD (optimizer_state=kept); with period=1 and plain SGD inside,
    Nesterov SGD on the mean gradient.

    streaming=P: Streaming DiLoCo with overlapping communication, Douillard et al., 2025. The parameters are cut into P
    fragments, synced one after the other, each every `period` steps. A fragment's mean is on its way for `overlap`
    steps; the outer step is then made, and the worker's fragment becomes mixing·own + (1 - mixing)·center.

    via=server: Decoupled DiLoCo for Resilient Distributed Pre-training, Douillard et al., 2026. Workers push what they
    moved in `period` steps and go on at once, from the center if it is a new one, else from where they are. Rounds are
    made by the server of what has come: see `manyhands.server.rules.rounds`. With bound=0 it is the form over the
    group.

    compress=: pseudo-gradients, or pushes, travel by a codec, with error feedback; centers travel whole.

    Deviations: means are weighted by what the loss counts (the papers: equal shards; Decoupled DiLoCo tokens times
    tokens a step). An epoch's end closes the window, however short, so that what is validated has all rows; a round in
    which nobody had rows changes nothing, the momentum included. Fragments are contiguous, the paper's take every P-th
    layer; means of fragments are not quantized; that mixing is 0.5 by default is a choice of ours, the paper's value
    was not confirmed. Via server all parameters are one fragment; a push counts rows / (1 + rounds since its worker saw
    the center, its own left out); the grace is counted in pushes, where the paper's is a time that adapts: so a run can
    be replayed.
    """

    period: int = 16
    """Steps between exchanges (the papers' H). Raise it when exchange takes long: language models bore 500. Lower it
    when accuracy falls, or when an epoch has few windows."""
    outer_rate: float = 0.7
    """Of the outer step; the paper's. Lower it when the loss jumps after an exchange."""
    outer_momentum: float = 0.9
    """Nesterov's, < 1. A constant direction is amplified 1 / (1 - outer_momentum)-fold: lower it for few rounds."""
    via: Literal["group", "server"] = "group"
    """`group`: all in step. `server`: every worker at its own pace; take it where some are late, or may be."""
    streaming: int = 0
    """Fragments that are synced in turn; 0: all at once. Raise it when the link is the bottleneck: the most that is
    sent at once falls as much, while `overlap` is at most period/streaming."""
    overlap: int | None = None
    """With streaming: steps that a fragment is under way (τ). Raise it while the summary shows exchange time."""
    mixing: float | None = None
    """With streaming: the share of its own parameters that a worker keeps when a fragment has come (α); none is 0.5,
    and 0 with overlap=0, where no step is missed. 0 takes the center over whole. Lower it when replicas drift apart."""
    quorum: int | None = None
    """Via server: so many workers make a round (K); none is more than half, the fewest that no two rounds can have
    without a worker in common. Raise it when rounds have too little in them, lower it when many workers are late."""
    grace: int | None = None
    """Via server: how long a round with its quorum waits for the others, in pushes of workers that are in it already;
    none is 1, about `period` steps of the fastest. 0 does not wait."""
    bound: int | None = None
    """Via server: how many steps the fastest may be ahead; `none`: any. 0 is synchronous."""

    name: ClassVar[str] = "diloco"
    source: ClassVar[str] = "DiLoCo: Distributed Low-Communication Training of Language Models, Douillard et al., 2023"
    summary: ClassVar[str] = "how far `period` steps went, for an outer step with Nesterov momentum"
    consistency: ClassVar[str] = "periodic"
    needs: ClassVar[Needs] = Needs(before_gradient=True)
    traits: ClassVar[Traits] = Traits(period="period", outer_steps=True)

    def __post_init__(self) -> None:
        server_strategy.check_whole(self.name, period=self.period)
        server_strategy.check_whole(self.name, 0, streaming=self.streaming)
        server_strategy.check_pace(self.name, self.bound, 0)
        _check_number("outer_rate", self.outer_rate, "above 0", lambda rate: 0 < rate < math.inf)
        _check_number("outer_momentum", self.outer_momentum, "from 0 to below 1", lambda share: 0 <= share < 1)
        if self.via not in ("group", "server"):
            raise BadInput(f"strategy diloco: via must be group or server, not {self.via!r}")
        compression.check(self.name, self)
        self._check_streaming()
        self._check_server()

    @override
    def server(self) -> ServerSpec | None:
        if self.via == "group":
            return None
        outer = {"rate": self.outer_rate, "momentum": self.outer_momentum}
        if self.bound == 0:
            options: dict[str, Any] = {**outer, "nesterov": self.outer_momentum > 0}
            return ServerSpec(rule="outer", bound=0, options=options, compress=self.compress)
        options = {**outer, "quorum": self.quorum, "grace": self._grace()}
        return ServerSpec(rule="rounds", bound=self.bound, options=options, one_shard=True, compress=self.compress)

    @override
    def leasing(self) -> Leasing | None:
        return server_strategy.leasing_of(self.bound, 0) if self.via == "server" else None

    @override
    def whole_replicas(self) -> str:
        if self.via == "server" and self.bound != 0:
            return (
                "its rounds are made of pushes of whole models: give bound=0, with which all are in step, or via=group"
            )
        return "streaming cuts the whole model into fragments" if self.streaming else super().whole_replicas()

    @override
    def rate_factor(self, workers: int) -> float:
        """For a constant update direction and equally fast workers, within an epoch.

        Over the group all means are used. With mixing, a fragment keeps that share of what its center is ahead or
        behind; of what is stepped while it is on its way, it keeps that share too. Over a server without grace, rounds
        of K pushes come N/K times as often. With unequal workers it is more, up to `workers` times: what one pushes
        twice in a round adds up.
        """
        factor = self.outer_rate / (1 - self.outer_momentum)
        if self.via == "group":
            schedule = self._schedule()
            kept = 1 - (1 - schedule.mixing) * schedule.overlap / self.period
            return factor * kept / (1 + schedule.mixing * (factor - 1))
        if self.bound == 0 or self._grace():
            return factor
        quorum = workers // 2 + 1 if self.quorum is None else self.quorum
        return factor * workers / min(quorum, workers)

    @override
    def start(self, replica: Replica, worker: Worker) -> State:
        if self.via == "group":
            return streaming.begin(self._schedule(), replica, worker)
        if self.quorum is not None and self.quorum > worker.mesh.data.size > 1:
            raise BadInput(
                f"strategy diloco: quorum={self.quorum} must not be more than workers={worker.mesh.data.size}: give at "
                f"most {worker.mesh.data.size}"
            )
        return decoupled.begin(self, replica, worker)

    @override
    def synchronize(self, replica: Replica, worker: Worker, state: Any, change: Change) -> None:
        super().synchronize(replica, worker, state, change)
        if change.first:
            state.center.copy_(replica.parameters)
            if self.via == "server":
                state.start.copy_(replica.parameters)

    @override
    def before_backward(self, replica: Replica, worker: Worker, state: Any) -> None:
        if self.via == "server":
            decoupled.look(self, replica, worker, state)

    @override
    def exchange(self, replica: Replica, worker: Worker, state: Any) -> StepResult:
        if self.via == "group":
            applied = self.step_alone(replica, worker, state)
            return StepResult(applied=applied, rows_left=streaming.turn(self._schedule(), replica, worker, state))
        weight, applied = replica.weight, replica.apply()
        decoupled.turn(self, replica, worker, state, weight if applied else 0.0, self.period)
        return StepResult(applied=applied)

    @override
    def step_alone(self, replica: Replica, worker: Worker, state: Any, *, extra: bool = False) -> bool:
        weight, applied = replica.weight, replica.apply(extra=extra)
        state.counted += weight if applied else 0.0
        return applied

    @override
    def step_extra(self, replica: Replica, worker: Worker, state: Any, ago: int) -> bool:
        return (
            streaming.step_extra(replica, state, ago)
            if self.via == "group"
            else super().step_extra(replica, worker, state, ago)
        )

    @override
    def open_steps(self, state: Any) -> int:
        return int(state.ticks - min(state.opened, default=0)) if self.via == "group" else 0

    @override
    def steps_since_round(self, state: Any) -> int:
        return self.open_steps(state) if self.via == "group" else int(state.ticks)

    @override
    def forget_exchange(self, replica: Replica, worker: Worker, state: Any) -> None:
        if self.via == "group":
            streaming.forget(self._schedule(), state)

    @override
    def finish(self, replica: Replica, worker: Worker, state: Any) -> None:
        if self.via == "group":
            streaming.close(self._schedule(), replica, worker, state)
        else:
            decoupled.close(self, replica, worker, state)

    @override
    def agreed(self, replica: Replica, state: Any) -> FlatVector | None:
        return state.center if self.via == "group" else None

    @override
    def consensus(self, replica: Replica, worker: Worker, state: Any) -> FlatVector:
        return state.center if self.via == "group" else compression.center(self, replica, worker)

    def _schedule(self) -> Schedule:
        on = self.streaming > 0
        overlap = (OVERLAP if self.overlap is None else self.overlap) if on else 0
        return Schedule(
            period=self.period,
            fragments=max(1, self.streaming),
            overlap=overlap,
            mixing=(MIXING if overlap else 0.0) if self.mixing is None else self.mixing,
            rate=self.outer_rate,
            momentum=self.outer_momentum,
            compress=self.compress,
            feedback=self.feedback,
        )

    def _grace(self) -> int:
        return GRACE if self.grace is None else self.grace

    # -- options -------------------------------------------------------------------------------------------------------

    def _check_streaming(self) -> None:
        if not self.streaming:
            self._refuse("without streaming all parameters are exchanged at once", "streaming=2", "overlap", "mixing")
            return
        if self.via == "server":
            raise BadInput(
                "strategy diloco: streaming does not work with via=server: leave streaming out, or use via=group"
            )
        if self.compress != "none":
            raise BadInput(
                f"strategy diloco: streaming={self.streaming} sends fragments while workers go on, and compress={self.compress} "
                "waits for one whole vector: leave one of them out"
            )
        if self.streaming > self.period:
            raise BadInput(
                f"strategy diloco: streaming={self.streaming} needs a period of at least as many steps, and "
                f"period={self.period}: give streaming={self.period} or less"
            )
        if self.overlap is not None:
            server_strategy.check_whole(self.name, 0, overlap=self.overlap)
        if self._schedule().overlap >= self.period:
            raise BadInput(
                f"strategy diloco: overlap={self._schedule().overlap} must be less than period={self.period}, because "
                "a fragment's exchange must end before its next one begins: give a smaller overlap"
            )
        if self.mixing is not None:
            _check_number("mixing", self.mixing, "from 0 to below 1", lambda share: 0 <= share < 1)

    def _check_server(self) -> None:
        if self.via == "group":
            self._refuse("via=group keeps all in step", "via=server", "quorum", "grace", "bound")
        if self.bound == 0:
            self._refuse("bound=0 waits for all workers", "another bound", "quorum", "grace")
        if self.quorum is not None:
            server_strategy.check_whole(self.name, 1, quorum=self.quorum)
        if self.grace is not None:
            server_strategy.check_whole(self.name, 0, grace=self.grace)

    def _refuse(self, why: str, instead: str, *names: str) -> None:
        """BadInput for options that mean nothing here."""
        given = [name for name in names if getattr(self, name) is not None]
        if given:
            raise BadInput(f"strategy diloco: {why}, so {given[0]} has no effect: leave it out, or give {instead}")


def _check_number(name: str, value: object, wanted: str, fine: Callable[[float], bool]) -> None:
    """Raise BadInput, by name, for what is no number, or none that is fine."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not fine(value):
        raise BadInput(f"strategy diloco: {name} must be a number {wanted}, not {value!r}")
