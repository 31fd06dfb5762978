"""What two real workers hold: a model whose vectors are of known lengths."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.evidence.estimate.executor_memory import MeasuredWorker, measure
from manyhands.strategies import strategy_of

VECTOR = 4 * 3000 * 1000  # bytes


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> MeasuredWorker:
    task = mh.Task(
        model=lambda: nn.Linear(3000, 1000, bias=False),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda model: torch.optim.Adam(model.parameters()),
        train_data=torch.ones(64, 3000),
        batch_size=16,
    )
    return measure(task, strategy_of(request.param), workers=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("measured", "vectors", "shards"),
    [("allreduce", 0, 0), ("local-sgd:period=2", 0, 0), ("easgd:via=group", 2, 0), ("dynsgd", 1, 1)],
    indirect=["measured"],
)
def test_vectors_are_counted(measured: MeasuredWorker, vectors: int, shards: int) -> None:
    """Adam keeps two vectors and a step. All are resident, and not much else is."""
    assert (measured.parameters, measured.gradients, measured.center) == (VECTOR, VECTOR, VECTOR)
    assert measured.optimizer == 2 * VECTOR + 4
    assert measured.strategy == vectors * VECTOR
    held = measured.parameters + measured.gradients + measured.optimizer + measured.strategy
    assert measured.peak > measured.base + held
    assert measured.peak < measured.base + 32 * VECTOR  # a checkpoint is copied twice while it is written
    assert measured.base > 50e6
    assert bool(measured.shards) == bool(shards)
    assert measured.shards >= shards * measured.center
