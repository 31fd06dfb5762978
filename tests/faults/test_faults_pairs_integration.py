"""A worker is lost while workers gossip in pairs: what it has pushed stays at the server, the rest is trained by others.

The model has one number for each row, and the loss is minus the mean of those of a batch. With rate 1, a slice of n rows
moves the mean of all 3 workers' numbers at the server by 1 / (3·n) for each of its rows, whoever trains it.
"""

from __future__ import annotations

from itertools import combinations_with_replacement, product

import numbered_rows
import pytest
import torch
from fault_harness import Patient, Strike, Trial, all_here, fired

import manyhands as mh
from manyhands.recording.run import Run
from manyhands.worker import Worker

BATCH, TICKS, EPOCHS, WORKERS = 6, 12, 2, 3
ROWS = BATCH * TICKS
slow = pytest.mark.slow


def task(**fields: object) -> mh.Task:
    return numbered_rows.task(ROWS, BATCH, **{"epochs": EPOCHS, **fields})


def check_counts(run: Run) -> None:
    """An epoch keeps the slices with which it began."""
    moved = run.model.of.detach()
    of_epochs = [1 / (rows * WORKERS) for rows in (2, 3, 6)]  # with three, two and one workers
    assert min(abs(float(moved[0]) - sum(one)) for one in combinations_with_replacement(of_epochs, EPOCHS)) < 1e-9
    assert torch.allclose(moved, moved[0].expand(ROWS), rtol=0, atol=1e-9), moved
    assert run.rows["total"] == EPOCHS * ROWS
    assert sorted(row["tick"] for row in run.history) == list(range(EPOCHS * TICKS))


PAIRS = {
    "each step": "gossip:graph=pairs",
    "each third step": "gossip:graph=pairs,period=3",
    "bounded": "gossip:graph=pairs,bound=2",
}
FAULTS = {"compute": "kill=1@step:3", "exchange": "kill=0@step:5:exchange", "first step": "kill=2@step:0"}
FAULTS |= {"all but one": "kill=0@step:4,kill=1@step:5"}


FAST = {("each third step", "compute"), ("each step", "all but one")}
CASES = [pytest.param(*case, marks=() if case in FAST else slow) for case in product(PAIRS, FAULTS)]


@pytest.mark.parametrize("replaced", [pytest.param(True, marks=slow), False])
@pytest.mark.parametrize(("how", "when"), CASES)
def test_each_row_is_at_the_server_once(how: str, when: str, replaced: bool, trial: Trial) -> None:
    faults = FAULTS[when]
    survive = f"max_losses=3,replace={str(replaced).lower()}"
    run = trial.train(of=task(), faults=faults, strategy=PAIRS[how], survive=survive, run_dir=trial.run_dir)
    fired(run, *faults.split(","))
    check_counts(run)


@pytest.mark.parametrize(
    "place",
    ["after push", *(pytest.param(one, marks=slow) for one in ("before push", "before meet", "before take_back"))],
)
def test_each_row_is_at_the_server_once_wherever_a_worker_is_struck(place: str, trial: Trial) -> None:
    strike = Strike(1, place, call=2 if "push" in place else 1)
    run = trial.train(strike, of=task(), strategy=PAIRS["each third step"], run_dir=trial.run_dir)
    fired(run, strike)
    check_counts(run)


def lost_and_back(worker: Worker) -> bool:
    return worker.broken or (worker.generation > 0 and all_here(worker))


@pytest.mark.slow
def test_a_replacement_goes_on_where_the_lost_one_stood(trial: Trial) -> None:
    """At the server it stands there; the window of the member whose state it takes is that one's alone."""
    fault = "kill=1@step:2"
    of = task(loss=Patient(until=lost_and_back, loss=numbered_rows.minus_mean, call=3))
    run = trial.train(of=of, faults=fault, strategy=PAIRS["each third step"], run_dir=trial.run_dir)
    fired(run, fault)
    assert run.generations == 3  # without it, and with the process in its place
    check_counts(run)
