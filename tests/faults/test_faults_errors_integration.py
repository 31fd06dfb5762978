"""A worker that raises, exits or runs out of memory is lost; the program's own error ends the run."""

from __future__ import annotations

import time

import pytest
from fault_harness import (
    GLOBAL_ROWS,
    Patient,
    Strike,
    Trial,
    equal,
    fired,
    leave,
    raise_bad_input,
    raise_key_error,
    raise_memory_error,
    raise_value_error,
    recorded_once,
    task,
)

import manyhands as mh
from manyhands.recording.run import Run

slow = pytest.mark.slow
STEP = "before backward"


@pytest.mark.parametrize("worker_id", [1, pytest.param(0, marks=slow)])
@pytest.mark.parametrize(
    ("act", "cause"),
    [
        (raise_value_error, "error"),
        pytest.param(raise_memory_error, "memory", marks=slow),
        pytest.param(leave, "error", marks=slow),
    ],
)
def test_an_exception_is_a_loss(act: object, cause: str, worker_id: int, trial: Trial, one_worker: Run) -> None:
    strike = Strike(worker_id, STEP, act=act, call=4)  # type: ignore[arg-type]
    run = trial.train(strike, run_dir=trial.run_dir)
    fired(run, strike)
    assert [(one["worker_id"], one["cause"], one["step"]) for one in run.losses] == [(worker_id, cause, 3)]
    equal(run, one_worker)
    recorded_once(run, trial.seen, trial.run_dir, GLOBAL_ROWS)


@pytest.mark.parametrize("first", [1, pytest.param(0, marks=slow)])
def test_the_same_exception_again_ends_the_run(first: int, trial: Trial) -> None:
    """With the first traceback: it follows the rows, not the worker."""
    strikes = [Strike(first, STEP, act=raise_value_error, call=3), Strike(2, STEP, act=raise_value_error, call=6)]
    with pytest.raises(mh.WorkerFailed) as caught:
        trial.train(*strikes, survive="max_losses=any", run_dir=trial.run_dir)
    assert trial.seen.faults == [str(one) for one in strikes]
    message = str(caught.value)
    assert f"worker {first}, then worker 2 raised the same ValueError at fault_harness.py:" in message
    assert "it follows the rows, not the worker" in message
    assert caught.value.rank == first
    assert 'raise ValueError("these rows are odd")' in caught.value.detail
    assert trial.seen.ends == ["failed"]


@slow
def test_a_replacement_that_raises_the_same_ends_the_run(trial: Trial) -> None:
    strikes = [Strike(1, STEP, act=raise_value_error, process=number) for number in (1, 2)]
    with pytest.raises(mh.WorkerFailed, match="worker 1, twice, raised the same ValueError at fault_harness.py:"):
        trial.train(*strikes, of=task(loss=Patient(call=3)), survive="max_losses=any")
    assert trial.seen.faults == [str(one) for one in strikes]


@slow
def test_different_exceptions_are_losses(trial: Trial, one_worker: Run) -> None:
    strikes = [
        Strike(1, STEP, act=raise_value_error, call=3),
        Strike(2, STEP, act=raise_key_error, call=5),
        Strike(0, STEP, act=raise_memory_error, call=8),
    ]
    run = trial.train(*strikes, survive="max_losses=3", run_dir=trial.run_dir, of=task(loss=Patient(call=6)))
    fired(run, *strikes)
    assert [(one["worker_id"], one["cause"]) for one in run.losses] == [(1, "error"), (2, "error"), (0, "memory")]
    equal(run, one_worker)
    recorded_once(run, trial.seen, trial.run_dir, GLOBAL_ROWS)


@slow
def test_running_out_of_memory_twice_is_two_losses(trial: Trial, one_worker: Run) -> None:
    strikes = [Strike(1, STEP, act=raise_memory_error, call=3), Strike(2, STEP, act=raise_memory_error, call=5)]
    run = trial.train(*strikes, run_dir=trial.run_dir)
    fired(run, *strikes)
    assert [one["cause"] for one in run.losses] == ["memory", "memory"]
    equal(run, one_worker)


@pytest.mark.parametrize("worker_id", [1, pytest.param(0, marks=slow)])
def test_bad_input_ends_the_run_at_once(worker_id: int, trial: Trial) -> None:
    strike = Strike(worker_id, STEP, act=raise_bad_input, call=4)
    began = time.monotonic()
    with pytest.raises(mh.BadInput, match="targets must be below 3"):
        trial.train(strike, survive="max_losses=any")
    assert time.monotonic() - began < 20
    assert trial.seen.faults == [str(strike)]
    assert trial.seen.ends == ["failed"]
