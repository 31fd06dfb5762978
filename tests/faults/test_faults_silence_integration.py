"""A worker that stops or hangs, and a run whose driver is asked to end."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from driver_script import wait_until
from fault_harness import Patient, Strike, Trial, as_ever, counted_once, equal, hang, lost, reference, task

import manyhands as mh
import plain
from manyhands.checkpoint import checkpoints
from manyhands.recording.run import Run

slow = pytest.mark.slow


@slow
def test_a_short_stop_is_nothing(trial: Trial, one_worker: Run) -> None:
    fault = "pause=1@step:4:exchange+0.5"
    run = trial.struck(fault, survive="max_losses=0,silence_s=20")
    assert (run.losses, run.generations) == ([], 1)
    as_ever(run, trial, one_worker)


@slow
def test_a_long_stop_is_a_loss(trial: Trial, one_worker: Run) -> None:
    """The stopped process is killed before the others go on, and another one takes its place."""
    fault = "pause=0@step:4:exchange+300"
    given = {"survive": "max_losses=1,silence_s=2", "of": task(loss=Patient(call=6))}
    run = trial.struck(fault, **given)
    assert [(one["worker_id"], one["cause"], one["step"]) for one in run.losses] == [(0, "silence", 4)]
    assert run.generations == 3
    as_ever(run, trial, one_worker)


@slow  # timeout_s holds for the start, too, which takes seconds on a busy machine
def test_a_hang_is_a_loss(trial: Trial, one_worker: Run) -> None:
    strike = Strike(1, "compute", act=hang, call=5)
    run = trial.struck(strike, survive="max_losses=1", timeout_s=15)
    assert lost(run) == [(1, "hang")]
    as_ever(run, trial, one_worker)


@dataclass
class Ending:
    """A loss at whose so manieth call in worker 0 after a lost worker was replaced the driver gets SIGTERM."""

    mark: Path
    call: int = 2
    calls: int = 0

    def __post_init__(self) -> None:
        self.driver, self.patient = os.getpid(), Patient(call=4)

    def __call__(self, model: torch.nn.Module, batch: Any) -> Any:
        worker = mh.worker()
        if worker is not None and model.training and worker.generation >= 0:
            self.patient(model, batch)
            self.calls += worker.generation >= 2  # three workers, then two, and three again
            if self.calls == self.call and worker.worker_id == 0 and not self.mark.exists():
                self.mark.touch()
                os.kill(self.driver, signal.SIGTERM)
                wait_until(lambda: worker.driver.should_stop() == "preempted")
        return plain.cross_entropy(model, batch)


@slow
def test_a_preempted_run_is_resumed(trial: Trial) -> None:
    """SIGTERM comes once the replacement is a member: all save at one step. It goes on without `survive`."""
    ending = Ending(trial.folder / "ended")
    fault, given = "kill=0@step:1:exchange", task(epochs=6)
    with pytest.raises(mh.Preempted):
        trial.train(fault, of=task(epochs=6, loss=ending), run_dir=trial.run_dir)
    assert trial.seen.faults == [fault]
    assert ending.mark.exists()
    newest = checkpoints.newest(trial.run_dir / "checkpoints", pytest.fail)
    assert newest is not None
    assert newest.ranks == 3
    assert 3 < newest.tick < 18
    run = trial.train(of=given, run_dir=trial.run_dir, resume=True, survive=None)
    equal(run, reference(given))
    assert run.info["warnings"] == []
    counted_once(run, [39, 39, 22] * 6)
    assert [row["tick"] for row in mh.read_history(trial.run_dir)] == list(range(18))


@slow
def test_a_driver_that_is_asked_to_end_while_a_worker_is_lost(trial: Trial, one_worker: Run) -> None:
    """The stop is asked for before the members meet again."""
    strike = Strike(1, "compute", act=end_driver_and_die, call=4)
    with pytest.raises(mh.Preempted):
        trial.train(strike, run_dir=trial.run_dir)
    assert trial.seen.faults == [str(strike)]
    run = trial.train(run_dir=trial.run_dir, resume=True)
    equal(run, one_worker)
    counted_once(run)


def end_driver_and_die() -> None:
    fork_server = os.getppid()
    driver = int(Path(f"/proc/{fork_server}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(driver, signal.SIGTERM)
    wait_until(lambda: mh.worker().driver.should_stop() == "preempted")
    os.kill(os.getpid(), signal.SIGKILL)
