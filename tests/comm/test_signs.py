"""Messages of signs: what is taken out of a vector is what others add, to the bit, and nothing else is believed."""

from __future__ import annotations

import struct

import pytest
import torch
from torch import Tensor

from manyhands.comm import signs
from manyhands.errors import ManyhandsError


def random(n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 4, 5, 1001])
@pytest.mark.parametrize("tau", [0.01, 1.0, 2.5, 9.0])
def test_sender_and_receivers_apply_the_same(n: int, tau: float, dtype: torch.dtype) -> None:
    residual = random(n, dtype)
    before, received = residual.clone(), torch.zeros(n, dtype=dtype)
    message, sent = signs.take_beyond_(residual, tau)
    signs.add_(message, received)
    beyond = before.abs() > tau
    number = torch.tensor(tau, dtype=dtype)
    wanted = torch.where(beyond, torch.where(before < 0, -number, number), torch.zeros_like(number))
    assert torch.equal(received, wanted)
    assert torch.equal(residual, before - wanted)
    assert sent == int(beyond.sum())
    assert len(message) <= signs.longest(n)


def test_few_are_sent_as_places_and_many_as_signs() -> None:
    """4 bytes each, or a byte for five; 16 before them."""
    vector = torch.zeros(1000)
    vector[[3, 999]] = torch.tensor([5.0, -5.0])
    message, _ = signs.take_beyond_(vector, 1.0)
    assert message.tolist() == [*struct.pack("<qd", signs.PLACES, 1.0), *struct.pack("<ii", 6, 1999)]
    assert not vector.eq(5).any()
    message, _ = signs.take_beyond_(torch.tensor([2.0, -2.0, 0.0, 0.0, 2.0, -2.0]), 1.0)
    assert message.tolist() == [*struct.pack("<qd", signs.SIGNS, 1.0), 2 + 3 * 0 + 9 + 27 + 81 * 2, 0 + 3 + 9 + 27 + 81]
    assert len(signs.take_beyond_(torch.full((1000,), 5.0), 1.0)[0]) == 16 + 200


@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 0.2, 1.0])
def test_no_message_is_more_than_a_sixteenth_of_float32(share: float) -> None:
    n = 10_000
    vector = torch.zeros(n)
    vector[: int(share * n)] = 3.0
    assert len(signs.take_beyond_(vector, 1.0)[0]) <= 4 * n / 16


def test_an_empty_message_says_nothing() -> None:
    vector = torch.ones(3)
    signs.add_(signs.NOTHING, vector)
    assert vector.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "data",
    [
        b"\x01",
        struct.pack("<qd", 9, 1.0),
        struct.pack("<qd", signs.PLACES, 1.0) + b"\x00" * 3,
        struct.pack("<qdi", signs.PLACES, 1.0, 2 * 10),
        struct.pack("<qdi", signs.PLACES, 1.0, -2),
        struct.pack("<qdii", signs.PLACES, 1.0, 2 * 70, 0),
        struct.pack("<qd", signs.SIGNS, 1.0) + b"\x00" * 3,
        struct.pack("<qd", signs.SIGNS, 1.0) + b"\xf3" * 2,
    ],
)
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    vector = torch.zeros(10, dtype=torch.float64)
    with pytest.raises(ManyhandsError, match="no update of 10 numbers"):
        signs.add_(torch.frombuffer(bytearray(data), dtype=torch.uint8), vector)
    assert not vector.any()
