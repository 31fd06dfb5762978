"""DiLoCo over a server: every worker pushes what its windows moved, at its own pace, and goes on from the newest
center.

Source: Decoupled DiLoCo for Resilient Distributed Pre-training, Douillard et al., 2026. Which pushes are a round is the
server's: `manyhands.server.rules.rounds`; with bound=0, those of a tick.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from typing_extensions import override

from manyhands.replica.flat_vector import FlatVector, weighted_mean
from manyhands.replica.replica import Replica
from manyhands.server.rules.rounds import LAST
from manyhands.strategies import compression, server_strategy
from manyhands.strategies.compression import CompressedState, CompressOptions
from manyhands.worker import Worker


@dataclass(kw_only=True)
class ServedState(CompressedState):
    """This worker's open window."""

    center: FlatVector  # as this worker saw it last
    start: FlatVector  # where the window began
    ticks: int = 0
    counted: float = 0.0  # by the loss, in the window
    memory: list[FlatVector] = field(default_factory=list)  # one of scratch

    @override
    def merge(self, others: list[ServedState], rank: int, size: int) -> ServedState:
        """With another number of ranks, the open windows become one, of which each has its share."""
        if len(others) == size:
            return others[rank]
        weights = [other.counted for other in others]
        return replace(
            others[0],
            start=weighted_mean([other.start for other in others], weights),
            ticks=max(other.ticks for other in others),
            counted=sum(weights) / size,
            residual=self.shared(others, size, adds=False),
        )

    @override
    def taken_over(self) -> ServedState:
        """No window of its own is open: the next begins at the center."""
        return replace(self, ticks=0, counted=0.0)

    @override
    def weight_of_window(self) -> float:
        return self.counted


def begin(options: CompressOptions, replica: Replica, worker: Worker) -> ServedState:
    """The state; the window begins at the replica's parameters."""
    x = replica.parameters
    memory = compression.remembered(options, replica, worker)
    return ServedState(center=x.clone(), start=x.clone(), memory=[x.zeros_like()], **memory)


def look(options: CompressOptions, replica: Replica, worker: Worker, state: ServedState) -> None:
    """Where a window begins: at the center, if it is another than this worker has seen, else where the worker is."""
    if state.ticks or state.counted:  # the latter alone: it has slices of lost workers
        return
    center = state.memory[0]
    server_strategy.pull_into(center, worker)
    compression.clear_padding(options, replica, center)
    if not center.equal(state.center):
        state.center.copy_(center)
        replica.set_parameters(center)
        replica.rounds += 1
    state.start.copy_(replica.parameters)


def turn(
    options: CompressOptions, replica: Replica, worker: Worker, state: ServedState, weight: float, period: int
) -> None:
    """After a step that counted `weight`: the window may be over."""
    state.ticks += 1
    state.counted += weight
    if state.ticks == period:
        _push(options, replica, worker, state)


def close(options: CompressOptions, replica: Replica, worker: Worker, state: ServedState) -> None:
    """The window ends, however short; the round stays open for the others' last ones."""
    _push(options, replica, worker, state, LAST)


def _push(options: CompressOptions, replica: Replica, worker: Worker, state: ServedState, bits: int = 0) -> None:
    """What the window moved goes to the server, if it had rows."""
    if state.counted:
        update = state.memory[0].subtract_(replica.parameters, state.start)
        compression.push(options, replica, worker, state, update, state.counted, bits)
    state.ticks, state.counted = 0, 0.0
