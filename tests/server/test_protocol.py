"""Small words of the protocol."""

import pytest
import torch

from manyhands.comm.checks import bits_bytes, bits_of
from manyhands.server.protocol import Kind, about, dtype_of
from manyhands.transport.frame import Frame, FrameError


def test_a_request_says_of_which_vectors_it_speaks():
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        frame = Frame(kind=Kind.PULL, **about(torch.zeros(7, dtype=dtype)))
        assert (frame.a, dtype_of(frame)) == (7, dtype)
    for wrong in ({"a": -1, "b": 0}, {"a": 7, "b": -1}, {"a": 7, "b": 99}):
        with pytest.raises(FrameError, match="expected a number of elements"):
            dtype_of(Frame(kind=Kind.PULL, **wrong))


def test_bits_of_any_number_come_back():
    for bits in (0, 1, 255, 256, 1 << 1000):
        assert bits_of(bits_bytes(bits)) == bits


def test_no_kind_is_the_hellos():
    assert min(Kind) > 0
    assert max(Kind) < 256
