"""Collectives over shared memory, and messages between two ranks.

An operation has an arrival, which publishes a header, and, unless there is no data, rounds. In a round the data of all
ranks lies at known places in their memory; each rank moves its part, and nobody goes on before all have. Tensors in
the ranks' arenas need a single round; as soon as one rank's tensor lies elsewhere, all go through it in pieces that fit
into the table's scratch area. `DirectMessages` carries the tensors of `send` and `receive_`.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from typing_extensions import override

from manyhands.comm.checks import (
    OPERATIONS,
    describe,
    different_operations,
    flattened,
    itemsize,
    other_message,
    restore,
    without_line,
)
from manyhands.comm.group import Group, MeanResult, Work
from manyhands.comm.reducing import CHUNK
from manyhands.comm.shared_memory.memory import PAGE, Arena
from manyhands.comm.shared_memory.synchronisation import (
    ARRIVED,
    DONE,
    INLINE,
    READY,
    Header,
    SharedCounters,
    Waiting,
    fence,
)
from manyhands.comm.shared_memory.table import IN_TABLE, MAIL, OUTSTANDING, RING, SCRATCH, GroupMemory

_PLANS = 256  # places whose pieces are remembered
_NOTHING = torch.empty(0)

Places = Sequence[int]
"""By rank: where the same element lies in each rank's memory, as `GroupMemory` has it."""

PieceWork = Callable[[Places, int, int], None]
"""(places, start, stop): move this rank's part of the elements [start, stop); `places` is where `start` lies."""


@dataclass(slots=True, eq=False)
class Operation(Work):
    """A collective under way. `run` moves its data, once all ranks have arrived; it gets their headers."""

    rounds: CollectiveRounds
    signature: int
    tensor: Tensor
    run: Callable[[Operation, list[Header]], None]
    weight: float = 1.0
    blob: bytes = b""
    n: int = 0
    offset: int = -1
    sequence: int = 0
    total: MeanResult = field(default_factory=lambda: MeanResult(0.0, 0))
    finished: bool = False

    @property
    def name(self) -> str:
        return OPERATIONS[self.signature & 0xFF]

    @override
    def wait(self) -> MeanResult:
        self.rounds.finish(self)
        return self.total

    def let_go(self) -> None:
        """It will not run any more, and `wait` raises the group's error."""
        self.tensor, self.run = _NOTHING, lambda operation, headers: None


class CollectiveRounds:
    """One rank's part in the collectives of `group`, in the order in which they were begun."""

    def __init__(
        self, group: Group, arena: Arena, memory: GroupMemory, board: SharedCounters, waiting: Waiting
    ) -> None:
        self._group, self._arena, self._memory, self._board, self._waiting = group, arena, memory, board, waiting
        self._scratch = [memory.layout.scratch(rank) for rank in range(group.size)]
        self._peers = [rank for rank in range(group.size) if rank != group.rank]
        self._begun, self._rounds = 0, {READY: 0, DONE: 0}
        self._under_way: deque[Operation] = deque()
        self._plans: dict[tuple[object, ...], list[list[Tensor]]] = {}

    def begin(self, operation: Operation) -> Operation:
        """Arrive at an operation: its header, and its tensor if that is in shared memory, are there for all."""
        self._waiting.check()
        if len(self._under_way) == OUTSTANDING:
            self._run_next()
        tensor = operation.tensor
        operation.n = tensor.numel()
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            operation.offset = self._arena.locate(tensor)
        self._begun += 1
        operation.sequence = self._begun
        header = Header(operation.signature, operation.n, operation.weight, operation.offset, len(operation.blob))
        self._board.write(operation.sequence, header, operation.blob)
        fence()
        self._board.raise_to(ARRIVED, operation.sequence)
        self._under_way.append(operation)
        return operation

    def finish(self, operation: Operation) -> None:
        """Complete an operation, and before it those that were begun earlier."""
        while not operation.finished:
            self._waiting.check()
            self._run_next()

    def close(self) -> None:
        """Let go of all tensors, those of operations under way included: whoever waits for one gets the group's error."""
        self._plans.clear()
        for operation in self._under_way:
            operation.let_go()
        self._under_way.clear()

    # -- for `run` ---------------------------------------------------------------------------------------------------

    def go_through(
        self, operation: Operation, headers: list[Header], work: PieceWork, lay_out: bool = True, put_back: bool = False
    ) -> None:
        """Call `work` for all of the operation's elements, and return when all ranks have done their part.

        lay_out: the others need what this rank's tensor holds. put_back: the others change it.
        """
        if min(header.offset for header in headers) >= 0:
            work([header.offset for header in headers], 0, operation.n)
            self._all(DONE, operation)
            return
        rank, itemsize = self._group.rank, operation.tensor.dtype.itemsize
        outside = operation.offset < 0 and (lay_out or put_back)
        flat = flattened(operation.tensor) if outside else operation.tensor
        staged = [IN_TABLE + place for place in self._scratch]
        for start in range(0, operation.n, SCRATCH // itemsize):
            stop = min(operation.n, start + SCRATCH // itemsize)
            scratch = self._memory.view(rank, staged[rank], stop - start, operation.tensor.dtype)
            if outside and lay_out:
                scratch.copy_(flat[start:stop])
            self._all(READY, operation)
            offsets = enumerate(header.offset for header in headers)
            work([staged[peer] if at < 0 else at + start * itemsize for peer, at in offsets], start, stop)
            self._all(DONE, operation)
            if outside and put_back:
                flat[start:stop].copy_(scratch)
        if outside and put_back:
            restore(flat, operation.tensor)

    def pieces(self, places: Places, start: int, stop: int, dtype: torch.dtype) -> list[list[Tensor]]:
        """All ranks' elements [start, stop) after `places`, cut to the size of the cache: [pieces][size]."""
        key = (*places, start, stop, dtype)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) == _PLANS:
                self._plans.clear()
            plan, length = [], CHUNK // dtype.itemsize
            for at in range(start, stop, length):
                n, begin = min(length, stop - at), at * dtype.itemsize
                plan.append([self._memory.view(rank, place + begin, n, dtype) for rank, place in enumerate(places)])
            self._plans[key] = plan
        return plan

    def blobs(self, operation: Operation, headers: list[Header]) -> list[bytes]:
        """What every rank gave along, of any length."""
        lengths = [header.blob for header in headers]
        if max(lengths) <= INLINE:
            return [self._board.inline(rank, operation.sequence, length) for rank, length in enumerate(lengths)]
        texts = [bytearray() for _ in lengths]
        table, own = self._memory.table, self._scratch[self._group.rank]
        for start in range(0, max(lengths), SCRATCH):
            piece = operation.blob[start : start + SCRATCH]
            table[own : own + len(piece)] = piece
            self._all(READY, operation)
            for text, place, length in zip(texts, self._scratch, lengths, strict=True):
                text += table[place : place + max(0, min(SCRATCH, length - start))]
            self._all(DONE, operation)
        return [bytes(text) for text in texts]

    # -- the protocol ------------------------------------------------------------------------------------------------

    def _run_next(self) -> None:
        operation = self._under_way.popleft()
        try:
            self._run(operation)
        except BaseException:
            operation.let_go()
            raise

    def _run(self, operation: Operation) -> None:
        start = 0.0
        for rank in self._peers:
            if self._board.words[rank][ARRIVED] < operation.sequence:
                start = start or time.perf_counter()
                self._waiting.until(rank, ARRIVED, operation.sequence, operation.name, self._group.step)
        fence()
        if start:
            self._group.waited_s += time.perf_counter() - start
        headers = [self._board.read(rank, operation.sequence) for rank in range(self._group.size)]
        own = without_line(operation.signature), operation.n
        for rank, header in enumerate(headers):
            if (without_line(header.signature), header.n) != own:
                step, called = self._group.step, describe(operation.signature, operation.n)
                theirs = describe(header.signature, header.n)
                raise self._waiting.fail(different_operations(step, self._group.rank, called, rank, theirs))
        operation.run(operation, headers)
        operation.finished = True

    def _all(self, counter: int, operation: Operation) -> None:
        """One more round laid out (READY) or done with (DONE); return when all ranks are as far."""
        self._rounds[counter] += 1
        fence()
        self._board.raise_to(counter, self._rounds[counter])
        for rank in self._peers:
            self._waiting.until(rank, counter, self._rounds[counter], operation.name, self._group.step)


_HEADER = struct.Struct("<QQ")


class DirectMessages:
    """Sends and receives flat byte tensors; a message of up to 1 MB leaves without waiting for its receiver."""

    def __init__(self, memory: GroupMemory, board: SharedCounters, waiting: Waiting) -> None:
        self._memory, self._board, self._waiting = memory, board, waiting
        self._sent, self._taken = [0] * board.size, [0] * board.size

    def send(self, data: Tensor, signature: int, target: int, step: int) -> None:
        """Lay out `data` (uint8 [n], any device) for `target`, waiting where the ring is full."""
        for start in _starts(data):
            self._lay(data, start, signature, target, step)

    def receive(self, data: Tensor, signature: int, source: int, step: int) -> None:
        """Fill `data` (uint8 [n], any device) with what `source` sends; ManyhandsError if that is something else."""
        for start in _starts(data):
            self._take(data, start, signature, source, step)

    def swap(self, data: Tensor, target: int, into: Tensor, source: int, signature: int, step: int) -> None:
        """`send` and `receive` of as many bytes, chunk by chunk in turn: nobody waits for more than one chunk."""
        for start in _starts(data):
            self._lay(data, start, signature, target, step)
            self._take(into, start, signature, source, step)

    def _lay(self, data: Tensor, start: int, signature: int, target: int, step: int) -> None:
        rank, sent = self._board.rank, self._sent[target]
        self._waiting.until(target, self._board.taken(rank), sent - RING + 1, "send", step)
        place = self._memory.layout.mail(rank, target, sent)
        _HEADER.pack_into(self._memory.table, place, signature, data.numel())
        piece = data[start : start + MAIL]
        self._memory.view(rank, IN_TABLE + place + PAGE, len(piece), torch.uint8).copy_(piece)
        fence()
        self._sent[target] = sent + 1
        self._board.raise_to(self._board.sent(target), sent + 1)

    def _take(self, data: Tensor, start: int, signature: int, source: int, step: int) -> None:
        rank, taken = self._board.rank, self._taken[source]
        self._waiting.until(source, self._board.sent(rank), taken + 1, "receive_", step)
        place = self._memory.layout.mail(source, rank, taken)
        came = _HEADER.unpack_from(self._memory.table, place)
        if came != (signature, data.numel()):
            self._board.give_up(rank)
            expected, other = _words(signature, data.numel()), _words(*came)
            raise self._waiting.fail(other_message(step, rank, expected, source, other))
        piece = data[start : start + MAIL]
        piece.copy_(self._memory.view(source, IN_TABLE + place + PAGE, len(piece), torch.uint8))
        fence()
        self._taken[source] = taken + 1
        self._board.raise_to(self._board.taken(source), taken + 1)


def _starts(data: Tensor) -> range:
    """Where the chunks begin; one of nothing is a message too."""
    return range(0, max(1, data.numel()), MAIL)


def _words(signature: int, nbytes: int) -> str:
    return describe(signature, nbytes // itemsize(signature))
