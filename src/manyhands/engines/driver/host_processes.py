"""The contract of the processes of one host, as the driver of a run sees them.

A process index is a worker's rank, or -1 - s for server shard s. Messages are JSON objects, over inherited sockets on
this host (`LocalProcesses`) and over a TLS channel to `manyhands join` on another (`RemoteProcesses`). Processes send,
each with its "type":

    started                                     its process is there
    beat    phase, step, idle_s, events         a heartbeat, and what was emitted since the last
    ask     event                               -> answer {value}
    lease   segment                             -> leased {value}; value None: wait, another `leased` will come
    arrive  name, process_indices, value        -> complete {name, values}, in that order, once all arrived
    value   value                               it returned, and what; nothing but `exited` follows
    error   (the fields of `Failure`)           it raised; nothing but `exited` follows
    exited  status, phase, step, detail         its process ended; where it was last, and the stack that a crash wrote
    lost    why, phase, step                    its host is gone; where its last heartbeat was

The driver sends answer, leased, complete and stop {reason}.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any


def shard_of(process_index: int) -> int:
    """The server shard of a process index, or the process index of a shard: the function is its own inverse."""
    return -1 - process_index


def name_of(process_index: int) -> str:
    """Its name in messages: "worker 3", "server shard 0"."""
    return f"worker {process_index}" if process_index >= 0 else f"server shard {shard_of(process_index)}"


def process_indices_of(workers: int, servers: int) -> list[int]:
    """All process indices of a run: workers in rank order, then shards."""
    return [*range(workers), *map(shard_of, range(servers))]


class HostProcesses(ABC):
    """`receive` and `start` raise WorkerFailed when the connection that carries the messages is gone."""

    host: str
    process_indices: list[int]  # workers in rank order, then shards

    @abstractmethod
    def start(self, shared: dict[str, Any], program: int) -> None:
        """Start all processes. shared: the settings of the run. program: the descriptor of what `serialize` wrote."""

    @abstractmethod
    def filenos(self) -> list[int]:
        """Descriptors to wait on: when any is readable, `receive` has something. The same from `start` to `end`."""

    @abstractmethod
    def receive(self) -> list[tuple[int, dict[str, Any]]]:
        """The messages that arrived, as (process_index, body), without waiting; in order, `exited` last."""

    @abstractmethod
    def send(self, process_index: int, body: dict[str, Any]) -> None:
        """Send to a process. One that is gone is skipped: its `exited` is on the way."""

    @abstractmethod
    def signal(self, number: int, process_indices: Sequence[int] | None = None) -> None:
        """Send a signal to these processes of this host; None: to all workers, and to no shard."""

    @abstractmethod
    def stacks(self) -> dict[int, str]:
        """Every process's Python stack, "" where it does not answer within a second."""

    @abstractmethod
    def where(self) -> dict[int, tuple[str, int]]:
        """The newest known (phase, step) of each process, without waiting; status pages are newer than heartbeats."""

    @abstractmethod
    def silent_s(self) -> float:
        """For how many seconds nothing at all came from this host; 0 for the driver's own."""

    @abstractmethod
    def end(self, grace_s: float) -> None:
        """On return every process of the run on this host and every descriptor of the run is gone. Idempotent."""
