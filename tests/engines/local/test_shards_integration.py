"""The parameter server's shards as processes of engine `local`."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driver_script import Script, wait_until
from typing_extensions import override

from manyhands.engines.base import LaunchSpec, Observer
from manyhands.engines.local.engine import Local
from manyhands.errors import BadInput, UnknownName, WorkerFailed
from manyhands.events import Event
from manyhands.server.base import ServerSpec
from manyhands.worker import Worker
from open_files import open_files


def served(workers: int = 2, servers: int = 1, bound: int | None = None, **options: Any) -> LaunchSpec:
    spec = ServerSpec(rule=options.pop("rule", "add"), bound=bound)
    return LaunchSpec(**{"workers": workers, "server": spec, "servers": servers, "timeout_s": 30.0, **options})


def counts(worker: Worker, n: int = 1000, ticks: int = 10) -> list[float]:
    """Each worker adds 1 at every tick; the center that all see at the end, its first and last element."""
    server = worker.server
    assert server is not None
    center = torch.zeros(n)
    server.initialize(center)
    server.activate()
    worker.group.barrier()
    for _ in range(ticks):
        server.pull(center)
        server.push(torch.ones(n))
        server.tick()
    server.deactivate()
    worker.group.barrier()
    server.center(center)
    worker.group.barrier()
    return [float(center[0]), float(center[-1])]


def processes() -> list[int]:
    """In a worker: everything that the fork server has forked."""
    parent = os.getppid()
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if _parent(pid) == parent]


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return -1


def shards(worker: Worker) -> list[int]:
    return sorted(set(processes()) - set(worker.group.all_gather_json(os.getpid())))


@pytest.mark.parametrize(("workers", "servers", "bound"), [(1, 1, None), (1, 2, 0), (2, 1, None), (3, 2, 1), (2, 3, 0)])
def test_every_push_is_in_the_center(local: Local, workers: int, servers: int, bound: int | None) -> None:
    """CASE 24: each counts fully, in every shard."""
    values = local.launch(counts, served(workers, servers, bound))
    assert values == [[10.0 * workers] * 2] * workers


def test_shards_are_processes_beside_the_workers(local: Local) -> None:
    def program(worker: Worker) -> list[int]:
        counts(worker)  # all are there, and answer
        return shards(worker)

    first, second = local.launch(program, served(servers=3))
    assert first == second
    assert len(first) == 3


def test_one_worker_has_its_server_in_the_same_process(local: Local) -> None:
    """A breakpoint works: no process, no thread."""

    def program(worker: Worker) -> tuple[int, int, list[float]]:
        return os.getpid(), threading.active_count(), counts(worker)

    assert local.launch(program, served(workers=1)) == [(os.getpid(), threading.active_count(), [10.0, 10.0])]


def test_a_rule_that_cannot_be_split_has_one_shard(local: Local) -> None:
    spec = ServerSpec(rule="quorum", bound=0, options={"backups": 1}, one_shard=True)
    plan = LaunchSpec(workers=2, server=spec, servers=3)
    assert plan.shards == 1


@pytest.mark.slow
def test_runs_with_and_without_a_server_on_one_warm_fork_server(local: Local) -> None:
    descriptors = None
    for _ in range(2):
        assert local.launch(lambda worker: worker.server, LaunchSpec(workers=2)) == [None, None]
        assert local.launch(counts, served(servers=2)) == [[20.0, 20.0]] * 2
        with pytest.raises(WorkerFailed, match="ZeroDivisionError"):
            local.launch(lambda worker: 1 / 0, served())
        came = open_files()
        descriptors = descriptors or came
        assert came <= descriptors
    assert local.launch(lambda worker: len(shards(worker)), LaunchSpec(workers=2)) == [0, 0]


def test_the_fork_server_keeps_no_descriptor_of_a_run(local: Local) -> None:
    """While it held one, the end of a connection would not mean the death of its owner."""
    local.launch(counts, served(servers=2))
    assert local._slot.spawner is not None
    folder = f"/proc/{local._slot.spawner._process.pid}/fd"
    idle = len(os.listdir(folder))

    def program(worker: Worker) -> None:
        counts(worker)
        wait_until(lambda: len(os.listdir(folder)) == idle, timeout_s=5.0)

    local.launch(program, served(servers=2))


def test_an_unknown_rule_is_an_error_of_the_users(local: Local) -> None:
    """CASE 20"""
    for workers in (1, 2):
        with pytest.raises(BadInput, match="nonsense") as raised:
            local.launch(counts, served(workers, rule="nonsense"))
        assert isinstance(raised.value, UnknownName)


def test_a_killed_shard_is_named_and_nothing_is_left(local: Local) -> None:
    """CASES 21, 28: the workers' lost peer is not the cause."""
    pids: list[int] = []

    class Ear(Observer):
        @override
        def event(self, event: Event) -> None:
            pids.extend(event.values["pids"])

    def program(worker: Worker) -> None:
        counts(worker)
        pids = [*shards(worker), os.getpid()]
        worker.emit("there", pids=pids)
        worker.ask("heard")
        if worker.rank == 0:
            os.kill(pids[1], signal.SIGKILL)
        counts(worker, ticks=1_000_000)

    began = time.monotonic()
    with pytest.raises(WorkerFailed, match=r"^server shard \d on \S+ was killed by signal 9 \(SIGKILL") as raised:
        local.launch(program, served(servers=2, observer=Ear()))
    assert time.monotonic() - began < 10
    assert raised.value.rank in (-1, -2)
    assert len(set(pids)) == 4
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.slow
def test_a_stopped_shard_is_a_hang_and_is_named(local: Local) -> None:
    def program(worker: Worker) -> None:
        counts(worker)
        (shard,) = shards(worker)
        worker.driver.progress("exchange", 5)
        if worker.rank == 0:
            os.kill(shard, signal.SIGSTOP)
        counts(worker, ticks=1_000_000)

    with pytest.raises(WorkerFailed, match="server shard 0 on .* sent no heartbeat") as raised:
        local.launch(program, served(timeout_s=2.5))
    assert "server shard 0:\n(no stack: the process does not answer" in raised.value.detail


def test_a_killed_worker_fails_the_run_and_its_shards_are_gone(local: Local) -> None:
    """CASES 21, 28"""

    def program(worker: Worker) -> None:
        counts(worker)
        if worker.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        counts(worker, ticks=1_000_000)

    with pytest.raises(WorkerFailed, match="worker 1 on .* was killed by signal 9"):
        local.launch(program, served(bound=1, servers=2))
    assert local.launch(lambda worker: len(shards(worker)), LaunchSpec(workers=2)) == [0, 0]


def test_no_servers_at_all_is_bad_input(local: Local) -> None:
    with pytest.raises(BadInput, match="servers must be a whole number of at least 1, not 0"):
        local.launch(counts, served(servers=0))


# two workers and two shards, until something is killed
WAITING = """
    import threading, torch
    from manyhands.engines.base import LaunchSpec, Observer
    from manyhands.engines.local.engine import Local
    from manyhands.server.base import ServerSpec

    class Print(Observer):
        def answer(self, event):
            print("there")
            return {}

    def program(worker):
        worker.server.initialize(torch.zeros(10))
        worker.ask("there")
        threading.Event().wait(60)

    Local().launch(program, LaunchSpec(workers=2, server=ServerSpec(rule="add"), servers=2, observer=Print()))
"""


def running(script: Callable[..., Script]) -> Script:
    run = script(WAITING)
    assert [run.line() for _ in range(2)] == ["there"] * 2
    assert len(run.processes()) == 6  # and the driver, and the fork server
    return run


@pytest.mark.slow
def test_shards_end_with_a_killed_driver(script: Callable[..., Script]) -> None:
    """CASE 28"""
    run = running(script)
    run.process.kill()
    wait_until(lambda: not run.processes(), timeout_s=2.0)


@pytest.mark.slow
def test_shards_end_with_ctrl_c(script: Callable[..., Script]) -> None:
    """CASES 22, 28"""
    run = running(script)
    os.killpg(run.process.pid, signal.SIGINT)
    wait_until(lambda: not run.processes(), timeout_s=5.0)
    code, _, err = run.end()
    assert code == -signal.SIGINT
    assert err.count("Traceback") == 1
