"""Point to point through shared memory: a ring of chunks for each pair of ranks, in the sender's memory."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from manyhands.comm.shared_memory.counters import SharedCounters
from manyhands.comm.shared_memory.memory import Arena
from manyhands.comm.shared_memory.waiting import Waiting, fence
from manyhands.comm.signature import describe, itemsize
from manyhands.errors import ManyhandsError

_RING = 4  # chunks laid out and not yet taken
_CHUNK = 1 << 18  # bytes
_HEADER = struct.Struct("<QQ")
_SLOT = _CHUNK + 4096  # a header, then the chunk on a page of its own


class Mailbox:
    """Sends and receives flat byte tensors; a message of up to 1 MB leaves without waiting for its receiver."""

    def __init__(self, arena: Arena, board: SharedCounters, waiting: Waiting) -> None:
        self._arena, self._board, self._waiting = arena, board, waiting
        self._start = arena.reserve(board.size * _RING * _SLOT)
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
        self._waiting.until(target, self._board.taken(rank), sent - _RING + 1, "send", step)
        place = self._place(target, sent)
        _HEADER.pack_into(self._arena.maps[rank], place, signature, data.numel())
        piece = data[start : start + _CHUNK]
        self._arena.view(rank, place + 4096, len(piece), torch.uint8).copy_(piece)
        fence()
        self._sent[target] = sent + 1
        self._board.raise_to(self._board.sent(target), sent + 1)

    def _take(self, data: Tensor, start: int, signature: int, source: int, step: int) -> None:
        rank, taken = self._board.rank, self._taken[source]
        self._waiting.until(source, self._board.sent(rank), taken + 1, "receive_", step)
        place = self._place(rank, taken)
        came = _HEADER.unpack_from(self._arena.maps[source], place)
        if came != (signature, data.numel()):
            self._refuse(came, (signature, data.numel()), source, step)
        piece = data[start : start + _CHUNK]
        piece.copy_(self._arena.view(source, place + 4096, len(piece), torch.uint8))
        fence()
        self._taken[source] = taken + 1
        self._board.raise_to(self._board.taken(source), taken + 1)

    def _place(self, target: int, chunk: int) -> int:
        return self._start + (target * _RING + chunk % _RING) * _SLOT

    def _refuse(self, came: tuple[int, ...], expected: tuple[int, int], source: int, step: int) -> None:
        self._board.give_up(self._board.rank)
        raise self._waiting.fail(
            ManyhandsError(
                f"worker {self._board.rank} expected {_words(*expected)} from worker {source} at step {step}; "
                f"{_words(*came)} came: give send and receive_ tensors of the same shape and dtype"
            )
        )


def _starts(data: Tensor) -> range:
    """Where the chunks begin; one of nothing is a message too."""
    return range(0, max(1, data.numel()), _CHUNK)


def _words(signature: int, nbytes: int) -> str:
    return describe(signature, nbytes // itemsize(signature))
