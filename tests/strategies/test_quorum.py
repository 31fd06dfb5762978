"""Quorum: the mean of the first gradients, and how a late worker catches up."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from by_hand import F64, ScriptedServer, clients_of
from torch import Tensor, nn

import plain
from manyhands.replica.replica import Replica
from manyhands.server.base import Pushed
from manyhands.strategies import strategy_of
from manyhands.strategies.quorum import Quorum, QuorumState
from manyhands.testing.threads import together
from manyhands.worker import Worker


def branches(worker: Worker) -> Replica:
    model = plain.Branches().double()
    for p in model.parameters():
        nn.init.constant_(p, 0.1)
    return Replica.of(model, plain.OPTIMIZERS["adamw"], group=worker.group, loss=plain.cross_entropy)


def ends_of(spec: str, workers: int) -> list[Tensor]:
    """Each worker's parameters after 5 ticks of `rank + 1` rows each; one branch of the model is unused on some."""
    x, y = plain.rows(9)
    strategy = strategy_of(spec)

    def program(worker: Worker) -> Tensor:
        replica = branches(worker)
        state = plain.started(strategy, replica, worker)
        if worker.server is not None:
            worker.server.activate()
        worker.group.barrier()
        part = slice(worker.rank * 3, worker.rank * 3 + worker.rank + 1)
        for tick in range(5):
            replica.begin_tick()
            replica.tick = tick
            replica.backward((x[part], y[part]))
            strategy.exchange(replica, worker, state)
        return replica.parameters.parts[0].clone()

    return together(workers, program, clients_of(strategy, workers))


def test_of_all_workers_it_is_all_reduce() -> None:
    """Of one worker bit for bit, and that is a plain loop: the strategies' suite compares with one. (CASE 1)"""
    ours, theirs = ends_of("quorum", 3), ends_of("allreduce", 3)
    assert all(torch.equal(end, ours[0]) for end in ours)
    assert (ours[0] - theirs[0]).abs().max() < 1e-12
    for backups in (0, 1):
        assert torch.equal(ends_of(f"quorum:backups={backups}", 1)[0], ends_of("allreduce", 1)[0])


def beside(
    server: ScriptedServer, optimizer: Callable[[nn.Module], torch.optim.Optimizer], ticks: int
) -> tuple[Replica, list[bool]]:
    """A worker of one weight, at 0, after so many ticks beside this server; and in which its row was used."""
    model, strategy, worker = nn.Linear(1, 1, bias=False).double(), Quorum(), Worker(server=server)  # type: ignore[arg-type]
    nn.init.zeros_(model.weight)
    replica = Replica.of(model, optimizer, group=worker.group, loss=lambda m, batch: m(batch).sum())
    state, used = plain.started(strategy, replica, worker), []
    for _ in range(ticks):
        replica.begin_tick()
        strategy.before_backward(replica, worker, state)
        replica.backward(torch.ones(1, 1, dtype=F64))
        used.append(strategy.exchange(replica, worker, state).used)
    return replica, used


def test_a_late_worker_applies_every_mean_and_computes_none_that_would_be_dropped() -> None:
    """Dropped and 2 behind: two ticks without a gradient, whose means it applies; then it computes again. Rows: unused."""
    server = ScriptedServer([(True, 0), (False, 2), (False, 1), (False, 0), (True, 0)])
    replica, used = beside(server, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), 5)
    assert server.weights == [1.0, 1.0, 0.0, 0.0, 1.0]
    assert used == [True, False, False, False, True]
    assert (replica.step, float(replica.parameters.parts[0][0])) == (5, pytest.approx(-0.5))


def test_a_parameter_that_only_a_dropped_gradient_touched_does_not_move() -> None:
    """It is not in the mean that the others apply: momentum and weight decay must not move it here alone."""
    replica, _ = beside(ScriptedServer([(False, 0)] * 2, touched=0), lambda m: torch.optim.AdamW(m.parameters()), 2)
    assert not replica.optimizer.state


def test_with_backups_only_a_step_without_any_rows_ends_a_stream() -> None:
    """Nobody who counted has rows: but one who came late may, and only a step of weight 0 has waited for all. (CASE 18)"""
    for backups, weight, more in [(0, 2.0, False), (1, 2.0, True), (1, 0.0, False)]:

        class Last(ScriptedServer):
            def push(self, update: Tensor, *_: Any, weight: float = weight, **__: Any) -> Pushed:
                return Pushed(applied=True, answer=update.clone(), weight=weight, bits=0)

        worker, strategy = Worker(server=Last([])), Quorum(backups=backups)  # type: ignore[arg-type]
        replica = branches(worker)
        state = plain.started(strategy, replica, worker)
        replica.backward(None)
        assert strategy.exchange(replica, worker, state).rows_left is more, (backups, weight)


def test_nobody_is_behind_a_checkpoint() -> None:
    assert QuorumState().merge([QuorumState(behind=3)] * 2, 0, 1).behind == 0
