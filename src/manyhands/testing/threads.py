"""Several workers as threads of one process, for tests of strategies: no engine, no files, errors with their own traceback."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from manyhands.comm.threads import Meeting, ThreadGroup
from manyhands.server.base import Server
from manyhands.worker import Worker

__all__ = ["Meeting", "ThreadGroup", "together"]

T = TypeVar("T")


def together(size: int, program: Callable[[Worker], T], servers: Sequence[Server] = ()) -> list[T]:
    """Run `program` on `size` workers, each a thread; their values in rank order. The first error is raised.

    servers: each worker's, in rank order.
    """
    meeting = Meeting(size)

    def run(rank: int) -> T:
        try:
            server = servers[rank] if servers else None
            return program(Worker(rank=rank, size=size, group=ThreadGroup(meeting, rank), server=server))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        errors = [f.exception() for f in futures]
        for error in sorted((e for e in errors if e), key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [f.result() for f in futures]
