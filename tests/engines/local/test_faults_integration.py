"""Faults on real processes: each fires once, where it is asked for, and the run ends as one that dies by itself; and who is
blamed for a process that stands still where all workers meet."""

from __future__ import annotations

import os
import signal
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
from manyhands.errors import WorkerFailed
from manyhands.events import Event
from manyhands.recording.run import Run
from manyhands.server.base import ServerSpec
from manyhands.worker import Worker, current
from refusals import all_refused


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
    [
        ("", 5, "compute"),
        pytest.param(":commit", 5, "exchange", marks=pytest.mark.slow),
        pytest.param(":save", 8, "checkpoint", marks=pytest.mark.slow),
    ],
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
    with pytest.raises(mh.WorkerFailed, match="worker 1 .* was killed by signal 9.* at step 0"):
        train(local, "kill=1@step:0:join", Seen(), workers=2)


def test_the_server_side_of_an_exchange(local: Local) -> None:
    seen = Seen()
    with pytest.raises(mh.WorkerFailed, match="worker 0 .* was killed by signal 9"):
        train(local, "kill=0@step:2:exchange", seen, workers=2, strategy="downpour")
    assert seen.faults == [("kill=0@step:2:exchange", 0, 2)]


def stop_on_1() -> None:
    if current().rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


class Stopping(torch.optim.lr_scheduler.ConstantLR):
    """Its state is asked for in a checkpoint, after the first step."""

    def state_dict(self) -> dict[str, Any]:
        if self.last_epoch > 0:
            stop_on_1()
        return super().state_dict()


def stopping_model() -> torch.nn.Module:
    stop_on_1()
    return plain.mlp()


def stopping_evaluate(model: torch.nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    stop_on_1()
    return {"loss": plain.cross_entropy(model, batch)}


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["start", "validation", "checkpoint"])
def test_a_stopped_worker_is_blamed_in_phases_where_all_meet(phase: str, local: Local, tmp_path: Path) -> None:
    stops: dict[str, dict[str, Any]] = {
        "start": {"model": stopping_model},
        "validation": {"validation_data": plain.rows(12), "evaluate": stopping_evaluate},
        "checkpoint": {"schedule": lambda optimizer, total: Stopping(optimizer)},
    }
    given = {"engine": local, "workers": 2, "threads_per_worker": 1, "timeout_s": 3.0, "run_dir": tmp_path / "run"}
    with pytest.raises(WorkerFailed, match="worker 1 .* sent no heartbeat") as raised:
        mh.train(plain.task(**stops[phase]), **given)
    assert (raised.value.rank, raised.value.phase) == (1, phase)


@pytest.mark.slow
def test_a_pause_changes_no_bit(local: Local) -> None:
    seen = Seen()
    run = train(local, "pause=1@step:5+0.3,pause=0@step:7:commit+0.1,kill=1@step:99", seen, workers=2)
    assert run.info["faults"] == {"pause=1@step:5+0.3": 1, "pause=0@step:7:commit+0.1": 1}
    assert sorted(seen.faults) == [("pause=0@step:7:commit+0.1", 0, 7), ("pause=1@step:5+0.3", 1, 5)]
    assert "kill=1@step:99 did not happen" in run.info["warnings"][0]
    plain_run = mh.train(plain.task(epochs=3), engine=local, workers=2)
    assert "faults" not in plain_run.info
    assert torch.equal(plain_run.parameters, run.parameters)


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


def test_what_cannot_be_is_refused(nothing_starts: None) -> None:
    cases = [
        (("kill=3@step:1", 3), "the last worker of this run is 2"),
        (("kill=shard0@1s", 3), "0 server shards"),
        (("restart=1@1s+1", 3), "cannot do restart=1"),
        (("drop=0.1", 3), "sends real ones|no server"),
        (("kill=0@step:1", 1), "apart=true"),
    ]
    kinds = (mh.BadInput, mh.Unsupported)
    all_refused(lambda of: mh.train(plain.task(), engine=Local(faults=of[0]), workers=of[1]), cases, kinds)
    unread = [(text, "faults") for text in ("kill=1", "kill=1@step:1:lunch", "stop=1@step:2", "kill=shard0@step:3")]
    all_refused(lambda text: Local(faults=text), unread, (mh.BadInput, mh.UnknownName))


def test_a_step_that_begins_twice_has_its_fault_once() -> None:
    """One whose gradient was not finite, say."""
    struck: list[tuple[Fault, int]] = []
    planned = Faults.parse("pause=0@step:1+1").planned
    injector = FaultInjector(planned, lambda fault, step: struck.append((fault, step)))
    for step in (0, 1, 1, 2):
        injector.reach("compute", step)
    assert struck == [(planned[0], 1)]
