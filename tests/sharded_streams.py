"""A stream in shards, of which each worker reads its own, as a Hugging Face dataset has files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import IterableDataset


class Sharded(IterableDataset[Any]):
    def __init__(self, shards: Sequence[Iterable[Any]]) -> None:
        self.shards, self.num_shards = shards, len(shards)

    def shard(self, num_shards: int, index: int) -> Sharded:
        return Sharded(self.shards[index::num_shards])

    def __iter__(self) -> Iterator[Any]:
        return (row for shard in self.shards for row in shard)
