"""Quorum: synchronous SGD that does not wait for its slowest workers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from manyhands.comm.group import MeanResult
from manyhands.errors import BadInput
from manyhands.replica.flat_vector import FlatVector
from manyhands.server.base import ServerSpec
from manyhands.strategies import compression, server_strategy
from manyhands.strategies.base import Needs, StepResult, Strategy, Traits
from manyhands.strategies.compression import CompressedState, CompressOptions
from manyhands.worker import Worker

if TYPE_CHECKING:
    from manyhands.replica.replica import Replica

AHEAD = 16  # ticks that the others may be ahead of a late worker: so many means the server keeps for it


@dataclass(kw_only=True)
class QuorumState(CompressedState):
    """How far this worker is behind, and what compression left out."""

    behind: int = 0  # steps that were decided without it, whose means it has yet to apply

    @override
    def merge(self, others: list[QuorumState], rank: int, size: int) -> QuorumState:
        """A checkpoint is of one tick of all ranks. With another number of ranks, each takes the mean of the late parts."""
        if len(others) == size:
            return replace(others[rank], behind=0)
        return replace(others[0], behind=0, residual=self.shared(others, size, adds=False))


@dataclass(frozen=True, kw_only=True)
class Quorum(CompressOptions, Strategy):
    """Synchronous SGD with backup workers.

    Source: Revisiting Distributed Synchronous SGD, Jianmin Chen, Xinghao Pan, Rajat Monga, Samy Bengio, Rafal
    Jozefowicz, 2016.

    1. Every worker computes the gradient of its slice, and pushes it.
    2. The server waits for the first `N - backups` gradients of a step, and drops those that come later.
    3. Every worker applies their mean, also one that came too late: all hold the same parameters, step after step.
    4. A worker that finds itself several steps behind applies their means one after the other, computing no gradient
       that would be dropped, until it is at the open step again.

    With backups=0 it equals all-reduce over a server, and with one worker a plain loop, bit for bit.

    Deviations: means are weighted by what the loss counts. Workers apply the mean themselves, with an optimizer each,
    where the paper's server applies it: every worker's parameters are the newest, and one that comes late need not
    fetch them. It finishes the gradient under way before it notices that the step went on without it. Rows
    whose gradient was dropped, or never computed, count as unused; the next epoch shuffles them anew.
    """

    backups: int = 0
    """How many workers a step does not wait for. Raise it when a few of many workers are often late (the summary's
    wait). The price is their rows, of few workers a large share: so the default waits for all, and is then exact and
    the same every time."""

    name: ClassVar[str] = "quorum"
    source: ClassVar[str] = "Revisiting Distributed Synchronous SGD, Chen, Pan, Monga, Bengio, Jozefowicz, 2016"
    summary: ClassVar[str] = "gradients; the first `N - backups` of a step count"
    consistency: ClassVar[str] = "synchronous with backups"
    needs: ClassVar[Needs] = Needs(gradients=True, before_gradient=True, elementwise=False)
    traits: ClassVar[Traits] = Traits(exact=True, drops=True)

    def __post_init__(self) -> None:
        server_strategy.check_whole(self.name, 0, backups=self.backups)
        compression.check(self.name, self)

    @override
    def server(self) -> ServerSpec:
        return ServerSpec(
            rule="quorum", bound=AHEAD, options={"backups": self.backups}, one_shard=True, compress=self.compress
        )

    @override
    def check_workers(self, workers: int) -> None:
        if self.backups >= workers > 1:
            raise BadInput(
                f"strategy quorum: backups={self.backups} must be less than workers={workers}: give at most {workers - 1}"
            )

    @override
    def start(self, replica: Replica, worker: Worker) -> QuorumState:
        return QuorumState(**compression.remembered(self, replica, worker))

    @override
    def before_backward(self, replica: Replica, worker: Worker, state: QuorumState) -> None:
        replica.skip = state.behind > 0

    @override
    def exchange(self, replica: Replica, worker: Worker, state: QuorumState) -> StepResult:
        weight, dropped = self._receive_mean(replica, worker, state)
        # A step of weight 0 has waited for all: only then nobody, late ones included, has rows.
        rows_left = replica.control.any_rank_has_rows or (self.backups > 0 and weight > 0)
        return StepResult(applied=replica.apply(), rows_left=rows_left, dropped=dropped)

    @override
    def step_alone(self, replica: Replica, worker: Worker, state: QuorumState, *, extra: bool = False) -> bool:
        """Not alone: all make the same steps, and the mean is of those who have rows."""
        self._receive_mean(replica, worker, state)
        return replica.apply(extra=extra)

    @override
    def extras_of(self, pushes: int, dealt: int) -> int:
        return min(pushes, dealt)

    def _receive_mean(self, replica: Replica, worker: Worker, state: QuorumState) -> tuple[float, bool]:
        """Push, and have the mean of the step in `gradients`: its weight, and whether this push came too late for it."""
        pushed = compression.push_gradients(self, replica, worker, state)
        state.behind = pushed.behind
        replica.rounds += 1
        if pushed.answer is not None:
            replica.gradients.take_joined_(pushed.answer)
        replica.record_mean(MeanResult(pushed.weight, pushed.bits))
        return pushed.weight, not pushed.applied

    @override
    def agreed(self, replica: Replica, state: QuorumState) -> FlatVector | None:
        return None if self.backups else replica.parameters
