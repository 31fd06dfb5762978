"""Messages between workers of one host: each writes into a ring of its own memory, once, and all others read there.

A region has one writer: counters, each on a cache line of its own, then the ring. Counters are in bytes and only grow:
POSTED, what was written, and by peer what this rank has read of that peer's ring. A message is its length in 8 bytes,
then itself, then what fills 8 bytes up. What the ring has no room for waits in its worker's own memory.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from manyhands.comm.mailbox import Mailbox, MailboxOwner
from manyhands.comm.shared_memory.synchronisation import Waiting, fence
from manyhands.comm.shared_memory.table import LINE
from manyhands.errors import BadInput
from manyhands.transport.frame import bytes_of

WORD = 8
POSTED = 0
_SMALLEST, _MESSAGES = 1 << 20, 8  # a ring has room for so many bytes, and for so many of the longest messages


def ring_bytes(longest: int) -> int:
    """Of a ring for messages of at most so many bytes."""
    return max(_SMALLEST, _MESSAGES * _padded(longest))


def region_bytes(size: int, longest: int) -> int:
    """Of a region, in a group of so many ranks."""
    return WORD * LINE * (1 + size) + ring_bytes(longest)


class SharedMailbox(Mailbox):
    """regions: every rank's, uint8 [region_bytes], zeros at first."""

    def __init__(self, group: MailboxOwner, regions: Sequence[Tensor], longest: int, waiting: Waiting) -> None:
        super().__init__(group)
        self._longest, self._length, self._waiting = longest, ring_bytes(longest), waiting
        counters = WORD * LINE * (1 + self.size)
        memory = [bytes_of(region) for region in regions]
        self._words = [view[:counters].cast("Q") for view in memory]
        self._rings = [view[counters:] for view in memory]
        self._peers = [peer for peer in range(self.size) if peer != self.rank]
        self._outbox = deque[Tensor]()  # posted, and not in the ring yet
        self._written = 0
        self._read = [0] * self.size  # by peer

    @override
    def _send(self, payload: Tensor) -> None:
        if payload.nbytes > self._longest:
            raise BadInput(f"a message of {payload.nbytes} bytes, where at most {self._longest} were announced")
        self._outbox.append(payload)
        self._write()
        if self._outbox and self._outbox[-1] is payload:
            self._outbox[-1] = payload.clone()  # there is no room yet, and the caller may change it

    def _write(self) -> None:
        """As much of the outbox into the ring as there is room for."""
        read = [self._words[peer][LINE * (1 + self.rank)] for peer in self._peers]
        end = min(read, default=self._written) + self._length
        ring, position = self._rings[self.rank], self._written
        while self._outbox and position + _padded(self._outbox[0].nbytes) <= end:
            payload = self._outbox.popleft()
            self._put(ring, position, memoryview(payload.nbytes.to_bytes(WORD, "little")))
            self._put(ring, position + WORD, bytes_of(payload))
            position += _padded(payload.nbytes)
        if position > self._written:
            fence()
            self._words[self.rank][POSTED] = self._written = position

    @override
    def _finish_sending(self) -> None:
        """What comes meanwhile is read: a peer may be waiting for that itself."""
        while self._outbox:
            peer = min(self._peers, key=lambda peer: int(self._words[peer][LINE * (1 + self.rank)]))
            words, index, start = self._words[peer], LINE * (1 + self.rank), time.perf_counter()
            before = int(words[index])

            def read(words: memoryview = words, index: int = index) -> int:
                self._collect()
                return int(words[index])

            self._waiting.until_reached(peer, read, before + 1, "post", self._group.step)
            self._group.waited_s += time.perf_counter() - start
            self._write()

    def _put(self, ring: memoryview, position: int, data: memoryview) -> None:
        at = position % self._length
        first = min(len(data), self._length - at)
        ring[at : at + first] = data[:first]
        ring[: len(data) - first] = data[first:]

    @override
    def _collect(self) -> None:
        for peer in self._peers:
            self._collect_of(peer)
        if self._outbox:
            self._write()

    def _collect_of(self, peer: int) -> None:
        posted, position = self._words[peer][POSTED], self._read[peer]
        if position < posted:
            fence()
            while position < posted:
                ring, at = self._rings[peer], position % self._length
                size = int.from_bytes(ring[at : at + WORD], "little")  # in one piece: all lengths are whole words
                self._inbox[peer].append(self._get(ring, position + WORD, size))
                position += _padded(size)
            fence()
            self._words[self.rank][LINE * (1 + peer)] = self._read[peer] = position

    def _get(self, ring: memoryview, position: int, size: int) -> Tensor:
        at = position % self._length
        first = min(size, self._length - at)
        found = torch.empty(size, dtype=torch.uint8)
        data = bytes_of(found)
        data[:first] = ring[at : at + first]
        data[first:] = ring[: size - first]
        return found

    @override
    def _wait_for(self, peer: int, count: int) -> float:
        start, inbox = time.perf_counter(), self._inbox[peer]

        def came() -> int:
            self._collect()
            return len(inbox)

        self._waiting.until_reached(peer, came, count, "take", self._group.step)
        return time.perf_counter() - start


def _padded(size: int) -> int:
    """Bytes of a message of so many in a ring."""
    return WORD + -(-size // WORD) * WORD
