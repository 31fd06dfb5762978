"""The source of rows of different lengths: a batch is a view of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from manyhands.data.batch import Collate
from manyhands.data.ragged import Ragged
from manyhands.data.source import Indexed, nonempty
from manyhands.errors import BadInput


class RaggedRows(Indexed):
    """A batch has the type of the data, such as `Csr` or `Corpus`."""

    def __init__(self, data: Ragged, collate: Collate | None = None) -> None:
        what = f"the {type(data).__name__}"
        if collate is not None:
            raise BadInput(f"{what} gives batches of its own type, for kernels: leave collate out")
        self._data = data
        self.rows = nonempty(len(data), what)

    @override
    def take(self, indices: Sequence[Any]) -> Ragged:
        return self._data.take(indices)
