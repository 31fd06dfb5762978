"""The contract of the processes of one host, as the driver of a run sees them.

A process index is a worker's rank, or -1 - s for server shard s. Messages are JSON objects, over inherited sockets on
this host (`LocalProcesses`) and over a TLS channel to `manyhands join` on another (`RemoteProcesses`). Processes send,
each with its "type":

    started                                     its process is there
    beat    phase, step, idle_s, events         a heartbeat, and what was emitted since the last
    ask     event                               -> answer {value}
    lease   segment                             -> leased {value}; value None: wait, another `leased` will come
    lease_of_push  segment, push                -> the same, where workers may be lost: the push that will carry the slice
    rows    (the header of `RowPiece`), a descriptor of the bytes -> delivered {value}; value None: wait, another will come
    arrive  name, process_indices, value        -> complete {name, values}, in that order, once all arrived
    place   generation, blank, lost             -> formed (see `form`), or over: wait for a place in the next generation
    connect shard                               -> connected {view, process, address}: a descriptor of a connection to the
                                                shard's primary (see `connect`); from another host where it listens
    listens address                             a shard's: where workers of other hosts reach it
    connection_closed  worker_id, applied, tick a shard's answer to `fence`: the number of the last push of this worker's
                                                process that it has, and the tick since the worker last became active; no
                                                further one enters
    pushes_of_lost  generation                  -> pushes_of_lost {value}, see `DriverClient.pushes_of_lost`
    copied  link, backup_lost  link             a primary's: the new copy has all; there is no connection to the other copy
    value   value                               it returned, and what; nothing but `exited` follows
    error   (the fields of `Failure`)           it raised; nothing but `exited` follows
    exited  status, phase, step, detail         its process ended; where it was last, and the stack that a crash wrote
    lost    why, phase, step                    its host is gone; where its last heartbeat was

The driver sends answer, leased, delivered, complete, formed, over, pushes_of_lost, stop {reason} and interrupt {generation}; and where a member is
lost or out of its group, `broken` {generation, lost, host} to the others of that generation, and `dropped` instead of
`complete`: nobody waits for it any more. To shards of a run whose members may change: connection {worker_id, process},
fence {worker_id, process}, view {view}, with a descriptor where it has a new copy, and finish.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
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
    preempted = False  # this host was asked to end
    lost = ""  # why nothing of it can come any more

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

    def start_worker(self, worker_id: int, faults: str) -> None:
        """Start a worker of this id, or a copy of a shard, which may have been another process's that is gone. faults: its
        steps' faults.

        For runs whose members may change; so is `form`.
        """
        raise NotImplementedError

    def form(self, generation: int, hosts: Sequence[Sequence[int]], names: Sequence[str]) -> None:
        """Answer those of the members that are here, who wait for it, with their group of this generation.

        hosts: the ids of all members, by host; names: of these hosts.
        """
        raise NotImplementedError

    def connect(self, first: tuple[int, dict[str, Any]], second: tuple[int, dict[str, Any]]) -> None:
        """Send each of two processes of this host its message, and with it one end of a connection between them.

        One that is gone is skipped: the other finds its connection closed.
        """
        raise NotImplementedError

    def abandon(self, why: str) -> bool:
        """Hang up, so that `receive` gives `lost` for each process; False: the run cannot go on without this host."""
        return False

    def dismiss(self) -> None:
        """Nothing of the run is left here, and nothing will be started: let the host go."""
        raise NotImplementedError

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


class Entrance(ABC):
    """Where further hosts come in while a run goes on."""

    @abstractmethod
    def admit(self, names: Collection[str]) -> tuple[HostProcesses, int] | None:
        """The next host that is let in, and how many workers it offers; without waiting. It has none yet, and a name that
        is not among those of the hosts that are there."""
