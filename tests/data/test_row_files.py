from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from manyhands.data import row_files
from manyhands.data.open_source import open_source
from manyhands.data.row_batches import to_batch
from manyhands.data.row_files import RowFile
from manyhands.errors import BadInput, ManyhandsError


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


def test_bfloat16_is_written_as_the_same_numbers(path: Path) -> None:
    given = torch.tensor([[1.5, -2.0], [3.0, 1e30]], dtype=torch.bfloat16)
    with RowFile(path) as file:
        file.write(to_batch(given))
        file.finish()
    assert table(path)["prediction"].to_pylist() == given.float().tolist()


def test_what_was_written_can_be_read_as_data(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    given = {"y": torch.arange(24.0).view(4, 2, 3), "n": torch.arange(4)}
    with RowFile(path) as file:
        file.write(to_batch(given))
        file.finish()
    found = open_source(path).take(range(4))  # type: ignore[attr-defined]
    assert torch.equal(found["y"], given["y"])
    assert torch.equal(found["n"], given["n"])


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
        assert [found.row_group(i).num_rows for i in range(found.num_row_groups)] == groups


def test_an_error_leaves_what_was_there(path: Path) -> None:
    path.write_text("before")

    def fail() -> None:
        with RowFile(path) as file:
            file.write(to_batch(torch.ones(3)))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    assert path.read_text() == "before"


def test_other_columns_than_before_are_refused(path: Path) -> None:
    with RowFile(path) as file:
        file.write(to_batch(torch.ones(3)))
        with pytest.raises(BadInput, match="same columns"):
            file.write(to_batch(torch.ones(3, 2)))
    assert list(path.parent.iterdir()) == []


def test_no_rows_are_no_file(path: Path) -> None:
    with RowFile(path) as file, pytest.raises(ManyhandsError, match="no rows came"):
        file.finish()
    assert list(path.parent.iterdir()) == []


@contextmanager
def full_after(nbytes: int) -> Iterator[None]:
    """No file of this process grows larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_full_disk_is_named_and_leaves_nothing(path: Path, at_the_end: bool) -> None:
    def write() -> None:
        with RowFile(path) as file:
            file.write(to_batch(torch.rand(1000 if at_the_end else 1_000_000)))
            file.write(to_batch(torch.rand(1000 if at_the_end else 2_000_000)))
            file.finish()

    with (
        full_after(2000 if at_the_end else 1 << 20),
        pytest.raises(ManyhandsError, match=r"cannot write .*out\.\w+: File too large. Make room"),
    ):
        write()
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("out.csv", "must end in .parquet or .arrow"),
        ("out", "must end in"),
        ("s3://bucket/out.parquet", "is a URL"),
        ("none/out.parquet", "there is no folder"),
        (".parquet/", "must end in|is a folder"),
    ],
)
def test_what_cannot_be_is_refused_at_construction(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / ".parquet").mkdir()
    given = name if "://" in name else tmp_path / name
    with pytest.raises(BadInput, match=words):
        RowFile(given)
