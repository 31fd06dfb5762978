"""Messages of signs: what is taken out of a vector is what others add, to the bit, and nothing else is believed."""

import struct
from itertools import product

import torch
from torch import Tensor

from manyhands.comm import signs
from manyhands.errors import ManyhandsError
from refusals import refused


def random(n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64).to(dtype)


def test_sender_and_receivers_apply_the_same() -> None:
    dtypes = (torch.float64, torch.float32, torch.bfloat16)
    for dtype, n, tau in product(dtypes, (1, 4, 5, 1001), (0.01, 1.0, 2.5, 9.0)):
        case, residual = (dtype, n, tau), random(n, dtype)
        before, received = residual.clone(), torch.zeros(n, dtype=dtype)
        message, sent = signs.take_beyond_(residual, tau)
        signs.add_(message, received)
        beyond, number = before.abs() > tau, torch.tensor(tau, dtype=dtype)
        wanted = torch.where(beyond, torch.where(before < 0, -number, number), torch.zeros_like(number))
        assert torch.equal(received, wanted), case
        assert torch.equal(residual, before - wanted), case
        assert sent == int(beyond.sum()), case
        assert len(message) <= signs.longest(n), case


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


def test_no_message_is_more_than_a_sixteenth_of_float32() -> None:
    n = 10_000
    for share in (0.0, 0.001, 0.05, 0.2, 1.0):
        vector = torch.zeros(n)
        vector[: int(share * n)] = 3.0
        assert len(signs.take_beyond_(vector, 1.0)[0]) <= 4 * n / 16, share


def test_an_empty_message_says_nothing_and_bytes_that_are_no_message_are_refused() -> None:
    vector = torch.ones(10, dtype=torch.float64)
    signs.add_(signs.NOTHING, vector)
    for data in (
        b"\x01",
        struct.pack("<qd", 9, 1.0),
        struct.pack("<qd", signs.PLACES, 1.0) + b"\x00" * 3,
        struct.pack("<qdi", signs.PLACES, 1.0, 2 * 10),
        struct.pack("<qdi", signs.PLACES, 1.0, -2),
        struct.pack("<qdii", signs.PLACES, 1.0, 2 * 70, 0),
        struct.pack("<qd", signs.SIGNS, 1.0) + b"\x00" * 3,
        struct.pack("<qd", signs.SIGNS, 1.0) + b"\xf3" * 2,
    ):
        message = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        refused("no update of 10 numbers", signs.add_, message, vector, kind=ManyhandsError, case=data)
    assert vector.tolist() == [1] * 10
