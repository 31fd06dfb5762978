"""How a sum travels: three ways with the same traffic, 2·(size-1)·n elements over all ranks, and the same bits
everywhere.

- swap, two workers, small: each sends all it has; one step, both compute the same.
- direct, small: worker j gets everybody's piece j, adds them up and gives the sum to all; two steps.
- ring, large: a piece goes round the ring and is added to on its way, then the sum goes round; 2·(size-1) steps, each
  with both neighbours at once, cut into chunks so that a step begins while the one before still travels. Bandwidth
  optimal: Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations (2009).

Which one is a matter of the number of bytes, the dtype and the size of the group. What travels first is as it was: the
receiver multiplies by the sender's share, so that nothing waits for the weights, which are on their way to all at the
same time. 16-bit numbers are added up in float32 and rounded once, which the ring would do at every hop: where there is
more than one hop, they travel directly, whatever their number. Where two compute the same (swap), products are rounded
before they are added: whether a multiply-add is fused is a matter of the processor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from manyhands.comm.checks import slice_of
from manyhands.comm.group import Ledger
from manyhands.comm.reducing import ACCUMULATED_WIDER, added_up_as
from manyhands.comm.ring.link import CHUNK
from manyhands.comm.ring.links import Links
from manyhands.errors import ManyhandsError
from manyhands.transport.frame import Frame, bytes_of

SWAP_BYTES = 1 << 22  # up to so many, two workers swap
DIRECT_BYTES = 1 << 20  # up to so many, pieces travel directly

Shares = Sequence[float | None] | None
"""Each rank's factor, None for one that does not count; None instead of all is the plain sum."""

CHUNK_BYTES = 1 << 20  # small enough for a core's cache (L2), large enough that a frame's cost does not count
_LEAST_BYTES = 1 << 16
_CHUNKS = 2  # a piece has at least so many, where they are not too small: the first travels on while the second comes
_KEPT = 16

Span = tuple[int, int]
"""Elements [start, stop)."""


class Exchange(ABC):
    """One tensor [n] of the operation, to be replaced by the sum of all ranks' tensor·share.

    What travels before the weights are known leaves with the frame that opens the operation; then comes `finish`, or
    `skip` if nothing counts. The tensor must not be touched in between. `messages`: the steps in which this rank sent.
    `lost` [n], zeros: gets what rounding the sum took away where this rank added up, see `Group.mean_`.
    """

    messages: int
    lost: Tensor | None = None

    def __init__(self, transfer: Transfer) -> None:
        self.transfer, self.links, self.flat = transfer, transfer.links, transfer.flat
        self.rank, self.size = transfer.rank, transfer.size

    @abstractmethod
    def finish(self, shares: Shares) -> None:
        """Replace the tensor; return when it may be touched again."""

    def skip(self) -> None:
        """Take what travelled in vain; the tensor stays as it was."""
        self.messages = 1
        for peer, span in self.transfer.first_in.items():
            for chunk in self.transfer.chunks(span):
                self.transfer.take_aside(peer, chunk)
        self.links.flush()

    def lost_in(self, chunk: Span) -> Tensor | None:
        return None if self.lost is None else self.lost[slice(*chunk)]

    def piece(self, owner: int) -> Span:
        return slice_of(owner % self.size, self.size, self.transfer.n)


def exchange_of(transfer: Transfer) -> Exchange:
    """The way for this tensor: the same on all ranks."""
    if transfer.size == 2 and transfer.nbytes <= SWAP_BYTES:
        return Swap(transfer)
    if transfer.nbytes <= DIRECT_BYTES or (transfer.flat.dtype in ACCUMULATED_WIDER and transfer.size > 2):
        return Direct(transfer)
    return Ring(transfer)


class Swap(Exchange):
    """Two workers, all at once. A chunk is worked on when the peer's is here and one's own has left.

    Neither waits in vain: who has the peer's chunk and waits for its own to leave is awaited by a peer that receives.
    """

    messages = 1

    def __init__(self, transfer: Transfer) -> None:
        super().__init__(transfer)
        transfer.first_out = transfer.first_in = {1 - self.rank: (0, transfer.n)}

    @override
    def finish(self, shares: Shares) -> None:
        peer = 1 - self.rank
        end = self.links[peer].enqueued
        for start, stop in self.transfer.chunks((0, self.transfer.n)):
            others, mine = self.transfer.take_aside(peer, (start, stop)), self.flat[start:stop]
            self.links.flush_to(peer, end - (self.transfer.n - stop) * mine.itemsize)
            pieces = [mine, others] if self.rank == 0 else [others, mine]
            add_up(pieces, shares, mine, self.lost_in((start, stop)))
        if self.rank and self.lost is not None:  # both computed the same, and one keeps it
            self.lost.zero_()


class Direct(Exchange):
    """To the owner of each piece and back."""

    messages = 2

    def __init__(self, transfer: Transfer) -> None:
        super().__init__(transfer)
        self._mine = self.piece(self.rank)
        transfer.first_out = {peer: self.piece(peer) for peer in self.links.peers}
        transfer.first_in = dict.fromkeys(self.links.peers, self._mine)

    @override
    def finish(self, shares: Shares) -> None:
        for chunk in self.transfer.chunks(self._mine):
            mine = self.flat[slice(*chunk)]
            add_up(self.transfer.take_from_all(chunk, mine), shares, mine, self.lost_in(chunk))
            for peer in self.links.peers:
                self.transfer.enqueue(peer, chunk)
            self.links.push()
        self.transfer.opened()
        for peer in self.links.peers:
            for chunk in self.transfer.chunks(self.piece(peer)):
                self.transfer.take(peer, chunk)
        self.links.flush()


class Ring(Exchange):
    """Round the ring: at step k of the first half, a rank adds to piece rank-k-1, and passes it on."""

    def __init__(self, transfer: Transfer) -> None:
        super().__init__(transfer)
        self.messages = 2 * (self.size - 1)
        self._left, self._right = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        transfer.first_out = {self._right: self.piece(self.rank)}
        transfer.first_in = {self._left: self.piece(self._left)}

    @override
    def finish(self, shares: Shares) -> None:
        for step in range(self.size - 1):
            for chunk in self.transfer.chunks(self.piece(self.rank - step - 1)):
                came = self.transfer.take_aside(self._left, chunk)
                self._add(step, came, chunk, shares)
                self._pass_on(chunk)
            self.transfer.opened()
        for step in range(self.size - 1):
            for chunk in self.transfer.chunks(self.piece(self.rank - step)):
                self.transfer.take(self._left, chunk)
                if step < self.size - 2:
                    self._pass_on(chunk)
        self.links.flush()

    def _pass_on(self, chunk: Span) -> None:
        self.transfer.enqueue(self._right, chunk)
        self.links.push()

    def _add(self, step: int, came: Tensor, chunk: Span, shares: Shares) -> None:
        """The chunk becomes what `step` + 1 ranks before this one added up, and this one's part."""
        mine = self.flat[slice(*chunk)]
        if self.size == 2 and mine.dtype in ACCUMULATED_WIDER:  # both as they were: the one hop
            add_up([mine, came] if self.rank == 0 else [came, mine], shares, mine, self.lost_in(chunk))
            return
        if shares is None:
            mine.add_(came)
            return
        before, own = [shares[(self.rank - 1 - i) % self.size] for i in range(step + 1)], shares[self.rank]
        if step == 0 and before[0] is not None:  # what came first is as it was
            came.mul_(before[0])
        if all(share is None for share in before):
            mine.mul_(own or 0.0)  # if 0.0, nobody has counted yet, and the next one passes over what this is
        elif own is None:
            mine.copy_(came)
        else:
            torch.add(came, mine, alpha=own, out=mine)


def add_up(pieces: Sequence[Tensor], shares: Shares, into: Tensor, lost: Tensor | None = None) -> None:
    """`into` [m] becomes the sum of piece·share in rank order, with one rounding of 16-bit numbers; `lost` [m] gets
    what that took away.

    The pieces' memory is used up; `into` may be one of them.
    """
    terms = []
    for rank, piece in enumerate(pieces):
        share = 1.0 if shares is None else shares[rank]
        if share is not None:
            term = piece.to(added_up_as(piece.dtype, lost))
            terms.append(term if shares is None else term.mul_(share))
    total = terms[0]
    for term in terms[1:-1]:
        total.add_(term)
    if len(terms) > 1:
        total = torch.add(total, terms[-1], out=into if into.dtype == total.dtype else total)
    if total.data_ptr() != into.data_ptr():
        into.copy_(total)
    if lost is not None:
        lost.copy_(total - into)


# -- one tensor on its way ---------------------------------------------------------------------------------------------


class Scratch:
    """Memory for what is added to something else, kept between operations."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._views: dict[tuple[int, int, torch.dtype], list[tuple[Tensor, memoryview]]] = {}

    def rows(self, count: int, n: int, dtype: torch.dtype) -> list[tuple[Tensor, memoryview]]:
        """`count` tensors [n] and their bytes; what they held before is anything."""
        key = (count, n, dtype)
        if key not in self._views:
            nbytes = n * dtype.itemsize
            length = -(-nbytes // 64) * 64
            if self._memory.numel() < count * length:
                self._memory = torch.empty(count * length, dtype=torch.uint8)
                self._views.clear()
            elif len(self._views) == _KEPT:
                self._views.clear()
            rows = [self._memory[i * length : i * length + nbytes].view(dtype) for i in range(count)]
            self._views[key] = [(row, bytes_of(row)) for row in rows]
        return self._views[key]


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
        view = self._view(chunk)
        frame = Frame(kind=CHUNK, sequence=self.sequence, elements=len(view), a=chunk[0])
        self.links[peer].enqueue(frame, view)
        self.sent_bytes += len(view)

    def count(self, ledger: Ledger, operation: str, messages: int = 1) -> None:
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
                        f"{self.links.names[peer]}, got {frame}: use the same version of manyhands on all hosts"
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
