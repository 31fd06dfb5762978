"""Mathematics that a hand can check: one parameter vector, quadratic losses, and workers that take scripted turns."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.replica.control_bits import CONTROL_BITS, MORE
from manyhands.replica.replica import Replica
from manyhands.server.base import Encoded, Pushed, Server
from manyhands.server.in_process import InProcessServers
from manyhands.strategies import strategy_of
from manyhands.strategies.base import Change, Strategy
from manyhands.strategies.graphs import edges
from manyhands.testing.threads import ScriptedTurns, together
from manyhands.worker import Worker

F64 = torch.float64
ROW = torch.zeros(1, dtype=F64)  # a batch of one row, which no loss here looks at


class Point(nn.Module):
    """w alone: losses are functions of it."""

    def __init__(self, start: list[float]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start, dtype=F64))


def quadratic(curvature: list[float], b: list[float] | None = None) -> Callable[[nn.Module, Any], Tensor]:
    a = torch.tensor(curvature, dtype=F64)
    shift = torch.zeros_like(a) if b is None else torch.tensor(b, dtype=F64)
    return lambda model, batch: ((model.w - shift) ** 2 * a).sum() / 2


def slope(gradient: float) -> Callable[[nn.Module, Any], Tensor]:
    """The same gradient everywhere."""
    return lambda model, batch: gradient * model.w.sum()


def sgd(rate: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(model.parameters(), lr=rate)


class Hand:
    """A worker that is told when to take a gradient, and when to exchange it."""

    def __init__(
        self, strategy: Strategy, worker: Worker, loss: Any, start: list[float] | nn.Module, rate: float
    ) -> None:
        self.strategy, self.worker = strategy, worker
        model = start if isinstance(start, nn.Module) else Point(start)
        self.replica = Replica.of(model, sgd(rate), group=worker.group, loss=loss)
        self.state = strategy.start(self.replica, worker)
        strategy.synchronize(self.replica, worker, self.state, Change())
        if worker.server is not None:
            worker.server.activate()
        worker.group.barrier()

    def gradient(self, batch: Tensor | None = ROW) -> None:
        self.replica.begin_tick()
        self.strategy.before_backward(self.replica, self.worker, self.state)
        self.replica.backward(batch)

    def exchange(self) -> None:
        self.strategy.exchange(self.replica, self.worker, self.state)
        self.replica.tick += 1
        if self.worker.server is not None:
            self.worker.server.tick(self.replica.bits() & MORE)

    def tick(self, batch: Tensor | None = ROW) -> None:
        self.gradient(batch)
        self.exchange()

    def finish(self) -> None:
        self.strategy.finish(self.replica, self.worker, self.state)
        if self.worker.server is not None:
            self.worker.server.deactivate()

    @property
    def x(self) -> Tensor:
        """[dimensions] the worker's parameters"""
        return self.replica.named(self.replica.parameters)["w"].clone()

    @property
    def center(self) -> Tensor:
        """[dimensions] what the strategy says; a collective"""
        return self.replica.named(self.strategy.consensus(self.replica, self.worker, self.state))["w"].clone()


def clients_of(strategy: Strategy, workers: int, shards: int = 1) -> Sequence[Server]:
    """Of the server that the strategy needs, in this process; none without one."""
    wanted = strategy.server()
    return InProcessServers(wanted, workers, shards, timeout_s=20).clients if wanted is not None else ()


def hands(
    spec: str | Strategy,
    losses: Sequence[Any],
    program: Callable[[Hand], Any],
    *,
    start: list[float] | None = None,
    rate: float = 0.1,
    shards: int = 1,
) -> list[Any]:
    """What `program` gives on every worker: one a loss, each a thread, around a server in this process."""
    strategy = strategy_of(spec)

    def run(worker: Worker) -> Any:
        return program(Hand(strategy, worker, losses[worker.rank], start or [0.0], rate))

    return together(len(losses), run, clients_of(strategy, len(losses), shards))


def path_of(ticks: int, ends: int = 0) -> Callable[[Hand], list[tuple[float, float]]]:
    """A program: (x, center) after each of so many ticks, and after each of so many ends of an epoch."""

    def program(hand: Hand) -> list[tuple[float, float]]:
        path = []
        for number in range(ticks + ends):
            if number < ticks:
                hand.tick()
            else:
                hand.worker.group.barrier()
                hand.finish()
            path.append((float(hand.x), float(hand.center)))
        return path

    return program


def close(found: Iterable[Any], wanted: Iterable[Any], abs: float = 1e-14) -> bool:
    """Whether two paths, or answers, are the same but for rounding."""
    return torch.allclose(
        torch.as_tensor(list(found), dtype=F64), torch.as_tensor(list(wanted), dtype=F64), rtol=0, atol=abs
    )


def matrix(graph: str, size: int, number: int = 0, **options: Any) -> Tensor:
    """[size, size] what rank i has after round `number` of gossip, as a mean of what all had before."""
    w = torch.eye(size, dtype=F64)
    for source, target, share in edges(graph, size, number, **options):
        w[target, source] += share
        w[source, source] -= share
    return w


class ScriptedServer:
    """A server whose answers are written down: whether a push counted, how far behind it was, which parameters the mean touches."""

    shards = 1

    def __init__(self, answers: Iterable[tuple[bool, int]], touched: int = 1) -> None:
        self.answers, self.touched, self.weights = iter(answers), touched, list[float]()

    def initialize(self, center: Tensor) -> None:
        pass

    def push(self, update: Tensor | Encoded, weight: float, bits: int, **_: Any) -> Pushed:
        self.weights.append(weight)
        applied, behind = next(self.answers)
        size = update.n if isinstance(update, Encoded) else len(update)
        mean = torch.full((size,), float(self.touched > 0), dtype=F64)
        return Pushed(applied=applied, answer=mean, weight=2.0, bits=self.touched << CONTROL_BITS, behind=behind)


def scripted(order: Sequence[int], ticks: int) -> Callable[[Hand], Tensor]:
    """A program of `ticks` ticks, each two turns of `order`: the gradient (which pulls), and the exchange (which pushes)."""
    turns = ScriptedTurns(order)

    def program(hand: Hand) -> Tensor:
        for _ in range(ticks):
            with turns.take(hand.worker.rank):
                hand.gradient()
            with turns.take(hand.worker.rank):
                hand.exchange()
        hand.worker.group.barrier()
        hand.finish()
        return hand.center

    return program
