"""Arrow's own files, as files with a footer (.arrow, .feather) and as streams (Hugging Face's): a block is a record batch."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from manyhands.data.shards.formats.base import Block, ShardFile, plain, selected
from manyhands.errors import BadInput

if TYPE_CHECKING:
    import pyarrow as pa

_MAGIC = b"ARROW1\x00\x00"


class Arrow(ShardFile):
    tells_rows = True

    @override
    def types(self) -> dict[str, pa.DataType]:
        with self._opened() as (_, reader, _):
            return {field.name: plain(field.type) for field in reader.schema}

    @override
    def blocks(self) -> list[Block]:
        blocks, first = [], 0
        with self._opened() as (source, reader, seekable):
            for at, batch in self._batches(source, reader, seekable):
                if batch.num_rows:
                    blocks.append(Block(first, batch.num_rows, at, batch.nbytes, batch.nbytes))
                first += batch.num_rows
        return blocks

    @override
    def read(self, block: Block, names: Sequence[str], start: int = 0) -> Generator[pa.RecordBatch, None, None]:
        import pyarrow as pa

        self.file.check()
        with self._opened() as (source, reader, seekable):
            if seekable:
                batch = reader.get_batch(block.at)
            else:
                source.seek(block.at)
                batch = pa.ipc.read_record_batch(pa.ipc.read_message(source), reader.schema)
            batch = selected(batch, names)
            if self.file.local is not None:
                self.file.counters.add(bytes=block.bytes, reads=1)
        for at in range(start, batch.num_rows, block.piece_rows):
            yield batch.slice(at, block.piece_rows)

    @staticmethod
    def _batches(source: Any, reader: Any, seekable: bool) -> Iterator[tuple[int, pa.RecordBatch]]:
        """(where, record batch) of all."""
        if seekable:
            yield from ((i, reader.get_batch(i)) for i in range(reader.num_record_batches))
            return
        while True:
            at = source.tell()
            try:
                yield at, reader.read_next_batch()
            except StopIteration:
                return

    @contextmanager
    def _opened(self) -> Iterator[tuple[Any, Any, bool]]:
        """(file, its reader, whether it has a footer)"""
        import pyarrow as pa

        local = self.file.local
        try:
            with pa.PythonFile(self.file.stream()) if local is None else pa.OSFile(local) as source:
                seekable = source.read(len(_MAGIC)) == _MAGIC
                source.seek(0)
                reader = pa.ipc.open_file(source) if seekable else pa.ipc.open_stream(source)
                coded = [field.name for field in reader.schema if pa.types.is_dictionary(field.type)]
                if coded and not seekable:  # a batch means nothing without the dictionaries before it
                    raise BadInput(
                        f"{self.file.url} is a stream whose column {coded[0]!r} has a dictionary, and its rows cannot be read one batch "
                        "at a time: write it with pyarrow.ipc.new_file, or as Parquet"
                    )
                yield source, reader, seekable
        except MemoryError:
            raise
        except FileNotFoundError:
            self.file.check()
            raise
        except (pa.ArrowException, OSError, EOFError) as error:
            raise BadInput(
                f"cannot read {self.file.url} as Arrow: {error}. Check that it is a complete Arrow file"
            ) from error
