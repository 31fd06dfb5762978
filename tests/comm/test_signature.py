"""Operations as numbers, and in words."""

import pytest
import torch

from manyhands.comm.signature import DTYPES, OPERATIONS, describe, itemsize, signature
from manyhands.errors import BadInput


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
