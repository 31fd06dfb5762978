"""A worker is lost where all are in step at a server: the step ends without it, and those who are left train what the server
does not have of it, each row exactly once.

The model has one number for each row, and the loss is minus the mean of those of a batch. With rate 1, a slice of n rows
moves its numbers by 1 / n each, whoever trains it. With quorum the step is along the mean of all slices: n is their rows.
"""

from __future__ import annotations

import re

import numbered_rows
import pytest
import torch
from fault_harness import Patient, Strike, Trial, equal, fired, task

import manyhands as mh
from manyhands.recording.run import Run

BATCH, TICKS = 12, 13
ROWS = BATCH * TICKS
slow = pytest.mark.slow


def numbered(**fields: object) -> mh.Task:
    return numbered_rows.task(ROWS, BATCH, **{"epochs": 1, "order": lambda epoch: range(ROWS), **fields})


SLICES = {  # rows of a slice, or of all slices of a step, with three workers, two and one, and of the lost worker's alone
    "downpour:bound=0": (4, 6, 12),
    "downpour:bound=0,push_every=3,pull_every=3": (4, 6, 12),
    "quorum": (12, 8, 6, 4),
}
FAULTS = {
    "compute": "kill=1@step:4",
    "exchange": "kill=0@step:5:exchange",
    "first step": "kill=2@step:0",
    "last step": "kill=1@step:12",
    "two": "kill=0@step:4,kill=1@step:5",
}
PLACES = {
    "before a push": [Strike(1, "before push", call=2)],
    "after a push": [Strike(0, "after push", call=2)],
    "validation": [Strike(0, "before evaluate validation")],
    "as another is replaced": [Strike(2, "before backward", call=3), Strike(0, "before push_extra")],
    "when it has pushed what was another's": [Strike(2, "before backward", call=3), Strike(0, "after push_extra")],
    "within what was another's": [Strike(2, "before backward", call=3), Strike(0, "after step_extra")],
    "at the end": [Strike(1, "before outcome")],
}
FAST = {("downpour:bound=0,push_every=3,pull_every=3", "compute"), ("quorum", "before a push")}


def cases(of: dict[str, object]) -> list[object]:
    return [
        pytest.param(strategy, of[when], id=f"{strategy}-{when}", marks=[] if (strategy, when) in FAST else [slow])
        for strategy in SLICES
        for when in of
    ]


@pytest.mark.parametrize(("strategy", "faults"), cases(FAULTS))
def test_each_row_is_in_one_step(strategy: str, faults: str, trial: Trial) -> None:
    run = trial.train(of=numbered(), faults=faults, strategy=strategy, run_dir=trial.run_dir)
    fired(run, *faults.split(","))
    numbered_rows.trained_once(run, BATCH, SLICES[strategy])
    assert run.rows["repeated"] >= 4 * ("exchange" not in faults)


@pytest.mark.parametrize(("strategy", "strikes"), cases(PLACES))
def test_each_row_is_in_one_step_wherever_a_worker_is_struck(
    strategy: str, strikes: list[Strike], trial: Trial
) -> None:
    of = numbered(validation_data=torch.arange(ROWS)) if strikes == PLACES["validation"] else numbered()
    run = trial.train(*strikes, of=of, strategy=strategy, validate_every=6)
    fired(run, *strikes)
    numbered_rows.trained_once(run, BATCH, SLICES[strategy])


@slow
def test_what_one_of_two_shards_has_of_a_slice_is_counted_and_not_repeated(trial: Trial) -> None:
    strike = Strike(1, "before push to a shard", call=2 * 4)  # the second of its fourth push
    run = trial.train(strike, of=numbered(), strategy="downpour:bound=0", servers=2)
    fired(run, strike)
    numbered_rows.partly_trained(run, BATCH, (4, 6, 12), partial=4)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["downpour:bound=0", pytest.param("quorum", marks=slow)])
def test_a_replacement_takes_part(strategy: str, trial: Trial) -> None:
    fault = "kill=1@step:3"
    of = numbered(loss=Patient(loss=numbered_rows.minus_mean))
    run = trial.train(of=of, faults=fault, strategy=strategy)
    fired(run, fault)
    numbered_rows.trained_once(run, BATCH, SLICES[strategy])
    assert run.generations >= 3
    assert run.rows["workers"][1] >= 4 * 5


@slow
@pytest.mark.parametrize(
    "strategy",
    [
        "easgd:bound=0,period=2",
        "eamsgd:bound=0,period=2",
        "dynsgd:bound=0",
        "agn:bound=0,window=2",
        "distance:bound=0",
        "diloco:period=3,via=server,bound=0",
        "downpour:bound=0,rule=adam",
        "downpour:bound=0,compress=topk:0.5",
        "quorum:backups=1",
    ],
)
def test_every_strategy_in_step_goes_on(strategy: str, trial: Trial) -> None:
    fault = "kill=1@step:5"
    run = trial.train(of=numbered(), faults=fault, strategy=strategy)
    fired(run, fault)
    assert run.rows["total"] == ROWS
    assert [row["tick"] for row in run.history] == list(range(TICKS))
    if not {"topk", "backups", "easgd", "eamsgd"} & set(re.split("[:=,]", strategy)):  # they may leave some out
        assert run.model.of.detach().min() > 0


@slow
def test_without_a_loss_a_run_that_could_have_one_is_the_same(trial: Trial) -> None:
    for strategy in ("downpour:bound=0", "quorum"):
        run = trial.train(strategy=strategy)
        equal(run, mh.train(task(), engine=trial.local, workers=3, strategy=strategy), tolerance=0.0)


@slow
def test_quorum_is_one_worker_though_a_worker_is_lost_when_its_gradient_is_in(trial: Trial, one_worker: Run) -> None:
    """Of an epoch's last step: the gradient counts, nothing is repeated, and all steps are those of one worker."""
    fault = "kill=1@step:5:exchange"
    run = trial.train(faults=fault, strategy="quorum")
    fired(run, fault)
    assert run.rows["repeated"] == 0
    equal(run, one_worker)
