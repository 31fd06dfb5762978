"""TFRecord files of `tf.train.Example`: a block is about BLOCK_BYTES of neighbouring records, or all of a gzip'ed file."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, BinaryIO, cast

from typing_extensions import override

from manyhands.data.readers import tfrecords
from manyhands.data.shards.formats.base import BLOCK_BYTES, PIECE_BYTES, READ_BYTES, Block, ShardFile

if TYPE_CHECKING:
    import pyarrow as pa


class TFRecord(ShardFile):
    @override
    def types(self) -> dict[str, pa.DataType]:
        with self.file.stream() as stream:
            for batch in tfrecords.read(cast(BinaryIO, stream), self.file.url, stop=1):
                return {field.name: field.type for field in batch.schema}
        return {}

    @override
    def blocks(self) -> list[Block]:
        with self.file.stream() as stream:
            found = tfrecords.spans(cast(BinaryIO, stream), self.file.url, BLOCK_BYTES)
        return [Block(first, rows, start, stop - start, stop - start) for first, rows, start, stop in found]

    @override
    def read(self, block: Block, names: Sequence[str], start: int = 0) -> Generator[pa.RecordBatch, None, None]:
        self.file.check()
        with self.file.stream(block.at, block.at + block.bytes, READ_BYTES) as stream:
            yield from tfrecords.read(
                cast(BinaryIO, stream), self.file.url, names, start, block.rows, first=block.first, piece=PIECE_BYTES
            )
