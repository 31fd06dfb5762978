"""data/shards/arrow_rows.py: what becomes record batches, with which names and types."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import manyhands as mh
from manyhands.data.shards.arrow_rows import arrow_rows
from refusals import refused


def table(data: Any, columns: Any = ()) -> pa.Table:
    rows = arrow_rows(data, columns)
    return pa.Table.from_batches(list(rows.batches), rows.schema)


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Pair:
    x: Any
    y: Any


class Squares(Dataset[Any]):
    def __len__(self) -> int:
        return 600

    def __getitem__(self, i: int) -> Any:
        return {"x": torch.tensor([float(i)]), "y": i * i}


class Counting(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(5))


X, Y = np.arange(6, dtype=np.float32).reshape(3, 2), np.array([1, 2, 3])
XY = {"x": [[0, 1], [2, 3], [4, 5]], "y": [1, 2, 3]}
FIXED = pa.schema([("x", pa.list_(pa.float32(), 2)), ("y", pa.int64())])


def test_columns_keep_names_types_and_shapes() -> None:
    for data in (
        {"x": X, "y": Y},
        {"x": torch.from_numpy(X), "y": [1, 2, 3]},
        Pair(X, Y),
        Point(X, torch.from_numpy(Y)),
        lambda: {"x": X, "y": Y},
        lambda: lambda: {"x": X, "y": Y},
    ):
        found = table(data)
        assert (found.schema, found.to_pydict()) == (FIXED, XY), data


def test_data_without_names_is_given_some() -> None:
    assert table((X, Y)).column_names == ["0", "1"]
    assert table(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), ["x", "y"]).to_pydict() == XY
    assert table(Y).to_pydict() == {"x": [1, 2, 3]}
    assert table(torch.from_numpy(Y), "n").to_pydict() == {"n": [1, 2, 3]}
    assert table({"a": {"b": Y, "c": (Y,)}}).column_names == ["a.b", "a.c.0"]


def test_tables_keep_their_types() -> None:
    kinds = {"s": pa.string(), "d": pa.decimal128(5, 2), "t": pa.timestamp("s"), "l": pa.list_(pa.int8())}
    columns = {"s": ["a", None], "d": [None, 1], "t": [1, 2], "l": [[1], [2, 3]]}
    given = pa.table({name: pa.array(values, kinds[name]) for name, values in columns.items()})
    assert table(given) == given
    assert table(given, ["t", "s"]) == given.select(["t", "s"])
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"x": [1.5, 2.5], "s": ["a", "b"]}, index=[7, 8])
    assert table(frame).to_pydict() == {"x": [1.5, 2.5], "s": ["a", "b"]}
    refused("the DataFrame cannot be written", table, pd.DataFrame({"x": [1, "a"]}))
    datasets = pytest.importorskip("datasets")
    hugging_face = datasets.Dataset.from_dict({"x": list(range(600))}).select(range(599, -1, -1))
    assert table(hugging_face).to_pydict() == {"x": list(range(599, -1, -1))}


def test_rows_of_datasets_and_streams() -> None:
    assert table(Squares()).to_pydict() == {"x": [[float(i)] for i in range(600)], "y": [i * i for i in range(600)]}
    assert table(Counting()).to_pydict() == {"x": list(range(5))}
    assert table(DataLoader(Squares(), batch_size=7)).to_pydict() == table(Squares()).to_pydict()
    assert table(lambda: iter([(1, "a"), (2, "b")]), ["n", "s"]).to_pydict() == {"n": [1, 2], "s": ["a", "b"]}
    rows = [{"b": b"1", "v": [1, 2], "d": {"k": i}} for i in range(3)]
    assert table(rows).to_pylist() == rows
    assert arrow_rows(iter(rows)).rows is None
    assert arrow_rows(rows).rows == 3


def test_arrays_of_different_lengths_are_lists() -> None:
    rows = [
        {"v": np.arange(i + 1, dtype=np.int16), "m": np.full((i + 1, 2), i), "r": np.zeros((2, i + 1))}
        for i in range(3)
    ]
    found = table(rows)
    assert found["v"].to_pylist() == [[0], [0, 1], [0, 1, 2]]
    assert found["m"].to_pylist() == [[[0, 0]], [[1, 1]] * 2, [[2, 2]] * 3]
    assert found["r"].to_pylist() == [[[0.0] * (i + 1)] * 2 for i in range(3)]
    assert found.schema.field("v").type == pa.list_(pa.int16())
    assert found.schema.field("m").type == pa.list_(pa.list_(pa.int64()))


def test_files_and_what_shards_makes_of_them(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    np.save(tmp_path / "a.npy", Y)
    (tmp_path / "a.csv").write_text("x,s\n1,a\n2,b\n")
    (tmp_path / "b.csv").write_text("x,s\n3,c\n")
    assert table(tmp_path / "a.npz").to_pydict() == XY
    assert table(str(tmp_path / "a.npy")).to_pydict() == {"x": [1, 2, 3]}
    assert table(tmp_path).to_pydict() == {"x": [1, 2, 3], "s": ["a", "b", "c"]}
    files = [tmp_path / "b.csv", tmp_path / "a.csv"]
    assert table(mh.shards(files), ["s"]).to_pydict() == {"s": ["c", "a", "b"]}
    doubled = mh.shards(files, shuffle=True, decode=lambda row: {"twice": 2 * row["x"]})
    assert table(doubled).to_pydict() == {"twice": [6, 2, 4]}


def test_what_cannot_become_columns_is_named() -> None:
    for data, columns, words in [
        ((X, Y), ["x"], "2 columns without names, and columns= gives 1: x"),
        ({"x": Y}, ["z"], "the data has no column 'z'; it has x"),
        (pa.table({"x": Y}), ["z"], "the data has no column 'z'; it has x"),
        (pa.table({"x": pa.array([], pa.int64())}), (), "the data has no rows"),
        ([{"x": None}, {"x": None}], (), "column 'x' has no values in the first 2 rows"),
        ({"x": torch.zeros(2, dtype=torch.bfloat16)}, (), "column 'x' cannot be written: .*bfloat16 as float32"),
        ({"x": np.zeros(2, complex)}, (), "column 'x' cannot be written"),
        ([{"x": 1}, {"y": 1}], (), "a row has y, and the first one x"),
        ([{"x": object()}], (), "column 'x' cannot be written"),
        ([{"x": np.zeros(2)}, {"x": np.zeros((2, 2))}], (), "column 'x' has arrays of different types or dimensions"),
        ({"x": np.zeros((2, 0))}, (), "column 'x' cannot be written"),
        (mh.Csr.__new__(mh.Csr), (), "Csr cannot be written"),
        (3, (), "cannot read data from int"),
    ]:
        refused(words, table, data, columns, case=words)
    rows = [{"x": 1}] * 256
    for wrong, words in (
        ({"x": "a"}, "column 'x' is string near row 256, and int64 in the first ones"),
        ({"y": 1}, "a row near 256 has the columns y, and the first ones have x"),
    ):
        refused(words, table, iter([*rows, wrong]))
    assert table([*rows, {"x": None}])["x"].to_pylist()[-2:] == [1, None]
