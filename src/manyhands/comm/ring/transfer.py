"""One operation's tensor on its way over the links."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from manyhands.comm.group import Ledger
from manyhands.comm.ring.link import CHUNK
from manyhands.comm.ring.links import Links
from manyhands.errors import ManyhandsError
from manyhands.transport.frame import Frame, bytes_of

CHUNK_BYTES = 1 << 20  # small enough for a core's cache (L2), large enough that a frame's cost does not count
_LEAST_BYTES = 1 << 16
_CHUNKS = 2  # a piece has at least so many, where they are not too small: the first travels on while the second comes
_KEPT = 16

Span = tuple[int, int]
"""Elements [start, stop)."""


class Scratch:
    """Memory for what is added to something else, kept between operations."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._views: dict[tuple[int, int, torch.dtype], list[tuple[Tensor, memoryview]]] = {}

    def rows(self, count: int, n: int, dtype: torch.dtype) -> list[tuple[Tensor, memoryview]]:
        """`count` tensors [n] and their bytes; what they held before is anything."""
        key = (count, n, dtype)
        if key not in self._views:
            self._views[key] = self._cut(*key)
        return self._views[key]

    def _cut(self, count: int, n: int, dtype: torch.dtype) -> list[tuple[Tensor, memoryview]]:
        nbytes = n * dtype.itemsize
        length = -(-nbytes // 64) * 64
        if self._memory.numel() < count * length:
            self._memory = torch.empty(count * length, dtype=torch.uint8)
            self._views.clear()
        elif len(self._views) == _KEPT:
            self._views.clear()
        rows = [self._memory[i * length : i * length + nbytes].view(dtype) for i in range(count)]
        return [(row, bytes_of(row)) for row in rows]


class Transfer:
    """What travels of `flat` [n] (contiguous, on the CPU) in one operation, under its sequence number.

    first_out, first_in: by peer, what goes and comes right behind the frame that opens the operation. All else comes
    in chunks of `length` elements, a frame each; all ranks cut alike.
    """

    def __init__(self, links: Links, scratch: Scratch, rank: int, size: int, sequence: int, flat: Tensor) -> None:
        self.links, self.rank, self.size, self.flat, self.bytes = links, rank, size, flat, bytes_of(flat)
        self.n, self.nbytes, self.sequence, self.sent_bytes = flat.numel(), len(self.bytes), sequence, 0
        self.first_out: dict[int, Span] = {}
        self.first_in: dict[int, Span] = {}
        self._scratch, self._itemsize = scratch, flat.dtype.itemsize
        least = -(-self.nbytes // (size * _CHUNKS))
        self.length = min(CHUNK_BYTES, max(_LEAST_BYTES, least)) // self._itemsize

    def chunks(self, span: Span) -> Iterator[Span]:
        """The elements chunk by chunk: the same for who sends and who receives."""
        start, stop = span
        for at in range(start, stop, self.length):
            yield at, min(stop, at + self.length)

    # -- out ---------------------------------------------------------------------------------------------------------

    def opening(self, peer: int) -> memoryview:
        """What goes to a peer behind the opening frame."""
        view = self._view(self.first_out.get(peer, (0, 0)))
        self.sent_bytes += len(view)
        return view

    def enqueue(self, peer: int, chunk: Span) -> None:
        """Queue a chunk for a peer."""
        view = self._view(chunk)
        frame = Frame(kind=CHUNK, sequence=self.sequence, elements=len(view), a=chunk[0])
        self.links[peer].enqueue(frame, view)
        self.sent_bytes += len(view)

    def count(self, ledger: Ledger, operation: str, messages: int = 1) -> None:
        """Add what was sent."""
        if self.size > 1:
            ledger.add(operation, self.sent_bytes, messages)

    # -- in ----------------------------------------------------------------------------------------------------------

    def coming(self, peer: int) -> int:
        """Bytes that come from a peer behind the opening frame."""
        start, stop = self.first_in.get(peer, (0, 0))
        return (stop - start) * self._itemsize

    def take(self, peer: int, chunk: Span, into: memoryview | None = None) -> None:
        """A chunk from a peer, into its place in `flat` unless `into` is given."""
        view = self._view(chunk) if into is None else into
        if peer not in self.first_in:
            frame, wanted = self.links.header(peer), (CHUNK, self.sequence, len(view), chunk[0])
            if (frame.kind, frame.sequence, frame.elements, frame.a) != wanted:
                raise self.links.fail(
                    ManyhandsError(
                        f"expected {len(view)} bytes at element {chunk[0]} of operation {self.sequence} from worker "
                        f"{self.links.name(peer)}, got {frame}: do all workers run the same version of manyhands?"
                    )
                )
        self.links.fill(peer, view)

    def take_aside(self, peer: int, chunk: Span) -> Tensor:
        """A chunk from a peer, in memory that the next call takes again."""
        ((row, view),) = self._scratch.rows(1, chunk[1] - chunk[0], self.flat.dtype)
        self.take(peer, chunk, view)
        return row

    def take_from_all(self, chunk: Span, mine: Tensor) -> list[Tensor]:
        """The same chunk from all peers, and `mine`, in rank order."""
        rows = self._scratch.rows(self.size - 1, chunk[1] - chunk[0], self.flat.dtype)
        for (_, view), peer in zip(rows, self.links.peers, strict=True):
            self.take(peer, chunk, view)
        pieces = [row for row, _ in rows]
        pieces.insert(self.rank, mine)
        return pieces

    def opened(self) -> None:
        """What came behind the opening frames is all taken; from now on come chunks."""
        self.first_in.clear()

    def _view(self, span: Span) -> memoryview:
        return self.bytes[span[0] * self._itemsize : span[1] * self._itemsize]
