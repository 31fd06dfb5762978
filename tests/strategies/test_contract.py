"""The contract fits what is to come: DiLoCo written against it.

A sketch of the algorithm, not the product's strategy: it proves that Strategy and Replica are enough to write it as its
paper has it, on mathematics that a hand can check.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from by_hand import ROW, Point, quadratic, sgd
from torch import Tensor

from manyhands.replica.flat_vector import FlatVector
from manyhands.replica.replica import Replica
from manyhands.strategies import strategy_of
from manyhands.strategies.base import Change, State, StepResult, Strategy
from manyhands.testing.threads import together
from manyhands.worker import Worker


def run(strategy: Strategy, replica: Replica, worker: Worker, ticks: int) -> None:
    state = strategy.start(replica, worker)
    strategy.synchronize(replica, worker, state, Change())
    for tick in range(ticks):
        replica.begin_tick()
        replica.tick = tick
        strategy.before_backward(replica, worker, state)
        replica.backward(ROW)
        strategy.exchange(replica, worker, state)


@dataclass(kw_only=True)
class Outer(State):
    center: FlatVector
    momentum: FlatVector
    ticks: int = 0


class DiLoCo(Strategy):
    """Inner steps, then an outer Nesterov step on the mean pseudo-gradient."""

    name, source, summary, consistency = "diloco", "", "", ""

    def __init__(self, period: int, rate: float, momentum: float) -> None:
        self.period, self.rate, self.momentum = period, rate, momentum

    def start(self, replica: Replica, worker: Worker) -> Outer:
        return Outer(center=replica.parameters.clone(), momentum=replica.zeros())

    def exchange(self, replica: Replica, worker: Worker, state: Outer) -> StepResult:
        applied = replica.apply()
        state.ticks += 1
        if state.ticks % self.period == 0:
            pseudo = state.center - replica.parameters
            replica.mean_(worker.group, pseudo, 1.0)
            state.momentum.mul_(self.momentum).add_(pseudo)
            state.center.add_(pseudo, alpha=-self.rate).add_(state.momentum, alpha=-self.rate * self.momentum)
            replica.set_parameters(state.center)
        return StepResult(applied=applied)


def _three(strategy: Strategy, ticks: int) -> Tensor:
    shifts = [-1.0, 0.0, 4.0]

    def program(worker: Worker) -> Tensor:
        replica = Replica.of(Point([1.0]), sgd(0.1), group=worker.group, loss=quadratic([2], [shifts[worker.rank]]))
        run(strategy, replica, worker, ticks)
        return replica.parameters.parts[0][:1].clone()

    return together(3, program)[0]


def test_diloco_with_outer_rate_one_is_local_sgd() -> None:
    """CASE 5"""
    assert (_three(DiLoCo(4, 1.0, 0.0), 12) - _three(strategy_of("local-sgd:period=4"), 12)).abs().max() < 1e-14


def test_diloco_with_period_one_is_nesterov_on_the_mean_gradient() -> None:
    """CASE 5"""
    model = Point([1.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    for _ in range(12):
        model.w.grad = (2 * (model.w - 1.0)).detach()
        optimizer.step()
    assert (_three(DiLoCo(1, 1.0, 0.9), 12) - model.w.detach()).abs().max() < 1e-14
