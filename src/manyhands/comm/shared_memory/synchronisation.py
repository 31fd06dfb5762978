"""How ranks of one host wait for each other: shared counters, liveness of peers, and waiting with a deadline.

`SharedCounters` are the first parts of each rank's region of the table. They have one writer, their rank: counters
first, then a ring of slots with the headers of the operations under way. A counter only grows, and Python writes it by a
plain 8-byte store. x86 makes stores visible in program order, so whoever sees a counter also sees what was written
before it; elsewhere `fence` sees to that.

`Waiting` spins briefly, then yields, then sleeps, and never waits for ever. `LivenessPipes` notice that a peer's process
is gone, however it ended: the kernel closes what only that process held.
"""

from __future__ import annotations

import os
import platform
import select
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from manyhands.comm.checks import FirstError
from manyhands.comm.shared_memory.table import FIRST_PAIR, LINE, SLOT, SLOTS, GroupMemory
from manyhands.errors import PeerLost
from manyhands.transport.socket_io import close_in_forks

# counters, as indices of 8-byte words
ARRIVED = 0  # operations begun
READY = LINE  # rounds of staged data laid out for the others
DONE = 2 * LINE  # rounds in which this rank has moved its part
STATE = 3 * LINE  # OPEN, CLOSED, or CLOSED + 1 + the rank because of which this one gave up

OPEN, CLOSED = 0, 1

_HEADER = struct.Struct("<QQdqQ")
_BLOB = 64
INLINE = SLOT - _BLOB  # bytes that fit beside a header


class Header(NamedTuple):
    """What a rank says when it arrives at an operation."""

    signature: int  # operation, dtype and source, as one number: equal on all ranks
    n: int  # elements
    weight: float
    offset: int  # where the tensor lies in the rank's arena; -1: outside, so that it has to be staged
    blob: int  # bytes that travel beside the tensor


class SharedCounters:
    """All ranks' regions, as one of them sees them. `words[rank][index]` is a counter."""

    def __init__(self, rank: int, size: int, memory: GroupMemory) -> None:
        self.rank, self.size = rank, size
        layout = memory.layout
        self._headers = layout.headers
        self._regions = [memory.table[layout.region(peer)] for peer in range(size)]
        self.words = [region[: layout.counters].cast("Q") for region in self._regions]
        self._own = self.words[rank]

    def sent(self, target: int) -> int:
        """Index of the counter of chunks that a rank laid out for `target`."""
        return LINE * (FIRST_PAIR + target)

    def taken(self, source: int) -> int:
        """Index of the counter of chunks that a rank took from `source`."""
        return LINE * (FIRST_PAIR + self.size + source)

    def raise_to(self, index: int, value: int) -> None:
        """Set one of this rank's counters. What it stands for must be written, and `fence`d, before."""
        self._own[index] = value

    def write(self, sequence: int, header: Header, blob: bytes) -> None:
        """Lay out the header of operation `sequence`, and the blob if it fits; ARRIVED makes it known."""
        region, place = self._regions[self.rank], self._place(sequence)
        _HEADER.pack_into(region, place, *header)
        if blob and len(blob) <= INLINE:
            region[place + _BLOB : place + _BLOB + len(blob)] = blob

    def read(self, rank: int, sequence: int) -> Header:
        """The header of a rank that has arrived at operation `sequence`."""
        return Header(*_HEADER.unpack_from(self._regions[rank], self._place(sequence)))

    def inline(self, rank: int, sequence: int, length: int) -> bytes:
        """The blob beside that header, where its length is at most INLINE."""
        start = self._place(sequence) + _BLOB
        return bytes(self._regions[rank][start : start + length])

    def give_up(self, because_of: int) -> None:
        """Tell all ranks that this one will not go on, because of a rank (its own, too)."""
        self._own[STATE] = CLOSED + 1 + because_of

    def close(self) -> None:
        """Say that this rank leaves, unless it gave up before; then let go of the memory. Idempotent."""
        if not self.words:
            return
        if self._own[STATE] == OPEN:
            self._own[STATE] = CLOSED
        for view in [*self.words, *self._regions]:
            view.release()
        self.words, self._regions = [], []

    def _place(self, sequence: int) -> int:
        return self._headers + sequence % SLOTS * SLOT


class LivenessPipes:
    """One pipe a rank: all peers hold its read end, the rank alone its write end; when it dies, the read ends hang up.

    pipes: (read end, write end) by rank, -1 for an end that this process does not have. They belong to this object
    from now on; the write ends of peers and the own read end, inherited by a fork, are closed at once.
    Instead of a read end any descriptor will do on which poll() reports an event once the rank is gone (a socket, a
    pidfd).
    """

    def __init__(self, rank: int, pipes: Sequence[tuple[int, int]]) -> None:
        self._ranks = {read: peer for peer, (read, _) in enumerate(pipes) if peer != rank and read >= 0}
        self._own = pipes[rank][1] if pipes else -1
        for peer, (read, write) in enumerate(pipes):
            _close(read if peer == rank else write)
        self._poll = select.poll()
        for fd in self._ranks:
            self._poll.register(fd, select.POLLIN)
        close_in_forks(self)

    def gone(self) -> list[int]:
        """The ranks whose process has ended."""
        return sorted(self._ranks[fd] for fd, _ in self._poll.poll(0))

    def close(self) -> None:
        """Close all descriptors: to the peers it looks as if this process had ended. Idempotent."""
        for fd in [self._own, *self._ranks]:
            _close(fd)
        self._own, self._ranks, self._poll = -1, {}, select.poll()


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


_SPINS = 60  # reads of a counter, some 3 µs; on a core that the two share, all of it is lost
_YIELD_S = 1e-3
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 50e-6, 1e-3

_ORDERED_STORES = platform.machine() in ("x86_64", "AMD64", "i686")
_lock = threading.Lock()


def fence() -> None:
    """Order all earlier loads and stores before all later ones; nothing to do on x86, where counters need no more.

    A release (end of the first block) followed by an acquire (start of the second) is not reordered on Arm and Power.
    """
    if not _ORDERED_STORES:
        with _lock:
            pass
        with _lock:
            pass


class Waiting(FirstError):
    """Waits for counters on the board, with a deadline and an eye on whether the peers live.

    hosts, names: where each rank is, and how messages call it. timeout_s: without progress of the awaited counter for
    so long, its rank counts as lost.
    """

    def __init__(
        self,
        board: SharedCounters,
        lifelines: LivenessPipes,
        hosts: Sequence[str],
        names: Sequence[int],
        timeout_s: float,
    ) -> None:
        self._board, self._lifelines, self._hosts, self._names = board, lifelines, hosts, names
        self._timeout_s = timeout_s
        alone = board.size <= len(os.sched_getaffinity(0))
        self._spins = _SPINS if alone else 1  # more workers than cores: a spin keeps the awaited peer from its core

    def until(self, rank: int, index: int, target: int, operation: str, step: int) -> None:
        """Return once counter `index` of `rank` is at least `target`.

        Raises PeerLost for any rank that died or gave up, and for `rank` when it left the group or made no progress
        for timeout_s. Other ranks learn of it from the board.
        """
        words = self._board.words[rank]
        for _ in range(self._spins):
            if words[index] >= target:
                break
        else:
            self.until_reached(rank, lambda: words[index], target, operation, step)
        fence()

    def until_reached(self, rank: int, read: Callable[[], int], target: int, operation: str, step: int) -> None:
        """As `until`, of whatever `read` returns: what only `rank` raises."""
        start = progress = time.perf_counter()
        seen = read()
        no_files = select.poll()  # one of this wait's own: two threads may not share it
        while (found := read()) < target:
            now = time.perf_counter()
            if now - start < _YIELD_S:
                os.sched_yield()
                no_files.poll(0)  # lets go of the GIL, which sched_yield does not; time.sleep(0) takes 65 µs
                continue
            if found != seen:
                seen, progress = found, now
            lost = self._lost(rank)
            if lost is None and now - progress > self._timeout_s:
                lost = rank, f"showed no progress for {self._timeout_s:g} s"
            if lost and read() < target:  # it may have raised the counter right before it left
                self._board.give_up(lost[0])
                name, host = self._names[lost[0]], self._hosts[lost[0]]
                raise self.fail(PeerLost(name, host, operation, step, now - start, lost[1]))
            time.sleep(min(_LONGEST_SLEEP_S, max(_SHORTEST_SLEEP_S, (now - start) / 16)))

    def _lost(self, awaited: int) -> tuple[int, str] | None:
        """(rank, why) of a peer without which this rank would wait in vain."""
        states = [words[STATE] for words in self._board.words]
        for rank, state in enumerate(states):
            if state > CLOSED:
                cause = state - CLOSED - 1
                return cause, "gave up" if cause == rank else f"is gone (worker {self._names[rank]} noticed)"
        if states[awaited] == CLOSED:
            return awaited, "left the group"
        for rank in self._lifelines.gone():
            if self._board.words[rank][STATE] == OPEN:
                return rank, "is gone"
        return None
