"""What users of other libraries reported, as it is here. One run loses a worker, takes another in its place, and goes on."""

from __future__ import annotations

import numbered_rows
import pytest
import torch
from fault_harness import Patient, Strike, Trial, fired
from test_faults_rounds_integration import STRATEGIES, check_counts
from test_faults_rounds_integration import task as rows_in_order

from manyhands.engines.driver.membership import Form, Membership, StopWorker
from manyhands.engines.local.engine import Local
from manyhands.engines.survive import Survive
from manyhands.events import Event
from manyhands.recording import event_log
from manyhands.recording.run import Run

BATCH, TICKS, EPOCHS = 6, 8, 2
ROWS = BATCH * TICKS
FAULT = "kill=1@step:5:exchange"
TIMEOUT_S = 60.0
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def struck(own_local: Local, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Trial]:
    """Worker 1 is killed in the first epoch, and the others wait for the one in its place."""
    trial = Trial(own_local, tmp_path_factory.mktemp("complaints"))
    of = numbered_rows.task(ROWS, BATCH, epochs=EPOCHS, loss=Patient(loss=numbered_rows.minus_mean, call=8))
    run = trial.train(of=of, faults=FAULT, run_dir=trial.run_dir, timeout_s=TIMEOUT_S)
    fired(run, FAULT)
    assert run.generations == 3
    return run, trial


def events(trial: Trial, kind: str) -> list[Event]:
    return [event for event in event_log.read(trial.run_dir / event_log.FILE) if event.type == kind]


@pytest.mark.slow
def test_the_global_batch_stays(struck: tuple[Run, Trial]) -> None:
    """torchft#186: the batch changes at a loss. Here each step is of as many rows, whoever trains them, at the same rate."""
    run, trial = struck
    assert [event.values["workers"] for event in events(trial, "membership")] == [2, 3]
    assert [row["rows"] for row in run.history] == [BATCH] * (EPOCHS * TICKS)
    assert {row["rate"] for row in run.history} == {1.0}
    assert torch.allclose(run.model.of.detach(), torch.full((ROWS,), EPOCHS / BATCH, dtype=torch.float64), atol=1e-12)


def test_who_comes_back_begins_with_the_others(struck: tuple[Run, Trial]) -> None:
    """torchft#309: a rejoiner is a batch behind. Here its first step is the members' first step with it."""
    _, trial = struck
    joined = events(trial, "membership")[-1]
    steps = {(event.generation, event.rank): event for event in reversed(events(trial, "step"))}  # the first of each
    assert {steps[joined.generation, rank].tick for rank in range(3)} == {joined.tick}
    assert {steps[joined.generation, rank].step for rank in range(3)} == {joined.tick + 1}


def test_no_row_is_lost(struck: tuple[Run, Trial]) -> None:
    """horovod#3143: rows are lost at a reset. Here the answer shows each of them once an epoch."""
    run, _ = struck
    times = run.model.of.detach() * BATCH
    assert torch.allclose(times, torch.full((ROWS,), float(EPOCHS), dtype=torch.float64), atol=1e-12)
    assert run.rows["total"] == EPOCHS * ROWS


def test_survivors_do_not_hang(struck: tuple[Run, Trial]) -> None:
    """pytorch#76287: survivors hang. Here they notice by the lost one's pipe, long before anything times out."""
    _, trial = struck
    [lost] = [event for event in events(trial, "change") if event.values["kind"] == "lost"]
    formed = events(trial, "membership")[0]
    assert formed.time_s - lost.time_s < TIMEOUT_S / 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "strike", [Strike(0, "after ask epoch"), pytest.param(Strike(1, "before ask epoch"), marks=slow)]
)
def test_the_epoch_is_the_members(strike: Strike, trial: Trial) -> None:
    """horovod#2844: the wrong epoch after a reset. Here one is lost as an epoch ends, and the next has its own order."""
    of = numbered_rows.task(ROWS, BATCH, epochs=3, order=lambda epoch: [epoch] * ROWS)
    run = trial.train(strike, of=of, run_dir=trial.run_dir)
    fired(run, strike)
    assert trial.seen.epochs == [1, 2, 3]
    assert [row["epoch"] for row in run.history] == [tick // TICKS for tick in range(3 * TICKS)]
    assert run.model.of.detach()[:4].tolist() == pytest.approx([TICKS] * 3 + [0])


def test_one_that_comes_back_as_the_others_are_done_ends_too(trial: Trial) -> None:
    """horovod#3494: a deadlock when a worker returns. Here it is lost in the last step, and the run's end waits for nobody."""
    fault = f"kill=1@step:{TICKS - 1}:exchange"
    run = trial.train(of=numbered_rows.task(ROWS, BATCH, epochs=1), faults=fault, run_dir=trial.run_dir)
    fired(run, fault)
    assert run.rows["total"] == ROWS


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES, ids=["local-sgd", "diloco"])
def test_what_survivors_have_computed_counts(strategy: str, trial: Trial) -> None:
    """torchft#192: good gradients are thrown away. Here, between rounds, only the lost worker's slices are trained again."""
    fault = "kill=2@step:6"
    survive = "max_losses=1,replace=false"
    run = trial.train(of=rows_in_order(), faults=fault, strategy=strategy, survive=survive, run_dir=trial.run_dir)
    fired(run, fault)
    assert 2 * 2 <= run.rows["repeated"] <= 4 * 2  # two rows a step, of two to four steps since the last round
    check_counts(run, trial.run_dir)


def test_of_two_halves_one_goes_on() -> None:
    """torchft#71: split brain. Here nobody goes on without the driver, nor beside one that may still run."""
    membership = Membership(Survive(max_losses="any", silence_s=10.0, replace=False), dict.fromkeys(range(4), "h"), 0.0)
    for worker_id in range(4):
        membership.requested(worker_id, -1, True, 0.0)
    assert membership.decide(0.0) == [Form(0, (0, 1, 2, 3))]
    for worker_id in (2, 3):  # out of reach, and perhaps alive
        membership.lost(worker_id, "silence", 5.0)
    for worker_id in (0, 1):
        membership.requested(worker_id, 0, False, 5.0)
    decided = membership.decide(5.0)
    assert [action for action in decided if isinstance(action, StopWorker)] == [StopWorker(2), StopWorker(3)]
    for worker_id in (2, 3):  # what they ask for reaches the driver late
        membership.requested(worker_id, 0, False, 6.0)
    assert not any(isinstance(action, Form) for action in [*decided, *membership.decide(14.9)])
    assert membership.decide(15.1) == [Form(1, (0, 1))]
