"""data/row_batches.py and row_files.py: rows that travel, and rows that are written."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from manyhands.data import row_batches, row_files
from manyhands.data.row_batches import pack, read, to_batch, unpack
from manyhands.data.row_files import RowFile
from manyhands.errors import ManyhandsError
from refusals import refused


def way(*rows: Any, kept: dict[str, Any] | None = None) -> Any:
    """What comes out of all batches, each in a piece of its own."""
    pieces = [pack([to_batch(one, kept)]) for one in rows]
    return unpack([batch for piece in pieces for batch in read(piece)])


def test_a_tensor_of_each_kind_comes_out_as_it_was() -> None:
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool]
    dtypes += [torch.int64, torch.int32, torch.int8, torch.uint8, torch.uint16]
    for dtype in dtypes:
        for shape in ((), (3,), (2, 3), (1, 2, 2)):
            given = torch.randint(0, 2, (5, *shape)).to(dtype)
            found = way(given[:2], given[2:])
            assert found.dtype == dtype, shape
            assert torch.equal(found, given), (dtype, shape)
    given = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 5e-324], dtype=torch.float64)
    assert torch.equal(way(given).view(torch.int64), given.view(torch.int64))
    wide = torch.arange(12.0).view(3, 4).requires_grad_()  # with strides, a gradient and an offset
    assert torch.equal(way(wide.t()[1:]), wide.t()[1:])


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
    found = way(torch.ones(2), kept={"id": ["a", "b"]})  # kept columns stand before the outputs
    assert (list(found), found["id"]) == (["id", "prediction"], ["a", "b"])
    assert list(way((torch.ones(2), torch.zeros(2)), kept={"id": torch.arange(2)})) == [
        "id",
        "prediction_0",
        "prediction_1",
    ]


def test_what_does_not_travel_is_named() -> None:
    for given, words in [
        (torch.tensor(3.0), "'prediction' must be a tensor whose first dimension counts rows; got Tensor"),
        (3, "must be a tensor whose first dimension counts rows, or a dict or tuple of such; got int"),
        (None, "give function="),
        ({}, "got no column"),
        ({"a": 3}, "output 'a' must be a tensor .*; got 3"),
        ({3: torch.ones(2)}, "need texts as names, not 3"),
        ({"a": torch.ones(2), "b": torch.ones(3)}, "a: 2, b: 3"),
        ({"a": {"b": torch.ones(2)}}, "output 'a' must be a tensor"),
        (torch.ones(2, dtype=torch.complex64), "complex64"),
        (torch.ones(2, 2).to_sparse(), "dense real numbers travel"),
        (torch.ones(2, 0), "which hold nothing"),
        (np.array([object(), object()]), "holds object"),
        (np.array(["2020-01-01"], dtype="datetime64[D]"), "holds datetime64"),
        (["a", 1], "holds int, str"),
        (np.array([b"a"], dtype="S1"), "holds .S1"),
    ]:
        refused(words, to_batch, given)
    refused("'id' is one of the columns to keep", to_batch, {"id": torch.ones(1)}, {"id": torch.ones(1)})
    for other in (torch.ones(2, 4), torch.ones(2, 3).double(), np.ones((2, 3), np.float32)):
        refused("same columns with rows of one shape and dtype", way, torch.ones(2, 3), other)


def test_damaged_bytes_are_no_rows() -> None:
    """Cut short, with other bytes in the place of the header, or with a text that is none."""
    whole = bytes(pack([to_batch({"a": torch.arange(100), "b": ["xyz"] * 100})]))
    damaged = [whole[:at] + b"\x07" * (8 if at < 60 else 0) for at in (0, 3, 8, 20, 60)]
    assert b"xyzxyz" in whole
    for data in [*damaged, whole.replace(b"xyzxyz", b"x\xff\xffxyz", 1)]:
        refused("rows that cannot be read", read, data, kind=ValueError)


@pytest.mark.slow
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
    environment = {**os.environ, "PYTHONPATH": str(source)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)


# -- row_files.py --------------------------------------------------------------------------------------------------------


def table(path: Path) -> pa.Table:
    if path.suffix == ".parquet":
        return pq.read_table(path)
    with pa.ipc.open_file(path) as file:
        return file.read_all()


@pytest.fixture(params=[".parquet", ".arrow"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / f"out{request.param}"


def test_rows_lie_in_order_and_no_file_is_there_before_all_are(path: Path) -> None:
    with RowFile(path) as file:
        for start in range(0, 30, 10):
            ids = [f"row {i}" for i in range(start, start + 10)]
            file.write(to_batch({"id": ids, "y": torch.arange(2.0 * start, 2.0 * start + 20).view(10, 2)}))
            assert not path.exists()
        file.finish()
    found = table(path)
    assert found["id"].to_pylist() == [f"row {i}" for i in range(30)]
    assert found["y"].to_pylist() == torch.arange(60.0).view(30, 2).tolist()
    assert list(path.parent.iterdir()) == [path]
    given = torch.tensor([[1.5, -2.0], [3.0, 1e30]], dtype=torch.bfloat16)  # is written as the same numbers
    with RowFile(path) as file:
        file.write(to_batch(given))
        file.finish()
    assert table(path)["prediction"].to_pylist() == given.float().tolist()


def test_row_groups_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By rows, and by bytes: nothing more is in memory."""
    path = tmp_path / "out.parquet"
    for limit, value, groups in (("GROUP_ROWS", 20, [20, 20, 10]), ("GROUP_BYTES", 800, [10] * 5)):
        with monkeypatch.context() as patch:
            patch.setattr(row_files, limit, value)
            with RowFile(path) as file:
                for _ in range(5):
                    file.write(to_batch(torch.ones(10, 10, dtype=torch.float64)))
                file.finish()
        found = pq.ParquetFile(path).metadata
        assert [found.row_group(i).num_rows for i in range(found.num_row_groups)] == groups, limit


def test_an_error_leaves_what_was_there(path: Path) -> None:
    with RowFile(path) as file:
        file.write(to_batch(torch.ones(3)))
        refused("same columns", file.write, to_batch(torch.ones(3, 2)))
    with RowFile(path) as file, pytest.raises(ManyhandsError, match="no rows came"):
        file.finish()
    assert list(path.parent.iterdir()) == []
    path.write_text("before")

    def fail() -> None:
        with RowFile(path) as file:
            file.write(to_batch(torch.ones(3)))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list(path.parent.iterdir()) == [path]
    assert path.read_text() == "before"


@contextmanager
def full_after(nbytes: int) -> Iterator[None]:
    """No file of this process grows larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(("rows", "limit"), [(100_000, 1 << 17), (1000, 2000)])
def test_a_full_disk_is_named_and_leaves_nothing(path: Path, rows: int, limit: int) -> None:
    """While rows are written, and at the end."""

    def write() -> None:
        with RowFile(path) as file:
            file.write(to_batch(torch.rand(rows)))
            file.write(to_batch(torch.rand(rows)))
            file.finish()

    with full_after(limit), pytest.raises(ManyhandsError, match=r"cannot write .*out\.\w+: File too large. Make room"):
        write()
    assert list(path.parent.iterdir()) == []


def test_what_cannot_be_is_refused_at_construction(tmp_path: Path) -> None:
    (tmp_path / ".parquet").mkdir()
    for name, words in [
        ("out.csv", "must end in .parquet or .arrow"),
        ("out", "must end in"),
        ("none/out.parquet", "there is no folder"),
        (".parquet/", "must end in|is a folder"),
    ]:
        refused(words, RowFile, tmp_path / name)
    refused("is a URL", RowFile, "s3://bucket/out.parquet")
