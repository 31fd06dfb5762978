"""The log of a shard's calls, by which its backup is what its primary is. Pure: no clock, no thread, no socket.

Viewstamped Replication, Oki, Liskov, 1988, with one backup and a view service beside it (the driver, see views.py).

1. The primary numbers every call of its store, in the order in which it makes them, and sends it to the backup. The
   store is deterministic: the backup makes the same calls and is the same store.
2. The backup acknowledges an entry once it has made the call. What a call gave to a worker leaves when the entry of that
   call and all before it are acknowledged: nobody sees a version that the backup lacks.
3. Entries and acknowledgements name their view. Those of an older view are refused: a primary in whose place another one
   is has no backup that acknowledges, and so answers nothing any more.
4. A new copy receives an image of the store at an index, and then the log. As soon as it has the image its
   acknowledgements are waited for; once it has all that was answered without it, the driver makes it the backup.
5. A primary that loses its backup waits for the driver's next view before it answers: the driver may have made the backup
   the primary.
6. What others' calls give to a worker whose own call waits is kept until that call asks for it. The worker's next call,
   or the same one once more, ends that: a new primary may release a worker before it has asked there again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from torch import Tensor

from manyhands.errors import ManyhandsError
from manyhands.server.replication.views import ShardView
from manyhands.server.store import Reply, Store


class Call(IntEnum):
    """What is called. Numbers of frames between copies, see backup_link.py."""

    INITIALIZE = 64
    ACTIVATE = 65
    PULL = 66
    READ = 67
    PUSH = 68
    TICK = 69
    DEACTIVATE = 70
    LEAVE = 71
    FENCE = 72
    RESTORE = 73


@dataclass(frozen=True, slots=True)
class Entry:
    """One call of the store. number: the sequence of a push, the number of a tick, the generation of the others."""

    index: int
    call: Call
    worker_id: int = -1
    number: int = 0
    weight: float = 1.0
    bits: int = 0
    vectors: tuple[Tensor, ...] = ()  # the first center, an update, or what is restored
    names: tuple[str, ...] = ()  # of what is restored
    numbers: Any = None  # the numbers of it; of a push, from which version its staleness counts


def make(store: Store, entry: Entry) -> Any:
    """The call of an entry; what the store replies. Raises what the store raises, on each copy the same."""
    worker_id, number, bits = entry.worker_id, entry.number, entry.bits
    match entry.call:
        case Call.INITIALIZE:
            return store.initialize(entry.vectors[0])
        case Call.ACTIVATE:
            return store.activate(worker_id, number)
        case Call.PULL:
            return store.pull(worker_id)
        case Call.READ:
            return store.read()
        case Call.PUSH:
            return store.push(worker_id, number, entry.vectors[0], entry.weight, bits, entry.numbers)
        case Call.TICK:
            return store.tick(worker_id, bits, number)
        case Call.DEACTIVATE:
            return store.deactivate(worker_id)
        case Call.LEAVE:
            return store.leave(worker_id)
        case Call.FENCE:
            return store.fence(worker_id, number)
        case Call.RESTORE:
            return store.restore(dict(zip(entry.names, entry.vectors, strict=True)), entry.numbers)


class ReleasedReplies:
    """What calls of others gave to workers whose own call waits, and the index of the entry of the call that gave it."""

    def __init__(self) -> None:
        self._replies: dict[int, tuple[Reply, int]] = {}

    def begin(self, worker_id: int) -> None:
        """This worker makes a call: what is here was for an earlier one, or for the same one, which finds it in the store."""
        self._replies.pop(worker_id, None)

    def put(self, released: Iterable[tuple[int, Reply]], index: int) -> None:
        self._replies.update({worker_id: (reply, index) for worker_id, reply in released})

    def take(self, worker_id: int) -> tuple[Reply, int]:
        return self._replies.pop(worker_id)

    def __contains__(self, worker_id: int) -> bool:
        return worker_id in self._replies


NOBODY = 1 << 31


class OutOfOrder(ManyhandsError):
    """An entry or an acknowledgement that cannot be: of an older view, after a gap, or of who is not asked."""


class Copy:
    """What one copy of a shard knows of the log: its place in the views, and which of its answers may leave.

    Who serves it calls it behind one lock.
    """

    def __init__(self, process_index: int = 0, *, alone: bool = True) -> None:
        """alone: it is the primary as long as there are no views; else nothing before its first."""
        self.process_index = process_index
        self.view = ShardView(number=-1, primary=process_index if alone else NOBODY)
        self.index = 0  # of the newest call that was made here
        self.acknowledged = 0  # by the other copy
        self.waits = False  # for its acknowledgements
        self._copied_at: int | None = None  # what was answered without it, up to this index, it must have

    @property
    def is_primary(self) -> bool:
        return self.view.primary == self.process_index

    def take_view(self, view: ShardView) -> bool:
        """The driver's newest view; whether it was new. An older one is ignored."""
        if view.number <= self.view.number:
            return False
        if (view.link, view.primary) != (self.view.link, self.view.primary):
            self.waits, self.acknowledged, self._copied_at = False, 0, None
        self.view = view
        return True

    # -- of the primary ------------------------------------------------------------------------------------------------

    def append(self) -> int:
        """The index of the call that is made next. OutOfOrder unless this copy is the primary."""
        if not self.is_primary:
            raise OutOfOrder(f"this copy is not the shard's primary in view {self.view.number}")
        self.index += 1
        return self.index

    def may_leave(self, index: int) -> bool:
        """Whether what the calls up to this one gave may be answered."""
        return self.is_primary and (not self.waits or self.acknowledged >= index)

    def acknowledge(self, link: int, index: int) -> bool:
        """The other copy has made the calls up to this one; True, once, when a new copy can be the backup."""
        if link != self.view.link or not self.is_primary:
            raise OutOfOrder(f"an acknowledgement over the link of view {link}, and the newest is {self.view.link}")
        if not self.waits:  # it has the image
            self.waits, self._copied_at = True, self.index
        self.acknowledged = max(self.acknowledged, index)
        if self._copied_at is None or self.acknowledged < self._copied_at:
            return False
        self._copied_at = None
        return True

    # -- of a backup, or a new copy ------------------------------------------------------------------------------------

    def take_image(self, link: int, index: int) -> None:
        """The store here is now what the primary's was after this call. It is acknowledged."""
        self._expect(link)
        self.index = index

    def receive(self, link: int, index: int) -> None:
        """An entry of the primary's, whose call is to be made next; then it is acknowledged."""
        self._expect(link)
        if index != self.index + 1:
            raise OutOfOrder(f"entry {index}, expected {self.index + 1}")
        self.index = index

    def _expect(self, link: int) -> None:
        if link != self.view.link or self.view.other != self.process_index:
            raise OutOfOrder(f"a message over the link of view {link}, and the newest view is {self.view}")
