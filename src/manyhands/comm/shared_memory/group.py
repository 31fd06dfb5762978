"""The group of workers on one host: they work on each other's tensors, in memory that all of them map.

The group is a table, see `table`, and its members' arenas, in which their tensors lie. A later group has a table of its
own and maps the arenas again: no vector is copied when it is formed, whoever its members are.

A mean of allocated tensors takes two steps. Everybody says that its tensor is ready; then each rank reduces its own
slice over all ranks' tensors and writes the result into all of them. Nothing is copied on the way. Tensors from
elsewhere are staged through shared memory in pieces.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from manyhands.comm.checks import (
    bits_bytes,
    bits_of,
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
from manyhands.comm.reducing import reduce_everywhere, shares_of, sum_of
from manyhands.comm.shared_memory.collectives import CollectiveRounds, DirectMessages, Operation, Places
from manyhands.comm.shared_memory.mailbox import SharedMailbox, region_bytes
from manyhands.comm.shared_memory.memory import Arena, create_arena
from manyhands.comm.shared_memory.synchronisation import Header, LivenessPipes, SharedCounters, Waiting
from manyhands.comm.shared_memory.table import GroupMemory, SharedMemory, create_table
from manyhands.errors import Unsupported

__all__ = ["Arena", "SharedMemory", "SharedMemoryGroup", "create_arena", "create_table"]

_ALIGNED = 64  # elements: ranks' slices of a mean begin on cache lines of their own
_COPIED = 1 << 22  # bytes of a tensor from elsewhere that is copied into the arena to be added up
_SIZES = 64  # of tensors whose places there are remembered
_NOTHING = torch.empty(0, dtype=torch.uint8)


class SharedMemoryGroup(Group):
    """Workers of one host. Only one thread of a process may use it.

    memory: descriptors, mapped and closed here: a table, which no other group has used, then the arena of each rank.
        `SharedMemory.create(size)` gives them all; `create_table` and `create_arena` give those that are new.
    arena: this rank's own, mapped already, where its vectors lie in it: those that were allocated before count as the
        group's own. It is the caller's and stays open. Without, the arena is the group's: no later group finds it.
        Nobody may still be at work in an earlier group on these arenas: peers write into each other's tensors, so
        whoever was there has closed that group, or its process has ended.
    lifelines: a pipe per rank as (read end, write end), see `LivenessPipes`; the group's own from now on.
        Without any, a peer's death is noticed only by its silence.
    hosts: where each rank is, for messages. names: the ranks by which messages call them, where the group is a part of
        a run.
    timeout_s: a peer for which others wait and which shows no progress for so long counts as lost.

    Operations complete in the order in which they were begun, on every rank. Handles may be many: from 64 on, the next
    `start_mean_` completes the oldest.

    Ledger: what this rank moves between its own memory and others'. A mean or sum: its slice, read from each counted
    peer (one message) and written to each peer (another): over all ranks 2·(size-1)·n elements. all_gather and
    reduce_scatter: what is read from peers. broadcast_ and send: counted where they come from.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        memory: Sequence[int],
        *,
        arena: Arena | None = None,
        lifelines: Sequence[tuple[int, int]] = (),
        hosts: Sequence[str] = (),
        names: Sequence[int] = (),
        timeout_s: float = 300.0,
    ) -> None:
        check_rank(rank, size, "rank")
        self.rank, self.size, self.ledger = rank, size, Ledger()
        assert len(memory) == 1 + size, "a table, and an arena for each rank"
        self._arena, self._lent = arena or Arena(memory[1 + rank]), arena is not None
        self._memory = GroupMemory(rank, self._arena, memory)
        for fd in memory:
            os.close(fd)
        self._board = SharedCounters(rank, size, self._memory)
        self._lifelines = LivenessPipes(rank, lifelines)
        hosts, names = list(hosts) or ["localhost"] * size, list(names) or range(size)
        self._waiting = Waiting(self._board, self._lifelines, hosts, names, timeout_s)
        self._copy: Tensor | None = None  # [_COPIED] uint8 in the arena, once it is needed
        self._copies: dict[tuple[int, torch.dtype], Tensor] = {}  # views of its start
        self._messages = DirectMessages(self._memory, self._board, self._waiting)
        self._rounds = CollectiveRounds(self, self._arena, self._memory, self._board, self._waiting)

    # -- the contract ------------------------------------------------------------------------------------------------

    @override
    def allocate(self, n: int, dtype: torch.dtype) -> Tensor:
        self._waiting.check()
        return self._arena.allocate(n, dtype)

    @override
    def start_mean_(self, tensor: Tensor, weight: float = 1.0, bits: int = 0, lost: Tensor | None = None) -> Work:
        check_mean(tensor, weight, bits, lost)
        number, run, blob = (
            signature("mean_", tensor.dtype, line=self.line),
            partial(self._mean, lost=lost),
            bits_bytes(bits),
        )
        return self._rounds.begin(Operation(self._rounds, number, tensor, run, weight=float(weight), blob=blob))

    @override
    def all_reduce_(self, tensor: Tensor) -> None:
        check_sum(tensor)
        add = partial(self._reduce, shares=None)
        if tensor.nbytes > _COPIED or tensor.device.type != "cpu" or self._arena.locate(tensor) >= 0:
            self._complete("all_reduce_", tensor, add)
            return
        own = self._copies.get((tensor.numel(), tensor.dtype))  # two copies of this rank's own take less than staging
        if own is None:
            own = self._copied(tensor.numel(), tensor.dtype)
        shaped, tensor = own.view(tensor.shape), tensor.detach()
        shaped.copy_(tensor)
        self._complete("all_reduce_", own, add)
        tensor.copy_(shaped)

    @override
    def all_gather(self, tensor: Tensor) -> Tensor:
        result = torch.empty((self.size, tensor.numel()), dtype=tensor.dtype, device=tensor.device)

        def copy(places: Places, start: int, stop: int) -> None:
            for rank, place in enumerate(places):
                result[rank, start:stop].copy_(self._memory.view(rank, place, stop - start, tensor.dtype))

        self._complete("all_gather", tensor, partial(self._rounds.go_through, work=copy))
        self.ledger.add("all_gather", (self.size - 1) * tensor.nbytes)
        return result.view(self.size, *tensor.shape)

    @override
    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        check_sum(tensor)
        low, high = slice_of(self.rank, self.size, tensor.numel())
        result = torch.empty(high - low, dtype=tensor.dtype, device=tensor.device)

        def add(places: Places, start: int, stop: int) -> None:
            at = max(low, start)
            for pieces in self._rounds.pieces(places, at - start, min(high, stop) - start, tensor.dtype):
                result[at - low : at - low + len(pieces[0])].copy_(sum_of(pieces))
                at += len(pieces[0])

        self._complete("reduce_scatter", tensor, partial(self._rounds.go_through, work=add))
        self.ledger.add("reduce_scatter", (self.size - 1) * result.nbytes)
        return result

    @override
    def broadcast_(self, tensor: Tensor, source: int) -> None:
        check_rank(source, self.size, "source")
        mine, flat = self.rank == source, flattened(tensor)

        def copy(places: Places, start: int, stop: int) -> None:
            if not mine:
                flat[start:stop].copy_(self._memory.view(source, places[source], stop - start, tensor.dtype))

        self._complete("broadcast_", tensor, partial(self._rounds.go_through, work=copy, lay_out=mine), source)
        if mine:
            self.ledger.add("broadcast_", (self.size - 1) * tensor.nbytes)
        else:
            restore(flat, tensor)

    @override
    def send(self, tensor: Tensor, target: int) -> None:
        """As the contract says. Up to 1 MB leaves at once; more waits until `target` receives."""
        self._waiting.check()
        check_peer(target, self.rank, self.size, "target")
        self._messages.send(flattened(tensor).view(torch.uint8), signature("send", tensor.dtype), target, self.step)
        self.ledger.add("send", tensor.nbytes)

    @override
    def receive_(self, tensor: Tensor, source: int) -> None:
        self._waiting.check()
        check_peer(source, self.rank, self.size, "source")
        flat = flattened(tensor)
        self._messages.receive(flat.view(torch.uint8), signature("send", tensor.dtype), source, self.step)
        restore(flat, tensor)

    @override
    def swap(self, tensor: Tensor, target: int, into: Tensor, source: int) -> None:
        """As the contract says, piece by piece in turn."""
        self._waiting.check()
        check_swap(tensor, target, into, source, self.rank, self.size)
        own, came = flattened(tensor), flattened(into)
        number = signature("send", tensor.dtype)
        self._messages.swap(own.view(torch.uint8), target, came.view(torch.uint8), source, number, self.step)
        self.ledger.add("send", tensor.nbytes)
        restore(came, into)

    @override
    def barrier(self) -> None:
        self._complete("barrier", _NOTHING, lambda operation, headers: None)

    @override
    def all_gather_json(self, value: Any) -> list[Any]:
        texts: list[bytes] = []

        def gather(operation: Operation, headers: list[Header]) -> None:
            texts.extend(self._rounds.blobs(operation, headers))

        self._complete("all_gather_json", _NOTHING, gather, blob=json_bytes(value))
        return [json.loads(text) for text in texts]

    @override
    def share(self, tensor: Tensor, owner: int) -> Tensor:
        self._waiting.check()
        check_rank(owner, self.size, "owner")
        offset = self._arena.locate(tensor) if tensor.device.type == "cpu" else -1
        if self.rank == owner and offset >= 0:
            self._arena.keep(offset)
        # ranks let go of memory at different times, and so may lie differently
        offset = self.all_gather_json(offset)[owner]
        if offset < 0:
            raise Unsupported(
                "workers can share only memory from allocate(), which is on the CPU, and this tensor (on "
                f"{tensor.device}) is not such memory: train on the CPU (device='cpu')"
            )
        return self._memory.view(owner, offset, tensor.numel(), tensor.dtype)

    @override
    def open_mailbox(self, longest: int) -> Mailbox:
        self._waiting.check()
        own = self.allocate(region_bytes(self.size, longest), torch.uint8)
        return SharedMailbox(self, [self.share(own, owner) for owner in range(self.size)], longest, self._waiting)

    @override
    def close(self) -> None:
        """As the contract says. Tensors stay valid for as long as they are referenced, views of peers' included.

        Means under way end here: whoever waits for one gets the error that broke the group, or that it was closed.
        """
        self._waiting.fail(closed())
        self._rounds.close()
        self._board.close()
        self._memory.close()
        self._copy = None
        self._copies.clear()
        if not self._lent:
            self._arena.close()
        self._lifelines.close()

    # -- how -----------------------------------------------------------------------------------------------------------

    def _copied(self, n: int, dtype: torch.dtype) -> Tensor:
        """[n] in the arena, for one operation at a time."""
        self._waiting.check()
        if self._copy is None:
            self._copy = self._arena.allocate(_COPIED, torch.uint8)
        if len(self._copies) == _SIZES:
            self._copies.clear()
        own = self._copies[n, dtype] = self._copy[: n * dtype.itemsize].view(dtype)
        return own

    def _complete(
        self,
        name: str,
        tensor: Tensor,
        run: Callable[[Operation, list[Header]], None],
        source: int = 0,
        blob: bytes = b"",
    ) -> None:
        number = signature(name, tensor.dtype, source, self.line)
        self._rounds.begin(Operation(self._rounds, number, tensor, run, blob=blob)).wait()

    def _mean(self, operation: Operation, headers: list[Header], lost: Tensor | None) -> None:
        weights = [header.weight for header in headers]
        blobs = self._rounds.blobs(operation, headers) if any(header.blob for header in headers) else []
        operation.total = total = MeanResult.of(weights, map(bits_of, blobs))
        if lost is not None:
            lost.zero_()
        if total.weight and self.size > 1:
            self._reduce(operation, headers, shares_of(weights, total.weight), lost)

    def _reduce(
        self, operation: Operation, headers: list[Header], shares: list[float | None] | None, lost: Tensor | None = None
    ) -> None:
        """Each rank reduces its slice in everybody's memory; `shares` None is the plain sum."""
        moved = 0

        def reduce(places: Places, start: int, stop: int) -> None:
            nonlocal moved
            n = stop - start
            length = -(-n // (self.size * _ALIGNED)) * _ALIGNED
            low, high = min(n, self.rank * length), min(n, (self.rank + 1) * length)
            for pieces in self._rounds.pieces(places, low, high, operation.tensor.dtype):
                length = len(pieces[0])
                reduce_everywhere(pieces, shares, None if lost is None else lost[start + low : start + low + length])
                low += length
                moved += length

        if operation.n:
            self._rounds.go_through(operation, headers, reduce, put_back=True)
            peers = [peer for peer in range(self.size) if peer != self.rank]
            read = sum(shares is None or shares[peer] is not None for peer in peers)
            nbytes = moved * (read + len(peers)) * operation.tensor.dtype.itemsize
            self.ledger.add(operation.name, nbytes, messages=2)
