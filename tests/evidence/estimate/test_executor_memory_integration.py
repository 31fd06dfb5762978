"""What two real workers hold: a model whose vectors are of known lengths."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.evidence.estimate.executor_memory import measure
from manyhands.strategies import strategy_of

VECTOR = 4 * 3000 * 1000  # bytes


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "vectors", "shards"), [("easgd:via=group", 2, 0), ("dynsgd", 1, 1)])
def test_vectors_are_counted(spec: str, vectors: int, shards: int) -> None:
    """Adam keeps two vectors and a step. All are resident, and not much else is."""
    task = mh.Task(
        model=lambda: nn.Linear(3000, 1000, bias=False),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda model: torch.optim.Adam(model.parameters()),
        train_data=torch.ones(64, 3000),
        batch_size=16,
    )
    measured = measure(task, strategy_of(spec), workers=4)
    assert (measured.parameters, measured.gradients, measured.center) == (VECTOR, VECTOR, VECTOR)
    assert measured.optimizer == 2 * VECTOR + 4
    assert measured.strategy == vectors * VECTOR
    held = measured.parameters + measured.gradients + measured.optimizer + measured.strategy
    assert measured.peak > measured.base + held
    assert measured.peak < measured.base + 32 * VECTOR  # a checkpoint is copied twice while it is written
    assert measured.base > 50e6
    assert bool(measured.shards) == bool(shards)
    assert measured.shards >= shards * measured.center
