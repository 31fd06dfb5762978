"""Error feedback over many steps, on a group of any kind: what was applied and what waits are all gradients."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import plain
from manyhands.comm.group import Group
from manyhands.comm.reducing import naive_mean
from manyhands.replica.replica import Replica
from manyhands.strategies import compression, strategy_of
from manyhands.worker import Worker

Sums = tuple[Tensor, Tensor, Tensor]
"""What was applied and all own gradients, added up, and what waits."""


def feedback(codec: str, weights: Sequence[float], steps: int) -> Callable[[Group], Sums]:
    """So many steps of `allreduce:compress=CODEC`, with gradients of about 1."""

    def run(group: Group) -> Sums:
        strategy = strategy_of(f"allreduce:compress={codec}")
        worker, model = Worker(rank=group.rank, size=group.size, group=group), nn.Linear(9, 7).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        replica = Replica.of(model, optimizer, group=group, loss=lambda model, batch: model(batch))
        state, draws = plain.started(strategy, replica, worker), torch.Generator().manual_seed(group.rank)
        applied, given = (torch.zeros_like(replica.gradients.parts[0]) for _ in range(2))
        for _ in range(steps):
            replica.begin_tick()
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=draws, dtype=torch.float64)
            replica.collect()
            replica.weight = weights[group.rank]
            given += replica.gradients.parts[0]
            compression.mean_gradients(strategy, replica, worker, state)()
            applied += replica.gradients.parts[0]
        return applied, given, state.residual

    return run


def check_feedback(got: Sequence[Sums], weights: Sequence[float], steps: int) -> None:
    """The same on all ranks, and to 2e-15 of a gradient a step the mean of all gradients."""
    for applied, _, _ in got:
        assert torch.equal(applied, got[0][0])
    lacks = naive_mean([given - residual for _, given, residual in got], weights) - got[0][0]
    assert lacks.abs().max() / steps < 2e-15
    assert max(float(residual.abs().max()) for *_, residual in got) > 1e-4  # something was rounded
