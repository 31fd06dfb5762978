from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from manyhands.data import row_batches
from manyhands.data.row_batches import pack, read, to_batch, unpack
from manyhands.errors import BadInput


def way(*rows: Any, kept: dict[str, Any] | None = None) -> Any:
    """What comes out of all batches, each in a piece of its own."""
    pieces = [pack([to_batch(one, kept)]) for one in rows]
    return unpack([batch for piece in pieces for batch in read(piece)])


def rows(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randint(0, 2, (5, *shape), generator=torch.Generator().manual_seed(3)).to(dtype)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (1, 2, 2)])
@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
        *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.uint16),
    ],
)
def test_a_tensor_of_each_kind_comes_out_as_it_was(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    given = rows(dtype, *shape)
    found = way(given[:2], given[2:])
    assert found.dtype == dtype
    assert torch.equal(found, given)


def test_every_float_bit_pattern_comes_out_as_it_was() -> None:
    """NaN, infinities, negative zero, and numbers below the smallest normal one."""
    given = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 5e-324], dtype=torch.float64)
    assert torch.equal(way(given).view(torch.int64), given.view(torch.int64))


def test_structures_and_kinds() -> None:
    tensor, array = torch.arange(6.0).view(3, 2), np.arange(3, dtype=">i4")
    first, second = way((tensor, array))
    assert torch.equal(first, tensor)
    assert (second.tolist(), second.dtype.isnative) == ([0, 1, 2], True)
    found = way({"a": tensor, "words": ["x", "", "ü"], "texts": np.array(["p", "q", "r"])})
    assert list(found) == ["a", "words", "texts"]
    assert (found["words"], found["texts"].tolist()) == (["x", "", "ü"], ["p", "q", "r"])
    assert way(["x", "y", "z"]) == ["x", "y", "z"]
    assert way([1, 2], [3]) == [1, 2, 3]
    assert way([True, False], [True]) == [True, False, True]
    assert way(np.array([b"\xff", b""], dtype=object)).tolist() == [b"\xff", b""]
    assert way([tensor, tensor])[1].shape == (3, 2)


def test_kept_columns_stand_before_the_outputs() -> None:
    found = way(torch.ones(2), kept={"id": ["a", "b"]})
    assert (list(found), found["id"]) == (["id", "prediction"], ["a", "b"])
    found = way((torch.ones(2), torch.zeros(2)), kept={"id": torch.arange(2)})
    assert list(found) == ["id", "prediction_0", "prediction_1"]


def test_strides_gradients_and_offsets_do_not_matter() -> None:
    wide = torch.arange(12.0).view(3, 4).requires_grad_()
    assert torch.equal(way(wide.t()[1:]), wide.t()[1:])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (torch.tensor(3.0), "'prediction' must be a tensor whose first dimension counts rows; got Tensor"),
        (3, "must be a tensor whose first dimension counts rows, or a dict or tuple of such; got int"),
        (None, "give function="),
        ({}, "equally many rows; got no column"),
        ({"a": 3}, "output 'a' must be a tensor whose first dimension counts rows; got 3"),
        ({3: torch.ones(2)}, "need texts as names, not 3"),
        ({"a": torch.ones(2), "b": torch.ones(3)}, "a: 2, b: 3"),
        ({"a": {"b": torch.ones(2)}}, "output 'a' must be a tensor"),
        (torch.ones(2, dtype=torch.complex64), "complex64"),
        (torch.ones(2, 2).to_sparse(), "dense real numbers travel"),
        (torch.ones(2, 0), "which hold nothing"),
        (np.array([object(), object()]), "holds object, and numbers"),
        (np.array(["2020-01-01"], dtype="datetime64[D]"), "holds datetime64"),
        (["a", 1], "holds int, str, and numbers, booleans and texts travel, of one type each"),
        (np.array([b"a"], dtype="S1"), "holds .S1"),
    ],
)
def test_what_does_not_travel_is_named(given: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        to_batch(given)


def test_a_kept_column_must_not_be_an_output() -> None:
    with pytest.raises(BadInput, match="'id' is one of the columns to keep and one of the outputs"):
        to_batch({"id": torch.ones(1)}, {"id": torch.ones(1)})


@pytest.mark.parametrize("other", [torch.ones(2, 4), torch.ones(2, 3).double(), np.ones((2, 3), np.float32)])
def test_batches_must_be_alike(other: Any) -> None:
    with pytest.raises(BadInput, match="same columns with rows of one shape and dtype"):
        way(torch.ones(2, 3), other)


@pytest.mark.parametrize("at", [0, 3, 8, 20, 60])
def test_damaged_bytes_are_no_rows(at: int) -> None:
    """Cut short, or with other bytes in the place of the header."""
    whole = bytes(pack([to_batch({"a": torch.arange(100), "b": ["x"] * 100})]))
    with pytest.raises(ValueError, match="rows that cannot be read"):
        read(whole[:at] + b"\x07" * (8 if at < 60 else 0))


def test_texts_that_are_none_are_no_rows() -> None:
    whole = bytes(pack([to_batch({"b": ["xyz"] * 100})]))
    assert b"xyzxyz" in whole
    with pytest.raises(ValueError, match="rows that cannot be read"):
        read(whole.replace(b"xyzxyz", b"x\xff\xffxyz", 1))


def test_pandas_is_not_imported() -> None:
    """It would cost each worker more than the rest of its start."""
    program = """if True:
        import sys, numpy as np, torch
        from manyhands.data.row_batches import pack, read, to_batch, unpack
        given = {"a": torch.ones(3, 2), "b": np.zeros(3, bool), "c": ["x", "y", "z"], "d": np.array(["p"] * 3), "e": [1, 2, 3]}
        unpack(read(pack([to_batch(given)])))
        assert "pyarrow" in sys.modules and "pandas" not in sys.modules
    """
    source = Path(row_batches.__file__).parents[2]
    subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(source)}, check=True, timeout=60
    )
