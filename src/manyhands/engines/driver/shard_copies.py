"""The driver's side of the server shards of a run whose members may change: it acts on what Views decides, connects workers to
the primaries, and learns what the shards have of workers that are lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from manyhands.engines.driver.host_processes import HostProcesses, shard_of
from manyhands.events import Event
from manyhands.server.replication.views import (
    CopiesChanged,
    LostShard,
    NewView,
    ShardView,
    StartCopy,
    StopCopy,
    Views,
)
from manyhands.worker import LastPushes

PATIENCE_S = 0.5
"""A worker whose connection is gone, while the shard's primary is there, gets another one to it after so long."""


def copies_changed(shard: int, copies: int, time_s: float, how: str = "") -> Event:
    """A shard has one copy, until a new one has its state, or two again. how: the lost one was lost."""
    message = f"server shard {shard} has {copies} copies again"
    if copies == 1:
        why = f" ({how})" if how else ""
        message = f"server shard {shard} has one copy{why}: a new one is started, and no update is lost"
    values = {"kind": "copies", "message": message, "worker_id": None, "shard": shard, "copies": copies}
    return Event(type="change", time_s=time_s, values=values)


def pushes_since(generation: int, of_lost: Iterable[tuple[int, int, LastPushes]]) -> dict[int, LastPushes]:
    """By worker id, of the members of a generation that were lost since then.

    of_lost: (the generation in which it was lost, worker id, what the server has of it), oldest first. A worker may be
    lost in each of its processes: the member is the first one.
    """
    found: dict[int, LastPushes] = {}
    for lost_in, worker_id, pushes in of_lost:
        if lost_in >= generation:
            found.setdefault(worker_id, pushes)
    return found


@dataclass(frozen=True)
class _Request:
    """A worker waits for a connection to a shard's primary: to another one than it had, or soon to the same."""

    worker_id: int
    shard: int
    since: float


class ShardCopies:
    """host_of: the host of each process.

    start, stop: a copy's process.
    report: (shard, how many copies it has, which process is lost).
    lost: nobody has a shard's state any more, since this process is lost; it raises.
    closed: (worker id, what all shards have of it), once nothing of a lost worker enters any more.
    """

    def __init__(
        self,
        shards: int,
        copies: int,
        host_of: Mapping[int, HostProcesses],
        *,
        start: Callable[[int], None],
        stop: Callable[[int], None],
        report: Callable[[int, int, int | None], None],
        lost: Callable[[int, int], None],
        closed: Callable[[int, LastPushes], None],
    ) -> None:
        self._host_of = host_of
        self._start, self._stop, self._report, self._lost, self._closed = start, stop, report, lost, closed
        self._views = [Views([shard_of(shard + copy * shards) for copy in range(copies)]) for shard in range(shards)]
        self._ending: set[int] = set()  # processes that were stopped, and may still run
        self._wanted: set[int] = set()  # copies that are to be started once such a process is gone
        self._starting: set[int] = set()  # they are being started
        self._started: Counter[int] = Counter()  # of each copy: how often it was started anew
        self._given: dict[tuple[int, int], tuple[int, int]] = {}  # worker id, shard -> the process that it was sent to
        self._addresses: dict[int, Any] = {}  # of each copy: where it listens for workers of other hosts
        self._processes: Counter[int] = Counter()  # of each worker id: how many are lost
        self._known: set[int] = set()  # worker ids whose process has asked for a connection
        self._fenced: dict[int, dict[int, tuple[int, int]]] = {}  # worker id -> shard -> (its last push, in which tick)
        self._requests: list[_Request] = []
        self._over = False

    def copy_of(self, shard: int, role: str) -> int | None:
        """The process that is the shard's "primary" or "backup" now."""
        view = self._views[shard].view
        return view.primary if role == "primary" else view.backup

    def shard_of(self, process_index: int) -> int:
        return shard_of(process_index) % len(self._views)

    # -- what happened to copies -----------------------------------------------------------------------------------------

    def started(self, process_index: int) -> None:
        if process_index in self._starting:
            self._starting.remove(process_index)
            self._views[self.shard_of(process_index)].started(process_index)

    def stopped(self, process_index: int) -> None:
        """A copy was judged lost, and is killed: its process may still run."""
        self._ending.add(process_index)
        self._stop(process_index)
        self._views[self.shard_of(process_index)].lost(process_index)

    def gone(self, process_index: int) -> None:
        """A copy's process is certainly not there any more."""
        if self._over:
            return
        if process_index in self._ending:  # it was lost before
            self._ending.remove(process_index)
        else:
            self._views[self.shard_of(process_index)].lost(process_index)
        if process_index in self._wanted:
            self._wanted.remove(process_index)
            self._begin(process_index)

    def copied(self, process_index: int, link: int) -> None:
        """A primary says that its new copy has all."""
        self._views[self.shard_of(process_index)].copied(link)

    def backup_lost(self, process_index: int, link: int) -> None:
        """A primary says that it has no connection to its other copy."""
        if self._over:
            return  # one copy ended before the other
        self._views[self.shard_of(process_index)].backup_lost(link)
        self._act_on_views()  # now: that the process is gone may be the next news, and is none then

    # -- workers ---------------------------------------------------------------------------------------------------------

    def listens(self, process_index: int, address: Any) -> None:
        """A copy says where it listens for workers of other hosts."""
        self._addresses[process_index] = address

    def connect(self, worker_id: int, shard: int, now: float) -> None:
        """A worker asks for a connection; it is answered as soon as there is one to be had."""
        self._known.add(worker_id)
        self._requests.append(_Request(worker_id, shard, now))

    def fence(self, worker_id: int) -> bool:
        """This worker's process is lost: have all shards refuse what still comes of it. False: that is not called for, since
        it has no connection: it never asked for one, or was fenced before."""
        if worker_id not in self._known:
            return False
        self._known.remove(worker_id)
        self._given = {key: primary for key, primary in self._given.items() if key[0] != worker_id}
        self._requests = [one for one in self._requests if one.worker_id != worker_id]
        if worker_id in self._fenced:
            return False  # as long as that is unanswered no further process of it is connected
        self._fenced[worker_id] = {}
        self._processes[worker_id] += 1
        for shard in range(len(self._views)):
            self._send_fence(shard, worker_id)
        return True

    @property
    def fences(self) -> bool:
        """Whether it is not known yet of some lost worker what the shards have."""
        return bool(self._fenced)

    def connection_closed(self, process_index: int, worker_id: int, applied: int, tick: int) -> None:
        """A shard's answer to the fence."""
        if worker_id not in self._fenced:
            return
        has = self._fenced[worker_id]
        has[self.shard_of(process_index)] = applied, tick
        if len(has) == len(self._views):
            del self._fenced[worker_id]
            self._closed(worker_id, LastPushes.of(has))

    # -- acting ----------------------------------------------------------------------------------------------------------

    def act(self, now: float) -> None:
        """All that is to be done by now."""
        self._act_on_views()
        self._answer(now)

    def _act_on_views(self) -> None:
        for shard, views in enumerate(self._views):
            for action in views.decide():
                match action:
                    case NewView(view):
                        self._tell(shard, view)
                    case StartCopy(process_index) if process_index in self._ending:
                        self._wanted.add(process_index)
                    case StartCopy(process_index):
                        self._begin(process_index)
                    case StopCopy(process_index):
                        self._ending.add(process_index)
                        self._stop(process_index)
                    case CopiesChanged(copies, lost):
                        self._report(shard, copies, lost)
                    case LostShard(process_index):
                        self._lost(shard, process_index)

    def finish(self) -> None:
        """The run is over."""
        self._over = True
        for views in self._views:
            for process_index in {views.view.primary, views.view.other} - {None}:
                assert process_index is not None
                self._send(process_index, {"type": "finish"})

    def _begin(self, process_index: int) -> None:
        self._starting.add(process_index)
        self._started[process_index] += 1
        self._addresses.pop(process_index, None)
        self._start(process_index)

    def _tell(self, shard: int, view: ShardView) -> None:
        """The copies of a view; a new one gets a connection to the primary with it. The primary learns whom it is to fence."""
        order = {"type": "view", "view": view.to_json()}
        if view.recruit is not None:
            self._host_of[view.primary].connect((view.primary, order), (view.recruit, order))
        else:
            for process_index in {view.primary, view.backup} - {None}:
                assert process_index is not None
                self._send(process_index, order)
        for worker_id in self._fenced:
            self._send_fence(shard, worker_id)

    def _send_fence(self, shard: int, worker_id: int) -> None:
        process = self._processes[worker_id] - 1
        self._send(self._views[shard].view.primary, {"type": "fence", "worker_id": worker_id, "process": process})

    def _answer(self, now: float) -> None:
        """Connect those who can be: not a worker in whose place another one was, before all shards have refused that."""
        left = []
        for one in self._requests:
            view = self._views[one.shard].serving
            if view is None or one.worker_id in self._fenced or not self._connect(one, view, now):
                left.append(one)
        self._requests = left

    def _connect(self, one: _Request, view: ShardView, now: float) -> bool:
        """Unless it was sent to the same process just now, which may be gone without that the driver knows it."""
        process, primary = self._processes[one.worker_id], (view.primary, self._started[view.primary])
        if self._given.get((one.worker_id, one.shard)) == primary and now - one.since < PATIENCE_S:
            return False
        answer: dict[str, Any] = {"type": "connected", "view": view.number, "process": process, "address": None}
        host, there = self._host_of[one.worker_id], self._host_of[view.primary]
        if host is there:
            order = {"type": "connection", "worker_id": one.worker_id, "process": process}
            host.connect((one.worker_id, answer), (view.primary, order))
        elif view.primary in self._addresses:
            host.send(one.worker_id, {**answer, "address": self._addresses[view.primary]})
        else:
            return False
        self._given[one.worker_id, one.shard] = primary
        return True

    def _send(self, process_index: int, body: dict[str, Any]) -> None:
        self._host_of[process_index].send(process_index, body)
