"""The parameter server's shards as processes of engine `local`; lost workers are fenced in test_faults_server_integration.py."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from heard import Heard
from joined_run import lives

from manyhands.engines.base import LaunchSpec
from manyhands.engines.local.engine import Local
from manyhands.errors import UnknownName, WorkerFailed
from manyhands.server.base import ServerSpec
from manyhands.worker import Worker
from refusals import all_refused


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


def shards(worker: Worker) -> list[int]:
    """What the fork server has forked besides the workers."""
    children = {int(pid) for pid in Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split()}
    return sorted(children - set(worker.group.all_gather_json(os.getpid())))


def test_every_push_is_in_the_center_and_shards_are_processes_beside_the_workers(local: Local) -> None:
    """CASE 24: each counts fully, in every shard."""

    def program(worker: Worker) -> tuple[list[float], list[int]]:
        return counts(worker), shards(worker)

    values = local.launch(program, served(3, 2, 1))
    assert [center for center, _ in values] == [[30.0, 30.0]] * 3
    (_, first), *others = values
    assert len(first) == 2
    assert all(beside == first for _, beside in others)


def test_one_worker_has_its_server_in_the_same_process(local: Local) -> None:
    """A breakpoint works."""
    for servers, bound in ((1, None), (2, 0)):
        found = local.launch(lambda worker: (os.getpid(), counts(worker)), served(1, servers, bound))
        assert found == [(os.getpid(), [10.0, 10.0])]


def test_an_unknown_rule_is_an_error_of_the_users_and_one_that_cannot_be_split_has_one_shard(local: Local) -> None:
    """CASE 20"""
    unknown = [(workers, "nonsense") for workers in (1, 2)]
    all_refused(lambda workers: local.launch(counts, served(workers, rule="nonsense")), unknown, UnknownName)
    spec = ServerSpec(rule="quorum", bound=0, options={"backups": 1}, one_shard=True)
    assert LaunchSpec(workers=2, server=spec, servers=3).shards == 1


def test_a_killed_shard_is_named_and_nothing_is_left(local: Local) -> None:
    """CASES 21, 28: the workers' lost peer is not the cause."""
    heard = Heard()

    def program(worker: Worker) -> None:
        counts(worker)
        pids = [*shards(worker), os.getpid()]
        worker.emit("there", pids=pids)
        worker.ask("heard")
        if worker.rank == 0:
            os.kill(pids[1], signal.SIGKILL)
        counts(worker, ticks=1_000_000)

    with pytest.raises(WorkerFailed, match=r"^server shard \d on \S+ was killed by signal 9 \(SIGKILL") as raised:
        local.launch(program, served(servers=2, observer=heard))
    assert raised.value.rank in (-1, -2)
    pids = {pid for event in heard.events for pid in event.values["pids"]}
    assert len(pids) == 4
    assert not any(map(lives, pids))


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
