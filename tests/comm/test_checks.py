"""What every group refuses."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from manyhands.comm.checks import (
    DTYPES,
    OPERATIONS,
    bits_bytes,
    check_mean,
    check_peer,
    check_rank,
    describe,
    flattened,
    itemsize,
    json_bytes,
    restore,
    signature,
    slice_of,
)
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
    with pytest.raises(BadInput, match=r"source must be a rank from 0 to 1; got 2"):
        check_rank(2, 2, "source")
    with pytest.raises(BadInput, match="another worker's rank"):
        check_peer(1, 1, 2, "target")


@pytest.mark.parametrize("value", [object(), {1: {2, 3}}, b"bytes"])
def test_what_is_not_json(value):
    with pytest.raises(BadInput, match="JSON"):
        json_bytes(value)


@pytest.mark.parametrize("bits", [0, 1, 255, 256, 1 << 100])
def test_bits_as_bytes(bits):
    assert int.from_bytes(bits_bytes(bits), "little") == bits
    assert bits or not bits_bytes(bits)


# -- flat --------------------------------------------------------------------------------------------------------------


def test_a_contiguous_tensor_is_not_copied():
    tensor = torch.zeros(2, 3)
    flattened(tensor).fill_(1)
    assert tensor.sum() == 6


@pytest.mark.parametrize("tensor", [torch.zeros(3, 2).t(), torch.zeros(6)[::2], torch.tensor(0.0), torch.zeros(2)[::2]])
def test_there_and_back(tensor):
    flat = flattened(tensor)
    assert flat.stride() == (1,)
    flat.copy_(torch.arange(1.0, 1 + tensor.numel()))
    restore(flat, tensor)
    assert tensor.reshape(-1).tolist() == list(range(1, 1 + tensor.numel()))


def test_a_leaf_that_requires_grad():
    leaf = torch.nn.Parameter(torch.zeros(3, 2).t())
    flat = flattened(leaf)
    flat.fill_(2)
    restore(flat, leaf)
    assert leaf.requires_grad
    assert leaf.sum() == 12


# -- signature ---------------------------------------------------------------------------------------------------------


def test_all_numbers_differ():
    numbers = {signature(name, dtype, source) for name in OPERATIONS for dtype in DTYPES for source in (0, 1, 4000)}
    assert len(numbers) == len(OPERATIONS) * len(DTYPES) * 3


def test_words():
    assert describe(signature("broadcast_", torch.int64, 3), 7) == "broadcast_ from worker 3 of 7 int64"
    assert describe(signature("mean_", torch.bfloat16), 0) == "mean_ of 0 bfloat16"
    assert describe(signature("barrier"), 0) == "barrier"


def test_size_of_an_element():
    assert [itemsize(signature("send", dtype)) for dtype in (torch.bool, torch.float64)] == [1, 8]


def test_a_dtype_that_cannot_travel():
    with pytest.raises(BadInput, match=r"float32.*qint8"):
        signature("send", torch.qint8)
