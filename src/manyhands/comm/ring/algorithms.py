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
from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from manyhands.comm.checks import slice_of
from manyhands.comm.reducing import ACCUMULATED_WIDER, added_up_as
from manyhands.comm.ring.transfer import Span, Transfer

SWAP_BYTES = 1 << 22  # up to so many, two workers swap
DIRECT_BYTES = 1 << 20  # up to so many, pieces travel directly

Shares = Sequence[float | None] | None
"""Each rank's factor, None for one that does not count; None instead of all is the plain sum."""


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
