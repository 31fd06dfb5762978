"""data/readers/files.py: .npz, .npy, .parquet, .tfrecord and .txt."""

import tracemalloc

import numpy as np
import torch

from manyhands.data.feed import Feed
from manyhands.data.open_source import open_source
from refusals import refused
from tfrecord_files import examples


def read(data, **options):
    return [part.batch for part in Feed(open_source(data, **options), batch_size=3, shuffle=False).epoch(0)]


def test_npz_and_npy(tmp_path):
    x, y = np.arange(8.0).reshape(4, 2), np.arange(4)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    np.save(tmp_path / "x.npy", x)
    first, last = read(str(tmp_path / "data.npz"))
    assert torch.equal(first["x"], torch.from_numpy(x[:3]))
    assert last["y"].tolist() == [3]
    assert torch.equal(torch.cat(read(tmp_path / "x.npy")), torch.from_numpy(x))
    shuffled = next(Feed(open_source(tmp_path / "x.npy"), batch_size=4).epoch(0)).batch
    assert sorted(shuffled[:, 0].tolist()) == [0, 2, 4, 6]


def test_files_of_a_folder_are_one_table_in_the_order_of_their_names(tmp_path):
    for name, number in (("b", 3), ("a", 0)):
        (tmp_path / f"{name}.tfrecord").write_bytes(examples({"x": [number + 0.5], "y": [number]}))
    for path in (str(tmp_path), f"file://{tmp_path}"):
        (batch,) = read(path)
        assert (batch["x"].tolist(), batch["y"].tolist()) == ([0.5, 3.5], [0, 3])


def test_text_rows_are_lines(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes("eins\n\nzwei drei\r\nvierß".encode())
    assert read(path) == [["eins", "", "zwei drei"], ["vierß"]]
    assert read(path, collate=lambda lines: torch.tensor([len(line) for line in lines]))[0].tolist() == [4, 0, 9]
    seen = [line for part in Feed(open_source(path), batch_size=2).epoch(0) for line in part.batch]
    assert sorted(seen) == ["", "eins", "vierß", "zwei drei"]
    path.write_bytes(b"a\nb\n")
    assert read(path) == [["a", "b"]]
    lines = ["x" * (i * i % 37) for i in range(1000)]
    lines[500] = "y" * 300_000  # longer than what is looked through at once
    path.write_text("".join(line + "\n" for line in lines))
    source = open_source(path)
    assert source.rows == 1000
    assert source.take(range(1000)) == lines
    assert source.take([999, 0, 500, 16, 15, 17]) == [lines[i] for i in (999, 0, 500, 16, 15, 17)]


def test_text_stays_in_its_file(tmp_path):
    """Neither while it is opened nor afterwards does a worker hold memory of the file's size."""
    (tmp_path / "text.txt").write_bytes(b"abc\n" * 2_000_000)
    tracemalloc.start()
    try:
        source = open_source(tmp_path / "text.txt")
        held, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (source.rows, source.take([1_999_999])) == (2_000_000, ["abc"])
    assert held < 2_000_000  # a quarter of the file
    assert most < 4_000_000


def test_what_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "data.xyz").write_text("1,2")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "empty.tfrecord").write_text("")
    (tmp_path / "empty").mkdir()
    np.savez(tmp_path / "objects.npz", x=np.array([{}, {}], dtype=object))
    for name in ("broken.npz", "broken.npy", "broken.parquet"):
        (tmp_path / name).write_text("no such format")
    for name, words in [
        ("missing.npz", "no file or folder"),
        ("data.xyz", "expected .npz"),
        ("empty.txt", "has no rows"),
        ("empty.tfrecord", "has no rows"),
        ("empty", "holds no .parquet"),
        ("broken.npz", "cannot read .*broken.npz"),
        ("broken.npy", "cannot read .*broken.npy"),
        ("broken.parquet", "cannot read .*broken.parquet as Parquet"),
        ("objects.npz", "plain arrays without Python objects"),  # which are never unpickled
    ]:
        refused(words, open_source, tmp_path / name)
    refused("cannot be read by URL: copy the file", open_source, "s3://bucket/x.npz")
    (tmp_path / "text.txt").write_bytes(b"a\n\xff\n")
    refused("line 2 of .* is not UTF-8", read, tmp_path / "text.txt")
