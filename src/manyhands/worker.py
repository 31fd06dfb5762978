"""What a program sees of the cluster it runs on: its rank, its group, its server, and its connection to the driver."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any, NamedTuple, Self

import torch

from manyhands.comm.group import Group
from manyhands.comm.lost import LostGroup
from manyhands.comm.solo import SoloGroup
from manyhands.data.leases import End, Lease, Leases, Segment, from_json, to_json
from manyhands.data.row_pieces import RowPiece
from manyhands.errors import BadInput, Unsupported
from manyhands.events import Event
from manyhands.server.base import Server, ServerSpec


class LastPushes(NamedTuple):
    """What the server has of a lost worker, by shard."""

    numbers: list[int]  # of its process's last push; 0: it has none
    ticks: list[int]  # in which that push came, from 0 since the worker last became active; -1: in none since then

    @classmethod
    def of(cls, by_shard: Mapping[int, tuple[int, int]]) -> Self:
        """by_shard: (number, tick) of each shard from 0 on."""
        numbers, ticks = zip(*(by_shard[shard] for shard in range(len(by_shard))), strict=True)
        return cls(list(numbers), list(ticks))


class DriverClient(ABC):
    """A worker's connection to the driver. Only the worker's main thread calls it; only `ask` and `lease` wait."""

    @abstractmethod
    def progress(self, phase: str, step: int) -> None:
        """Say what this worker does now (start, input, compute, exchange, wait, validation, checkpoint, end).

        Where members may change, also join, bring (a member's state to others), complete (wait until all have a round's
        result), commit (it is this worker's from now on), and deliver (the run's result).
        Costs well under a microsecond: it sets a field, which a heartbeat carries to the driver. A driver that sees no
        new (phase, step) for `timeout_s` declares the worker hung.
        """

    @abstractmethod
    def emit(self, event: Event) -> None:
        """Send an event to the driver; it arrives soon, in order, and costs the worker microseconds."""

    @abstractmethod
    def ask(self, event: Event) -> dict[str, Any]:
        """Send an event and wait for the driver's answer to it (all that was emitted before has arrived by then)."""

    @abstractmethod
    def collect(self, group: Group) -> None:
        """A collective at an epoch's end and before a checkpoint: bring to the driver all ranks' events that still wait."""

    @abstractmethod
    def lease(self, segment: Segment, replica: int, push: int | None = None) -> Lease | End | None:
        """The next slice of the segment for this replica, or its end; waits while replica 0 trains alone. None: members
        change meanwhile.

        push: where workers may be lost, the number of this worker's push that will carry the slice.
        """

    def deliver(self, piece: RowPiece) -> None:
        """Hand rows to the driver, which puts those of all workers in order. Waits while it has enough that is too early.

        Where each rank is its own driver they arrive at the next `collect`, on all ranks.
        """
        raise Unsupported("this engine brings no rows to the driver: use engine local, hosts, spark, torchrun or sim")

    def computed(self, rows: int) -> None:  # noqa: B027
        """A gradient over so many rows was computed. Where time is simulated it passes here; elsewhere it has passed."""

    def begin_passes(self, rows: int, stage: int, sizes: Sequence[int]) -> Callable[[bool, float], None]:
        """A gradient over a replica's rows begins, of which this worker computes a stage, a micro-batch at a time.

        sizes: how many parameters each stage uses. What comes back is called after each pass, with whether it went forward
        and with the micro-batch's share of the rows. Where time is simulated it passes there; `computed` then adds nothing.
        """
        return lambda forward, share: None

    def after_backward(self, action: Callable[[], None]) -> None:
        """Called inside a backward: do this at its end, before `backward()` returns. It may call the group."""
        torch.autograd.Variable._execution_engine.queue_callback(action)

    @abstractmethod
    def should_stop(self) -> str:
        """Why the run is to stop ("preempted", "callback", …), or "" """

    def interrupted(self, generation: int) -> bool:
        """Whether the driver asked the members of this generation to form the next one."""
        return False

    def pushes_of_lost(self, generation: int) -> dict[int, LastPushes]:
        """By worker id, what the server has of the members of this generation that were lost since. Nothing further of them
        enters; waits until that is so. Workers that never connected to the server are left out."""
        return {}

    def broken(self, generation: int) -> bool:
        """Whether the driver said that a member of this generation is lost."""
        return False


class SoloDriverClient(DriverClient):
    """No driver: for tests, and for scripts outside a run."""

    def __init__(self) -> None:
        self._leases = Leases()

    def progress(self, phase: str, step: int) -> None:
        pass

    def emit(self, event: Event) -> None:
        pass

    def ask(self, event: Event) -> dict[str, Any]:
        return {}

    def collect(self, group: Group) -> None:
        pass

    def lease(self, segment: Segment, replica: int, push: int | None = None) -> Lease | End:
        answer = self._leases.take(replica, segment)
        assert answer is not None  # one worker waits for nobody
        return answer

    def should_stop(self) -> str:
        return ""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The groups that a worker is in. Where one worker holds a replica, `data` and `world` are one group."""

    world: Group
    """All workers of the run; stop bits travel here."""
    data: Group
    """The workers that hold the same shards, one of each replica: strategies use this group alone."""
    model: Group = field(default_factory=SoloGroup)
    """The workers that hold one replica together."""
    rows: tuple[int, int]
    """Rank and size by which the feed deals rows: workers of one replica read the same ones, but for `own_rows`."""
    coordinate: int = 0
    """Which part of a replica this worker holds; workers of `data` have the same."""
    own_rows: bool = False
    """Whether the workers of one replica read rows of their own."""

    @property
    def parts(self) -> list[Group]:
        """The groups besides `world`."""
        return [group for group in (self.data, self.model) if group is not self.world]

    @property
    def place(self) -> dict[str, int]:
        """As events name it where several workers hold a replica: {"replica", "stage"}."""
        return {} if self.model.size == 1 or self.own_rows else {"replica": self.rows[0], "stage": self.coordinate}

    @property
    def counts_rows(self) -> bool:
        """Whether this worker reports the rows that it reads: of a replica whose workers all read the same, one does."""
        return self.own_rows or self.model.rank == 0


class Refused(BadInput):
    """A worker cannot join those that train: its program is another one. They go on, and it is not started again."""


@dataclass(frozen=True, kw_only=True)
class FormedGroup:
    """A group of a run whose members may change, as one of them gets it."""

    generation: int
    worker_ids: Sequence[int]  # of all members; a worker's rank is the place of its id
    group: Group
    subgroup: Callable[[Sequence[int]], Group] | None = None  # of some members, by worker id; None: there are none


@dataclass(kw_only=True)
class Worker:
    """One worker of a run, as the program on it sees the run."""

    rank: int = 0
    size: int = 1
    host: str = "localhost"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    generation: int = 0  # -1: no member yet
    members: Sequence[int] = ()  # the worker ids of a group whose members may change, by rank
    worker_id: int = field(default=None)  # type: ignore[assignment]  # stays when the members change; default: the rank
    group: Group = field(default_factory=SoloGroup)  # all workers: `mesh.world`
    mesh: Mesh = field(default=None)  # type: ignore[assignment]  # default: each worker holds a replica
    subgroup: Callable[[Sequence[int]], Group] | None = None  # how the engine makes what `make_group` gives
    form: Callable[[bool, int | None], FormedGroup | None] | None = None  # what `join` asks; None: members never change
    server: Server | None = None
    start_server: Callable[[ServerSpec], Server] | None = (
        None  # a collective, where workers are there before it is known
    )
    clock: Callable[[], float] = time.perf_counter
    driver: DriverClient = field(default_factory=SoloDriverClient)
    threads: int = 1
    local_rank: int = 0
    address: str = "127.0.0.1"  # at which all other workers reach what listens on this host
    listen: str = "127.0.0.1"  # of this host, on which to listen for them: often the same
    ports: tuple[int, int] | None = None  # (first, last) on which to listen there; None: any that is free
    shares_process: bool = False  # others live in this process too: what this worker changes must be its own
    prepared: Any = field(default=None, init=False, repr=False, compare=False)  # what `prepare` knows of this worker

    def __post_init__(self) -> None:
        if self.mesh is None:
            self.mesh = Mesh(world=self.group, data=self.group, rows=(self.rank, self.size))  # type: ignore[unreachable]
        if self.mesh.world is not self.group:
            raise ValueError("the mesh's world is another group than the worker's: give both")
        self.worker_id = self.rank if self.worker_id is None else self.worker_id

    @property
    def elastic(self) -> bool:
        """Whether members may be lost, leave or join while the program runs. Such a worker begins alone: see `join`."""
        return self.form is not None

    @property
    def interrupted(self) -> bool:
        """Whether the members of this generation are to form the next one, although none of them is lost."""
        return self.elastic and self.driver.interrupted(self.generation)

    @property
    def broken(self) -> bool:
        """Whether a member of this generation is known to be lost, although no collective has shown it."""
        return self.elastic and self.driver.broken(self.generation)

    def join(self, blank: bool, lost: int | None = None) -> bool:
        """Leave the group, wait for a place in the next generation's, and take it. False: the run is over.

        blank: this worker has no state yet, and takes that of a member. lost: the id of a peer that this worker found
        gone. Other groups that the worker made are the caller's to close.
        """
        assert self.form is not None
        before = self.group
        before.close()
        formed = self.form(blank, lost)
        if formed is None:
            return False
        formed.group.ledger.include(before.ledger)  # counts are the worker's, through all its groups
        formed.group.waited_s += before.waited_s
        self.group, self.generation = formed.group, formed.generation
        self.members, self.subgroup = list(formed.worker_ids), formed.subgroup
        self.rank, self.size = self.members.index(self.worker_id), len(self.members)
        self.mesh = Mesh(world=self.group, data=self.group, rows=(self.rank, self.size))
        return True

    @contextmanager
    def apart(self, generation: int, rank: int, size: int) -> Iterator[None]:
        """Within, this is a worker of an older generation, of whom it has lost the others: collectives raise PeerLost."""
        before = self.mesh, self.generation
        lost = LostGroup(rank, size)
        self.mesh, self.generation = Mesh(world=lost, data=lost, rows=(rank, size)), generation
        try:
            yield
        finally:
            self.mesh, self.generation = before

    def make_group(self, ranks: Sequence[int]) -> Group:
        """A further group of these workers, this one among them, in rank order; a collective of them alone.

        The caller closes it. Where members may change it is of this generation, and its vectors lie where those of the
        group of all do. Raises Unsupported where the engine makes no others than the group of all.
        """
        if list(ranks) == [self.rank] and not self.elastic:
            return SoloGroup()
        if self.subgroup is None:
            raise Unsupported("this engine makes one group of all its workers: use engine local, hosts or torchrun")
        return self.subgroup([self.members[rank] for rank in ranks] if self.elastic else ranks)

    def lease(self, segment: Segment, push: int | None = None) -> Lease | End | None:
        """The next slice of the segment for this worker's replica, or its end; None: members change. Collective over
        `mesh.model`.

        The first worker of a replica asks the driver, and the others get its answer. push: see `DriverClient.lease`.
        """
        members = self.mesh.model
        answer = self.driver.lease(segment, self.mesh.rows[0], push) if members.rank == 0 else None
        if members.size == 1:
            return answer
        found = members.all_gather_json(None if answer is None else to_json(answer))[0]
        return None if found is None else from_json(found)

    def tick(self, bits: int) -> int:
        """This worker's replica has finished a tick: wait until the server's gate lets it begin the next one.

        Returns what `Server.tick` does. Where there is a gate, collective over `mesh.model`: the workers of a replica go
        on together, after the first of them, with the OR of their bits.
        """
        assert self.server is not None
        members = self.mesh.model
        if members.size == 1 or self.server.spec.bound is None:
            return self.server.tick(bits)
        bits = reduce(or_, members.all_gather_json(bits))
        received = self.server.tick(bits) if members.rank == 0 else 0
        received = int(members.all_gather_json(received)[0])
        if members.rank:
            self.server.tick(bits)
        return received

    def emit(self, type: str, *, tick: int = 0, step: int = 0, **values: Any) -> None:
        """Send an event of this worker to the driver."""
        self.driver.emit(self._event(type, tick, step, values))

    def ask(self, type: str, *, tick: int = 0, step: int = 0, **values: Any) -> dict[str, Any]:
        """Send an event of this worker to the driver and wait for its answer."""
        return self.driver.ask(self._event(type, tick, step, values))

    def _event(self, type: str, tick: int, step: int, values: dict[str, Any]) -> Event:
        return Event(
            type=type,
            time_s=self.clock(),
            generation=max(0, self.generation),
            rank=self.worker_id,
            tick=tick,
            step=step,
            values=values | self.mesh.place,
        )


_current: Worker | None = None


def current() -> Worker | None:
    """The Worker that this process is, if an engine made it one."""
    return _current


def set_current(worker: Worker | None) -> None:
    """For engines: set which Worker this process is."""
    global _current
    _current = worker


@contextmanager
def as_current(worker: Worker) -> Iterator[None]:
    """Within, this process is that worker; afterwards what it was."""
    before = current()
    set_current(worker)
    try:
        yield
    finally:
        set_current(before)
