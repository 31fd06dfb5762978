"""A worker is lost between rounds: those who are left train its rows into the same round, each row exactly once.

The answer shows who trained what, see `numbered_rows.rounds_problem`.
"""

from __future__ import annotations

from pathlib import Path

import numbered_rows
import pytest
from fault_harness import Strike, Trial, fired, lose_peer

import manyhands as mh
from manyhands.recording import event_log
from manyhands.recording.run import Run

BATCH, PERIOD, TICKS = 6, 4, 11
ROWS = BATCH * TICKS
slow = pytest.mark.slow


def task(**fields: object) -> mh.Task:
    return numbered_rows.task(ROWS, BATCH, **{"epochs": 1, "order": lambda epoch: range(ROWS), **fields})


def check_counts(run: Run, run_dir: Path, workers: int = 3) -> None:
    """Each row is in its round once."""
    assert run.rows["total"] == ROWS
    assert run.rows["unused"] == 0
    assert [(row["tick"], row["rows"]) for row in run.history] == [(tick, BATCH) for tick in range(TICKS)]
    members = {0: workers}
    for event in event_log.read(run_dir / event_log.FILE):
        if event.type == "membership":
            members[event.tick] = event.values["workers"]
    assert numbered_rows.rounds_problem(run.model.of.detach(), run.history, members, BATCH) == ""


STRATEGIES = [f"local-sgd:period={PERIOD}", f"diloco:period={PERIOD},outer_rate=1,outer_momentum=0"]
FAULTS = {
    "compute": "kill={}@step:5",
    "exchange": "kill={}@step:7:exchange",
    "first step": "kill={}@step:0",
    "round's first step": "kill={}@step:4",
    "epoch's last step": "kill={}@step:10",
}


def cases() -> list[object]:
    fast = {("local-sgd", "exchange", 0), ("diloco", "compute", 1)}
    found = []
    for strategy in STRATEGIES:
        for when, fault in FAULTS.items():
            for worker_id in (1, 0):
                name = strategy.partition(":")[0]
                marks = [] if (name, when, worker_id) in fast else [slow]
                found.append(
                    pytest.param(strategy, fault.format(worker_id), id=f"{name}-{when}-{worker_id}", marks=marks)
                )
    return found


@pytest.mark.parametrize(("strategy", "fault"), cases())
def test_a_lost_workers_rows_are_in_the_same_round(strategy: str, fault: str, trial: Trial) -> None:
    run = trial.train(of=task(), faults=fault, strategy=strategy, run_dir=trial.run_dir)
    fired(run, fault)
    assert [one["worker_id"] for one in run.losses] == [int(fault[5])]
    check_counts(run, trial.run_dir)


PLACES = {
    "with its result": [Strike(1, "before complete", call=2)],
    "when all have the result": [Strike(1, "in complete", call=2)],
    "first, when all have the result": [Strike(0, "in complete", call=2)],
    "at the epoch's end": [Strike(1, "before complete", call=3)],
    "with another's rows": [Strike(1, "before backward", call=6), Strike(0, "before step_extra", call=2)],
    "after another's rows": [Strike(1, "before backward", call=6), Strike(0, "after train_extra")],
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES, ids=["local-sgd", "diloco"])
@pytest.mark.parametrize(
    "when", [pytest.param(when, marks=[] if when == "with another's rows" else slow) for when in PLACES]
)
def test_a_worker_is_lost_while_a_round_is_closed(when: str, strategy: str, trial: Trial) -> None:
    run = trial.train(*PLACES[when], of=task(), strategy=strategy, run_dir=trial.run_dir)
    fired(run, *PLACES[when])
    assert len(run.losses) == len(PLACES[when])
    check_counts(run, trial.run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES, ids=["local-sgd", "diloco"])
@pytest.mark.parametrize("workers", [[1], [0], [1, 2]])
def test_a_round_that_one_has_completed_is_completed_by_all(workers: list[int], strategy: str, trial: Trial) -> None:
    """Nobody is lost, but these find a connection broken when the others go on with the round's result."""
    strikes = [Strike(worker_id, "in complete", lose_peer, call=2) for worker_id in workers]
    run = trial.train(*strikes, of=task(), strategy=strategy, run_dir=trial.run_dir)
    fired(run, *strikes)
    assert run.losses == []
    assert run.generations > 1
    assert run.rows["repeated"] == 0
    check_counts(run, trial.run_dir)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", [STRATEGIES[0], pytest.param(STRATEGIES[1], marks=slow)], ids=["local-sgd", "diloco"]
)
def test_a_round_that_one_has_no_part_in_any_more_is_made_again(strategy: str, trial: Trial) -> None:
    """One finds a connection broken with the result at hand, and before it says so: nobody goes on with the round."""
    strike = Strike(1, "before complete", lose_peer, call=2)
    run = trial.train(strike, of=task(), strategy=strategy, run_dir=trial.run_dir)
    fired(run, strike)
    assert run.losses == []
    assert run.rows["repeated"] == 0
    check_counts(run, trial.run_dir)
