"""A worker that raises, exits, runs out of memory or is much slower is lost; the program's own error ends the run."""

import time
from typing import Any

import pytest
from fault_harness import (
    Patient,
    Strike,
    Trial,
    as_ever,
    equal,
    leave,
    lost,
    raises,
    recorded_once,
    reference,
    survive,
    task,
)
from torch import nn

import manyhands as mh
import plain
from manyhands.recording.run import Run

slow = pytest.mark.slow
ODD = ValueError("these rows are odd")


@slow
def test_an_exception_is_a_loss(trial: Trial, one_worker: Run) -> None:
    strikes = [Strike(1, "compute", act=raises(ODD), call=4), Strike(2, "compute", act=leave, call=6)]
    strikes.append(Strike(0, "compute", act=raises(MemoryError()), call=8))
    run = trial.struck(*strikes, workers=4, survive=survive(False))
    assert lost(run) == [(1, "error"), (2, "error"), (0, "memory")]
    assert run.losses[0]["step"] == 3
    as_ever(run, trial, one_worker)


@slow
def test_a_replacement_that_raises_the_same_ends_the_run(trial: Trial) -> None:
    """With its traceback: it follows the rows, not the worker."""
    strikes = [Strike(1, "compute", act=raises(ODD), process=number) for number in (1, 2)]
    words = r"worker 1, twice, raised the same ValueError at fault_harness\.py:\d+: it follows the rows, not the worker"
    with pytest.raises(mh.WorkerFailed, match=words) as caught:
        trial.train(*strikes, of=task(loss=Patient(call=3)), survive="max_losses=any")
    assert (trial.seen.faults, trial.seen.ends) == ([str(one) for one in strikes], ["failed"])
    assert caught.value.rank == 1
    assert "these rows are odd" in caught.value.detail


def test_bad_input_ends_the_run_at_once(trial: Trial) -> None:
    strike = Strike(1, "compute", act=raises(mh.BadInput("targets must be below 3")), call=4)
    with pytest.raises(mh.BadInput, match="targets must be below 3"):
        trial.train(strike, survive="max_losses=any")
    assert trial.seen.faults == [str(strike)]
    assert trial.seen.ends == ["failed"]


def sluggish(model: nn.Module, batch: Any) -> Any:
    """Worker 1 takes its time."""
    worker = mh.worker()
    if worker is not None and worker.elastic and worker.worker_id == 1 and model.training:
        time.sleep(0.1)
    return plain.cross_entropy(model, batch)


@slow
@pytest.mark.parametrize("leaves", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_slow_worker_leaves_or_is_named(leaves: bool, trial: Trial) -> None:
    of, survives = task(loss=sluggish, epochs=8), "max_losses=1,slow=3" if leaves else "max_losses=1"
    run = trial.train(of=of, survive=survives, run_dir=trial.run_dir)
    (message,) = trial.seen.changes
    assert "worker 1 on" in message
    assert "as long for a step as the others" in message
    assert lost(run) == ([(1, "slow")] if leaves else [])
    assert run.generations == 1 + leaves, "no process takes its place"
    equal(run, reference(task(epochs=8)))
    recorded_once(run, trial, [39, 39, 22] * 8)
