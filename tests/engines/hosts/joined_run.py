"""Two "hosts" on loopback: the driver in this process, and joiners beside it, in its threads or in processes of their own."""

import os
import re
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
import warm_servers
from driver_script import living, wait_until
from host_process import HostProcess, agent

import manyhands as mh
from manyhands.engines.base import LaunchSpec
from manyhands.engines.hosts import join as join_module
from manyhands.engines.hosts.engine import Hosts
from manyhands.engines.hosts.join import Join, join

T = TypeVar("T")

ADDRESS = re.compile(r"manyhands join (\S+) --workers (\d+)")


class Joiner(threading.Thread):
    """`manyhands join` in a thread: its fork server and its workers are processes of their own all the same."""

    def __init__(self, address: str, workers: int, **fields: Any) -> None:
        super().__init__()
        self.offer = Join(address=address, workers=workers, wait_s=30, **fields)
        self.error: Exception | None = None
        self.output: list[str] = []
        self.start()

    def run(self) -> None:
        try:
            join(self.offer, self.output.append)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error


class Run:
    """A driver in this process. `joiners` is called with the address, from another thread, while it waits."""

    def __init__(self, engine: Hosts, joiners: Callable[[str], list[Joiner]]) -> None:
        self.engine, self.output, self.address = engine, list[str](), ""
        self.joined: list[Joiner] = []
        self._begin, self._helper = joiners, threading.Thread(target=self._join)
        engine.announcer.say = self._hear

    def launch(self, program: Callable[[Any], Any], plan: LaunchSpec) -> list[Any]:
        """The values. All joiners are done when this returns or raises."""
        return self.during(lambda: self.engine.launch(program, plan))

    def during(self, call: Callable[[], T]) -> T:
        """What `call`, which launches on `engine`, returns. All joiners are done when this returns or raises."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(join_module, "Spawner", warm_servers.lend)
            try:
                return call()
            finally:
                if self.address:
                    self._helper.join(30)
                for joiner in self.joined:
                    joiner.join(30)
                    assert not joiner.is_alive()

    def _hear(self, text: str) -> None:
        self.output.append(text)
        found = ADDRESS.search(text)
        if found and not self.address:
            self.address = found[1]
            self._helper.start()

    def _join(self) -> None:
        self.joined += self._begin(self.address)


def joined_by(*workers: int, **fields: Any) -> Callable[[str], list[Joiner]]:
    """A joiner for each number of workers, one after the other."""
    return lambda address: [Joiner(address, count, **fields) for count in workers]


class RunWithAgent(Run):
    """A driver whose other host, with so many workers, is a process of its own. Without TLS."""

    agent: HostProcess

    def __init__(self, process: Callable[..., HostProcess], local_workers: int, workers: int, **fields: Any) -> None:
        def begin(address: str) -> list[Joiner]:
            self.agent = process(agent, address, workers, False)
            return []

        super().__init__(Hosts(local_workers=local_workers, tls=False, **fields), begin)


# -- runs that go on without a host, or with another -------------------------------------------------------------------

EPOCHS, STEPS, ROWS = 6, 24, 6 * 39


def check_trained(run: mh.Run, alone: torch.Tensor, lost: list[tuple[int, str]]) -> None:
    """What one worker trains of plain.task(epochs=EPOCHS), each row and each step once.

    lost: the worker ids, and why.
    """
    assert (run.parameters - alone).abs().max() < 1e-10
    assert run.rows["total"] == ROWS
    assert [row["step"] for row in run.history] == list(range(1, STEPS + 1))
    assert [row["rows"] for row in run.history] == [12, 12, 12, 3] * EPOCHS
    assert sorted((loss["worker_id"], loss["cause"]) for loss in run.losses) == lost


# -- a program of three workers ----------------------------------------------------------------------------------------

ELEMENTS = 1 << 22  # more than any buffer between two workers holds


def one_leaves(worker: Any) -> float:
    """Worker 1 returns; once its process is gone, worker 0 sends to worker 2, which waits all the while."""
    pids = worker.group.all_gather_json(os.getpid())
    vector = torch.full((ELEMENTS,), float(worker.rank))
    if worker.rank == 0:
        wait_until(lambda: not lives(pids[1]))
        worker.group.send(vector + 5.0, 2)
    elif worker.rank == 2:
        worker.group.receive_(vector, 0)
    return vector[-1].item()


def lives(pid: int) -> bool:
    return bool(living(lambda entry, _: entry.name == str(pid)))
