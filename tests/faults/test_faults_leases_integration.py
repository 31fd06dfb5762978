"""A worker is lost at its own pace: what the server does not have of it is trained by others, each row exactly once.

The model has one number for each row, and the loss is minus the mean of those of a batch. With rate 1, a slice of n rows
moves its numbers at the server by 1 / n each, whoever trains it.
"""

from __future__ import annotations

import fcntl
import json
import threading
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import numbered_rows
import pytest
import torch
from fault_harness import Patient, Strike, Trial, fired, kill

import manyhands as mh
from manyhands.recording import event_log
from manyhands.recording.run import Run
from manyhands.worker import Worker

BATCH, TICKS, EPOCHS = 6, 12, 2
ROWS = BATCH * TICKS
slow = pytest.mark.slow


def task(**fields: object) -> mh.Task:
    return numbered_rows.task(ROWS, BATCH, **{"epochs": EPOCHS, **fields})


def check_counts(run: Run) -> None:
    """An epoch keeps the slices with which it began: all of one epoch move their numbers alike."""
    moved = run.model.of.detach()
    of_epochs = [1 / rows for rows in (2, 3, 6)]  # with three, two and one workers
    assert min(abs(float(moved[0]) - sum(one)) for one in combinations_with_replacement(of_epochs, EPOCHS)) < 1e-9
    assert torch.allclose(moved, moved[0].expand(ROWS), rtol=0, atol=1e-9), moved
    assert run.rows["total"] == EPOCHS * ROWS
    assert run.rows["unused"] == 0
    assert sorted(row["tick"] for row in run.history) == list(range(EPOCHS * TICKS))
    assert {row["rows"] for row in run.history} == {BATCH}


COUNTED = {
    "each step": "downpour",
    "each third step": "downpour:push_every=3,pull_every=3",
    "bounded": "downpour:bound=2",
    "alone at first": "downpour:bound=1,warmup=8",
}
FAULTS = {
    "compute": "kill=1@step:3",
    "exchange": "kill=0@step:5:exchange",
    "first step": "kill=2@step:0",
    "two": "kill=0@step:4,kill=1@step:5",
}
PLACES = {
    "before a push": Strike(1, "before push", call=2),
    "after a push": Strike(0, "after push", call=2),
    "before all meet": Strike(1, "before meet"),
    "with an open window at the epoch's end": Strike(0, "before take_back"),
    "after its last push": Strike(1, "before take_back"),
    "at the end": Strike(1, "before take_back", call=2),
    "as it joins": Strike(0, "before join", process=2),
}
FAST = {
    ("each third step", "compute"),
    ("alone at first", "exchange"),
    ("each third step", "with an open window at the epoch's end"),
}


def cases(of: dict[str, object]) -> list[object]:
    found = []
    for name, strategy in COUNTED.items():
        for when, fault in of.items():
            marks = [] if (name, when) in FAST else [slow]
            found.append(pytest.param(strategy, fault, id=f"{name}-{when}", marks=marks))
    return found


@pytest.mark.parametrize(("strategy", "faults"), cases(FAULTS))
def test_each_row_is_at_the_server_once(strategy: str, faults: str, trial: Trial) -> None:
    run = trial.train(of=task(), faults=faults, strategy=strategy, run_dir=trial.run_dir)
    fired(run, *faults.split(","))
    check_counts(run)


def regroups(worker: Worker) -> bool:
    return worker.interrupted or worker.generation > 0


def kill_soon() -> None:
    threading.Timer(0.2, kill).start()


def others_are_lost(worker: Worker) -> bool:
    return worker.broken or worker.interrupted or worker.generation > 0


WHILE_IT_WAITS = Strike(2, "before lease", kill_soon)


@pytest.mark.parametrize(
    ("strikes", "faults"),
    [
        pytest.param([WHILE_IT_WAITS], "", id="one that waits"),
        pytest.param([], "kill=0@step:3", id="worker 0", marks=slow),
        pytest.param([], "leave=1@step:2", id="one that waits leaves", marks=slow),
        pytest.param([WHILE_IT_WAITS], "kill=0@step:3", id="both", marks=slow),
    ],
)
def test_who_is_the_first_trains_alone_at_first(strikes: list[Strike], faults: str, trial: Trial) -> None:
    """The others wait for it, and not for ever. Once it is lost the next one is the first."""
    of = task()
    if strikes or "=1" in faults:  # worker 0 waits in its warm-up until it has happened
        of = task(loss=Patient(loss=numbered_rows.minus_mean, until=others_are_lost, call=3))
    run = trial.train(*strikes, of=of, faults=faults, strategy=COUNTED["alone at first"], run_dir=trial.run_dir)
    fired(run, *strikes, *faults.split(",") if faults else ())
    check_counts(run)
    steps = [event for event in event_log.read(trial.run_dir / "events.jsonl") if event.type == "step"]
    alone = {(event.generation, event.rank) for event in steps if event.values["lease"][2] < 8 and event.tick < TICKS}
    assert len(alone) == len(dict(alone)), "several trained in the warm-up of one generation"


@pytest.mark.slow
def test_who_leaves_with_an_open_window_takes_no_row_along(trial: Trial) -> None:
    """What it had not pushed is trained by others."""
    fault = "leave=1@step:2"
    of = task(loss=Patient(loss=numbered_rows.minus_mean, until=regroups))
    run = trial.train(of=of, faults=fault, strategy=COUNTED["each third step"], run_dir=trial.run_dir)
    fired(run, fault)
    assert run.losses == []
    check_counts(run)


@pytest.mark.parametrize(("strategy", "strike"), cases(PLACES))
def test_each_row_is_at_the_server_once_wherever_a_worker_is_struck(
    strategy: str, strike: Strike, trial: Trial
) -> None:
    first, of = [], task()
    if strike.process == 2:
        first, of = [Strike(0, "before backward", call=3)], task(loss=Patient(loss=numbered_rows.minus_mean))
    run = trial.train(*first, strike, of=of, strategy=strategy, run_dir=trial.run_dir)
    fired(run, *first, strike)
    check_counts(run)


@pytest.mark.slow
def test_what_one_of_two_shards_has_of_a_slice_is_counted_and_not_repeated(trial: Trial) -> None:
    strike = Strike(1, "before push to a shard", call=2 * 3)  # the second of its third push
    of = task(epochs=1)
    run = trial.train(strike, of=of, strategy="downpour", servers=2, run_dir=trial.run_dir)
    fired(run, strike)
    numbered_rows.partly_trained(run, BATCH, (2, 3, 6), partial=2)
    assert json.loads((trial.run_dir / "result.json").read_text())["rows"]["partial"] == 2
    assert "2 rows which only some shards of the server have" in run.summary()


# -- hogwild -----------------------------------------------------------------------------------------------------------


def all_here_again(worker: Worker) -> bool:
    """After a loss: nobody takes all rows before it."""
    return worker.broken or worker.interrupted or (worker.generation > 0 and worker.size >= 3)


class OneWriter(torch.optim.SGD):
    """Of several that write the same memory, each writes all of it, and may undo another's: here one after the other."""

    def __init__(self, parameters: Any, lock: Path) -> None:
        super().__init__(parameters, lr=1.0)
        self._lock = lock

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with self._lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            super().step()


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    ["kill=0@step:3", *(pytest.param(one, marks=slow) for one in ("kill=1@step:0", "kill=0@step:2,kill=1@step:2"))],
)
def test_memory_that_workers_share_stays_and_a_replacement_maps_it(faults: str, trial: Trial) -> None:
    """Worker 0's, in whose memory the parameters are, too. No slice under way was stepped on: each row is trained once."""
    lock = trial.folder / "lock"
    of = task(
        epochs=1,
        loss=Patient(loss=numbered_rows.minus_mean, until=all_here_again),
        optimizer=lambda model: OneWriter(model.parameters(), lock),
    )
    run = trial.train(of=of, faults=faults, strategy="hogwild", run_dir=trial.run_dir)
    fired(run, *faults.split(","))
    numbered_rows.trained_once(run, BATCH, (2,))
    assert run.rows["repeated"] == 2 * len(faults.split(","))
    assert run.generations >= 3


@slow
def test_memory_that_workers_share_goes_on_with_fewer(trial: Trial) -> None:
    run = trial.train(
        of=task(), faults="kill=0@step:3,kill=1@step:9", strategy="hogwild", survive="max_losses=3,replace=false"
    )
    fired(run, "kill=0@step:3", "kill=1@step:9")
    check_counts(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        "easgd:period=2",
        *(
            pytest.param(one, marks=slow)
            for one in ("eamsgd:period=2", "dynsgd", "agn:window=2", "distance", "diloco:period=3,via=server")
        ),
    ],
)
def test_every_strategy_at_its_own_pace_goes_on(strategy: str, trial: Trial) -> None:
    fault = "kill=1@step:5"
    run = trial.train(of=task(), faults=fault, strategy=strategy, run_dir=trial.run_dir)
    fired(run, fault)
    assert run.rows["total"] == EPOCHS * ROWS
    assert sorted(row["tick"] for row in run.history) == list(range(EPOCHS * TICKS))
    assert run.model.of.detach().min() > 0


@pytest.mark.slow
def test_an_interrupted_run_leaves_no_row_out(trial: Trial) -> None:
    """Stopped after a loss, and resumed with another number of workers."""
    fault = "kill=1@step:0"
    of = task(max_steps=7)
    first = trial.train(of=of, faults=fault, strategy=COUNTED["each step"], run_dir=trial.run_dir)
    fired(first, fault)
    assert first.rows["total"] == 7 * BATCH
    run = trial.train(of=task(), strategy=COUNTED["each step"], run_dir=trial.run_dir, resume=True, workers=2)
    check_counts(run)
