"""Checkpoints that are written beside training, and a disk that is full."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from driver_script import wait_until
from fault_harness import (
    GLOBAL_ROWS,
    STEPS,
    Patient,
    Trial,
    equal,
    fired,
    recorded_once,
    reference,
    task,
)
from torch import nn

import manyhands as mh
import plain
from manyhands.checkpoint import checkpoints
from manyhands.recording import event_log
from manyhands.recording.run import Run

slow = pytest.mark.slow


def ticks(run_dir: Path) -> list[int]:
    """Of the checkpoints that are whole."""
    return sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").iterdir())


class WritesLate:
    """A task's model function: each worker writes a file of a checkpoint once it has computed two steps more."""

    def __call__(self) -> nn.Module:
        worker = mh.worker()
        if worker is not None and worker.elastic:
            synced = checkpoints.synced

            @contextmanager
            def late(path: Path) -> Iterator[io.BufferedWriter]:
                tick = int(re.match(r"step-(\d+)", path.parent.name)[1])  # type: ignore[index]
                if tick < STEPS:
                    wait_until(lambda: worker.group.step >= tick + 2)
                with synced(path) as file:
                    yield file

            checkpoints.synced = late
        return plain.mlp()


@pytest.mark.slow
def test_a_checkpoint_holds_no_newer_values_than_its_step(trial: Trial) -> None:
    """pytorch#144657: the optimizer has made two steps more before a byte is written."""
    run = trial.train(of=task(model=WritesLate(), schedule=None), run_dir=trial.run_dir)
    equal(run, reference(task(schedule=None)))
    assert ticks(trial.run_dir) == [6, 9]
    held = reference(task(schedule=None, max_steps=6))
    saved = checkpoints.newest(trial.run_dir / "checkpoints", pytest.fail)
    assert saved is not None
    before = checkpoints.Checkpoint(saved.path.parent / "step-00000006", 6, 3)
    for rank in range(3):
        tensors, values = before.tensors(rank), before.values(rank)
        for name, tensor in held.model.state_dict().items():
            assert torch.allclose(tensors[f"parameters/{name}"], tensor, rtol=0, atol=1e-10), name
            assert int(tensors[f"optimizer/step/{name}"]) == 6
        assert (values["position"]["tick"], values["step"]) == (6, 6)
    events = [event for event in event_log.read(trial.run_dir / event_log.FILE) if event.type in ("part", "checkpoint")]
    assert [event.tick for event in events] == [3] * 4 + [6] * 4 + [9] * 4
    assert [event.type for event in events] == ["part", "part", "part", "checkpoint"] * 3
    for event in events:
        assert 0 <= event.values["stall_s"] <= event.values["seconds"]


# -- a full disk -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("worker_id", [1, pytest.param(0, marks=slow)])
def test_a_full_disk_is_a_warning_while_an_older_checkpoint_is_whole(
    worker_id: int, trial: Trial, one_worker: Run
) -> None:
    fault = f"disk={worker_id}@step:6"
    run = trial.train(faults=fault, run_dir=trial.run_dir)
    fired(run, fault)
    assert run.losses == []
    equal(run, one_worker)
    recorded_once(run, trial.seen, trial.run_dir, GLOBAL_ROWS)
    (warning,) = run.info["warnings"]
    for word in ("step 6", f"worker {worker_id}: No space left on device", "step 3"):
        assert word in warning
    assert ticks(trial.run_dir) == [3, 9]


@slow
@pytest.mark.parametrize(
    ("step", "words"),
    [(9, ("the run's last one", "from step 6", "--resume")), (3, ("no older one",))],
)
def test_a_full_disk_at_the_end_or_without_an_older_checkpoint_is_an_error(
    step: int, words: tuple[str, ...], trial: Trial, one_worker: Run
) -> None:
    """There is room again when the run is resumed."""
    fault = f"disk=1@step:{step}"
    with pytest.raises(mh.ManyhandsError) as caught:
        trial.train(faults=fault, run_dir=trial.run_dir)
    assert not isinstance(caught.value, mh.BadInput)
    for word in (f"step {step} ", "worker 1: No space left on device", *words):
        assert word in str(caught.value)
    assert trial.seen.faults == [fault]
    assert ticks(trial.run_dir) == ([3, 6] if step == 9 else [])
    run = trial.train(run_dir=trial.run_dir, resume=True)
    equal(run, one_worker)
    assert [(row["tick"], row["rows"]) for row in run.history] == list(enumerate(GLOBAL_ROWS))


class MarksFullDisk:
    """A task's model function: a worker that finds its disk full makes this file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __call__(self) -> nn.Module:
        worker = mh.worker()
        if worker is not None and worker.elastic:
            synced = checkpoints.synced

            @contextmanager
            def marking(path: Path) -> Iterator[io.BufferedWriter]:
                try:
                    with synced(path) as file:
                        yield file
                except OSError:
                    self.mark.touch()
                    raise

            checkpoints.synced = marking
        return plain.mlp()


@slow
def test_a_full_disk_and_a_lost_worker(trial: Trial, one_worker: Run) -> None:
    """It is lost in the step after that, once it has found its disk full."""
    faults, mark = ["disk=1@step:6", "kill=1@step:7:exchange"], trial.folder / "mark"
    loss: Any = Patient(until=lambda _: mark.exists(), call=7)
    of = task(model=MarksFullDisk(mark), loss=loss)
    run = trial.train(faults=",".join(faults), of=of, run_dir=trial.run_dir)
    fired(run, *faults)
    equal(run, one_worker)
    assert ticks(trial.run_dir) == [3, 9]


@slow
def test_without_survive_a_full_disk_ends_the_run(trial: Trial, one_worker: Run) -> None:
    fault = "disk=1@step:6"
    with pytest.raises(mh.WorkerFailed, match="No space left on device"):
        trial.train(faults=fault, survive=None, run_dir=trial.run_dir)
    assert trial.seen.faults == [fault]
    run = trial.train(survive=None, run_dir=trial.run_dir, resume=True)
    equal(run, one_worker)
    assert ticks(trial.run_dir) == [6, 9]


# -- a member is lost while parts are written --------------------------------------------------------------------------


class NeverWrites:
    """A task's model function: worker 1's first process writes no file of the checkpoint of this step."""

    def __init__(self, mark: Path, tick: int) -> None:
        self.mark, self.tick = mark, tick

    def __call__(self) -> nn.Module:
        worker = mh.worker()
        if worker is not None and worker.elastic and worker.worker_id == 1 and not self.mark.exists():
            self.mark.touch()
            synced = checkpoints.synced

            @contextmanager
            def never(path: Path) -> Iterator[io.BufferedWriter]:
                if path.parent.name.startswith(f"step-{self.tick:08d}"):
                    wait_until(lambda: False, 60)
                with synced(path) as file:
                    yield file

            checkpoints.synced = never
        return plain.mlp()


@pytest.mark.slow
def test_a_member_that_is_lost_before_its_part_is_written(trial: Trial, one_worker: Run) -> None:
    """The checkpoint is dropped and named, its folder is gone, and the next one is whole."""
    fault = "kill=1@step:7:exchange"
    model = NeverWrites(trial.folder / "mark", 6)
    run = trial.train(faults=fault, of=task(model=model), run_dir=trial.run_dir)
    fired(run, fault)
    equal(run, one_worker)
    recorded_once(run, trial.seen, trial.run_dir, GLOBAL_ROWS)
    (warning,) = run.info["warnings"]
    for word in ("step 6 is dropped", "worker 1", "step 3"):
        assert word in warning
    assert ticks(trial.run_dir) == [3, 9]


@slow
def test_a_member_that_is_lost_while_the_last_checkpoint_is_written(trial: Trial, one_worker: Run) -> None:
    """It hangs in its write; those that are left save again, and the run ends with that checkpoint."""
    model = NeverWrites(trial.folder / "mark", STEPS)
    run = trial.train(of=task(model=model), run_dir=trial.run_dir, timeout_s=15, survive="max_losses=1,replace=false")
    assert [(one["worker_id"], one["cause"]) for one in run.losses] == [(1, "hang")]
    equal(run, one_worker)
    newest = checkpoints.newest(trial.run_dir / "checkpoints", pytest.fail)
    assert newest is not None
    assert (newest.tick, newest.ranks) == (STEPS, 2)


class WritesWhenGone:
    """A task's model function: worker 1 writes its part of the checkpoint of step 6 once the others train without it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __call__(self) -> nn.Module:
        worker = mh.worker()
        if worker is not None and worker.elastic and worker.worker_id == 1:
            synced = checkpoints.synced

            @contextmanager
            def late(path: Path) -> Iterator[io.BufferedWriter]:
                if path.parent.name.startswith("step-00000006"):
                    wait_until(self.mark.exists)
                    time.sleep(0.3)  # in which a worker that does not wait for this would end
                with synced(path) as file:
                    yield file

            checkpoints.synced = late
        return plain.mlp()


@slow
def test_a_worker_that_leaves_writes_its_part_before_it_ends(trial: Trial, one_worker: Run) -> None:
    fault, mark = "leave=1@step:6", trial.folder / "mark"
    whole = trial.run_dir / "checkpoints/step-00000006"

    def until(worker: mh.Worker) -> bool:
        if worker.size == 2:
            mark.touch()
            return whole.exists()
        return worker.interrupted

    loss: Any = Patient(until=until, call=7)
    run = trial.train(faults=fault, of=task(model=WritesWhenGone(mark), loss=loss), run_dir=trial.run_dir)
    fired(run, fault)
    equal(run, one_worker)
    assert mark.exists()
    assert (run.losses, run.info["warnings"]) == ([], [])
    assert ticks(trial.run_dir) == [6, 9]
