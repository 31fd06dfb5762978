"""The contract of a format: how the rows of one file are counted, and how a block of them is read."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from manyhands.data.shards.stored_file import StoredFile

if TYPE_CHECKING:
    import pyarrow as pa

BLOCK_BYTES = 16 << 20
"""Of formats without blocks of their own: rows that lie together make blocks of about so many bytes."""
PIECE_BYTES = 1 << 20
"""What is decoded at once: a record batch is about as large in memory, a row at least. Of each open block two are held, so that
16 of them are some 200 MB of a worker's memory, whatever the files are like.
"""
READ_BYTES = 1 << 20
"""What is asked of a file at once, at least, that is read from front to back."""


class Block(NamedTuple):
    """Rows of a file that are read together."""

    first: int
    """The number of its first row in the file."""
    rows: int
    at: int
    """Where it begins: a byte, or the number of a row group or record batch."""
    bytes: int
    """As it is stored."""
    memory: int
    """About as many bytes when it is decoded."""

    @property
    def piece_rows(self) -> int:
        """Rows of a piece: of about PIECE_BYTES in memory."""
        return max(1, self.rows * PIECE_BYTES // max(1, self.memory, PIECE_BYTES))


@dataclass(frozen=True)
class ShardFile(ABC):
    """One file of rows. Every method may be called by several threads. A row is one value of each column."""

    file: StoredFile
    tells_rows: ClassVar[bool] = False
    """Whether a look at its header or footer says how many rows it has."""

    @abstractmethod
    def types(self) -> dict[str, pa.DataType]:
        """{column: Arrow type} as its first rows have them; {} where nothing says it."""

    @abstractmethod
    def blocks(self) -> list[Block]:
        """All of its blocks in order. It costs a look at the file's footer, or one reading of the file."""

    @abstractmethod
    def read(self, block: Block, names: Sequence[str], start: int = 0) -> Generator[pa.RecordBatch, None, None]:
        """The rows of a block from its row `start` on, as record batches of these columns, about PIECE_BYTES each.

        Raises BadInput, naming file and row or column, for what is damaged, and for rows that lack a column.
        """

    def suffixes(self, columns: Sequence[str]) -> dict[str, str]:
        """{column: the suffix of a file with such bytes}, by which its values are decoded; of these columns, those that need it."""
        return {}

    def whole(self) -> Block:
        """All of a file whose rows nobody has counted, as one block. Not of formats that say how many they are."""
        return Block(0, sys.maxsize, 0, self.file.size, self.file.size)


def plain(kind: pa.DataType) -> pa.DataType:
    """The type that a column is read as: decimals as doubles, as on their way from Spark; of a dictionary its values."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return plain(kind.value_type)
    return pa.float64() if pa.types.is_decimal(kind) else kind


def selected(batch: pa.RecordBatch, names: Sequence[str]) -> pa.RecordBatch:
    """These columns, in this order, as `plain` says. ArrowInvalid for what is damaged: its offsets would be followed
    to memory of others, and its texts be no texts.
    """
    import pyarrow as pa

    columns = [batch.column(name) for name in names]
    columns = [one if plain(one.type) == one.type else one.cast(plain(one.type)) for one in columns]
    found = pa.RecordBatch.from_arrays(columns, names=list(names))
    found.validate(full=True)
    return found
