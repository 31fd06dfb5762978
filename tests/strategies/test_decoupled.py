"""DiLoCo over a server, in whole runs of workers that are not equally fast: which pushes are a round, and what they count."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import manyhands as mh
import plain
from manyhands.server.rules.outer import OuterRule
from manyhands.server.rules.rounds import LAST, RoundsRule
from manyhands.server.store import Store

UNEQUAL = "sim:compute='row=1e-3,1=1.4x,2=3x'"
ROWS = 150  # in 13 global batches of 12, the last of 6


class Log:
    """What the server did, in order: "push", "last" (an epoch's), "round"; and what the pushes of all rounds counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.counted = 0.0
        self.by_reading = 0  # rounds that were closed to be read
        join, step, close = RoundsRule._join, OuterRule.merge, Store._close

        def joined(rule: RoundsRule, push: Any) -> None:
            self.events.append("last" if push.bits & LAST else "push")
            join(rule, push)

        def stepped(rule: OuterRule, old: Any, new: Any, pushes: Any) -> None:
            self.events.append("round")
            self.counted += sum(push.weight for push in pushes)
            step(rule, old, new, pushes)

        def closed(store: Store) -> None:
            self.by_reading += 1
            close(store)

        monkeypatch.setattr(RoundsRule, "_join", joined)
        monkeypatch.setattr(OuterRule, "merge", stepped)
        monkeypatch.setattr(Store, "_close", closed)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    return Log(monkeypatch)


def train(strategy: str, workers: int = 3, engine: str = UNEQUAL, **fields: Any) -> mh.Run:
    given = plain.task(**{"train_data": plain.rows(ROWS), "epochs": 3, **fields.pop("task", {})})
    return mh.train(given, strategy=strategy, engine=engine, workers=workers, threads_per_worker=1, **fields)


@pytest.mark.parametrize("options", ["", ",quorum=1,grace=0", ",quorum=3", ",bound=1"])
def test_an_epochs_end_is_one_outer_step_with_all_that_was_begun(log: Log, options: str) -> None:
    run = train(f"diloco:period=4,via=server{options}", task={"validation_data": plain.rows(20)})
    ends = re.findall("l+r*", "".join(event[0] for event in log.events))
    assert [end.count("r") for end in ends] == [1, 1, 1]
    assert any(end.count("l") > 1 for end in ends)
    assert run.rows["total"] == 3 * ROWS


def test_a_meeting_for_a_checkpoint_closes_no_round(log: Log, tmp_path: Path) -> None:
    """Only the three epochs' ends do, validated or not."""
    train("diloco:period=4,via=server,quorum=3", checkpoint_every=2, run_dir=tmp_path / "run")
    assert log.by_reading == 3


def test_a_validation_in_mid_epoch_closes_the_open_round(log: Log) -> None:
    """As the docs say: with what was pushed by then."""
    train("diloco:period=4,via=server,quorum=3", task={"validation_data": plain.rows(20)}, validate_every=5)
    assert log.by_reading > 3


@pytest.mark.parametrize("jitter", ["none", "uniform:0.01"])
def test_equal_workers_count_in_full_also_where_one_is_a_moment_earlier(log: Log, jitter: str) -> None:
    """The pushes of all rounds count all rows: nobody was late."""
    engine = f"sim:compute='row=1e-2,jitter={jitter}'"
    run = train("diloco:period=2,via=server", 4, engine, task={"train_data": plain.rows(144)})
    assert log.events.count("round") == 3 * 6
    assert log.counted == run.rows["total"] == 3 * 144


def test_a_late_worker_counts_less(log: Log) -> None:
    run = train("diloco:period=2,via=server", engine="sim:compute='row=1e-2,2=6x'")
    assert 0.5 * run.rows["total"] < log.counted < run.rows["total"]


@pytest.mark.parametrize("options", ["", ",quorum=1,grace=0,bound=2", ",compress=topk:0.1"])
def test_unequal_workers_are_replayed_bit_for_bit(options: str, tmp_path: Path) -> None:
    """With checkpoints and validations in mid-epoch: the order of versions says all."""
    task = {"validation_data": plain.rows(20)}
    run = train(
        f"diloco:period=3,via=server{options}",
        task=task,
        validate_every=5,
        checkpoint_every=4,
        run_dir=tmp_path / "run",
    )
    given = plain.task(train_data=plain.rows(ROWS), epochs=3, **task)
    assert mh.replay(tmp_path / "run", task=given).identical
    assert run.rows["workers"][2] < run.rows["workers"][0]


def test_unequal_workers_learn() -> None:
    """Beside the same rows in step."""
    losses = [
        run.metrics["validation_loss"]
        for run in (
            train("diloco:period=4,via=server", task={"validation_data": plain.rows(ROWS), "epochs": 6}),
            train("diloco:period=4", task={"validation_data": plain.rows(ROWS), "epochs": 6}),
        )
    ]
    assert losses[0] < 1.05 * losses[1]
