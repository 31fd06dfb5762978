"""DiLoCo over a server, in whole runs of workers that are not equally fast: which pushes are a round, and what they count."""

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
ROWS = 102  # in 9 global batches of 12, the last of 6


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


def test_an_epochs_end_is_one_outer_step_with_all_that_was_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    for options in ("", ",quorum=1,grace=0", ",bound=1"):
        with monkeypatch.context() as patch:
            log = Log(patch)
            run = train(f"diloco:period=4,via=server{options}", task={"validation_data": plain.rows(20)})
        ends = re.findall("l+r*", "".join(event[0] for event in log.events))
        assert [end.count("r") for end in ends] == [1, 1, 1], options
        assert any(end.count("l") > 1 for end in ends), options
        assert run.rows["total"] == 3 * ROWS


def test_a_meeting_for_a_checkpoint_closes_no_round_but_a_validation_does(log: Log, tmp_path: Path) -> None:
    """The three epochs' ends do, validated or not; one in mid-epoch closes the round with what was pushed by then."""
    train("diloco:period=4,via=server,quorum=3", checkpoint_every=2, run_dir=tmp_path / "run")
    assert log.by_reading == 3
    train("diloco:period=4,via=server,quorum=3", task={"validation_data": plain.rows(20)}, validate_every=5)
    assert log.by_reading > 6


def test_equal_workers_count_in_full_also_where_one_is_a_moment_earlier(log: Log) -> None:
    """The pushes of all rounds count all rows: nobody was late. A late worker counts less."""
    engine = "sim:compute='row=1e-2,jitter=uniform:0.01'"
    run = train("diloco:period=2,via=server", 4, engine, task={"train_data": plain.rows(144)})
    assert log.events.count("round") == 3 * 6
    assert log.counted == run.rows["total"] == 3 * 144
    log.counted = 0.0
    run = train("diloco:period=2,via=server", engine="sim:compute='row=1e-2,2=6x'")
    assert 0.5 * run.rows["total"] < log.counted < run.rows["total"]
