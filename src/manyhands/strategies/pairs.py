"""Asynchronous gossip in pairs, the workers' half. They exchange through the server, see server/rules/pairs.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from manyhands.replica.flat_vector import FlatVector
from manyhands.strategies import server_strategy
from manyhands.strategies.base import State, StepResult
from manyhands.worker import Worker

if TYPE_CHECKING:
    from manyhands.replica.replica import Replica


@dataclass(kw_only=True)
class PairsState(State):
    """This worker's open window."""

    start: FlatVector  # the parameters at which the window began; where none is open, those as they are
    ticks: int = 0
    weight: float = 0.0
    merged: bool = False  # the replica is a mean of others that no exchange has brought up to date yet

    @override
    def merge(self, others: list[PairsState], rank: int, size: int) -> PairsState:
        """With another number of ranks, the open windows become one window of all, with the same effect on the answer."""
        if len(others) == size:
            return others[rank]
        starts = zip(*(other.start.parts for other in others), strict=True)
        start = FlatVector([torch.stack(parts).mean(0) for parts in starts])
        ticks, weight = max(other.ticks for other in others), sum(other.weight for other in others) / size
        return replace(others[0], start=start, ticks=ticks, weight=weight, merged=True)

    @override
    def taken_over(self) -> PairsState:
        """The open window is the other one's. At the server this worker stands where the one before it stood."""
        return replace(self, ticks=0, weight=0.0, merged=True)


def turn(period: int, replica: Replica, worker: Worker, state: PairsState) -> StepResult:
    """After a gradient: the step, and every `period` steps an exchange."""
    applied = replica.apply()
    state.ticks += 1
    state.weight += replica.weight
    if state.ticks >= period:
        close(replica, worker, state)
    return StepResult(applied=applied)


def close(replica: Replica, worker: Worker, state: PairsState) -> None:
    """Give the server what the window moved, and go on from its answer; a window without rows moved nothing."""
    weight, state.ticks, state.weight = state.weight, 0, 0.0
    if not weight:
        return
    replica.rounds += 1
    update = state.start.subtract_(replica.parameters, state.start)  # until the answer is there
    answer = server_strategy.answer_of(server_strategy.push(replica, worker, update, weight), replica)
    if meets(worker, state):
        assert answer is not None
        replica.parameters.copy_(answer)
        state.merged = False
    state.start.copy_(replica.parameters)


def consensus(replica: Replica, worker: Worker, state: PairsState) -> FlatVector:
    """The mean of all workers' parameters at the server; of one worker, its own."""
    return server_strategy.center(replica, worker) if meets(worker, state) else replica.parameters


def meets(worker: Worker, state: PairsState) -> bool:
    """Whether there is anybody to meet: those who were lost stay at the server."""
    return worker.mesh.data.size > 1 or state.merged or worker.elastic
