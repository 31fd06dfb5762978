"""Rows a second written as shards: `mh.write_shards` beside what people write each format with; alternating, medians.

    python benchmarks/write_shards.py [--rows 20000] [--blocks 5] [--json FILE]

The rows, 64 float32 and a label, lie in memory, and both write the same files: Parquet beside pyarrow's own writer, a tar beside Python's
tarfile with numpy.save, as webdataset's ShardWriter has it, TFRecord beside protobuf's Examples, serialised one by one.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import struct
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import manyhands as mh

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from tfrecord_files import example

Rows = dict[str, np.ndarray]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the numbers to this file, too")
    asked = parser.parse_args()
    draw = np.random.default_rng(0)
    rows = {"x": draw.normal(size=(asked.rows, 64)).astype(np.float32), "cls": draw.integers(0, 10, asked.rows)}
    found = {}
    print(f"{asked.rows:,} rows, median of {asked.blocks} blocks: rows/s")
    for suffix, peer in PEERS.items():
        ours, theirs = [], []
        for _ in range(asked.blocks):
            ours.append(rate(lambda path: mh.write_shards(rows, path), rows, suffix))
            theirs.append(rate(lambda path, peer=peer: peer(rows, path), rows, suffix))
        mine, other = statistics.median(ours), statistics.median(theirs)
        print(f"  {suffix:10} manyhands {mine:12,.0f}   {peer.__name__:10} {other:12,.0f}   ratio {mine / other:.2f}")
        found[suffix] = {"manyhands": mine, peer.__name__: other, "ratio": mine / other}
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=2) + "\n")


def rate(write: Callable[[Path], object], rows: Rows, suffix: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        write(Path(folder) / f"rows.{suffix}")
        return len(rows["cls"]) / (time.perf_counter() - start)


def pyarrow(rows: Rows, path: Path) -> None:
    x = pa.FixedSizeListArray.from_arrays(rows["x"].reshape(-1), rows["x"].shape[1])
    pq.write_table(pa.table({"x": x, "cls": rows["cls"]}), path)


def tarfiles(rows: Rows, path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        for i in range(len(rows["cls"])):
            file = io.BytesIO()
            np.save(file, rows["x"][i], allow_pickle=False)
            for suffix, data in (("x.npy", file.getvalue()), ("cls", b"%d" % rows["cls"][i])):
                member = tarfile.TarInfo(f"{i:09d}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def protobuf(rows: Rows, path: Path) -> None:
    with path.open("wb") as file:
        for i in range(len(rows["cls"])):
            data = example({"x": rows["x"][i].tolist(), "cls": [int(rows["cls"][i])]})
            length = struct.pack("<Q", len(data))
            file.write(length + checksum(length) + data + checksum(data))


def checksum(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32)


PEERS = {"parquet": pyarrow, "tar": tarfiles, "tfrecord": protobuf}

if __name__ == "__main__":
    main()
