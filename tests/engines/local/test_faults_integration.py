"""Faults on real processes: each fires once, where it is asked for, and the run ends as one that dies by itself; and who is
blamed for a process that stands still where all workers meet."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from driver_script import wait_until
from heard import Heard

import manyhands as mh
import plain
from manyhands.engines.base import LaunchSpec
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


def train(faults: str, seen: Seen, **options: Any) -> Run:
    given: dict[str, Any] = {"engine": Local(faults=faults), "workers": 3, "callbacks": [seen], **options}
    return mh.train(plain.task(epochs=3), **given)


@pytest.mark.parametrize(
    ("fault", "strategy"),
    [("kill=1@step:5", "allreduce"), ("kill=0@step:2:exchange", "downpour"), ("kill=1@step:0:join", "allreduce")],
)
def test_a_worker_is_killed_where_it_should(fault: str, strategy: str, tmp_path: Path) -> None:
    """At other places test_faults_places_integration.py kills."""
    seen, who, step = Seen(), int(fault[5]), int(fault[12])
    with pytest.raises(mh.WorkerFailed, match=f"worker {who} .* was killed by signal 9") as caught:
        train(fault, seen, strategy=strategy, run_dir=tmp_path / "run")
    assert (caught.value.rank, caught.value.step) == (who, step)
    assert caught.value.phase == "compute" or ":" in fault.removeprefix(f"kill={who}@step:")
    assert not step or seen.faults == [(fault, who, step)]
    if fault == "kill=1@step:5":  # at a server the other goes on meanwhile
        assert max(row["step"] for row in mh.read_history(tmp_path / "run")) <= step


def stopping(model: torch.nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    if current().rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return {"loss": plain.cross_entropy(model, batch)}


@pytest.mark.slow
def test_a_stopped_worker_is_blamed_where_all_meet(local: Local) -> None:
    given = {"engine": local, "workers": 2, "threads_per_worker": 1, "timeout_s": 6.0}
    with pytest.raises(WorkerFailed, match="worker 1 ") as raised:
        mh.train(plain.task(validation_data=plain.rows(12), evaluate=stopping), **given)
    assert (raised.value.rank, raised.value.phase) == (1, "validation")


def test_faults_at_a_time(local: Local) -> None:
    """The worker sees its clock jump while it stands still; a shard dies."""
    observer = Heard()

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
    engine = Local(faults="pause=1@0.5s+0.4")
    values = engine.launch(program, LaunchSpec(workers=2, observer=observer, timeout_s=20))
    assert values[1] >= 0.2
    spec = LaunchSpec(workers=2, server=ServerSpec(rule="add"), observer=observer, timeout_s=20)
    with pytest.raises(mh.WorkerFailed, match="server shard 0 .*was killed by signal 9"):
        Local(faults="kill=shard0@0.2s").launch(lambda worker: wait_until(lambda: False), spec)
    assert [event.values["fault"] for event in observer.events] == ["pause=1@0.5s+0.4", "kill=shard0@0.2s"]


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
