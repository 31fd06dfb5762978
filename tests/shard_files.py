"""Writes files of every format that `shards` reads, whose rows are numbers, and tells the numbers of a batch."""

import gzip
import io
import json
import tarfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from manyhands.data.shards.formats import base, lines, tar, tfrecord
from tfrecord_files import examples

GROUP = 7  # rows of a row group or record batch


def small_blocks(monkeypatch: pytest.MonkeyPatch, block: int = 300, piece: int = 60) -> None:
    """A few rows of these files fill a block, and fewer a piece."""
    for module in (base, lines, tar, tfrecord):
        for name, size in (("BLOCK_BYTES", block), ("PIECE_BYTES", piece), ("READ_BYTES", piece)):
            monkeypatch.setattr(module, name, size)


def table(numbers: Iterable[int]) -> pa.Table:
    """Columns x (a number), v (two of them) and name (a text)."""
    rows = [{"x": i, "v": [i + 0.5, -i], "name": f"row {i}"} for i in numbers]
    return pa.Table.from_pylist(
        rows, pa.schema([("x", pa.int64()), ("v", pa.list_(pa.float64())), ("name", pa.string())])
    )


def tar_bytes(members: Mapping[str, bytes], **options: Any) -> bytes:
    """A tar of these files, written by Python's own library."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", **options) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return made.getvalue()


def _parquet(numbers: Iterable[int]) -> bytes:
    made = io.BytesIO()
    pq.write_table(table(numbers), made, row_group_size=GROUP)
    return made.getvalue()


def _arrow(numbers: Iterable[int], kind: Callable[..., Any] = pa.ipc.new_file, **options: Any) -> bytes:
    made, rows = io.BytesIO(), table(numbers)
    with kind(made, rows.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(rows, max_chunksize=GROUP)
    return made.getvalue()


def _tfrecord(numbers: Iterable[int]) -> bytes:
    return examples(*({"x": [i], "v": [i + 0.5, -float(i)], "name": [b"row %d" % i]} for i in numbers))


def _tar(numbers: Iterable[int]) -> bytes:
    return tar_bytes({f"{i:06}.{suffix}": b"%d" % i for i in numbers for suffix in ("cls", "txt")})


def _lines(row: Callable[[int], str], head: str = "") -> Callable[[Iterable[int]], bytes]:
    return lambda numbers: (head + "".join(row(i) + "\n" for i in numbers)).encode()


BYTES_OF: dict[str, Callable[[Iterable[int]], bytes]] = {
    "parquet": _parquet,
    "arrow": _arrow,
    "stream.arrow": lambda numbers: _arrow(numbers, pa.ipc.new_stream),
    "tfrecord": _tfrecord,
    "tfrecord.gz": lambda numbers: gzip.compress(_tfrecord(numbers)),
    "tar": _tar,
    "tar.gz": lambda numbers: gzip.compress(_tar(numbers)),
    "csv": _lines(lambda i: f'{i},"row, {i}",{i + 0.5}', "x,name,half\n"),
    "tsv": _lines(lambda i: f"{i}\trow, {i}\t{i + 0.5}", "x\tname\thalf\n"),
    "jsonl": _lines(lambda i: json.dumps({"x": i, "v": [i + 0.5, -i], "name": f"row {i}"})),
    "txt": _lines(str),
}
"""{suffix: the bytes of a file of these rows}"""


def write(folder: Path, suffix: str, sizes: Iterable[int]) -> list[str]:
    """Files of so many rows each, which are numbered through all files; their paths."""
    paths, first = [], 0
    folder.mkdir(parents=True, exist_ok=True)
    for i, rows in enumerate(sizes):
        path = folder / f"{i:03}.{suffix}"
        path.write_bytes(BYTES_OF[suffix](range(first, first + rows)))
        paths.append(str(path))
        first += rows
    return paths


def numbers(batch: Mapping[str, Any]) -> list[int]:
    """The numbers of a batch's rows, whatever the format."""
    return [int(value) for value in batch[next(name for name in ("x", "cls", "text") if name in batch)]]
