"""Two "hosts" on loopback: the driver in this process, or in one that a test may kill, and joiners beside it."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from driver_script import wait_until
from warm_servers import warm_servers

from manyhands.engines.base import LaunchSpec
from manyhands.engines.hosts.engine import Hosts
from manyhands.engines.hosts.join import Join, join

T = TypeVar("T")

ADDRESS = re.compile(r"manyhands join (\S+) --workers (\d+)")

JOINER = """
    import sys
    from manyhands.engines.hosts.join import Join, join
    join(Join(address=sys.argv[1], workers=int(sys.argv[2]), wait_s=30), lambda line: print(line, flush=True))
"""


class Joiner(threading.Thread):
    """`manyhands join` in a thread: its fork server and its workers are processes of their own all the same."""

    def __init__(self, address: str, workers: int, **fields: Any) -> None:
        super().__init__()
        self.offer = Join(address=address, workers=workers, wait_s=30, **fields)
        self.error: Exception | None = None
        self.output: list[str] = []

    def run(self) -> None:
        try:
            join(self.offer, self.output.append)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error


class Run:
    """A driver in this process. `joiners` is called with the address, from another thread, while it waits."""

    def __init__(self, engine: Hosts, joiners: Callable[[str], list[Joiner]]) -> None:
        self.engine, self.output = engine, []
        self.joined: list[Joiner] = []
        self._begin, self._helper = joiners, threading.Thread(target=self._join)
        self._address = ""
        engine.announcer.say = self._hear

    def launch(self, program: Callable[[Any], Any], plan: LaunchSpec) -> list[Any]:
        """The values. All joiners are done when this returns or raises."""
        return self.during(lambda: self.engine.launch(program, plan))

    def during(self, call: Callable[[], T]) -> T:
        """What `call`, which launches on `engine`, returns. All joiners are done when this returns or raises."""
        with warm_servers():
            try:
                return call()
            finally:
                if self._address:
                    self._helper.join(30)
                for joiner in self.joined:
                    joiner.join(30)
                    assert not joiner.is_alive()

    def _hear(self, text: str) -> None:
        self.output.append(text)
        found = ADDRESS.search(text)
        if found:
            self._address = found[1]
            self._helper.start()

    def _join(self) -> None:
        self.joined += self._begin(self._address)


def joined_by(*workers: int, **fields: Any) -> Callable[[str], list[Joiner]]:
    """A joiner for each number of workers, one after the other."""

    def begin(address: str) -> list[Joiner]:
        joiners = [Joiner(address, count, **fields) for count in workers]
        for joiner in joiners:
            joiner.start()
        return joiners

    return begin


ELEMENTS = 1 << 22  # more than any buffer between two workers holds


def one_leaves(worker: Any) -> float:
    """A program of three workers: worker 1 returns; once its process is gone, worker 0 sends to worker 2, which waits all the while."""
    pids = worker.group.all_gather_json(os.getpid())
    vector = torch.full((ELEMENTS,), float(worker.rank))
    if worker.rank == 0:
        wait_until(lambda: not lives(pids[1]))
        worker.group.send(vector + 5.0, 2)
    elif worker.rank == 2:
        worker.group.receive_(vector, 0)
    return vector[-1].item()


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
