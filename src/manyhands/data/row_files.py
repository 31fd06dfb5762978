"""Rows into a Parquet or Arrow file, as they come: under another name until all are there, so that there is no half file."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from manyhands.data.row_batches import check_alike, widened
from manyhands.errors import BadInput, ManyhandsError

if TYPE_CHECKING:
    import pyarrow as pa

KINDS = (".parquet", ".arrow")
GROUP_BYTES = 16 << 20
GROUP_ROWS = 1 << 17
"""Of a Parquet row group, at most so many and the rest of a piece: a group is in memory before it is written."""


class RowFile:
    """A file that appears when it is complete. As a context manager it leaves nothing after an error.

    A file of that name, if there is one, is replaced. Columns are the outputs' (`prediction`, or their names); rows of
    several numbers are fixed-size lists. bfloat16 is written as float32.
    """

    def __init__(self, path: str | Path) -> None:
        """Nothing is written before the first rows. Raises BadInput where no such file can be."""
        self.path = Path(path).expanduser()
        if "://" in str(path):
            raise BadInput(f"output {str(path)!r} is a URL, and rows are written into a file of this machine: copy it")
        if self.path.suffix.lower() not in KINDS:
            raise BadInput(f"output must end in {' or '.join(KINDS)}, not {str(path)!r}")
        if self.path.is_dir():
            raise BadInput(f"output {self.path} is a folder: give the name of a file")
        if not self.path.parent.is_dir():
            raise BadInput(f"output {self.path}: there is no folder {self.path.parent}; make it first")
        self.rows = 0
        self._partial = self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}.partial")
        self._sink: Any = None
        self._writer: Any = None
        self._schema: pa.Schema | None = None
        self._group: list[pa.RecordBatch] = []  # of a Parquet file: what the next row group will hold
        self._held = [0, 0]  # its rows and bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._drop()

    def write(self, batch: pa.RecordBatch) -> None:
        """Append rows. BadInput for other columns than before, ManyhandsError where the disk is full."""
        if self._schema is None:
            self._schema = batch.schema
        check_alike(self._schema, batch.schema)
        batch = widened(batch)
        self.rows += batch.num_rows
        with self._errors_named():
            if self._writer is None:
                self._open(batch.schema)
            if self.path.suffix.lower() == ".arrow":
                self._writer.write_batch(batch)
                return
            self._group.append(batch)
            self._held = [self._held[0] + batch.num_rows, self._held[1] + batch.nbytes]
            if self._held[0] >= GROUP_ROWS or self._held[1] >= GROUP_BYTES:
                self._write_group()

    def finish(self) -> None:
        """The file is there, under its name. ManyhandsError where the disk is full, or no rows came."""
        if self._writer is None:
            raise ManyhandsError(f"no rows came for {self.path}: nothing was written")
        with self._errors_named():
            self._write_group()
            self._writer.close()
            self._writer = None
            self._sink.flush()
            self._sink.close()
            self._sink = None
            self._partial.replace(self.path)

    def _open(self, schema: pa.Schema) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._sink = self._partial.open("xb")
        if self.path.suffix.lower() == ".arrow":
            self._writer = pa.ipc.new_file(self._sink, schema)
        else:
            texts = [field.name for field in schema if pa.types.is_large_string(field.type)]
            self._writer = pq.ParquetWriter(self._sink, schema, use_dictionary=texts)  # of floats it only costs time

    def _write_group(self) -> None:
        if self._group:
            import pyarrow as pa

            self._writer.write_table(pa.Table.from_batches(self._group), row_group_size=self._held[0])
            self._group, self._held = [], [0, 0]

    def _drop(self) -> None:
        """What is not complete. Idempotent."""
        writer, sink, self._writer, self._sink, self._group = self._writer, self._sink, None, None, []
        for open_one in (writer, sink):
            if open_one is not None:
                with suppress(Exception):  # a full disk, once more; the file goes anyway
                    open_one.close()
        self._partial.unlink(missing_ok=True)

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        import pyarrow as pa

        try:
            yield
        except OSError as error:
            raise ManyhandsError(
                f"cannot write {self.path}: {error.strerror or error}. Make room, or give another output; nothing of it was left"
            ) from error
        except pa.ArrowNotImplementedError as error:
            raise BadInput(f"{self.path} cannot hold this: {error}. Give an output that ends in .arrow") from error
