"""The contract fits what is to come: Downpour, EAMSGD, quorum and DiLoCo written against it, with an in-process server.

These are sketches of the algorithms, not the product's strategies: they prove that Strategy, Replica and Server are
enough to write each as its paper has it, on mathematics that a hand can check.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from in_process_server import InProcessServer
from torch import Tensor, nn

import plain
from manyhands.comm.group import Total
from manyhands.replica import CONTROL_BITS, Replica
from manyhands.strategies import strategy_of
from manyhands.strategies.base import State, Strategy
from manyhands.testing.threads import together
from manyhands.worker import Worker

F64 = torch.float64


class Point(nn.Module):
    """w alone: losses are functions of it."""

    def __init__(self, start: list[float]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start, dtype=F64))


def quadratic(curvature: list[float], b: list[float] | None = None):
    a = torch.tensor(curvature, dtype=F64)
    shift = torch.zeros_like(a) if b is None else torch.tensor(b, dtype=F64)
    return lambda model, batch: ((model.w - shift) ** 2 * a).sum() / 2


def sgd(rate: float):
    return lambda model: torch.optim.SGD(model.parameters(), lr=rate)


def run(strategy: Strategy, replica: Replica, worker: Worker, ticks: int, batch: Tensor | None = None) -> State:
    state = strategy.start(replica, worker)
    rows = torch.zeros(1, dtype=F64) if batch is None else batch
    for tick in range(ticks):
        replica.begin_tick()
        replica.tick = tick
        strategy.before_backward(replica, worker, state)
        replica.backward(rows)
        strategy.exchange(replica, worker, state)
    return state


@dataclass(kw_only=True)
class Window(State):
    start: Tensor
    ticks: int = 0


class Downpour(Strategy):
    """Push the accumulated update, then pull, every `period` ticks."""

    name, source, summary, consistency = "downpour", "", "", ""

    def __init__(self, period: int, gradients: bool = False) -> None:
        self.period, self.gradients = period, gradients

    def start(self, replica: Replica, worker: Worker) -> Window:
        worker.server.initialize(replica.parameters)
        replica.set_parameters(worker.server.pull().center)
        return Window(start=replica.parameters.clone())

    def exchange(self, replica: Replica, worker: Worker, state: Window) -> bool:
        replica.apply()
        state.ticks += 1
        if state.ticks % self.period == 0:
            worker.server.push(replica.parameters - state.start)
            replica.set_parameters(worker.server.pull().center)
            state.start.copy_(replica.parameters)
        return True


def add(center: Tensor, update: Tensor, staleness: int) -> None:
    center += update


def test_downpour_of_one_worker_is_sequential_sgd() -> None:
    """CASE 7"""
    server = InProcessServer(add)
    model = Point([1.0, 1.0, 1.0])
    worker = Worker(server=server)
    replica = Replica(model, sgd(0.1), group=worker.group, loss=quadratic([1, 2, 5]))
    run(Downpour(5), replica, worker, 20)
    w = torch.ones(3, dtype=F64)
    for _ in range(20):
        w = w - 0.1 * torch.tensor([1.0, 2, 5], dtype=F64) * w
    assert (replica.named(server.center)["w"] - w).abs().max() < 1e-15


def test_downpours_updates_add_and_the_gradient_is_fresh_each_tick() -> None:
    """CASE 24 and 26: two workers at a constant gradient move the center twice as far, not four times."""
    server = InProcessServer(add)

    def program(worker: Worker) -> None:
        replica = Replica(Point([0.0]), sgd(0.1), group=worker.group, loss=lambda m, b: m.w.sum())
        run(Downpour(5), replica, worker, 10)

    together(2, program, server)
    assert server.center[0] == pytest.approx(-0.1 * 10 * 2)


def test_staleness_reaches_the_rule() -> None:
    """CASE 12: an update of staleness 3 enters with weight 1/4."""
    server = InProcessServer(lambda center, update, staleness: center.add_(update, alpha=1 / (staleness + 1)))
    server.initialize(torch.zeros(1, dtype=F64))
    server.pull()
    server.version = 3
    server.push(torch.ones(1, dtype=F64))
    assert server.center[0] == 0.25


@dataclass(kw_only=True)
class Elastic(State):
    velocity: Tensor
    center: Tensor
    before: Tensor


class Eamsgd(Strategy):
    """Momentum at a look-ahead point, elastic difference taken where the gradient was taken."""

    name, source, summary, consistency = "eamsgd", "", "", ""

    def __init__(self, alpha: float, momentum: float) -> None:
        self.alpha, self.momentum = alpha, momentum

    def start(self, replica: Replica, worker: Worker) -> Elastic:
        replica.agree(worker.group)
        return Elastic(velocity=replica.zeros(), center=replica.parameters.clone(), before=replica.parameters.clone())

    def before_backward(self, replica: Replica, worker: Worker, state: Elastic) -> None:
        state.before.copy_(replica.parameters)
        replica.parameters.add_(state.velocity, alpha=self.momentum)

    def exchange(self, replica: Replica, worker: Worker, state: Elastic) -> bool:
        difference = self.alpha * (state.before - state.center)
        replica.apply()
        state.velocity.copy_(replica.parameters - state.before)
        replica.parameters.sub_(difference)
        worker.group.all_reduce_(difference)
        state.center.add_(difference)
        return True


def test_elastic_averaging_rests_where_the_closed_form_says() -> None:
    """CASE 6"""
    shifts = [-1.0, 0.0, 4.0]

    def program(worker: Worker) -> tuple[float, float]:
        replica = Replica(Point([0.0]), sgd(0.1), group=worker.group, loss=quadratic([2], [shifts[worker.rank]]))
        state = run(Eamsgd(0.2, 0.0), replica, worker, 600)
        return float(replica.parameters[0]), float(state.center[0])

    ends = together(3, program)
    for (x, center), offset in zip(ends, (-1.0, -0.5, 1.5), strict=True):
        assert center == pytest.approx(1.0, abs=1e-12)
        assert x - center == pytest.approx(offset, abs=1e-12)


def test_look_ahead_momentum_is_nesterovs() -> None:
    """v = δv - ηg(x + δv), x = x + v, by hand."""
    worker = Worker()
    replica = Replica(Point([1.0]), sgd(0.1), group=worker.group, loss=quadratic([2]))
    run(Eamsgd(0.0, 0.9), replica, worker, 30)
    x, v = 1.0, 0.0
    for _ in range(30):
        v = 0.9 * v - 0.1 * 2 * (x + 0.9 * v)
        x += v
    assert float(replica.parameters[0]) == pytest.approx(x, abs=1e-14)


class Quorum(Strategy):
    """The server averages the first gradients of a step; every worker applies what it gives back, never its own."""

    name, source, summary, consistency = "quorum", "", "", ""

    def start(self, replica: Replica, worker: Worker) -> State:
        worker.server.initialize(replica.parameters)
        replica.agree(worker.group)
        return State()

    def exchange(self, replica: Replica, worker: Worker, state: State) -> bool:
        answer = worker.server.push(replica.gradients, replica.weight, replica.bits())
        replica.gradients.copy_(answer.mean)
        replica.averaged(Total(answer.weight, answer.bits))
        replica.apply()
        return True


def test_quorum_of_all_is_all_reduce() -> None:
    x, y = plain.rows(9)
    ends = []
    for strategy in (Quorum(), strategy_of("allreduce")):

        def program(worker: Worker, strategy: Strategy = strategy) -> Tensor:
            model = plain.Branches().double()
            for p in model.parameters():
                nn.init.constant_(p, 0.1)
            replica = Replica(model, plain.OPTIMIZERS["adamw"], group=worker.group, loss=plain.cross_entropy)
            state = strategy.start(replica, worker)
            for tick in range(5):
                replica.begin_tick()
                replica.tick = tick
                part = slice(worker.rank * 3, worker.rank * 3 + worker.rank + 1)
                replica.backward((x[part], y[part]))
                strategy.exchange(replica, worker, state)
            return replica.parameters.clone()

        ends.append(together(3, program, InProcessServer(add, quorum=3)))
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(*ends, strict=True))
    assert CONTROL_BITS == 3


@dataclass(kw_only=True)
class Outer(State):
    center: Tensor
    momentum: Tensor
    ticks: int = 0


class DiLoCo(Strategy):
    """Inner steps, then an outer Nesterov step on the mean pseudo-gradient."""

    name, source, summary, consistency = "diloco", "", "", ""

    def __init__(self, period: int, rate: float, momentum: float) -> None:
        self.period, self.rate, self.momentum = period, rate, momentum

    def start(self, replica: Replica, worker: Worker) -> Outer:
        replica.agree(worker.group)
        return Outer(center=replica.parameters.clone(), momentum=replica.zeros())

    def exchange(self, replica: Replica, worker: Worker, state: Outer) -> bool:
        replica.apply()
        state.ticks += 1
        if state.ticks % self.period == 0:
            pseudo = state.center - replica.parameters
            replica.mean_(worker.group, pseudo, 1.0)
            state.momentum.mul_(self.momentum).add_(pseudo)
            state.center.sub_(pseudo + self.momentum * state.momentum, alpha=self.rate)
            replica.set_parameters(state.center)
        return True


def _three(strategy: Strategy, ticks: int) -> Tensor:
    shifts = [-1.0, 0.0, 4.0]

    def program(worker: Worker) -> Tensor:
        replica = Replica(Point([1.0]), sgd(0.1), group=worker.group, loss=quadratic([2], [shifts[worker.rank]]))
        run(strategy, replica, worker, ticks)
        return replica.parameters[:1].clone()

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
