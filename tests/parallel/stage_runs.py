"""Runs of replicas of several stages, and of replicas of one worker that they are held against."""

import functools
from typing import Any

import pytest
import torch
from stage_models import TASKS

import manyhands as mh

WITHIN = 1e-10
TICKS = 6


def train(
    name: str, workers: int, model_parallel: str | None, strategy: str = "allreduce", engine: Any = "sim", **given: Any
) -> mh.Run:
    """given: fields of the task, and options of `mh.train`."""
    options = {"run_dir", "resume", "keep", "servers", "survive", "callbacks", "checkpoint_every", "validate_every"}
    fields = {key: given.pop(key) for key in [*given] if key not in options}
    return mh.train(
        TASKS[name].with_fields(**fields),
        workers=workers,
        engine=engine,
        strategy=strategy,
        model_parallel=model_parallel,
        threads_per_worker=1,
        **given,
    )


trained = functools.cache(train)


def alone(name: str, **given: Any) -> mh.Run:
    """One worker, in this process."""
    return trained(name, 1, None, engine="local", **given)


def expect_alike(run: mh.Run, expected: mh.Run, within: float = WITHIN, losses: bool = True) -> None:
    """Parameters, buffers, metrics, rows and the loss of each step. losses: False where a worker is lost, whose newest
    losses may not have been reported."""
    own, theirs = run.model.state_dict(), expected.model.state_dict()
    assert own.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(own[name], value, rtol=0, atol=within, msg=lambda text, name=name: f"{name}: {text}")
    assert run.metrics == pytest.approx(expected.metrics, abs=WITHIN)
    assert run.rows["total"] == expected.rows["total"]
    for name in ("step", "rows"):
        assert [row[name] for row in run.history] == [row[name] for row in expected.history]
    if losses:
        found, wanted = ([row["loss"] for row in one.history] for one in (run, expected))
        assert found == pytest.approx(wanted, abs=WITHIN)
