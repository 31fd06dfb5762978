"""A sparse step: a vector whose numbers are plus or minus one number, or 0, as a message, whichever way is shorter.

Source: Scalable Distributed DNN Training Using Commodity GPU Cloud Computing, Nikko Strom, 2015 (places). Deeplearning4j
sends 2 bits a number where many are sent (its bitmap); here five signs share a byte, which is 1.6.

A message: its kind in 8 bytes, then the number in 8 (float64), then

    PLACES   4 bytes for each number that is not 0: 2·place + (1 if negative), ascending; so n is below 2^31
    SIGNS    a byte for five numbers: the sum of (sign + 1)·3^i

An empty message says nothing.
"""

from __future__ import annotations

import struct
from functools import cache

import torch
from torch import Tensor

from manyhands.comm.checks import tensor_of
from manyhands.errors import BadInput, ManyhandsError
from manyhands.transport.frame import bytes_of

PLACES, SIGNS = 1, 2

_HEAD = struct.Struct("<qd")
_ENTRY, _IN_BYTE = 4, 5
_POWERS = (1, 3, 9, 27, 81)
NOTHING = torch.empty(0, dtype=torch.uint8)


def longest(n: int) -> int:
    """Bytes of the longest message about [n] numbers."""
    return _HEAD.size + -(-n // _IN_BYTE)


def take_beyond_(vector: Tensor, tau: float) -> tuple[Tensor, int]:
    """(a message, how many numbers it says): all of magnitude above tau as plus or minus tau, which `vector` [n] loses."""
    n = vector.numel()
    if n >= 1 << 31:
        raise BadInput(f"places are sent as 31 bits, and this model has {n:,} numbers: use another strategy")
    places = (vector.abs() > tau).nonzero().reshape(-1)
    negative = vector[places] < 0
    if _ENTRY * len(places) <= -(-n // _IN_BYTE):
        kind, body = PLACES, _as_bytes((places * 2 + negative).to(torch.int32))
    else:
        signs = torch.ones(-(-n // _IN_BYTE) * _IN_BYTE, dtype=torch.uint8, device=vector.device)
        signs[places] = 2 - 2 * negative.to(torch.uint8)
        by_place = signs.view(-1, _IN_BYTE)
        body = by_place[:, 0].clone()
        for i, power in enumerate(_POWERS[1:], start=1):
            body.add_(by_place[:, i], alpha=power)
        kind, body = SIGNS, body.cpu()
    message = torch.cat([tensor_of(_HEAD.pack(kind, tau)), body])
    add_(message, vector, alpha=-1)
    return message, len(places)


def add_(message: Tensor, vector: Tensor, alpha: int = 1) -> None:
    """Add what a message says, `alpha` (1 or -1) times, to a vector [n]. ManyhandsError where it is none about [n]."""
    if not message.numel():
        return
    n = vector.numel()
    head, body = message[: _HEAD.size], message[_HEAD.size :]
    if len(head) < _HEAD.size:
        raise _no_message(len(message), n)
    kind, tau = _HEAD.unpack(bytes_of(head))
    if kind == PLACES and len(body) % _ENTRY == 0:
        entries = _numbers(body, torch.int32, vector).to(torch.int64)
        places = entries >> 1
        if len(places) and (int(places.min()) < 0 or int(places.max()) >= n):
            raise _no_message(len(message), n)
        signed = torch.tensor([tau, -tau], dtype=vector.dtype, device=vector.device).mul_(alpha)
        vector.index_add_(0, places, signed[entries & 1])
    elif kind == SIGNS and len(body) == -(-n // _IN_BYTE):
        if n and int(body.max()) >= 3**_IN_BYTE:
            raise _no_message(len(message), n)
        signs = _signs().to(vector.device)[body.to(vector.device).int()].reshape(-1)[:n]
        vector.add_(signs.to(vector.dtype).mul_(torch.tensor(tau, dtype=vector.dtype)), alpha=alpha)
    else:
        raise _no_message(len(message), n)


def _no_message(nbytes: int, n: int) -> ManyhandsError:
    return ManyhandsError(f"{nbytes} bytes came that are no update of {n} numbers: use the same version on all hosts")


@cache
def _signs() -> Tensor:
    """int8 [243, 5] of each byte."""
    byte = torch.arange(3**_IN_BYTE)
    return torch.stack([byte // power % 3 - 1 for power in _POWERS], dim=1).to(torch.int8)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().view(torch.uint8)


def _numbers(body: Tensor, dtype: torch.dtype, like: Tensor) -> Tensor:
    """The bytes as numbers, where `like` is; copied, since they may lie anywhere."""
    return body.clone().view(dtype).to(like.device)
