"""The contract of a crew: the processes of one host, as the driver of a run sees them.

A seat is a worker's rank, or -1 - s for server shard s. A crew carries messages, JSON objects, whether the host is this
one (`LocalCrew`, over inherited sockets) or another (`RemoteCrew`, over a TLS channel to `manyhands join`). It judges
nothing. From a seat come, each with its "type":

    started                                     its process is there
    beat    phase, step, idle_s, events         a heartbeat, and what was emitted since the last
    ask     event                               -> answer {value}
    lease   segment                             -> leased {value}; value None: wait, another `leased` will come
    meet    name, seats, value                  -> met {name, values}, in the order of `seats`, once all of them came
    value   value                               it returned, and what; nothing but `exited` follows
    error   (the fields of `Failure`)           it raised; nothing but `exited` follows
    exited  status, phase, step, detail         its process ended; where it was last, and the stack that a crash wrote
    lost    why, phase, step                    its host is gone; where it was when it was last heard

To a seat go answer, leased, met, and stop {reason}.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


def shard_of(seat: int) -> int:
    """The server shard whose seat this is; its own inverse: also the seat of a shard."""
    return -1 - seat


def name_of(seat: int) -> str:
    """How messages call it: "worker 3", "server shard 0"."""
    return f"worker {seat}" if seat >= 0 else f"server shard {shard_of(seat)}"


def seats_of(workers: int, servers: int) -> list[int]:
    """All seats of a run, in the order in which they are listed everywhere."""
    return [*range(workers), *map(shard_of, range(servers))]


class HostProcesses(ABC):
    """Start, hear, tell, end. `receive` and `start` raise WorkerFailed when what carries the messages is gone itself."""

    host: str
    seats: list[int]  # workers in rank order, then shards

    @abstractmethod
    def start(self, shared: dict[str, Any], program: int) -> None:
        """Start all seats; `shared` is what all know of the run, `program` the descriptor of what `ship` wrote."""

    @abstractmethod
    def filenos(self) -> list[int]:
        """Descriptors to wait on: when any is readable, `receive` has something. The same from `start` to `end`."""

    @abstractmethod
    def receive(self) -> list[tuple[int, dict[str, Any]]]:
        """What came, as (seat, body), without waiting: a seat's in the order of sending, `exited` the last."""

    @abstractmethod
    def tell(self, seat: int, body: dict[str, Any]) -> None:
        """Send to a seat; one that is gone is passed over, the news of its end is on its way."""

    @abstractmethod
    def signal(self, number: int) -> None:
        """Send a signal to all workers; shards get none."""

    @abstractmethod
    def stacks(self) -> dict[int, str]:
        """Every seat's Python stack, "" where it does not answer within a second."""

    @abstractmethod
    def where(self) -> dict[int, tuple[str, int]]:
        """The newest (phase, step) that is known of each seat, without waiting; newer than its heartbeats where a page tells."""

    @abstractmethod
    def silent_s(self) -> float:
        """For how many seconds nothing at all came from this host; 0 for the driver's own."""

    @abstractmethod
    def end(self, grace_s: float) -> None:
        """When this returns, every process of the run on this host is gone, and every descriptor of the run's. Idempotent."""
