"""What every group refuses."""

import itertools
import math

import torch

from manyhands.comm.checks import (
    DTYPES,
    OPERATIONS,
    bits_bytes,
    bits_of,
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
from refusals import refused


def test_slices_cover_everything_once():
    for n in (0, 1, 7, 100):
        for size in (1, 3, 8):
            slices = [slice_of(rank, size, n) for rank in range(size)]
            assert slices[0][0] == 0
            assert slices[-1][1] == n
            assert all(a[1] == b[0] for a, b in itertools.pairwise(slices))


def test_what_every_group_refuses():
    ones = torch.ones(1)
    for weight in (-1, math.nan, math.inf):
        refused(str(weight), check_mean, ones, weight, 0)
    refused(r"float32.*int64", check_mean, torch.ones(1, dtype=torch.int64), 1, 0)
    refused("-2", check_mean, ones, 1, -2)
    refused("source must be a rank from 0 to 1; got 2", check_rank, 2, 2, "source")
    refused("another worker's rank", check_peer, 1, 1, 2, "target")
    for value in (object(), {1: {2, 3}}, b"bytes"):
        refused("JSON", json_bytes, value)
    refused(r"float32.*qint8", signature, "send", torch.qint8)


def test_bits_as_bytes():
    for bits in (0, 1, 255, 256, 1 << 100, 1 << 1000):
        assert bits_of(bits_bytes(bits)) == int.from_bytes(bits_bytes(bits), "little") == bits
        assert bits or not bits_bytes(bits)


def test_there_and_back():
    tensor = torch.zeros(2, 3)
    flattened(tensor).fill_(1)
    assert tensor.sum() == 6, "a contiguous tensor is not copied"
    for tensor in (torch.zeros(3, 2).t(), torch.zeros(6)[::2], torch.tensor(0.0), torch.zeros(2)[::2]):
        flat, n = flattened(tensor), tensor.numel()
        assert flat.stride() == (1,), tensor.shape
        restore(flat.copy_(torch.arange(1.0, 1 + n)), tensor)
        assert tensor.reshape(-1).tolist() == list(range(1, 1 + n)), tensor.shape
    leaf = torch.nn.Parameter(torch.zeros(3, 2).t())
    restore(flattened(leaf).fill_(2), leaf)
    assert leaf.requires_grad
    assert leaf.sum() == 12


def test_signatures_differ_and_have_words():
    numbers = {signature(name, dtype, source) for name in OPERATIONS for dtype in DTYPES for source in (0, 1, 4000)}
    assert len(numbers) == len(OPERATIONS) * len(DTYPES) * 3
    assert describe(signature("broadcast_", torch.int64, 3), 7) == "broadcast_ from worker 3 of 7 int64"
    assert describe(signature("mean_", torch.bfloat16), 0) == "mean_ of 0 bfloat16"
    assert describe(signature("barrier"), 0) == "barrier"
    assert [itemsize(signature("send", dtype)) for dtype in (torch.bool, torch.float64)] == [1, 8]
