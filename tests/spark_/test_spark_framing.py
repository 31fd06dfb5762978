"""spark/dataframe.py where no session is needed: tables in files."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import manyhands as mh
from manyhands.errors import BadInput
from refusals import all_refused
from tfrecord_files import examples

TABLE: dict[str, Any] = {
    "x": [0.5],
    "n": [1],
    "yes": [True],
    "v": [[1.0, 2.0]],
    "name": ["a"],
    "vector": [{"type": 1, "values": [1.0]}],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pq.write_table(pa.table(TABLE), tmp_path / "a.parquet")
    return tmp_path


def kinds(frame: Any) -> list[tuple[str, tuple[str, ...], str]]:
    return [(column.name, column.sources, column.dtype) for column in frame.columns]


def test_columns_of_files_are_typed_as_those_of_a_dataframe(folder: Path) -> None:
    assert kinds(mh.spark.frame(folder, features="n")) == [("features", ("n",), "float32")]
    for table in (folder, str(folder / "*.parquet"), [folder / "a.parquet"]):
        frame = mh.spark.frame(table, features=["x", "v"], label=["n", "yes"], weight="x", dtype="float64")
        assert kinds(frame) == [
            ("features", ("x", "v"), "float64"),
            ("label", ("n", "yes"), "int64"),
            ("weight", ("x",), "float64"),
        ]
        assert frame.files == (f"file://{folder}/a.parquet",)
        assert frame.table is None


def test_records_are_typed_by_their_lists(tmp_path: Path) -> None:
    (tmp_path / "a.tfrecord").write_bytes(examples({"x": [0.5, 1.5], "y": [1], "raw": [b"1"]}))
    assert kinds(mh.spark.frame(tmp_path, features="x", label="y")) == [
        ("features", ("x",), "float32"),
        ("label", ("y",), "int64"),
    ]
    with pytest.raises(BadInput, match="column 'raw' holds binary, not numbers"):
        mh.spark.frame(tmp_path, features="raw")


def test_what_cannot_be_is_refused(folder: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"features": "z"}, "the files have no column 'z'; they have x, n"),
        ({"features": "name"}, "column 'name' holds string, not numbers"),
        ({"features": "vector"}, r"not numbers: .*vector_to_array.*or have Spark read them"),
        ({"features": "x", "input": "stream"}, "input='stream' is for a DataFrame: give spark.read.parquet"),
        ({"features": "x", "input": "rows"}, "input must be 'stream' or 'files', not 'rows'"),
        ({"features": "x", "weight": "n"}, "give label too"),
    ]
    all_refused(lambda options: mh.spark.frame(folder, **options), cases)
