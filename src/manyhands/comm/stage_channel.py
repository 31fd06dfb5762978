"""Tensors from one stage of a model to its neighbour, and their gradients back."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.comm.group import Group, Ledger

_ALIGNED = 64  # bytes; where each tensor of a message begins
_LENGTHS = struct.Struct("=qq")  # what begins a message: its bytes, and those of its header


@dataclass(frozen=True, slots=True)
class Sent:
    """A tensor of a message. None stands in the place of one that there is not, such as a gradient of what has none."""

    tensor: Tensor | None
    requires_grad: bool = False


class StageChannel:
    """One of its two ends. What is sent leaves without waiting for the neighbour, and comes in its order.

    Shapes and dtypes travel along, so that each message may have others. Waits end as the group's do, with PeerLost.
    """

    def __init__(self, group: Group, longest: int) -> None:
        """group: of the two neighbours alone. longest: bytes of a piece in which messages travel; a collective of both."""
        assert group.size == 2, "a channel is between two"
        self.ledger = Ledger()
        """Bytes of tensors, without headers."""
        self._longest = -(-longest // _ALIGNED) * _ALIGNED + _ALIGNED
        self._group, self._other = group, 1 - group.rank
        self._mailbox = group.open_mailbox(self._longest)

    def send(self, operation: str, tensors: Sequence[Sent]) -> None:
        """Copies of these tensors, on any device. operation: under which the ledger counts them."""
        header = json.dumps(
            [
                None if one.tensor is None else [str(one.tensor.dtype)[6:], list(one.tensor.shape), one.requires_grad]
                for one in tensors
            ]
        ).encode()
        starts, end = list[int](), _aligned(_LENGTHS.size + len(header))
        for one in tensors:
            starts.append(end)
            end = _aligned(end + (0 if one.tensor is None else one.tensor.nbytes))
        message = torch.empty(end, dtype=torch.uint8)
        head = bytearray(_LENGTHS.pack(end, len(header)) + header)
        message[: len(head)].copy_(torch.frombuffer(head, dtype=torch.uint8))
        for one, at in zip(tensors, starts, strict=True):
            if one.tensor is not None and one.tensor.numel():
                place = message[at : at + one.tensor.nbytes].view(one.tensor.dtype).view(one.tensor.shape)
                place.copy_(one.tensor.detach())
        for first in range(0, end, self._longest):
            self._mailbox.post(message[first : first + self._longest])
        self.ledger.add(operation, sum(one.tensor.nbytes for one in tensors if one.tensor is not None))

    def receive(self, device: torch.device) -> list[Sent]:
        """The next message; its tensors have memory of their own."""
        message = self._next_piece()
        total, length = _LENGTHS.unpack(message[: _LENGTHS.size].numpy().tobytes())
        if len(message) < total:
            pieces, came = [message], len(message)
            while came < total:
                pieces.append(self._next_piece())
                came += len(pieces[-1])
            message = torch.cat(pieces)
        header = json.loads(message[_LENGTHS.size : _LENGTHS.size + length].numpy().tobytes())
        found, at = list[Sent](), _aligned(_LENGTHS.size + length)
        for one in header:
            if one is None:
                found.append(Sent(None))
                continue
            dtype, shape, requires_grad = getattr(torch, one[0]), one[1], one[2]
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            tensor = message[at : at + nbytes].view(dtype).view(shape)
            found.append(Sent(tensor.to(device).data, requires_grad))  # .data: no view to autograd
            at = _aligned(at + nbytes)
        return found

    @property
    def waited_s(self) -> float:
        """Seconds that this end waited for the other one."""
        return self._group.waited_s

    def close(self) -> None:
        self._mailbox.close()
        self._group.close()

    def _next_piece(self) -> Tensor:
        wanted = list(self._mailbox.taken)
        wanted[self._other] += 1
        return self._mailbox.take(wanted)[self._other][0]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED
