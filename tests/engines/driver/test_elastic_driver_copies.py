"""The driver of a run whose server shards have copies, and whose workers all stay. No process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from test_driver import Scripted, Writing
from typing_extensions import override

from manyhands.engines.base import LaunchSpec
from manyhands.engines.driver.elastic_driver import ElasticDriver
from manyhands.engines.survive import Survive
from manyhands.errors import WorkerFailed
from manyhands.server.base import ServerSpec


class Host(Scripted):
    @override
    def start_worker(self, worker_id: int, faults: str) -> None:
        self.did.append(("start", worker_id))

    @override
    def form(self, generation: int, hosts: Sequence[Sequence[int]], names: Sequence[str]) -> None:
        self.did.append(("form", generation))

    @override
    def connect(self, first: tuple[int, dict[str, Any]], second: tuple[int, dict[str, Any]]) -> None:
        self.sent += [first, second]


class Run:
    """Workers 0 and 1 in generation 0; one shard, whose copies are the processes -1 and -2."""

    def __init__(self, silence_s: float = 10.0) -> None:
        self.now, self.host = 0.0, Host("alpha", [0, 1, -1, -2])
        survive = Survive(copies=2, silence_s=silence_s)
        spec = LaunchSpec(workers=2, server=ServerSpec(rule="add"), observer=Writing(), timeout_s=60.0, survive=survive)
        self.driver = ElasticDriver([self.host], spec, clock=lambda: self.now)
        for index in (0, 1, -1, -2):
            self.say(index, "started")
        for worker_id in (0, 1):
            self.say(worker_id, "place", generation=-1, blank=True, lost=None)
        self.turn()
        self.say(-1, "copied", link=0)
        self.turn()

    def say(self, index: int, type: str, **body: Any) -> None:
        self.host.output.append((index, {"type": type, **body}))

    def exits(self, index: int, status: int = 0) -> None:
        self.say(index, "exited", status=status, phase=None, step=None, detail="")

    def turn(self, seconds: float = 0.0, silent: Sequence[int] = ()) -> bool:
        self.now += seconds
        for process in self.driver.monitor.processes.values():
            if process.number not in silent:
                process.last_beat_at = process.progress_at = self.now
        self.driver._hear(self.host)
        return self.driver._finished()

    @property
    def changes(self) -> list[str]:
        return [event.values["message"] for event in self.driver._news if event.type == "change"]


def test_a_worker_that_returns_before_the_first_is_no_loss() -> None:
    run = Run()
    run.say(1, "value")
    run.exits(1)
    run.turn()
    assert run.driver.membership.losses == []
    run.say(0, "value", value="result")
    run.exits(0)
    run.turn()
    assert run.driver._results() == ["result", None]
    assert [(index, body["type"]) for index, body in run.host.sent[-2:]] == [(-1, "finish"), (-2, "finish")]


def test_a_lost_worker_ends_the_run() -> None:
    run = Run()
    run.exits(1, -9)
    with pytest.raises(WorkerFailed, match="worker 1 on alpha was killed by signal 9.*max_losses is 0"):
        run.turn()


@pytest.mark.parametrize("index", [-1, -2])
def test_a_lost_copy_is_started_again_and_reported(index: int) -> None:
    run = Run()
    run.exits(index, -9)
    run.turn()
    assert ("start", index) in run.host.did
    (message,) = run.changes
    assert f"server shard 0 has one copy (server shard 0 (copy {-1 - index}) on alpha was killed by signal 9" in message


def test_a_silent_copy_is_killed_and_started_again_once_it_is_gone() -> None:
    run = Run(silence_s=2.0)
    run.turn(2.5, silent=[-1])
    assert (9, -1) in run.host.did
    assert ("start", -1) not in run.host.did
    run.exits(-1, -9)
    run.turn()
    assert run.host.did.count(("start", -1)) == 1


def test_both_copies_lost_end_the_run_with_the_last_ones_end() -> None:
    run = Run()
    run.exits(-1, -9)
    run.exits(-2, -11)
    with pytest.raises(WorkerFailed, match=r"copy 1\) on alpha was killed by signal 11.*No copy of .*--resume"):
        run.turn()


def test_an_error_of_a_copy_is_its_loss() -> None:
    run = Run()
    failure = {"rank": -2, "phase": "serve", "step": 4, "message": "no room", "detail": "a traceback"}
    run.say(-2, "error", **failure, error="ValueError", family="", exit_code=1, secondary=False, lost=None)
    run.exits(-2, 1)
    run.turn()
    assert ("start", -2) in run.host.did
    assert "ValueError: no room" in run.changes[0]
