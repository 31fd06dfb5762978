"""A worker that is much slower than the others: it is named, or leaves."""

from __future__ import annotations

import time
from typing import Any

import pytest
from fault_harness import Trial, equal, recorded_once, reference, task
from torch import nn

import manyhands as mh
import plain

slow = pytest.mark.slow
EPOCHS = 10  # of three steps
ROWS = [39, 39, 22] * EPOCHS


def sluggish(model: nn.Module, batch: Any) -> Any:
    """Worker 1 takes its time."""
    worker = mh.worker()
    if worker is not None and worker.elastic and worker.worker_id == 1 and model.training:
        time.sleep(0.1)
    return plain.cross_entropy(model, batch)


@pytest.mark.slow
@pytest.mark.parametrize("survive", ["max_losses=1,slow=3", pytest.param("max_losses=1", marks=slow)])
def test_a_slow_worker_leaves_or_is_named(survive: str, trial: Trial) -> None:
    run = trial.train(of=task(loss=sluggish, epochs=EPOCHS), survive=survive, run_dir=trial.run_dir)
    (message,) = trial.seen.changes
    assert "worker 1 on" in message
    assert "as long for a step as the others" in message
    leaves = survive != "max_losses=1"
    assert [(one["worker_id"], one["cause"]) for one in run.losses] == ([(1, "slow")] if leaves else [])
    assert run.generations == 1 + leaves, "no process takes its place"
    equal(run, reference(task(epochs=EPOCHS)))
    recorded_once(run, trial.seen, trial.run_dir, ROWS)
