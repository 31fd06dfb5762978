"""`manyhands data`: what it shows, what it writes, what it ends with."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from command_line import invoke as command
from command_line import refused

import manyhands as mh
from manyhands.cli.data import text
from manyhands.data.shards.survey import survey


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("manyhands.data.shards.survey.available", lambda: 10**9)
    monkeypatch.chdir(tmp_path)
    mh.write_shards({"x": np.arange(800.0).reshape(400, 2), "y": np.arange(400)}, "rows", rows_per_file=25)


def invoke(*words: str) -> Any:
    return command("data", *words)


def test_what_a_folder_holds() -> None:
    done = invoke("rows", "-n", "2", "--rows", "1")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].startswith("rows: Parquet, 400 rows, ")
    assert lines[1].startswith("  files    16: ")
    assert lines[2] == "  blocks   16 row groups: 25 rows each"
    assert [line.split() for line in lines[6:9]] == [
        ["column", "type", "shape", "decoded"],
        ["x", "double", "[2]", "16", "B"],
        ["y", "int64", "8", "B"],
    ]
    assert "an epoch of 2 workers, batches of 64 rows, shuffle blocks:16" in lines
    assert [line.split()[:3] for line in lines[12:14]] == [["0", "200", "8"], ["1", "200", "8"]]
    assert "  together workers read 1.00× the bytes of the files" in lines
    assert lines[-2:] == ["x       y", "[0, 1]  0"]


def test_uncounted_rows_arrays_of_numpy_and_json() -> None:
    mh.write_shards({"cls": np.arange(400)}, "tars", format="tar", rows_per_file=100)
    shown = invoke("tars", "--no-count").stdout
    assert "tars: Tar, about 400 rows" in shown
    assert "uncounted: whole files are dealt" in shown
    assert "1 block in the first file: 100 rows" in shown
    assert [line.split()[:2] for line in shown.splitlines() if line.startswith("  0 ")] == [["0", "4"]]
    assert "tars: Tar, 400 rows" in invoke("tars").stdout
    np.save("a.npy", np.arange(6.0).reshape(3, 2))
    shown = invoke("a.npy").stdout
    assert "a.npy: npy, 3 rows" in shown
    assert "none of its own, the file is mapped" in shown
    assert "(the array)" in shown
    done = invoke("rows", "--json", "--workers", "4", "--batch-size", "8", "--shuffle", "none", "--columns", "y")
    assert done.exit_code == 0, done.output
    wanted = survey(["rows"], workers=4, batch_size=8, shuffle="none", columns=["y"])
    assert json.loads(done.stdout) == json.loads(wanted.to_json())


def test_no_line_is_wider_than_the_terminal() -> None:
    columns = {f"a_long_name_of_column_{i}": np.array(["a long value " * 5] * 10) for i in range(8)}
    mh.write_shards(columns, "wide.parquet")
    for workers in (2, 40):
        for path, count in (("rows", True), ("rows", False), ("wide.parquet", True)):
            found = survey([path], workers=workers, shuffle="blocks:3", count=count)
            for width in (60, 80, 120):
                shown = text(found, width)
                assert max(map(len, shown.splitlines())) <= width
    assert "more columns" in shown
    assert "a_long_name_of_column_0" in shown
    many = text(survey(["rows"], workers=40))  # they have one line each number
    assert "  each rows    6–13" in many  # 64 rows: 1 or 2 of six batches, the last of 16 rows
    assert "  worker  " not in many


def test_rows_are_written_in_another_form() -> None:
    done = invoke("rows", "--to", "b.tfrecord", "--columns", "x, y")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("b.tfrecord: 400 rows in 1 file, ")
    assert "manyhands: column x: fixed_size_list<" in done.stderr
    done = invoke("b.tfrecord", "--to", "c/", "--rows-per-file", "150", "--row-group-bytes", "1KB", "--shuffle", "rows")
    assert done.exit_code == 0, done.output
    rows = pq.read_table("c")["y"].to_pylist()
    assert sorted(rows) == list(range(400))
    assert rows != list(range(400))
    assert [path.name for path in sorted(Path("c").iterdir())] == [f"part-{i:05d}.parquet" for i in range(3)]
    done = invoke("b.tfrecord", "--to", "d", "--format", "arrow", "--shuffle", "rows", "--seed", "5", "--json")
    assert json.loads(done.stdout)["rows"] == 400
    done = invoke("rows/part-00003.parquet", "rows/part-00001.parquet", "--to", "b.parquet")
    assert done.exit_code == 0, done.output
    assert pq.read_table("b.parquet")["y"].to_pylist() == [*range(75, 100), *range(25, 50)]
    np.savez("a.npz", x=np.arange(3))
    assert invoke("a.npz", "--to", "a.arrow").stdout.startswith("a.arrow: 3 rows in 1 file")


def test_bad_input_is_one_message_and_exit_code_2() -> None:
    for words, message in (
        (["nowhere"], "there is no file or folder 'nowhere'"),
        (["rows", "--columns", "z"], "has no column 'z'; it has x, y"),
        (["rows", "--shuffle", "blocks:0"], '"blocks:K"'),
        (["rows", "--shuffle", "some"], "shuffle must be blocks:K, rows or none, not 'some'"),
        (["rows", "-n", "65"], "batch_size=64 leaves some of the 65 workers without a row"),
        (["rows", "--format", "tar"], "--format is of writing: give --to, too"),
        (["rows", "--seed", "0"], "--seed is of writing"),
        (["rows", "--to", "out", "-n", "2"], "--workers says how rows would be dealt, and --to writes them"),
        (["rows", "--to", "out", "--shuffle", "blocks:4"], "give --shuffle rows, not blocks:4"),
        (["rows", "--to", "out", "--format", "csv"], "format must be one of parquet, arrow, tfrecord, tar"),
        (["rows", "--to", "rows"], "the folder 'rows' is not empty"),
        (["rows", "--to", "out.tar", "--row-group-bytes", "1MB"], ".tar files have no row groups"),
        (["rows", "a.npz"], "there is no file or folder 'a.npz'"),
    ):
        refused(message, "data", *words)
        assert not Path("out").exists()
    refused("", "data", "rows", "-n", "0")
    refused("", "data")
