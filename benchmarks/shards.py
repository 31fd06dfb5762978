"""Rows a second from shards on a local disk, two processes: manyhands beside webdataset, Hugging Face streaming and pyarrow's dataset.

    python benchmarks/shards.py --peers PYTHON [--blocks 5]

PYTHON: an interpreter with torch, webdataset, datasets and pyarrow. Every reader gives shuffled batches of tensors to a loop that does
nothing. One process of two reads half of the files or of each batch, as that library shares rows out. Each has given a batch before,
so that nothing is imported while it is timed. pyarrow-1 is pyarrow's dataset with use_threads=False. Blocks alternate.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np

PROCESSES = 2
BATCH = 256  # rows of all processes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=sys.executable, help="Python interpreter that has the peers")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--rows", type=int, default=3_000_000, help="of the Parquet files; the tars hold a 25th")
    parser.add_argument("--read", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.read:
        _read(json.loads(asked.read))
        return
    with tempfile.TemporaryDirectory(prefix="manyhands-shards-") as folder:
        os.environ["MANYHANDS_CACHE"] = f"{folder}/cache"
        _write(Path(folder), asked.rows)
        for kind, peers in (("parquet", ("pyarrow", "pyarrow-1", "datasets")), ("tar", ("webdataset", "datasets"))):
            rates: dict[str, list[float]] = {name: [] for name in ("manyhands", *peers)}
            for _ in range(asked.blocks):
                for name, found in rates.items():
                    python = sys.executable if name == "manyhands" else asked.peers
                    found.append(_rate(python, name, kind, f"{folder}/{kind}"))
            print(f"{kind}, {PROCESSES} processes, batches of {BATCH}: rows/s, median of {asked.blocks} blocks")
            medians = {name: statistics.median(found) for name, found in rates.items()}
            best = max(medians[name] for name in peers)
            for name, median in medians.items():
                print(f"  {name:12} {median:12,.0f}   from {min(rates[name]):,.0f} to {max(rates[name]):,.0f}")
            print(f"  manyhands / the better one: {medians['manyhands'] / best:.2f}")


def _write(folder: Path, rows: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    draw = np.random.default_rng(0)
    (folder / "parquet").mkdir()
    (folder / "tar").mkdir()
    for i in range(8):
        many = rows // 8
        x = pa.FixedSizeListArray.from_arrays(pa.array(draw.normal(size=many * 64).astype(np.float32)), 64)
        table = pa.table({"x": x, "y": draw.integers(0, 10, many)})
        pq.write_table(table, folder / "parquet" / f"{i}.parquet", row_group_size=10_000)
        with tarfile.open(folder / "tar" / f"{i}.tar", "w") as tar:
            for j in range(many // 25):
                for suffix, data in (
                    ("npy", _npy(draw.integers(0, 255, (32, 32, 3)).astype(np.uint8))),
                    ("cls", b"%d" % (j % 10)),
                ):
                    member = tarfile.TarInfo(f"{i:02}{j:06}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


def _npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _rate(python: str, name: str, kind: str, folder: str) -> float:
    """Rows a second of all processes together, by the time from the first one's first row to the last one's end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    readers = [
        subprocess.Popen(
            [python, __file__, "--read", json.dumps({"name": name, "kind": kind, "folder": folder, "rank": rank})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(PROCESSES)
    ]
    for reader in readers:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "ready\n"
    start = time.monotonic()
    for reader in readers:
        assert reader.stdin is not None
        reader.stdin.write("go\n")
        reader.stdin.flush()
    rows = [int(reader.communicate(timeout=600)[0]) for reader in readers]
    return sum(rows) / (time.monotonic() - start)


def _read(asked: dict) -> None:
    made = {
        "manyhands": _manyhands,
        "pyarrow": _pyarrow,
        "pyarrow-1": partial(_pyarrow, use_threads=False),
        "datasets": _datasets,
        "webdataset": _webdataset,
    }[asked["name"]]
    open_batches = made(asked["kind"], asked["folder"], asked["rank"])
    with closing(open_batches()) as batches:
        next(batches)
    print("ready", flush=True)
    sys.stdin.readline()
    rows = 0
    for batch in open_batches():
        rows += len(batch)
    print(rows, flush=True)


def _manyhands(kind: str, folder: str, rank: int):
    import manyhands as mh
    from manyhands.data.feed import Feed
    from manyhands.data.open_source import open_source

    def batches():
        source = open_source(mh.shards(folder))
        for part in Feed(source, rank=rank, size=PROCESSES, batch_size=BATCH).epoch(0):
            yield part.batch["y" if kind == "parquet" else "cls"]

    return batches


def _files(folder: str, rank: int) -> list[str]:
    return sorted(str(path) for path in Path(folder).iterdir())[rank::PROCESSES]


def _pyarrow(kind: str, folder: str, rank: int, use_threads: bool = True):
    import pyarrow.dataset as ds
    import torch

    def batches():
        """Whole record batches are shuffled among their rows, and cut: what a user of pyarrow.dataset writes."""
        own = np.random.default_rng(0)
        files = ds.dataset(_files(folder, rank), format="parquet")
        for batch in files.to_batches(batch_size=BATCH * 32, use_threads=use_threads):
            order = own.permutation(batch.num_rows)
            x = torch.from_numpy(batch["x"].flatten().to_numpy(zero_copy_only=False).reshape(-1, 64)[order])
            y = torch.from_numpy(batch["y"].to_numpy(zero_copy_only=False)[order])
            for i in range(0, len(y), BATCH // PROCESSES):
                _, target = x[i : i + BATCH // PROCESSES], y[i : i + BATCH // PROCESSES]
                yield target

    return batches


def _datasets(kind: str, folder: str, rank: int):
    import datasets

    datasets.disable_progress_bars()

    def batches():
        name = "parquet" if kind == "parquet" else "webdataset"
        data = datasets.load_dataset(name, data_files={"train": _files(folder, rank)}, split="train", streaming=True)
        data = data.shuffle(seed=0, buffer_size=1000)
        if kind == "parquet":
            data = data.with_format("torch")
            for batch in data.iter(batch_size=BATCH // PROCESSES):
                yield batch["y"]
            return
        import torch

        for batch in data.iter(batch_size=BATCH // PROCESSES):
            images = [np.load(io.BytesIO(one)) if isinstance(one, bytes) else np.asarray(one) for one in batch["npy"]]
            torch.from_numpy(np.stack(images))
            yield torch.tensor([int(one) for one in batch["cls"]])

    return batches


def _webdataset(kind: str, folder: str, rank: int):
    import torch
    import webdataset as wds

    def batches():
        data = wds.WebDataset(_files(folder, rank), shardshuffle=False).shuffle(1000).decode().to_tuple("npy", "cls")
        for images, targets in data.batched(BATCH // PROCESSES, collation_fn=_collate):
            torch.from_numpy(images)
            yield targets

    def _collate(rows):
        return np.stack([row[0] for row in rows]), torch.tensor([row[1] for row in rows])

    return batches


if __name__ == "__main__":
    main()
