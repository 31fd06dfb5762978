"""A run that cannot go on starts again from its newest checkpoint: one history, each row once, the result of a run without
faults. Simulated runs: test_faults_simulated.py."""

from collections.abc import Callable
from typing import Any

import pytest
from fault_harness import Trial, counted_once, equal, task

import manyhands as mh
from manyhands.checkpoint import launch_lock
from manyhands.events import Event
from manyhands.recording.run import Run

slow = pytest.mark.slow


def launches(trial: Trial) -> int:
    claim = launch_lock.claim_in(trial.run_dir)
    assert claim is not None
    return claim.number


class Patience(mh.Callback):
    """Counts validations, and remembers that in checkpoints."""

    def __init__(self) -> None:
        self.seen = 0

    def on_validation(self, event: Event) -> None:
        self.seen += 1

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


@slow
def test_a_loss_is_a_restart(trial: Trial, one_worker: Run) -> None:
    """Epochs, validations and callbacks are those of one run (Ray resumed at epoch 1: ray#46814)."""
    counts, fault = Patience(), "kill=1@step:7"
    run = trial.struck(fault, survive="max_restarts=1,replace=false", callbacks=[trial.seen, counts])
    ((start, cause),) = ((one["step"], one["cause"]) for one in run.restarts)
    assert cause == "death"
    assert start in (3, 6)  # the newest checkpoint is written beside training, and is dropped with the lost worker
    assert (run.losses, run.generations) == ([], 2)
    equal(run, one_worker)
    counted_once(run)
    assert [row["tick"] for row in mh.read_history(trial.run_dir)] == list(range(9))
    assert [row["step"] for row in run.history] == list(range(1, 10))
    assert launches(trial) == 2  # which wrote the checkpoints
    assert trial.seen.epochs == [1, 2, *range(1 + start // 3, 4)]
    assert (trial.seen.order.count("start"), counts.seen, trial.seen.ends) == (1, 3, ["end"])
    assert 0 < run.goodput["goodput"] < 1
    assert [(event.values["kind"], event.step) for event in trial.events("change")] == [("restart", start)]
    assert [event.values["launch"] for event in trial.events("start")] == [1, 2]


@slow
def test_a_run_whose_workers_share_memory_starts_again(trial: Trial) -> None:
    of = task(epochs=4, batch_size=20)
    run = trial.train(
        "kill=1@step:4", survive="max_restarts=1", of=of, run_dir=trial.run_dir, strategy="hogwild", workers=2
    )
    assert len(run.restarts) == 1
    assert run.rows["total"] == 4 * 100


def always_odd(model: Any, batch: Any) -> Any:
    raise ValueError("these rows are odd")


def test_the_programs_own_error_ends_the_run_by_its_second_time(simulated: Callable[[], Trial]) -> None:
    """With its traceback, however many restarts are left."""
    trial = simulated()
    with pytest.raises(mh.WorkerFailed, match=r"ValueError at test_faults_restart_integration\.py:") as caught:
        trial.train(of=task(loss=always_odd), survive="max_restarts=9", run_dir=trial.run_dir)
    assert 'raise ValueError("these rows are odd")' in caught.value.detail
    assert launches(trial) == 2


def test_restarts_need_a_run_directory(trial: Trial) -> None:
    with pytest.raises(mh.BadInput, match="run_dir") as caught:
        trial.train(survive="max_restarts=1")
    assert caught.value.exit_code == 2
    assert trial.seen.order == []
