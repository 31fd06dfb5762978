"""data/readers/arrays.py: columns in memory."""

import math
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import torch

from manyhands.data.readers.arrays import Columns
from manyhands.data.source import Reading
from refusals import refused

Pair = namedtuple("Pair", "x y")
INDICES = np.array([4, 0, 3])


@dataclass
class Scans:
    x: torch.Tensor
    y: np.ndarray


def test_gathered_rows_have_the_bits_of_indexing():
    x, y = torch.randn(7, 3, dtype=torch.float64), torch.randint(9, (7,))
    batch = Columns((x, y)).take(INDICES)
    assert torch.equal(batch[0], x[INDICES])
    assert torch.equal(batch[1], y[INDICES])
    assert isinstance(batch, tuple)


def test_numpy_columns_become_tensors_of_their_dtype():
    kinds = ["float64", "float32", "float16", "int8", "uint8", "uint16", "uint32", "uint64", "bool", "complex64"]
    for dtype in [*kinds, ">f4", ">i8"]:
        for shape in ((5,), (5, 2)):
            array = (np.arange(math.prod(shape)).reshape(shape) % (2 if dtype == "bool" else 7)).astype(dtype)
            native = torch.from_numpy(array.astype(np.dtype(dtype).newbyteorder("="))).dtype
            for indices in (INDICES, range(1, 4)):
                batch = Columns({"a": array}).take(indices)["a"]
                assert batch.dtype == native, dtype
                np.testing.assert_array_equal(batch.numpy(), array[np.asarray(indices)], err_msg=f"{dtype} {shape}")


def test_structures_and_strings_are_kept():
    x = torch.arange(5.0)
    batch = Columns({"a": Pair(x, x.numpy()), "b": [1, 2, 3, 4, 5]}).take(INDICES)
    assert isinstance(batch["a"], Pair)
    assert batch["a"].y.tolist() == [4, 0, 3]
    assert batch["b"].tolist() == [5, 1, 4]
    assert Columns(Scans(x, x.numpy())).take(INDICES).y.tolist() == [4, 0, 3]
    batch = Columns({"text": np.array(["a", "b", "c", "d", "e"]), "more": ["v", "w", "x", "y", "z"]}).take(INDICES)
    assert batch["text"].tolist() == ["e", "a", "d"]
    assert batch["more"].tolist() == ["z", "v", "y"]


def test_neighbours_are_views_and_arrays_are_copied_where_they_must():
    x = np.arange(10.0)
    assert Columns(x).take(range(2, 5)).data_ptr() == x[2:].ctypes.data
    tensor = torch.arange(10.0)
    assert Columns(tensor).take(range(2, 5)).data_ptr() == tensor[2:].data_ptr()
    x.flags.writeable = False
    for column in (x, np.arange(10.0)[::-1]):  # without a warning
        for indices in (INDICES, range(2)):
            np.testing.assert_array_equal(Columns(column).take(indices).numpy(), column[np.asarray(indices)])
    Columns(x).take(range(2)).zero_()
    assert x[1] == 1.0


def test_collate_gets_rows():
    seen = Columns({"x": torch.arange(5), "y": np.arange(5.0)}, collate=lambda rows: rows).take(INDICES)
    assert [int(row["x"]) for row in seen] == [4, 0, 3]
    assert set(seen[0]) == {"x", "y"}


def test_a_thread_reads_ahead_for_large_gathers_only():
    row = torch.empty(200, 64 << 10, dtype=torch.uint8)  # 64 KiB a row
    large, small = Reading(batch_size=65), Reading(batch_size=64)
    assert Columns(row).in_background(large)
    assert not Columns(row).in_background(small)
    assert not Columns(row).in_background(Reading(batch_size=65, shuffle=False))
    assert not Columns(row).in_background(Reading(batch_size=65, size=2))
    assert not Columns(row, collate=list).in_background(large)


def test_what_cannot_be_columns_is_refused():
    for data, words in [
        ((torch.zeros(4), torch.zeros(3)), r"equally long; got \[0\]: 4, \[1\]: 3"),
        ({"x": np.zeros((4, 2)), "y": [1, 2, 3]}, r"\['x'\]: 4, \['y'\]: 3"),
        (torch.zeros(0, 3), "has no rows"),
        ({}, "has no columns"),
        (torch.tensor(3.0), "first dimension that counts rows"),
        ((torch.zeros(2), 3), "must consist of arrays; got int"),
        ((torch.zeros(2), [[1], [2, 3]]), "pad its rows to one length"),
        ((torch.zeros(2), [object(), object()]), "must hold numbers or strings"),
    ]:
        refused(words, Columns, data)
