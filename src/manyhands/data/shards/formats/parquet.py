"""Parquet: a block is a row group."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

from typing_extensions import override

from manyhands.data.shards.formats.base import Block, ShardFile, plain, selected
from manyhands.errors import BadInput

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_WHOLE_BYTES = 4 << 20  # a row group of so many bytes is read at once, a larger one by column and piece
_BUFFER_BYTES = 1 << 20
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8}
_FOOTER_BYTES = 1 << 16  # read at least, of a store; row groups are read in larger pieces


class Parquet(ShardFile):
    tells_rows = True

    @override
    def types(self) -> dict[str, pa.DataType]:
        with self._named():
            return {field.name: plain(field.type) for field in self._metadata.schema.to_arrow_schema()}

    @override
    def blocks(self) -> list[Block]:
        blocks, first = [], 0
        with self._named():
            for i in range(self._metadata.num_row_groups):
                group = self._metadata.row_group(i)
                columns = [group.column(j) for j in range(group.num_columns)]
                stored, memory = sum(one.total_compressed_size for one in columns), sum(map(_decoded_bytes, columns))
                blocks.append(Block(first, group.num_rows, i, stored, memory))
                first += group.num_rows
        return blocks

    @override
    def read(self, block: Block, names: Sequence[str], start: int = 0) -> Generator[pa.RecordBatch, None, None]:
        self.file.check()
        there = self.types()
        if missing := [name for name in names if name not in there]:
            raise BadInput(f"{self.file.url} has no column {missing[0]!r}; it has {', '.join(there)}")
        stored = self._stored_bytes(block, set(names))
        at, rows = 0, block.piece_rows
        with self._opened(whole=stored <= _WHOLE_BYTES) as file:
            if self.file.local is not None:
                self.file.counters.add(bytes=stored, reads=1)
            for batch in file.iter_batches(rows, row_groups=[block.at], columns=list(names), use_threads=False):
                behind, at = at, at + batch.num_rows
                if at > start:
                    yield selected(batch.slice(max(0, start - behind)), names)

    def _stored_bytes(self, block: Block, wanted: set[str]) -> int:
        """Of these columns of a block."""
        group = self._metadata.row_group(block.at)
        columns = [group.column(i) for i in range(group.num_columns)]
        with self._named():
            return sum(one.total_compressed_size for one in columns if one.path_in_schema.split(".")[0] in wanted)

    @cached_property
    def _metadata(self) -> pq.FileMetaData:
        with self._opened(whole=False) as file:
            if self.file.local is not None:
                self.file.counters.add(bytes=file.metadata.serialized_size, reads=1)
            return file.metadata

    @contextmanager
    def _opened(self, whole: bool) -> Iterator[pq.ParquetFile]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        local = self.file.local
        known = self.__dict__.get("_metadata")
        with self._named():
            source = self.file.stream(piece=_FOOTER_BYTES) if local is None else pa.OSFile(local)
            buffered = 0 if whole else _BUFFER_BYTES
            with (
                source,
                pq.ParquetFile(
                    source,
                    metadata=known,
                    pre_buffer=whole,
                    buffer_size=buffered,
                    page_checksum_verification=True,  # where a file has them
                ) as file,
            ):
                yield file

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Errors of Arrow's name the file."""
        import pyarrow as pa

        try:
            yield
        except MemoryError:
            raise
        except FileNotFoundError:
            self.file.check()
            raise
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise BadInput(
                f"cannot read {self.file.url} as Parquet: {error}. Check that it is a complete Parquet file"
            ) from error


def _decoded_bytes(column: pq.ColumnChunkMetaData) -> int:
    """About as many as its values have in memory; encoded, values that repeat take next to nothing."""
    width = _WIDTHS.get(column.physical_type, 16)
    if column.physical_type == "BYTE_ARRAY" and column.is_stats_set and column.statistics.has_min_max:
        width = 4 + (len(column.statistics.min_raw) + len(column.statistics.max_raw)) // 2
    return int(max(column.total_uncompressed_size, width * column.num_values))
