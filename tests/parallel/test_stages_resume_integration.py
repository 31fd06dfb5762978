"""A run of replicas of two stages goes on under its own plan, to the bit, and under any other."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from stage_models import TASKS

import manyhands as mh

WHOLE, FIRST = 11, 6  # steps


def run(workers: int, model_parallel: str | None, steps: int, strategy: str, folder: Path | None, name: str) -> mh.Run:
    return mh.train(
        TASKS[name].with_fields(max_steps=steps, schedule=None),
        workers=workers,
        engine="local",
        strategy=strategy,
        model_parallel=model_parallel,
        threads_per_worker=1,
        run_dir=folder,
        resume=folder is not None,
        keep="best:validation_loss",
    )


@functools.cache
def whole(workers: int, strategy: str, name: str) -> mh.Run:
    return run(workers, "stages=2", WHOLE, strategy, None, name)


@pytest.mark.parametrize(
    ("name", "strategy", "replicas", "workers", "model_parallel"),
    [
        pytest.param("gpt", "allreduce", 1, 2, "stages=2"),
        pytest.param("gpt", "allreduce", 1, 3, "stages=3", marks=pytest.mark.slow),
        pytest.param("gpt", "allreduce", 1, 1, None, marks=pytest.mark.slow),
        pytest.param("gpt", "allreduce", 1, 4, "stages=4", marks=pytest.mark.slow),
        pytest.param("gpt", "allreduce", 1, 4, "stages=2", marks=pytest.mark.slow),
        pytest.param("cnn", "allreduce", 1, 1, None, marks=pytest.mark.slow),
        pytest.param("cnn", "allreduce", 1, 3, "stages=3", marks=pytest.mark.slow),
        pytest.param("dropout", "allreduce", 2, 4, "stages=2", marks=pytest.mark.slow),
        pytest.param("gpt", "diloco:period=3", 2, 4, "stages=2", marks=pytest.mark.slow),
        pytest.param("gpt", "diloco:period=3", 2, 2, None, marks=pytest.mark.slow),
        pytest.param("gpt", "local-sgd:period=2", 2, 2, None, marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on(
    name: str, strategy: str, replicas: int, workers: int, model_parallel: str | None, tmp_path: Path
) -> None:
    """torchtitan#811: a checkpoint cannot be loaded by another number of workers."""
    expected = whole(2 * replicas, strategy, name)
    run(2 * replicas, "stages=2", FIRST, strategy, tmp_path / "run", name)
    resumed = run(workers, model_parallel, WHOLE, strategy, tmp_path / "run", name)
    if (workers, model_parallel) == (2 * replicas, "stages=2"):
        assert torch.equal(resumed.parameters, expected.parameters)
    own, theirs = resumed.model.state_dict(), expected.model.state_dict()
    for key, value in theirs.items():
        torch.testing.assert_close(own[key], value, rtol=0, atol=1e-10)
    assert resumed.metrics == pytest.approx(expected.metrics, abs=1e-10)
    assert resumed.rows["total"] == expected.rows["total"]
