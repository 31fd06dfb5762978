"""The group of workers linked by sockets: a ring for large tensors, direct exchange for small ones.

All are linked with all. Every operation opens with a frame to each peer that says what it is (operation, dtype, n,
weight, bits): so weights and bits travel in headers, a mismatch is seen by all, and a dead peer is noticed by all at
once. The data follows without waiting for those of the others; see algorithms.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from manyhands.comm.background import Background
from manyhands.comm.checks import (
    bits_bytes,
    bits_of,
    check_mean,
    check_peer,
    check_rank,
    check_sum,
    check_swap,
    describe,
    different_operations,
    flattened,
    json_bytes,
    other_message,
    restore,
    signature,
    slice_of,
    without_line,
)
from manyhands.comm.group import Group, Ledger, MeanResult, Work
from manyhands.comm.mailbox import Mailbox
from manyhands.comm.reducing import shares_of
from manyhands.comm.ring.algorithms import DIRECT_BYTES, Exchange, Scratch, Shares, Transfer, add_up, exchange_of
from manyhands.comm.ring.link import ARRIVE, SEND, Link
from manyhands.comm.ring.links import Links
from manyhands.comm.ring.mailbox import Connect, SocketMailbox
from manyhands.errors import BadInput, ManyhandsError
from manyhands.transport.channel import Channel
from manyhands.transport.frame import Frame, bytes_of

_MOST_TEXT = 1 << 26  # bytes of bits or JSON beside an operation: memory is taken on a peer's word
_CLOSING_S = 5.0
_NOTHING = torch.empty(0, dtype=torch.uint8)


class RingGroup(Group):
    """Workers linked by sockets; one thread of a process may use it at a time.

    channels: one to each other rank, by rank (`connect_all` makes them); the group's own from now on.
    hosts: names by rank, for messages. names: the ranks by which messages call the members, where the group is a part
        of a larger one.
    timeout_s: a peer for which this one waits and which moves no byte for so long counts as lost.

    Means that were started go on in a thread of the group's while the caller computes; they complete in the order in
    which they were started, before anything that is called after them; `waited_s` leaves them out.

    Ledger: what this rank sends. A mean or sum: 2·(n - n/size) elements in 2·(size-1) messages on the ring, in 2
    directly; n in one for two workers that swap. All 0 weights: only what travels before they are known.

    A mean's products are tensor·(weight/total), rounded, then added: along the ring for large tensors, in rank order
    for others; 16-bit numbers are added up in float32 and rounded once. See algorithms.py.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        channels: Mapping[int, Channel],
        *,
        hosts: Sequence[str] = (),
        names: Sequence[int] = (),
        timeout_s: float = 300.0,
        connect: Connect | None = None,
    ) -> None:
        check_rank(rank, size, "rank")
        if sorted(channels) != [peer for peer in range(size) if peer != rank]:
            raise BadInput(f"rank {rank} of {size} needs a channel to each other rank; got them to {sorted(channels)}")
        self.rank, self.size, self.ledger = rank, size, Ledger()
        self._names, self._hosts = list(names) or list(range(size)), list(hosts) or ["localhost"] * size
        self._links = Links(
            rank,
            {peer: Link(peer, channel.detach()) for peer, channel in channels.items()},
            names=self._names,
            hosts=self._hosts,
            timeout_s=timeout_s,
        )
        self._timeout_s, self._connect, self._mailboxes = timeout_s, connect, list[SocketMailbox]()
        self._background, self._scratch, self._sequence = Background("manyhands-ring"), Scratch(), 0

    # -- the contract ------------------------------------------------------------------------------------------------

    @override
    def allocate(self, n: int, dtype: torch.dtype) -> Tensor:
        self._links.check()
        return torch.zeros(n, dtype=dtype)

    @override
    def start_mean_(self, tensor: Tensor, weight: float = 1.0, bits: int = 0, lost: Tensor | None = None) -> Work:
        check_mean(tensor, weight, bits, lost)
        self._links.check()
        blob = bits_bytes(bits)
        return self._background.start(lambda: self._mean(tensor, float(weight), blob, lost))

    @override
    def mean_(self, tensor: Tensor, weight: float = 1.0, bits: int = 0, lost: Tensor | None = None) -> MeanResult:
        """As the contract says; in the caller's thread, since a hand-over costs more than a small mean."""
        check_mean(tensor, weight, bits, lost)
        self._background.drain()
        return self._mean(tensor, float(weight), bits_bytes(bits), lost)

    @override
    def all_reduce_(self, tensor: Tensor) -> None:
        check_sum(tensor)
        self._background.drain()
        transfer = self._transfer(tensor)
        exchange = exchange_of(transfer)
        self._meet("all_reduce_", transfer)
        self._finish("all_reduce_", exchange, None)
        restore(transfer.flat, tensor)

    @override
    def all_gather(self, tensor: Tensor) -> Tensor:
        self._background.drain()
        flat = _on_cpu(tensor)
        result = torch.empty((self.size, flat.numel()), dtype=tensor.dtype)
        result[self.rank].copy_(flat)
        if self.size > 2 and flat.nbytes > DIRECT_BYTES:
            self._gather_round(result)
        else:
            self._gather_directly(flat, result)
        return result.view(self.size, *tensor.shape).to(tensor.device)

    @override
    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        check_sum(tensor)
        self._background.drain()
        transfer, peers = self._transfer(tensor), self._links.peers
        transfer.first_out = {peer: slice_of(peer, self.size, transfer.n) for peer in peers}
        low, high = slice_of(self.rank, self.size, transfer.n)
        transfer.first_in = dict.fromkeys(peers, (low, high))
        self._meet("reduce_scatter", transfer)
        result = transfer.flat[low:high].clone()
        for start, stop in transfer.chunks((low, high)) if peers else ():
            mine = result[start - low : stop - low]
            add_up(transfer.take_from_all((start, stop), mine), None, mine)
        self._links.flush()
        transfer.count(self.ledger, "reduce_scatter")
        return result.to(tensor.device)

    @override
    def broadcast_(self, tensor: Tensor, source: int) -> None:
        check_rank(source, self.size, "source")
        self._background.drain()
        transfer = self._transfer(tensor)
        parent, children = self._tree(source, transfer)
        everything = (0, transfer.n)
        if self.rank == source:
            transfer.first_out = dict.fromkeys(children, everything)
        elif parent == source:
            transfer.first_in = {source: everything}
        self._meet("broadcast_", transfer, source)
        for chunk in transfer.chunks(everything) if self.rank != source else ():
            transfer.take(parent, chunk)
            for child in children:
                transfer.enqueue(child, chunk)
            self._links.push()
        self._links.flush()
        if children:
            transfer.count(self.ledger, "broadcast_")
        restore(transfer.flat, tensor)

    @override
    def send(self, tensor: Tensor, target: int) -> None:
        """As the contract says. What the sockets' buffers hold leaves at once; more waits until `target` receives."""
        check_peer(target, self.rank, self.size, "target")
        self._background.drain()
        self._links.begin("send", self.step)
        self._queue(_on_cpu(tensor), target)
        self._leave(tensor, target)

    @override
    def receive_(self, tensor: Tensor, source: int) -> None:
        check_peer(source, self.rank, self.size, "source")
        self._background.drain()
        self._links.begin("receive_", self.step)
        self._take(tensor, source)

    @override
    def swap(self, tensor: Tensor, target: int, into: Tensor, source: int) -> None:
        """As the contract says, both ways at once: while this rank waits for what comes, what it enqueued leaves."""
        check_swap(tensor, target, into, source, self.rank, self.size)
        self._background.drain()
        self._links.begin("swap", self.step)
        self._queue(_on_cpu(tensor), target)
        self._take(into, source)
        self._leave(tensor, target)

    @override
    def barrier(self) -> None:
        self._background.drain()
        self._meet("barrier", self._transfer(_NOTHING))

    @override
    def all_gather_json(self, value: Any) -> list[Any]:
        own = json_bytes(value)
        self._background.drain()
        arrivals = self._meet("all_gather_json", self._transfer(_NOTHING), text=own)
        return [json.loads(text) for _, text in arrivals]

    @override
    def open_mailbox(self, longest: int) -> Mailbox:
        return self.open_mailbox_of(self, longest)

    def open_mailbox_of(self, group: Group, longest: int) -> Mailbox:
        """As `open_mailbox`, of a group of which this one is a part, and which counts what is sent."""
        if self._connect is None:
            return super().open_mailbox(longest)
        self._mailboxes.append(SocketMailbox(group, self._connect(), self._names, self._hosts, self._timeout_s))
        return self._mailboxes[-1]

    @override
    def close(self) -> None:
        """As the contract says. A mean that is under way fails: wait for its handle first."""
        if self._background.busy:
            self._links.interrupt()
        self._background.close(_CLOSING_S)
        for mailbox in self._mailboxes:
            mailbox.close()
        self._links.close()

    @override
    def lose(self, name: int, host: str) -> None:
        """As the contract says; the other peers are not notified."""
        self._links.lose(name, host)

    def abandon(self, error: ManyhandsError) -> None:
        """Give up for a reason the peers cannot see: they raise it too. The group is unusable from then on."""
        self._background.drain()
        self._links.fail(error)

    # -- how ---------------------------------------------------------------------------------------------------------

    def _queue(self, flat: Tensor, target: int) -> None:
        """Give a message to its link; `flat` must stay as it is until all of it has left."""
        number = signature("send", flat.dtype)
        self._links[target].enqueue(Frame(kind=SEND, elements=flat.nbytes, a=number, b=flat.numel()), bytes_of(flat))
        self._links.push()

    def _leave(self, tensor: Tensor, target: int) -> None:
        """Return once what was enqueued for `target` has left; other ranks may have left the group."""
        self._links.flush_to(target, self._links[target].enqueued)
        self.ledger.add("send", tensor.nbytes)

    def _take(self, tensor: Tensor, source: int) -> None:
        """Fill `tensor` with the next message of `source`."""
        flat, number = _on_cpu(tensor), signature("send", tensor.dtype)
        frame = self._links.header(source)
        if (frame.kind, frame.a, frame.b, frame.elements) != (SEND, number, flat.numel(), flat.nbytes):
            rank, peer = self._links.names[self.rank], self._links.names[source]
            expected = describe(number, flat.numel())
            raise self._links.fail(other_message(self.step, rank, expected, peer, _called(frame)))
        self._links.fill(source, bytes_of(flat))
        restore(flat, tensor)

    def _mean(self, tensor: Tensor, weight: float, blob: bytes, lost: Tensor | None) -> MeanResult:
        transfer = self._transfer(tensor)
        exchange = exchange_of(transfer)
        if lost is not None:
            exchange.lost = lost.zero_()
        arrivals = self._meet("mean_", transfer, weight=weight, text=blob)
        weights = [own for own, _ in arrivals]
        total = MeanResult.of(weights, (bits_of(bits) for _, bits in arrivals))
        if total.weight and self.size > 1:
            self._finish("mean_", exchange, shares_of(weights, total.weight))
            restore(transfer.flat, tensor)
        elif self.size > 1 and transfer.n:
            exchange.skip()
            transfer.count(self.ledger, "mean_", exchange.messages)
        return total

    def _finish(self, operation: str, exchange: Exchange, shares: Shares) -> None:
        if self.size > 1 and exchange.transfer.n:
            exchange.finish(shares)
            exchange.transfer.count(self.ledger, operation, exchange.messages)

    def _gather_directly(self, flat: Tensor, result: Tensor) -> None:
        """Each to all at once."""
        transfer = self._transfer(flat)
        transfer.first_out = transfer.first_in = dict.fromkeys(self._links.peers, (0, transfer.n))
        self._meet("all_gather", transfer)
        for peer in self._links.peers:
            self._links.fill(peer, bytes_of(result[peer]))
        self._links.flush()
        transfer.count(self.ledger, "all_gather")

    def _gather_round(self, result: Tensor) -> None:
        """Round the ring: a card that all send to at once is shared unevenly, and the slowest is waited for."""
        transfer, n = self._transfer(result), result.shape[1]
        left, right = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        rows = [(rank * n, (rank + 1) * n) for rank in range(self.size)]
        transfer.first_out, transfer.first_in = {right: rows[self.rank]}, {left: rows[left]}
        self._meet("all_gather", transfer)
        for step in range(1, self.size):
            for chunk in transfer.chunks(rows[self.rank - step]):
                transfer.take(left, chunk)
                if step < self.size - 1:
                    transfer.enqueue(right, chunk)
                    self._links.push()
            transfer.opened()
        self._links.flush()
        transfer.count(self.ledger, "all_gather", self.size - 1)

    def _transfer(self, tensor: Tensor) -> Transfer:
        return Transfer(self._links, self._scratch, self.rank, self.size, self._sequence + 1, _on_cpu(tensor))

    def _tree(self, source: int, transfer: Transfer) -> tuple[int, list[int]]:
        """(who sends to this rank, to whom it passes on): from the source to all if small, else along the ring."""
        if transfer.nbytes <= DIRECT_BYTES:
            return source, self._links.peers if self.rank == source else []
        right = (self.rank + 1) % self.size
        return (self.rank - 1) % self.size, [right] if right != source else []

    def _meet(
        self, operation: str, transfer: Transfer, source: int = 0, weight: float = 1.0, text: bytes = b""
    ) -> list[tuple[float, bytes]]:
        """Arrive at an operation with what goes first, and return when all have arrived: weight and text of each."""
        if len(text) > _MOST_TEXT:
            raise BadInput(
                f"{operation} can carry at most {_MOST_TEXT:,} bytes of JSON or bits; got {len(text):,}: send them in "
                "parts, or as a tensor"
            )
        number = signature(operation, transfer.flat.dtype, source, self.line)
        self._links.begin(operation, self.step)
        self._sequence += 1
        for peer in self._links.peers:
            view = transfer.opening(peer)
            nbytes = len(text) + len(view)
            frame = Frame(kind=ARRIVE, sequence=self._sequence, elements=nbytes, weight=weight, a=number, b=transfer.n)
            self._links[peer].enqueue(frame, view, text)
        self._links.push()
        start = time.perf_counter()
        arrivals = [self._arrival(peer, number, transfer) for peer in self._links.peers]
        arrivals.insert(self.rank, (weight, text))
        if self._links.at_home:  # what a mean under way waits for, the caller does not
            self.waited_s += time.perf_counter() - start
        if not transfer.n:  # else what follows takes the rest along
            self._links.flush()
        return arrivals

    def _arrival(self, rank: int, number: int, transfer: Transfer) -> tuple[float, bytes]:
        """(weight, text) of a peer; what goes first of its tensor follows."""
        frame, coming = self._links.header(rank), transfer.coming(rank)
        called = frame.kind, frame.sequence, without_line(frame.a), frame.b
        if called != (ARRIVE, self._sequence, without_line(number), transfer.n):
            me, peer, own = self._links.names[self.rank], self._links.names[rank], describe(number, transfer.n)
            raise self._links.fail(different_operations(self.step, me, own, peer, _called(frame)))
        if not 0 <= frame.elements - coming <= _MOST_TEXT:
            raise self._links.fail(
                ManyhandsError(
                    f"worker {self._links.names[rank]} announced {frame.elements} bytes with {_called(frame)}; expected "
                    f"{coming} and at most {_MOST_TEXT} of bits or JSON: use the same version of manyhands on all hosts"
                )
            )
        text = bytearray(frame.elements - coming)
        self._links.fill(rank, memoryview(text))
        return frame.weight, bytes(text)


def _on_cpu(tensor: Tensor) -> Tensor:
    """[n] the elements in order, on the CPU; `restore` puts them back."""
    return flattened(tensor).cpu()


def _called(frame: Frame) -> str:
    """What a peer called, in words, as far as its frame shows."""
    if frame.kind not in (ARRIVE, SEND):
        return "something else"
    try:
        return describe(frame.a, frame.b)
    except IndexError:
        return "something unknown"
