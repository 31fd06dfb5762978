"""What every group refuses."""

import itertools
import math

import pytest
import torch

from manyhands.comm.checks import bits_bytes, check_mean, check_peer, check_rank, json_bytes, slice_of
from manyhands.errors import BadInput


def test_slices_cover_everything_once():
    for n in (0, 1, 7, 100):
        for size in (1, 3, 8):
            slices = [slice_of(rank, size, n) for rank in range(size)]
            assert slices[0][0] == 0
            assert slices[-1][1] == n
            assert all(a[1] == b[0] for a, b in itertools.pairwise(slices))


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf])
def test_weights(weight):
    with pytest.raises(BadInput, match=str(weight)):
        check_mean(torch.ones(1), weight, 0)


def test_dtypes_and_bits_of_a_mean():
    with pytest.raises(BadInput, match=r"float32.*int64"):
        check_mean(torch.ones(1, dtype=torch.int64), 1, 0)
    with pytest.raises(BadInput, match="-2"):
        check_mean(torch.ones(1), 1, -2)


def test_ranks():
    with pytest.raises(BadInput, match=r"source is a rank in range\(2\); got 2"):
        check_rank(2, 2, "source")
    with pytest.raises(BadInput, match="another rank"):
        check_peer(1, 1, 2, "target")


@pytest.mark.parametrize("value", [object(), {1: {2, 3}}, b"bytes"])
def test_what_is_not_json(value):
    with pytest.raises(BadInput, match="JSON"):
        json_bytes(value)


@pytest.mark.parametrize("bits", [0, 1, 255, 256, 1 << 100])
def test_bits_as_bytes(bits):
    assert int.from_bytes(bits_bytes(bits), "little") == bits
    assert bits or not bits_bytes(bits)
