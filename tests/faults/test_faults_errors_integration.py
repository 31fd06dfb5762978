"""A worker that raises, exits, runs out of memory or is much slower is lost; the program's own error ends the run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from fault_harness import (
    Patient,
    Strike,
    Trial,
    as_ever,
    equal,
    fired,
    leave,
    lost,
    raises,
    recorded_once,
    reference,
    task,
)
from torch import nn

import manyhands as mh
import plain
from manyhands.recording.run import Run

slow = pytest.mark.slow
ODD = ValueError("these rows are odd")


@pytest.mark.parametrize(
    ("act", "worker_id", "cause"),
    [
        (raises(ODD), 1, "error"),
        pytest.param(raises(MemoryError()), 0, "memory", marks=slow),
        pytest.param(leave, 1, "error", marks=slow),
    ],
)
def test_an_exception_is_a_loss(
    act: Callable[[], None], worker_id: int, cause: str, trial: Trial, one_worker: Run
) -> None:
    strike = Strike(worker_id, "compute", act=act, call=4)
    run = trial.train(strike, run_dir=trial.run_dir)
    fired(run, strike)
    assert [(one["worker_id"], one["cause"], one["step"]) for one in run.losses] == [(worker_id, cause, 3)]
    as_ever(run, trial, one_worker)


@slow
def test_the_same_exception_again_ends_the_run(trial: Trial) -> None:
    """With the first traceback: it follows the rows, not the worker."""
    strikes = [Strike(one, "compute", act=raises(ODD), call=call) for one, call in ((0, 3), (2, 6))]
    with pytest.raises(mh.WorkerFailed) as caught:
        trial.train(*strikes, survive="max_losses=any", run_dir=trial.run_dir)
    assert trial.seen.faults == [str(one) for one in strikes]
    message = str(caught.value)
    assert "worker 0, then worker 2 raised the same ValueError at fault_harness.py:" in message
    assert "it follows the rows, not the worker" in message
    assert caught.value.rank == 0
    assert "these rows are odd" in caught.value.detail
    assert trial.seen.ends == ["failed"]


@slow
def test_a_replacement_that_raises_the_same_ends_the_run(trial: Trial) -> None:
    strikes = [Strike(1, "compute", act=raises(ODD), process=number) for number in (1, 2)]
    with pytest.raises(mh.WorkerFailed, match=r"worker 1, twice, raised the same ValueError at fault_harness\.py:"):
        trial.train(*strikes, of=task(loss=Patient(call=3)), survive="max_losses=any")
    assert trial.seen.faults == [str(one) for one in strikes]


def test_bad_input_ends_the_run_at_once(trial: Trial) -> None:
    strike = Strike(1, "compute", act=raises(mh.BadInput("targets must be below 3")), call=4)
    with pytest.raises(mh.BadInput, match="targets must be below 3"):
        trial.train(strike, survive="max_losses=any")
    assert trial.seen.faults == [str(strike)]
    assert trial.seen.ends == ["failed"]


@slow
def test_a_gradient_that_is_not_finite_ends_the_run(trial: Trial) -> None:
    with pytest.raises(mh.ManyhandsError, match=r"gradient of step 4 is not finite in 0\.weight") as caught:
        trial.train("nan=1@step:4")
    assert not isinstance(caught.value, mh.WorkerFailed | mh.BadInput)
    assert "own gradient of worker 1 alone is not finite" in str(caught.value)
    assert (trial.seen.faults, trial.seen.changes, trial.seen.ends) == (["nan=1@step:4"], [], ["failed"])


def sluggish(model: nn.Module, batch: Any) -> Any:
    """Worker 1 takes its time."""
    worker = mh.worker()
    if worker is not None and worker.elastic and worker.worker_id == 1 and model.training:
        time.sleep(0.1)
    return plain.cross_entropy(model, batch)


@slow
@pytest.mark.parametrize("leaves", [True, False])
def test_a_slow_worker_leaves_or_is_named(leaves: bool, trial: Trial) -> None:
    of, survives = task(loss=sluggish, epochs=10), "max_losses=1,slow=3" if leaves else "max_losses=1"
    run = trial.train(of=of, survive=survives, run_dir=trial.run_dir)
    (message,) = trial.seen.changes
    assert "worker 1 on" in message
    assert "as long for a step as the others" in message
    assert lost(run) == ([(1, "slow")] if leaves else [])
    assert run.generations == 1 + leaves, "no process takes its place"
    equal(run, reference(task(epochs=10)))
    recorded_once(run, trial, [39, 39, 22] * 10)
