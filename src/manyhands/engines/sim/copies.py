"""The copies of a simulated server shard: the real log and views, in virtual time.

A shard's primary sends each call of its store to its backup over the wires, and what the call gave leaves when the backup
has acknowledged it. The driver learns of a lost copy `notice` seconds later; what it says then takes no time.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

from torch import Tensor

from manyhands.engines.sim.network import NetworkState
from manyhands.engines.sim.shard import SimShard
from manyhands.engines.sim.timeline import Timeline
from manyhands.errors import ManyhandsError
from manyhands.server.replication.log import Call, Copy, Entry, OutOfOrder, make
from manyhands.server.replication.views import (
    CopiesChanged,
    LostShard,
    NewView,
    ShardView,
    StartCopy,
    StopCopy,
    Views,
)
from manyhands.server.store import Store


class LoggedStore:
    """A shard's store, each call of which that changes it is an entry of the log. All else is the store's own."""

    def __init__(self, store: Store, copy: Copy, send: Callable[[Entry], None]) -> None:
        self._store, self._copy, self._send = store, copy, send

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def initialize(self, center: Tensor) -> Any:
        return self._make(Call.INITIALIZE, vectors=(center,))

    def activate(self, worker: int, generation: int) -> Any:
        return self._make(Call.ACTIVATE, worker, number=generation)

    def read(self) -> Any:
        return self._make(Call.READ)

    def pull(self, worker: int) -> Any:
        return self._make(Call.PULL, worker)

    def push(
        self, worker: int, sequence: int, update: Tensor, weight: float, bits: int, since: int | None = None
    ) -> Any:
        fields = {"vectors": (update,), "weight": weight, "bits": bits, "numbers": since}
        return self._make(Call.PUSH, worker, number=sequence, **fields)

    def tick(self, worker: int, bits: int, number: int = 0) -> Any:
        return self._make(Call.TICK, worker, number=number, bits=bits)

    def deactivate(self, worker: int) -> Any:
        return self._make(Call.DEACTIVATE, worker)

    def leave(self, worker: int) -> Any:
        return self._make(Call.LEAVE, worker)

    def fence(self, worker: int, generation: int) -> Any:
        return self._make(Call.FENCE, worker, number=generation)

    def restore(self, vectors: dict[str, Tensor], numbers: dict[str, Any]) -> Any:
        return self._make(Call.RESTORE, names=tuple(vectors), vectors=tuple(vectors.values()), numbers=numbers)

    @property
    def plain(self) -> Store:
        """The store itself, whose calls are no entries."""
        return self._store

    def _make(self, call: Call, worker: int = -1, **values: Any) -> Any:
        entry = Entry(self._copy.append(), call, worker, **values)
        self._send(entry)
        return make(self._store, entry)


class SimCopies:
    """One shard's. Copy c of shard s is process -1 - s - c·shards, and as such a node of the network.

    new_shard: (process index, its Copy, how an entry leaves) -> a shard with an empty store, that serves nobody.
    serve: this copy is the primary now, and workers go to it. changed: as CopiesChanged. lost: no copy is left.
    """

    def __init__(
        self,
        process_indices: Sequence[int],
        timeline: Timeline,
        wires: NetworkState,
        notice_s: float,
        merge_s: float,
        *,
        new_shard: Callable[[int, Copy, Callable[[Entry], None]], SimShard],
        serve: Callable[[SimShard], None],
        changed: Callable[[int, int | None], None],
        lost: Callable[[], None],
    ) -> None:
        self._timeline, self._wires, self._notice_s, self._merge_s = timeline, wires, notice_s, merge_s
        self._new_shard, self._serve, self._changed, self._lost = new_shard, serve, changed, lost
        self._views = Views(process_indices)
        self._processes: dict[int, SimShard] = {}
        self._under_way: dict[tuple[SimShard, SimShard], deque[Callable[[], None]]] = {}
        self._last_at: dict[tuple[SimShard, SimShard], float] = {}  # when the newest message arrives
        self._serving: SimShard | None = None
        for process_index in process_indices:
            self._start(process_index)
        timeline.at(timeline.now, self._decide)

    def kill(self, backup: bool) -> bool:
        """The primary, or the backup; whether there is one."""
        view = self._views.view
        process_index = view.backup if backup else view.primary
        victim = None if process_index is None else self._processes.get(process_index)
        if victim is None or victim.is_killed:
            return False
        victim.kill()
        self._timeline.at(self._timeline.now + self._notice_s, partial(self._gone, victim))
        return True

    def _start(self, process_index: int) -> None:
        copy = Copy(process_index, alone=False)
        self._processes[process_index] = self._new_shard(process_index, copy, partial(self._send_entry, process_index))

    def _gone(self, process: SimShard) -> None:
        if self._processes.get(process.node) is process:
            self._views.lost(process.node)
            self._decide()

    def _decide(self) -> None:
        for action in self._views.decide():
            match action:
                case NewView(view):
                    self._tell(view)
                case StartCopy(process_index):
                    self._start(process_index)
                    self._views.started(process_index)
                    self._decide()
                case StopCopy(process_index):
                    self._processes[process_index].kill()
                case CopiesChanged(copies, lost):
                    self._changed(copies, lost)
                case LostShard():
                    self._lost()

    def _tell(self, view: ShardView) -> None:
        for process_index in (view.primary, view.other):
            if process_index is not None:
                process = self._processes[process_index]
                assert process.copy is not None
                process.copy.take_view(view)
        primary = self._processes[view.primary]
        if view.recruit is not None and view.link == view.number and not primary.is_killed:
            self._send_image(primary, self._processes[view.recruit], view.link)
        primary.let_go()
        if self._views.serving is not None and self._serving is not primary:
            self._serving = primary
            self._serve(primary)

    # -- between two copies --------------------------------------------------------------------------------------------

    def _send_image(self, primary: SimShard, recruit: SimShard, link: int) -> None:
        assert primary.copy is not None
        vectors, numbers = primary.store.image()
        copied, text, index = (
            {name: one.clone() for name, one in vectors.items()},
            json.dumps(numbers),
            primary.copy.index,
        )

        def arrive() -> None:
            assert recruit.copy is not None
            recruit.copy.take_image(link, index)
            cast(LoggedStore, recruit.store).plain.take_image(copied, json.loads(text))
            self._acknowledge(recruit, primary, link, index)

        self._carry(primary, recruit, sum(one.nbytes for one in copied.values()), arrive)

    def _send_entry(self, process_index: int, entry: Entry) -> None:
        primary = self._processes[process_index]
        assert primary.copy is not None
        view = primary.copy.view
        if view.other is None:
            return
        other, link = self._processes[view.other], view.link
        own = replace(entry, vectors=tuple(vector.clone() for vector in entry.vectors))

        def arrive() -> None:
            assert other.copy is not None
            other.copy.receive(link, own.index)
            store = cast(LoggedStore, other.store).plain
            with suppress(ManyhandsError):  # which the primary's store has raised as well
                make(store, own)
            store.released.clear()
            self._acknowledge(other, primary, link, own.index)

        self._carry(primary, other, sum(vector.nbytes for vector in own.vectors), arrive)

    def _acknowledge(self, copy: SimShard, primary: SimShard, link: int, index: int) -> None:
        def arrive() -> None:
            assert primary.copy is not None
            if primary.copy.acknowledge(link, index):
                self._views.copied(link)
                self._decide()
            primary.let_go()

        self._carry(copy, primary, 0, arrive)

    def _carry(self, source: SimShard, target: SimShard, bytes: int, deliver: Callable[[], None]) -> None:
        """In order. It takes the wires' time, and where it has a payload the target's to go through that."""

        way = source, target

        def arrive() -> None:
            deliver = self._under_way[way].popleft()  # what is due at the same time happens in any order
            if not target.is_killed and self._processes.get(target.node) is target:
                with suppress(OutOfOrder):  # of an older view: its sender is not asked any more
                    deliver()

        at = self._wires.send(source.node, target.node, bytes, self._timeline.now) + self._merge_s * bytes
        at = self._last_at[way] = max(at, self._last_at.get(way, 0.0))
        self._under_way.setdefault(way, deque()).append(deliver)
        self._timeline.at(at, arrive)
