"""The group of simulated workers: real tensors, the arithmetic of one host, the time of the simulated network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from manyhands.comm.checks import (
    check_mean,
    check_peer,
    check_rank,
    check_sum,
    check_swap,
    closed,
    flattened,
    json_bytes,
    restore,
    signature,
    slice_of,
)
from manyhands.comm.group import Group, Ledger, MeanResult, Work
from manyhands.comm.mailbox import Mailbox
from manyhands.comm.reducing import CHUNK, reduce_everywhere, shares_of, sum_of
from manyhands.engines.sim.collectives import Cost
from manyhands.engines.sim.compute import Compute
from manyhands.engines.sim.rendezvous import CollectiveCall, PendingMessage, Round, Run, SimRendezvous

_NOTHING = torch.empty(0, dtype=torch.uint8)
_FREE = Cost(0.0, [], [])


class SimGroup(Group):
    """One simulated worker's. Only the program of this rank calls it, in its turn.

    A collective is computed at once when the last rank comes, in all ranks' own tensors, with the bits that
    SharedMemoryGroup gives at one thread a worker. It is over, for everybody, when the last rank has come, the group's
    collective before it is over, and the time has passed that its algorithm takes on this network: see `Costs`. A mean
    that was started travels while its worker computes. `waited_s` ends with the last arrival; what follows is exchange.

    send leaves at once, of any size: the message waits for this worker's network card, not the worker. share: any
    tensor. Codecs take what `compute` says (nothing without it), before what they send leaves and after it has come.
    Ledger: what this rank sends in the algorithm that `Costs` chose, without words (weights, bits, JSON, barriers).

    After PeerLost the tensors of operations that were under way hold what they held, or the result.
    """

    def __init__(self, meeting: SimRendezvous, rank: int, compute: Compute | None = None) -> None:
        check_rank(rank, meeting.size, "rank")
        self.rank, self.size, self.ledger = rank, meeting.size, Ledger()
        self._meeting, self._compute = meeting, compute or Compute()
        self._closed, self._boxes = False, 0

    @override
    def allocate(self, n: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(n, dtype=dtype)

    @override
    def start_mean_(self, tensor: Tensor, weight: float = 1.0, bits: int = 0, lost: Tensor | None = None) -> Work:
        check_mean(tensor, weight, bits, lost)
        call = self._call("mean_", signature("mean_", tensor.dtype), tensor)
        call.weight, call.bits = float(weight), bits
        if lost is not None:
            call.lost = lost.zero_()
        return _Started(self, self._arrive(call, self._mean), call.step)

    @override
    def all_reduce_(self, tensor: Tensor) -> None:
        check_sum(tensor)
        self._complete(self._call("all_reduce_", signature("all_reduce_", tensor.dtype), tensor), self._sum)

    @override
    def all_gather(self, tensor: Tensor) -> Tensor:
        rows = self._complete(self._call("all_gather", signature("all_gather", tensor.dtype), tensor), self._gather)
        own: Tensor = rows.clone()  # one rank's at a time, where it is not kept
        return own.view(self.size, *tensor.shape)

    @override
    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        check_sum(tensor)
        call = self._call("reduce_scatter", signature("reduce_scatter", tensor.dtype), tensor)
        low, high = slice_of(self.rank, self.size, call.n)
        result: Tensor = self._complete(call, self._scatter)[low:high].clone()
        return result

    @override
    def broadcast_(self, tensor: Tensor, source: int) -> None:
        check_rank(source, self.size, "source")
        call = self._call("broadcast_", signature("broadcast_", tensor.dtype, source), tensor)
        self._complete(call, lambda calls: self._broadcast(calls, source))

    @override
    def send(self, tensor: Tensor, target: int) -> None:
        check_peer(target, self.rank, self.size, "target")
        message = PendingMessage(signature("send", tensor.dtype), flattened(tensor).clone())
        self._meeting.send(message, self.rank, target, self.step)
        self.ledger.add("send", tensor.nbytes)

    @override
    def receive_(self, tensor: Tensor, source: int) -> None:
        check_peer(source, self.rank, self.size, "source")
        number = signature("send", tensor.dtype)
        message, waited_s = self._meeting.take(source, self.rank, self.step)
        self.waited_s += waited_s
        if (message.number, message.data.numel()) != (number, tensor.numel()):
            raise self._meeting.refuse(message, number, tensor.numel(), source, self.rank, self.step)
        tensor.detach().copy_(message.data.view(tensor.shape))

    @override
    def swap(self, tensor: Tensor, target: int, into: Tensor, source: int) -> None:
        """As the contract says: what is sent leaves at once, so that both are on their way together."""
        check_swap(tensor, target, into, source, self.rank, self.size)
        self.send(tensor, target)
        self.receive_(into, source)

    @override
    def barrier(self) -> None:
        self._complete(self._call("barrier", signature("barrier")), lambda calls: (self._words(), None))

    @override
    def all_gather_json(self, value: Any) -> list[Any]:
        call = self._call("all_gather_json", signature("all_gather_json"))
        call.text = json_bytes(value).decode()
        values: list[Any] = json.loads(self._complete(call, self._texts))
        return values

    @override
    def share(self, tensor: Tensor, owner: int) -> Tensor:
        check_rank(owner, self.size, "owner")
        call = self._call("share", signature("broadcast_", tensor.dtype, owner), tensor)
        shared: Tensor = self._complete(call, lambda calls: (_FREE, calls[owner].tensor))
        return shared

    @override
    def open_mailbox(self, longest: int) -> Mailbox:
        self._boxes += 1
        return SimMailbox(self, self._meeting, self._boxes)

    @override
    def encoded(self, codec: str, n: int, nbytes: int) -> None:
        self._meeting.timeline.work(self._compute.coding(codec, self.rank).encoding(n, nbytes))

    @override
    def decoded(self, codec: str, n: int, nbytes: int, payloads: int = 1) -> None:
        self._meeting.timeline.work(self._compute.coding(codec, self.rank).decoding(n, nbytes, payloads))

    @override
    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._meeting.leave(self.rank)

    # -- how a call takes its course ---------------------------------------------------------------------------------

    def _call(self, name: str, number: int, tensor: Tensor = _NOTHING) -> CollectiveCall:
        return CollectiveCall(self.rank, name, number, tensor, self.step, self.ledger)

    def _arrive(self, call: CollectiveCall, run: Run) -> Round:
        if self._closed:
            raise closed()
        return self._meeting.arrive(call, run)

    def _complete(self, call: CollectiveCall, run: Run) -> Any:
        round_ = self._arrive(call, run)
        self.end(round_, call.name, call.step)
        return round_.result

    def end(self, round_: Round, name: str, step: int) -> None:
        self.waited_s += self._meeting.end(round_, self.rank, name, step)

    # -- what collectives do, with all ranks' calls ------------------------------------------------------------------

    def _mean(self, calls: Sequence[CollectiveCall]) -> tuple[Cost, MeanResult]:
        weights = [call.weight for call in calls]
        total = MeanResult.of(weights, (call.bits for call in calls))
        if not total.weight or not calls[0].n:
            return self._words(), total
        if self.size > 1:
            _reduce(calls, shares_of(weights, total.weight))
        return self._meeting.costs.mean(calls[0].n, calls[0].tensor.itemsize), total

    def _sum(self, calls: Sequence[CollectiveCall]) -> tuple[Cost, None]:
        if not calls[0].n:
            return self._words(), None
        _reduce(calls, None)
        return self._meeting.costs.mean(calls[0].n, calls[0].tensor.itemsize), None

    def _gather(self, calls: Sequence[CollectiveCall]) -> tuple[Cost, Tensor]:
        rows = torch.stack([flattened(call.tensor) for call in calls])
        return self._meeting.costs.all_gather(calls[0].n, calls[0].tensor.itemsize), rows

    def _scatter(self, calls: Sequence[CollectiveCall]) -> tuple[Cost, Tensor]:
        total = sum_of([flattened(call.tensor) for call in calls])
        return self._meeting.costs.reduce_scatter(calls[0].n, calls[0].tensor.itemsize), total

    def _broadcast(self, calls: Sequence[CollectiveCall], source: int) -> tuple[Cost, None]:
        given = flattened(calls[source].tensor)
        for call in calls:
            if call.rank != source:
                call.tensor.detach().copy_(given.view(call.tensor.shape))
        return self._meeting.costs.broadcast(calls[0].n, given.itemsize, source), None

    def _texts(self, calls: Sequence[CollectiveCall]) -> tuple[Cost, str]:
        cost = self._meeting.costs.json([len(call.text) for call in calls])
        return cost, f"[{','.join(call.text for call in calls)}]"

    def _words(self) -> Cost:
        return self._meeting.costs.barrier()


class SimMailbox(Mailbox):
    """A message leaves at once to each peer, one after the other: the network card is what waits, not the worker."""

    def __init__(self, group: SimGroup, meeting: SimRendezvous, box: int) -> None:
        super().__init__(group)
        self._meeting, self._box = meeting, box

    @override
    def _send(self, payload: Tensor) -> None:
        data = payload.clone()
        for peer in range(self.size):
            if peer != self.rank:
                self._meeting.send(PendingMessage(0, data), self.rank, peer, self._group.step, self._box)

    @override
    def _collect(self) -> None:
        for peer in range(self.size):
            while self._meeting.has_arrived(peer, self.rank, self._box):
                self._next_of(peer)

    @override
    def _wait_for(self, peer: int, count: int) -> float:
        waited_s = 0.0
        while len(self._inbox[peer]) < count:
            waited_s += self._next_of(peer)
        return waited_s

    def _next_of(self, peer: int) -> float:
        message, waited_s = self._meeting.take(peer, self.rank, self._group.step, self._box)
        self._inbox[peer].append(message.data)
        return waited_s


class _Started(Work):
    def __init__(self, group: SimGroup, round_: Round, step: int) -> None:
        self._group, self._round, self._step = group, round_, step

    @override
    def wait(self) -> MeanResult:
        self._group.end(self._round, "mean_", self._step)
        total: MeanResult = self._round.result
        return total


def _reduce(calls: Sequence[CollectiveCall], shares: Sequence[float | None] | None) -> None:
    """Replace all ranks' tensors by the sum of tensor·share in rank order, in pieces that stay in the cache."""
    flats = [flattened(call.tensor) for call in calls]
    n, length, lost = calls[0].n, CHUNK // calls[0].tensor.itemsize, calls[0].lost
    for start in range(0, n, length):
        part = slice(start, start + length)
        pieces = [flat[part] for flat in flats] if n > length else flats
        reduce_everywhere(pieces, shares, None if lost is None else lost[part])
    for flat, call in zip(flats, calls, strict=True):
        restore(flat, call.tensor)
