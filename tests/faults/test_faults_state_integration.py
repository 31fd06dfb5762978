"""What else a run remembers than parameters: buffers, residuals, schedules, the best model, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fault_harness import (
    GLOBAL_ROWS,
    STEPS,
    Patient,
    Recording,
    Strike,
    Trial,
    equal,
    fired,
    recorded_once,
    reference,
    task,
)
from torch import Tensor, nn

import manyhands as mh
import plain
from manyhands.checkpoint import checkpoints
from manyhands.recording import event_log
from manyhands.recording.run import Run

slow = pytest.mark.slow


class Averaging(nn.Module):
    """A buffer that follows the parameters, by as much at each forward of training, whatever rows a worker has."""

    def __init__(self) -> None:
        super().__init__()
        self.net = plain.mlp()
        self.register_buffer("average", torch.zeros(9, 5, dtype=torch.float64))
        self.average: Tensor

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.average.lerp_(self.net[0].weight.detach(), 0.1)
        return self.net(x)


@pytest.fixture(scope="module")
def averaged() -> Run:
    return reference(task(model=Averaging))


# The last step of all has 22 rows: two workers' slices of them are no larger than three workers' of a whole batch, and
# so they are not computed in pieces, each of which would move the buffers.


@pytest.mark.parametrize(
    "faults",
    [
        "kill=1@step:8:exchange",
        pytest.param("kill=0@step:8:exchange", marks=slow),
        pytest.param("kill=0@step:8:commit", marks=slow),
        pytest.param("kill=1@step:8:commit", marks=slow),
    ],
)
def test_buffers_of_a_repeated_step_are_those_of_before(faults: str, trial: Trial, averaged: Run) -> None:
    run = trial.train(faults=faults, of=task(model=Averaging), survive="max_losses=2,replace=false")
    fired(run, *faults.split(","))
    equal(run, averaged)


class Normalized(nn.Module):
    """Batch norm of inputs, whose first column is always 2, and dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5).double()
        self.drop, self.net = nn.Dropout(dropout), plain.mlp()

    def forward(self, x: Tensor) -> Any:
        return self.net(self.drop(self.norm(x)))


def constant_first() -> tuple[Tensor, Tensor]:
    x, y = plain.rows(100)
    x[:, 0] = 2.0
    return x, y


@slow
@pytest.mark.parametrize("phase", ["compute", "exchange", "commit"])
def test_batch_norm_counts_each_step_once(phase: str, trial: Trial) -> None:
    """What its statistics say of a column that is the same on all rows is that of a run without faults."""
    fault = f"kill=1@step:8:{phase}"
    given = task(model=Normalized, train_data=constant_first())
    run = trial.train(faults=fault, of=given, survive="max_losses=1,replace=false")
    fired(run, *mended(fault))
    alone = reference(given)
    norm, other = run.model.norm, alone.model.norm
    assert int(norm.num_batches_tracked) == int(other.num_batches_tracked) == STEPS
    assert torch.allclose(norm.running_mean[0], other.running_mean[0], rtol=0, atol=1e-12)
    assert torch.allclose(norm.running_var[0], other.running_var[0], rtol=0, atol=1e-12)


def mended(fault: str) -> list[str]:
    return [fault.removesuffix(":compute")]


@slow
@pytest.mark.parametrize("worker_id", [0, 1])
def test_dropout_runs_and_finishes(worker_id: int, trial: Trial) -> None:
    fault = f"kill={worker_id}@step:2:exchange"
    given = task(model=lambda: Normalized(0.5), loss=Patient())
    run = trial.train(faults=fault, of=given, run_dir=trial.run_dir)
    fired(run, fault)
    recorded_once(run, trial.seen, trial.run_dir, GLOBAL_ROWS)
    assert int(run.model.norm.num_batches_tracked) >= STEPS  # a larger slice is computed in pieces


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("kill=1@step:4", marks=slow),
        "kill=1@step:4:exchange",
        pytest.param("kill=0@step:4:exchange", marks=slow),
        pytest.param("kill=0@step:4:commit", marks=slow),
    ],
)
def test_with_overlap(fault: str, trial: Trial, one_worker: Run) -> None:
    run = trial.train(
        faults=fault, of=task(loss=Patient(call=6)), strategy="allreduce:overlap=true", run_dir=trial.run_dir
    )
    fired(run, fault)
    equal(run, one_worker)
    recorded_once(run, trial.seen, trial.run_dir, GLOBAL_ROWS)


@slow
@pytest.mark.parametrize("compress", ["topk:0.2", "onebit", "powersgd:2"])
@pytest.mark.parametrize("fault", ["kill=1@step:4:exchange", "kill=0@step:4:commit"])
def test_compressed(compress: str, fault: str, trial: Trial) -> None:
    """What a lost worker left out is lost; all go on, each step once."""
    run = trial.train(
        faults=fault,
        of=task(loss=Patient(call=6)),
        strategy=f"allreduce:compress={compress}",
        run_dir=trial.run_dir,
    )
    fired(run, fault)
    recorded_once(run, trial.seen, trial.run_dir, GLOBAL_ROWS)
    assert all(torch.isfinite(tensor).all() for tensor in run.model.state_dict().values())


@slow
@pytest.mark.parametrize("replaced", [True, False])
def test_in_micro_batches(replaced: bool, trial: Trial, one_worker: Run) -> None:
    fault = "kill=1@step:4:exchange"
    run = trial.train(
        faults=fault,
        of=task(micro_batch_size=5),
        survive=f"max_losses=1,replace={str(replaced).lower()}",
        run_dir=trial.run_dir,
    )
    fired(run, fault)
    equal(run, one_worker)
    recorded_once(run, trial.seen, trial.run_dir, GLOBAL_ROWS)


# -- validation --------------------------------------------------------------------------------------------------------


def on_plateau(optimizer: torch.optim.Optimizer, total: int) -> Any:
    """Nothing is good enough after the first validation: each counts, and two of them halve the rate."""
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5, threshold=0.9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strike",
    [
        pytest.param(Strike(1, "before evaluate validation", call=2), marks=slow),
        pytest.param(Strike(0, "before ask validation", call=2), marks=slow),
        Strike(1, "after ask validation", call=2),
        pytest.param(Strike(0, "after ask validation", call=2), marks=slow),
    ],
    ids=lambda strike: str(strike),
)
@pytest.mark.parametrize("replaced", [pytest.param(True, marks=slow), False])
def test_each_validation_steps_the_schedule_once(strike: Strike, replaced: bool, trial: Trial) -> None:
    given = task(schedule=on_plateau, epochs=5)
    alone = Recording()
    held = reference(given, callbacks=[alone])
    run = trial.train(
        strike,
        of=task(schedule=on_plateau, epochs=5, loss=Patient(call=7) if replaced else plain.cross_entropy),
        run_dir=trial.run_dir,
        survive=f"max_losses=1,replace={str(replaced).lower()}",
    )
    fired(run, strike)
    assert trial.seen.rates == alone.rates
    equal(run, held)
    recorded_once(run, trial.seen, trial.run_dir, [39, 39, 22] * 5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strike",
    [
        pytest.param(Strike(1, "before evaluate validation", call=1), marks=slow),
        pytest.param(Strike(1, "after ask validation", call=1), marks=slow),
        Strike(0, "before ask validation", call=2),
        pytest.param(Strike(0, "before ask validation", call=3), marks=slow),
        pytest.param(Strike(0, "after ask validation", call=2), marks=slow),
        pytest.param(Strike(0, "before outcome"), marks=slow),
    ],
    ids=lambda strike: f"{strike} {strike.call}",
)
def test_the_best_model_is_kept(strike: Strike, trial: Trial) -> None:
    """The last epochs spoil the model, which the schedule has leap then."""
    given = task(schedule=leaping, epochs=4)
    alone = Recording()
    held = reference(given, callbacks=[alone], keep="best:validation_loss")
    assert held.info["kept"]["epoch"] < 4
    run = trial.train(strike, of=given, keep="best:validation_loss", run_dir=trial.run_dir)
    fired(run, strike)
    equal(run, held)
    assert run.info["kept"] == held.info["kept"]
    assert trial.seen.best == alone.best
    recorded_once(run, trial.seen, trial.run_dir, [39, 39, 22] * 4)


def leaping(optimizer: torch.optim.Optimizer, total: int) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 6 else 50.0)


EVERY = {"validate_every": 7, "checkpoint_every": 5}


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("kill=1@step:5:save", marks=slow),
        pytest.param("kill=0@step:5:save", marks=slow),
        pytest.param("kill=1@step:6:exchange", marks=slow),
        Strike(1, "before tell sync"),
        pytest.param(Strike(0, "before tell sync"), marks=slow),
        pytest.param(Strike(0, "after tell sync"), marks=slow),
        pytest.param(Strike(0, "after save", call=1), marks=slow),
        pytest.param(Strike(1, "after save", call=1), marks=slow),
        Strike(1, "before evaluate validation"),
        pytest.param(Strike(0, "before evaluate validation"), marks=slow),
        pytest.param(Strike(0, "before ask validation"), marks=slow),
        pytest.param(Strike(0, "after ask validation"), marks=slow),
        pytest.param(Strike(1, "after ask validation"), marks=slow),
    ],
    ids=str,
)
def test_what_is_due_after_so_many_steps_is_done_once(fault: str | Strike, trial: Trial) -> None:
    alone = Recording()
    held = reference(callbacks=[alone], **EVERY)
    strikes, faults = ([], fault) if isinstance(fault, str) else ([fault], "")
    run = trial.train(*strikes, faults=faults, run_dir=trial.run_dir, **EVERY)
    fired(run, fault)
    equal(run, held)
    recorded_once(run, trial.seen, trial.run_dir, GLOBAL_ROWS)
    assert trial.seen.validations == alone.validations
    assert [step for _, step in alone.validations] == [7, 9]
    later = ("after save", "step:6:exchange", "validation")  # when a part may still be to be written
    after_the_save = str(fault).endswith(later)
    dropped = after_the_save and any("step 5 is dropped" in message for message in run.info["warnings"])
    assert saved(trial.run_dir) == ([9] if dropped else [5, 9])


def saved(run_dir: Path) -> list[int]:
    return sorted({event.tick for event in event_log.read(run_dir / event_log.FILE) if event.type == "checkpoint"})


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill=1@step:3:exchange", pytest.param("kill=0@step:4:exchange", marks=slow)])
def test_a_last_step_in_the_middle_of_an_epoch(fault: str, trial: Trial) -> None:
    held = reference(task(max_steps=5))
    run = trial.train(faults=fault, of=task(max_steps=5), run_dir=trial.run_dir)
    fired(run, fault)
    equal(run, held)
    recorded_once(run, trial.seen, trial.run_dir, GLOBAL_ROWS[:5])
    assert [step for _, step in trial.seen.validations] == [3, 5]


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("worker_id", [1, pytest.param(0, marks=slow)])
def test_a_run_that_lost_a_worker_in_a_save_is_resumed(worker_id: int, trial: Trial, one_worker: Run) -> None:
    """A second loss, which is one too many, ends it: once the checkpoint is whole."""
    faults = [f"kill={worker_id}@step:6:save", "kill=2@step:7:exchange"]
    whole = trial.run_dir / "checkpoints/step-00000006"
    patient = Patient(until=lambda worker: whole.exists(), call=8)
    with pytest.raises(mh.WorkerFailed, match="loss 2, and max_losses is 1"):
        trial.train(faults=",".join(faults), survive="max_losses=1", of=task(loss=patient), run_dir=trial.run_dir)
    assert trial.seen.faults == faults
    newest = checkpoints.newest(trial.run_dir / "checkpoints", pytest.fail)
    assert newest is not None
    assert newest.tick == 6
    run = trial.train(faults="kill=0@step:7:exchange", run_dir=trial.run_dir, resume=True)
    fired(run, "kill=0@step:7:exchange")
    equal(run, one_worker)
    assert run.rows["total"] == sum(GLOBAL_ROWS)
    assert run.info["warnings"] == []
    assert [(row["tick"], row["rows"]) for row in mh.read_history(trial.run_dir)] == list(enumerate(GLOBAL_ROWS))
    assert [(row["tick"], row["rows"]) for row in run.history] == list(enumerate(GLOBAL_ROWS))


@slow
def test_a_finished_run_is_not_trained_again(trial: Trial, one_worker: Run) -> None:
    run = trial.train(faults="kill=1@step:9:save", run_dir=trial.run_dir)
    newest = checkpoints.newest(trial.run_dir / "checkpoints", pytest.fail)
    assert newest is not None
    assert newest.tick == STEPS
    again = trial.train(run_dir=trial.run_dir, resume=True)
    equal(again, one_worker)
    assert (again.losses, again.generations) == (run.losses, run.generations)
    assert [row["rows"] for row in again.history] == GLOBAL_ROWS


@slow
def test_a_stop_after_so_long(trial: Trial, one_worker: Run) -> None:
    """The stop and a loss in the same run; what was trained counts, and the rest is done when it is resumed."""
    fault = "kill=1@step:2:exchange"
    run = trial.train(faults=fault, of=task(loss=Patient(rests_s=1.2)), max_seconds=1.0, run_dir=trial.run_dir)
    fired(run, fault)
    assert run.info["stopped"] == "max_seconds"
    assert run.steps < STEPS
    again = trial.train(run_dir=trial.run_dir, resume=True)
    equal(again, one_worker)
    assert [(row["tick"], row["rows"]) for row in again.history] == list(enumerate(GLOBAL_ROWS))
