"""data/shards/formats/mosaic.py: shards as mosaicml-streaming writes them, each encoding, and what is damaged."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import manyhands as mh
from manyhands.data.feed import Feed
from manyhands.data.open_source import open_source
from manyhands.data.shards.formats import mosaic
from refusals import refused

COLUMNS = {
    "text": ("str", None),
    "raw": ("bytes", None),
    "number": ("int", 8),
    "half": ("float16", 2),
    "image": ("ndarray:uint8:2,3", 6),
    "meta": ("json", None),
}


def encoded(encoding: str, value: Any) -> bytes:
    if encoding in ("str", "json"):
        return (value if encoding == "str" else json.dumps(value)).encode()
    if encoding == "int":
        return np.int64(value).tobytes()
    return value if isinstance(value, bytes) else np.asarray(value).tobytes()


def write(path: Path, rows: list[dict[str, Any]], columns: dict[str, tuple[str, int | None]] = COLUMNS) -> None:
    """A shard, as `MDSWriter.encode_joint_shard` puts it together."""
    samples = []
    for row in rows:
        parts = [(encoded(encoding, row[name]), size) for name, (encoding, size) in columns.items()]
        head = b"".join(struct.pack("<I", len(part)) for part, size in parts if size is None)
        samples.append(head + b"".join(part for part, _ in parts))
    encodings, sizes = ([one[i] for one in columns.values()] for i in range(2))
    config = {"column_names": list(columns), "column_encodings": encodings, "column_sizes": sizes}
    head = json.dumps({"version": 2, "format": "mds", **config}).encode()
    begins = np.cumsum([0, *map(len, samples)]) + 4 + 4 * (len(samples) + 1) + len(head)
    path.write_bytes(struct.pack("<I", len(samples)) + begins.astype("<u4").tobytes() + head + b"".join(samples))


def row(i: int) -> dict[str, Any]:
    return {
        "text": "é" * (i % 5),
        "raw": bytes([i % 256]) * (i % 3),
        "number": i - 7,
        "half": np.float16(i / 4),
        "image": np.arange(6, dtype=np.uint8).reshape(2, 3) + np.uint8(i % 200),
        "meta": {"i": i},
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(mosaic, "BLOCK_BYTES", 400)
    monkeypatch.setattr(mosaic, "PIECE_BYTES", 150)
    rows = [row(i) for i in range(103)]
    (tmp_path / "rows").mkdir()
    for i, own in enumerate([rows[:50], [], rows[50:51], rows[51:]]):
        write(tmp_path / "rows" / f"shard.{i:05}.mds", own)
    (tmp_path / "rows" / "index.json").write_text("{}")
    return tmp_path / "rows"


def test_every_encoding_comes_as_it_was_written(folder: Path) -> None:
    slices = list(Feed(open_source(mh.shards(folder, shuffle=False)), batch_size=10).epoch(0))
    found = {name: [value for one in slices for value in one.batch[name]] for name in COLUMNS}
    for i in range(103):
        expected = row(i)
        assert [found[name][i] for name in ("text", "raw", "meta")] == [expected[n] for n in ("text", "raw", "meta")]
        assert (int(found["number"][i]), float(found["half"][i])) == (expected["number"], float(expected["half"]))
        assert torch.equal(found["image"][i], torch.from_numpy(expected["image"]))
    assert slices[0].batch["image"].dtype == torch.uint8


def test_each_row_once(folder: Path) -> None:
    for options in ({}, {"shuffle": "blocks:3"}, {"shuffle": True}, {"counted": False}):
        for size in (1, 3):
            rows = []
            for rank in range(size):
                source = open_source(mh.shards(folder, columns=["number"], **options))
                feed = Feed(source, rank=rank, size=size, batch_size=7)
                rows += [int(n) for one in feed.epoch(1) if one.batch is not None for n in one.batch["number"]]
            assert sorted(rows) == [i - 7 for i in range(103)], (options, size)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    def read() -> None:
        list(Feed(open_source(mh.shards(path))).epoch(0))

    path = tmp_path / "one.mds"
    for encoding, words in [
        ("pkl", "pickled objects"),
        ("ndarray", "'x' of .*one.mds holds arrays whose shape differs"),
    ]:
        write(path, [{"x": b"1"}], {"x": (encoding, None)})
        refused(words, read, case=encoding)
    write(path, [row(0), row(1)])
    whole = path.read_bytes()
    for damaged, words in [
        (whole[:-3], "its samples end at byte"),
        (whole[:3], "header"),
        (whole.replace(b'"column_names"', b'"column_nams_"'), "header is damaged"),
        (whole[:4] + b"\xff" * 4 + whole[8:], "header|samples|ends at byte|end"),
    ]:
        path.write_bytes(damaged)
        refused(f"one.mds.*({words})", read, case=words)
