"""What a run remembers besides parameters, when processes are lost: validations, checkpoints, also on a full disk."""

import io
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from driver_script import wait_until
from fault_harness import STEPS, Patient, Trial, as_ever, counted_once, equal, lost, reference, survive, task
from torch import nn

import manyhands as mh
import plain
from manyhands.checkpoint import checkpoints
from manyhands.checkpoint.checkpoints import Checkpoint
from manyhands.recording.run import Run

slow = pytest.mark.slow


def whole(run_dir: Path) -> list[int]:
    """Steps of the checkpoints that are whole."""
    return sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").iterdir())


def newest(run_dir: Path) -> Checkpoint:
    found = checkpoints.newest(run_dir / "checkpoints", pytest.fail)
    assert found is not None
    return found


@slow
def test_a_run_that_lost_a_worker_in_a_save_is_resumed(trial: Trial, one_worker: Run) -> None:
    """A second loss, which is one too many, ends it: once the checkpoint is whole."""
    faults = ["kill=0@step:6:save", "kill=2@step:7:exchange"]
    folder = trial.run_dir / "checkpoints/step-00000006"
    patient = Patient(until=lambda worker: folder.exists(), call=8)
    with pytest.raises(mh.WorkerFailed, match="lost .was killed by signal 9. during exchange of step 7") as caught:
        trial.train(*faults, survive="max_losses=1", of=task(loss=patient), run_dir=trial.run_dir)
    assert "loss 2, and max_losses is 1, the first was worker 0 (its process ended)" in str(caught.value)
    assert (trial.seen.faults, trial.seen.ends) == (faults, ["failed"])
    assert newest(trial.run_dir).tick == 6
    fault = "kill=0@step:7:exchange"
    run = trial.struck(fault, resume=True)
    equal(run, one_worker)
    counted_once(run)
    assert run.info["warnings"] == []
    assert [row["tick"] for row in mh.read_history(trial.run_dir)] == list(range(STEPS))
    again = trial.train(run_dir=trial.run_dir, resume=True)  # a finished run is not trained again
    equal(again, one_worker)
    assert (again.losses, again.generations) == (run.losses, run.generations)
    counted_once(again)


def test_a_stop_after_so_long(simulated: Callable[[], Trial], one_worker: Run) -> None:
    """The stop and a loss in the same run; what was trained counts, and the rest is done when it is resumed."""
    trial, fault = simulated(), "kill=1@step:2:exchange"
    run = trial.struck(fault, max_seconds=0.45)
    assert run.info["stopped"] == "max_seconds"
    assert run.steps < STEPS
    again = trial.train(run_dir=trial.run_dir, resume=True)
    equal(again, one_worker)
    counted_once(again)


# -- checkpoints that are written beside training --------------------------------------------------------------------------


@dataclass
class Writes:
    """A task's model function: before an elastic worker writes a file of a checkpoint, `before(worker, step)` is called, and
    when that fails, `full()`. The writer is a thread of its own, and reports no phase."""

    before: Callable[[mh.Worker, int], object] = lambda worker, step: None
    full: Callable[[], None] = lambda: None

    def __call__(self) -> nn.Module:
        worker = mh.worker()
        if worker is not None and worker.elastic:
            synced = checkpoints.synced

            @contextmanager
            def writing(path: Path) -> Iterator[io.BufferedWriter]:
                found = re.match(r"step-(\d+)", path.parent.name)
                assert found is not None
                self.before(worker, int(found[1]))
                try:
                    with synced(path) as file:
                        yield file
                except OSError:
                    self.full()
                    raise

            checkpoints.synced = writing
        return plain.mlp()


def two_steps_later(worker: mh.Worker, step: int) -> None:
    if step < STEPS:
        wait_until(lambda: worker.group.step >= step + 2)


@slow
def test_a_checkpoint_holds_no_newer_values_than_its_step(trial: Trial) -> None:
    """pytorch#144657: the optimizer has made two steps more before a byte is written."""
    run = trial.train(of=task(model=Writes(two_steps_later), schedule=None), run_dir=trial.run_dir)
    equal(run, reference(task(schedule=None)))
    assert whole(trial.run_dir) == [6, 9]
    held = reference(task(schedule=None, max_steps=6))
    before = Checkpoint(newest(trial.run_dir).path.parent / "step-00000006", 6, 3)
    for rank in range(3):
        tensors, values = before.tensors(rank), before.values(rank)
        for name, tensor in held.model.state_dict().items():
            assert torch.allclose(tensors[f"parameters/{name}"], tensor, rtol=0, atol=1e-10), name
            assert int(tensors[f"optimizer/step/{name}"]) == 6
        assert (values["position"]["tick"], values["step"]) == (6, 6)
    events = trial.events("part", "checkpoint")
    assert [event.tick for event in events] == [3] * 4 + [6] * 4 + [9] * 4
    assert [event.type for event in events] == ["part", "part", "part", "checkpoint"] * 3
    for event in events:
        assert 0 <= event.values["stall_s"] <= event.values["seconds"]


@slow
@pytest.mark.parametrize(
    ("step", "words"), [(9, ("the run's last one", "from step 6", "--resume")), (3, ("no older one",))]
)
def test_a_full_disk_at_the_end_or_without_an_older_checkpoint_is_an_error(
    step: int, words: tuple[str, ...], trial: Trial, one_worker: Run
) -> None:
    """There is room again when the run is resumed."""
    with pytest.raises(mh.ManyhandsError) as caught:
        trial.train(f"disk=1@step:{step}", run_dir=trial.run_dir)
    assert not isinstance(caught.value, mh.BadInput)
    for word in (f"step {step} ", "worker 1: No space left on device", *words):
        assert word in str(caught.value)
    assert whole(trial.run_dir) == ([3, 6] if step == 9 else [])
    run = trial.train(run_dir=trial.run_dir, resume=True)
    equal(run, one_worker)
    counted_once(run)


@slow
def test_a_full_disk_is_a_warning_while_an_older_checkpoint_is_whole(trial: Trial, one_worker: Run) -> None:
    """The worker is lost in the step after that, once it has found its disk full."""
    faults, mark = ["disk=1@step:6", "kill=1@step:7:exchange"], trial.folder / "mark"
    of = task(model=Writes(full=mark.touch), loss=Patient(until=lambda _: mark.exists(), call=7))
    run = trial.struck(*faults, of=of)
    as_ever(run, trial, one_worker)
    (warning,) = run.info["warnings"]
    for word in ("step 6", "worker 1: No space left on device", "step 3"):
        assert word in warning
    assert whole(trial.run_dir) == [3, 9]


@slow
def test_without_survive_a_full_disk_ends_the_run(trial: Trial, one_worker: Run) -> None:
    with pytest.raises(mh.WorkerFailed, match="No space left on device"):
        trial.train("disk=1@step:6", survive=None, run_dir=trial.run_dir)
    equal(trial.train(survive=None, run_dir=trial.run_dir, resume=True), one_worker)
    assert whole(trial.run_dir) == [6, 9]


def never(mark: Path, step: int) -> Callable[[mh.Worker, int], None]:
    """Worker 1's first process writes no file of the checkpoint of this step."""

    def before(worker: mh.Worker, saved: int) -> None:
        if worker.worker_id == 1 and saved == step and not mark.exists():
            mark.touch()
            wait_until(lambda: False, 60)

    return before


@slow
def test_a_member_that_is_lost_before_its_part_is_written(trial: Trial, one_worker: Run) -> None:
    """The checkpoint is dropped and named, its folder is gone, and the next one is whole."""
    fault, mark = "kill=1@step:7:exchange", trial.folder / "mark"
    of = task(
        model=Writes(never(mark, 6)), loss=Patient(until=lambda worker: worker.worker_id != 1 or mark.exists(), call=8)
    )
    run = trial.struck(fault, of=of)
    as_ever(run, trial, one_worker)
    (warning,) = run.info["warnings"]
    for word in ("step 6 is dropped", "worker 1", "step 3"):
        assert word in warning
    assert whole(trial.run_dir) == [3, 9]


@slow
def test_a_member_that_is_lost_while_the_last_checkpoint_is_written(trial: Trial, one_worker: Run) -> None:
    """It hangs in its write; those that are left save again, and the run ends with that checkpoint."""
    of = task(model=Writes(never(trial.folder / "mark", STEPS)))
    run = trial.train(of=of, run_dir=trial.run_dir, timeout_s=15, survive=survive(False, 1))
    assert lost(run) == [(1, "hang")]
    equal(run, one_worker)
    assert (newest(trial.run_dir).tick, newest(trial.run_dir).ranks) == (STEPS, 2)


@slow
def test_a_worker_that_leaves_writes_its_part_before_it_ends(trial: Trial, one_worker: Run) -> None:
    fault, mark = "leave=1@step:6", trial.folder / "mark"
    folder = trial.run_dir / "checkpoints/step-00000006"

    def when_gone(worker: mh.Worker, step: int) -> None:
        """Once the others train without it."""
        if worker.worker_id == 1 and step == 6:
            wait_until(mark.exists)
            time.sleep(0.3)  # in which a worker that does not wait for this would end

    def until(worker: mh.Worker) -> bool:
        if worker.size == 2:
            mark.touch()
            return folder.exists()
        return worker.interrupted

    of = task(model=Writes(when_gone), loss=Patient(until=until, call=7))
    run = trial.struck(fault, of=of)
    equal(run, one_worker)
    assert mark.exists()
    assert (run.losses, run.info["warnings"]) == ([], [])
    assert whole(trial.run_dir) == [6, 9]
