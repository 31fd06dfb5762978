"""Faults on real processes: each fires once, where it is asked for, and the run ends as one that dies by itself."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from driver_script import wait_until

import manyhands as mh
import plain
from manyhands.engines.base import LaunchSpec, Observer
from manyhands.engines.fault_injector import FaultInjector
from manyhands.engines.faults import Fault, Faults
from manyhands.engines.local.engine import Local
from manyhands.events import Event
from manyhands.recording.run import Run
from manyhands.server.base import ServerSpec
from manyhands.worker import Worker
from slow_cases import slow_after


class Seen(mh.Callback):
    """The faults that happened, with the worker and its step."""

    def __init__(self) -> None:
        self.faults: list[tuple[str, int | None, int]] = []

    def on_notice(self, event: Event) -> None:
        if event.type == "fault":
            self.faults.append((event.values["fault"], event.rank, event.step))


def faulty(local: Local, faults: str) -> Local:
    """An engine with faults that uses the tests' warm fork server."""
    engine = Local(faults=faults)
    object.__setattr__(engine, "_slot", local._slot)
    return engine


def train(local: Local, faults: str, seen: Seen, **options: Any) -> Run:
    given = {"workers": 3, "callbacks": [seen], **options}
    return mh.train(plain.task(epochs=3), engine=faulty(local, faults), **given)


@pytest.mark.parametrize(
    ("phase", "step", "where"),
    slow_after(
        2, [("", 5, "compute"), (":exchange", 5, "exchange"), (":commit", 5, "exchange"), (":save", 8, "checkpoint")]
    ),
)
def test_a_worker_is_killed_in_each_phase(phase: str, step: int, where: str, local: Local, tmp_path: Path) -> None:
    """Of 12 steps; the checkpoint of an epoch's end is made after step 8."""
    seen, fault = Seen(), f"kill=1@step:{step}{phase}"
    with pytest.raises(mh.WorkerFailed, match="worker 1 .* was killed by signal 9") as caught:
        train(local, fault, seen, run_dir=tmp_path / "run")
    assert seen.faults == [(fault, 1, step)]
    assert (caught.value.rank, caught.value.phase, caught.value.step) == (1, where, step)
    assert max(row["step"] for row in mh.read_history(tmp_path / "run")) <= step


def test_one_is_killed_while_it_joins(local: Local) -> None:
    with pytest.raises(mh.WorkerFailed, match="worker 2 .* was killed by signal 9.* at step 0"):
        train(local, "kill=2@step:0:join", Seen())


def test_the_server_side_of_an_exchange(local: Local) -> None:
    seen = Seen()
    with pytest.raises(mh.WorkerFailed, match="worker 0 .* was killed by signal 9"):
        train(local, "kill=0@step:2:exchange", seen, strategy="downpour")
    assert seen.faults == [("kill=0@step:2:exchange", 0, 2)]


@pytest.mark.slow
def test_a_pause_changes_no_bit(local: Local) -> None:
    seen = Seen()
    run = train(local, "pause=1@step:5+0.3,pause=2@step:7:commit+0.1", seen)
    assert run.info["faults"] == {"pause=1@step:5+0.3": 1, "pause=2@step:7:commit+0.1": 1}
    assert sorted(seen.faults) == [("pause=1@step:5+0.3", 1, 5), ("pause=2@step:7:commit+0.1", 2, 7)]
    plain_run = mh.train(plain.task(epochs=3), engine=local, workers=3)
    assert "faults" not in plain_run.info
    for name, tensor in plain_run.model.state_dict().items():
        assert torch.equal(tensor, run.model.state_dict()[name])


class Watching(Observer):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def event(self, event: Event) -> None:
        self.seen.append(event.values.get("fault") or event.values.get("message") or event.type)


def test_faults_at_a_time(local: Local) -> None:
    """The worker sees its clock jump while it stands still."""
    observer = Watching()

    def program(worker: Worker) -> float:
        before, longest = time.perf_counter(), 0.0
        while longest < 0.2 or worker.rank == 0:
            now = time.perf_counter()
            before, longest = now, max(longest, now - before)
            if worker.rank == 0 and worker.driver.should_stop() == "":
                return 0.0
            time.sleep(0.01)
        return longest

    local.launch(lambda worker: None, LaunchSpec(workers=2))  # the server is up: half a second later, so is the program
    engine = faulty(local, "pause=1@0.5s+0.4")
    values = engine.launch(program, LaunchSpec(workers=2, observer=observer, timeout_s=20))
    assert values[1] >= 0.2
    assert observer.seen == ["pause=1@0.5s+0.4"]


def test_a_shard_is_killed_at_a_time(local: Local) -> None:
    observer = Watching()

    def program(worker: Worker) -> None:
        wait_until(lambda: False)

    spec = LaunchSpec(workers=2, server=ServerSpec(rule="add"), observer=observer, timeout_s=20)
    with pytest.raises(mh.WorkerFailed, match="server shard 0 .*was killed by signal 9"):
        faulty(local, "kill=shard0@0.2s").launch(program, spec)
    assert observer.seen == ["kill=shard0@0.2s"]


def test_what_did_not_happen_is_a_warning(local: Local) -> None:
    run = train(local, "kill=1@step:99", Seen())
    assert "kill=1@step:99 did not happen" in run.info["warnings"][0]
    assert "faults" not in run.info


@pytest.mark.parametrize(
    ("faults", "workers", "message"),
    [
        ("kill=3@step:1", 3, "the last worker of this run is 2"),
        ("kill=shard0@1s", 3, "0 server shards"),
        ("restart=1@1s+1", 3, "cannot do restart=1"),
        ("drop=0.1", 3, "sends real ones|no server"),
        ("kill=0@step:1", 1, "apart=true"),
    ],
)
def test_what_cannot_be_is_refused(faults: str, workers: int, message: str, nothing_starts: None) -> None:
    with pytest.raises((mh.BadInput, mh.Unsupported), match=message):
        mh.train(plain.task(), engine=Local(faults=faults), workers=workers)


@pytest.mark.parametrize("faults", ["kill=1", "kill=1@step:1:lunch", "stop=1@step:2", "kill=shard0@step:3"])
def test_what_cannot_be_read_is_refused_at_once(faults: str) -> None:
    with pytest.raises((mh.BadInput, mh.UnknownName), match="faults"):
        Local(faults=faults)


def test_a_step_that_begins_twice_has_its_fault_once() -> None:
    """One whose gradient was not finite, say."""
    struck: list[tuple[Fault, int]] = []
    planned = Faults.parse("pause=0@step:1+1").planned
    injector = FaultInjector(planned, lambda fault, step: struck.append((fault, step)))
    for step in (0, 1, 1, 2):
        injector.reach("compute", step)
    assert struck == [(planned[0], 1)]
