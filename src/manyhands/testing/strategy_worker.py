"""A worker in the conformance suite of strategies: a tiny replica, its strategy, and the ticks of the loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from manyhands.comm import threads
from manyhands.data.sharding import slice_of
from manyhands.replica.replica import MORE, STOP, Replica
from manyhands.server.in_process import InProcessServers
from manyhands.strategies.base import Strategy
from manyhands.testing.group_suite import CheckFailed, expect
from manyhands.testing.threads import together
from manyhands.worker import Worker

T = TypeVar("T")
Batch = tuple[Tensor, Tensor]  # [rows, 3], [rows, 1]
Tensors = dict[str, Tensor]

ROWS = (6, 5, 2, 7, 1, 6, 4, 3, 8, 5, 2)
"""Of the global batch of each tick."""
EXTRA_TICKS = 40
"""Ticks after the last row, or after a stop, within which all ranks must know of it."""
SECONDS_A_TICK = 0.4
"""Of the clock. A strategy that exchanges control bits once a second does so every other tick."""


class StrategyWorker:
    """One worker: its replica, the strategy's state, and the ticks of the loop."""

    def __init__(self, strategy: Strategy, worker: Worker) -> None:
        self.strategy, self.worker, self.tick = strategy, worker, 0
        self.active = False
        self.replica = Replica(tiny_model(worker.rank), adamw, group=worker.group, loss=squared_error)
        worker.clock = lambda: SECONDS_A_TICK * (self.replica.tick + 1)
        self.state = strategy.start(self.replica, worker)

    def run_tick(self, batch: Batch | None, *, idle: bool = False, more: bool = True, stop: bool = False) -> bool:
        """Run one tick. Returns whether any rank has rows, as `exchange` or the server reports."""
        self._activate()
        replica, step = self.replica, self.replica.step
        replica.begin_tick()
        replica.tick, self.tick = self.tick, self.tick + 1
        replica.more, replica.stop, replica.idle = more, stop, idle
        self.strategy.before_backward(replica, self.worker, self.state)
        replica.backward(batch)
        answer = self.strategy.exchange(replica, self.worker, self.state)
        expect(replica.step - step <= 1, f"one exchange applied {replica.step - step} steps, expected one at most")
        return self._pass_gate(answer)

    def _activate(self) -> None:
        """Collective before the first tick: wait until all workers take part."""
        if not self.active:
            if self.worker.server is not None:
                self.worker.server.activate()
            self.barrier()
        self.active = True

    def _pass_gate(self, answer: bool) -> bool:
        spec = self.strategy.server()
        if spec is None or self.worker.server is None:
            return answer
        bits = self.worker.server.tick(self.replica.bits() & (MORE | STOP))
        if spec.bound != 0:
            return answer
        self.replica.control_bits |= bits
        return bool(bits & MORE)

    def train(self, ticks: int) -> None:
        """Run the next `ticks` ticks, each with this rank's slice of the global batch."""
        for _ in range(ticks):
            x, y = global_batch(self.tick)
            start, stop = slice_of(len(x), self.worker.rank, self.worker.size)
            self.run_tick((x[start:stop], y[start:stop]) if start < stop else None, idle=start == stop)

    def barrier(self) -> None:
        """Wait until no worker trains."""
        self.worker.group.barrier()

    def finish(self) -> None:
        self.barrier()
        self.strategy.finish(self.replica, self.worker, self.state)
        if self.worker.server is not None:
            self.worker.server.deactivate()
        self.active = False
        self.barrier()

    def consensus(self) -> Tensor:
        """[D'] a copy"""
        return self.strategy.consensus(self.replica, self.worker, self.state).clone()

    def tensors(self) -> Tensors:
        """Copies of all tensors that training changes, by name: parameters and the optimizer's state."""
        held = {name: view.clone() for name, view in self.replica.named(self.replica.parameters).items()}
        for name, p in zip(self.replica.layout.names, self.replica.layout.parameters, strict=True):
            state = self.replica.optimizer.state.get(p, {})
            held |= {f"the optimizer's {key} of {name}": value.clone() for key, value in state.items()}
        return held


def tiny_model(rank: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    generator = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    error: Tensor = model(batch[0]) - batch[1]
    return error.square().mean()


def global_batch(tick: int) -> Batch:
    generator, rows = torch.Generator().manual_seed(1000 + tick), ROWS[tick % len(ROWS)]
    x = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True).sin()


def run_workers(strategy: Strategy, size: int, program: Callable[[StrategyWorker], T]) -> list[T]:
    """Run `program` on every worker; its results in rank order. A failure names the strategy and the workers."""
    spec = strategy.server()
    clients = InProcessServers(spec, size, timeout_s=threads.DEADLINE_S).clients if spec is not None else ()
    try:
        return together(size, lambda worker: program(StrategyWorker(strategy, worker)), clients)
    except threading.BrokenBarrierError:
        problem = "hung: some ranks called the group where others did not; expected the same calls on all ranks"
        raise CheckFailed(f"{strategy} on {size} workers {problem}") from None
    except CheckFailed as error:
        raise CheckFailed(f"{strategy} on {size} workers: {error}") from None


def expect_unchanged(before: Tensors, after: Tensors, what: str) -> None:
    both = before.keys() & after.keys()
    names = (before.keys() ^ after.keys()) | {name for name in both if not torch.equal(before[name], after[name])}
    expect(not names, f"{what}: expected the same bits, these differ: {', '.join(sorted(names))}")


def expect_same_on_all(vectors: list[Tensor], strategy: Strategy, what: str) -> None:
    """Expect finite values and, for a strategy of one model, the same bits on all ranks."""
    for rank, vector in enumerate(vectors):
        problem = f"{strategy} on {len(vectors)} workers: {what} of rank {rank}"
        expect(bool(vector.isfinite().all()), f"{problem} is not finite: {vector.tolist()}")
        if strategy.needs.one_model:
            off = float((vector - vectors[0]).abs().max())
            expect(torch.equal(vector, vectors[0]), f"{problem} has other bits than rank 0's, by up to {off}")


def expect_one_tick(ticks: list[int | None], earliest: int, what: str) -> None:
    """Expect the same tick on every rank (None: never), and not before `earliest`."""
    good = ticks[0] is not None and ticks[0] >= earliest and len(set(ticks)) == 1
    problem = f"expected one tick for all ranks, {earliest} to {earliest + EXTRA_TICKS}"
    expect(good, f"{what} ticks {ticks} by rank (None: never), {problem}")


def run_to_end(trainer: StrategyWorker) -> Tensors:
    """Finish the run. Returns all tensors that must have the same bits when a run is repeated or resumed."""
    trainer.train(len(ROWS) - trainer.tick)
    held = {"the consensus in the open window": trainer.consensus()}
    trainer.finish()
    return held | {"the consensus": trainer.consensus()} | trainer.tensors()
