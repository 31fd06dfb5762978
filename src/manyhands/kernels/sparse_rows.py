"""What the kernels of sparse rows share: the rows that they take, and pieces of their loops."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray
from typing_extensions import override

from manyhands.data.csr import Csr
from manyhands.errors import BadInput
from manyhands.sparse.compile import compiled
from manyhands.sparse.kernel import Kernel, Touched

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class SparseRowsKernel(Kernel):
    """Its data is a `Csr`, of no more features than it has."""

    features: int

    @override
    def prepare(self, batch: Any, random: int) -> dict[str, Array]:
        """The arrays of the whole data, and the numbers of the batch's rows."""
        if not isinstance(batch, Csr):
            raise BadInput(
                f"kernel {self.name} takes sparse rows: give train_data as a manyhands.Csr, not what gives batches of {type(batch).__name__}"
            )
        if batch.features > self.features:
            raise BadInput(f"kernel {self.name} has {self.features:,} features, and its rows have {batch.features:,}")
        return {
            "rows": batch.numbers(),
            "offsets": batch.offsets,
            "keys": batch.keys,
            "values": batch.values,
            "targets": batch.targets,
        }

    @override
    def touched(self, batch: Any) -> Touched:
        """A row's features."""
        assert isinstance(batch, Csr)
        return batch


@compiled
def log_loss(margin: float) -> float:
    """log(1 + exp(-margin)), which does not overflow."""
    return math.log1p(math.exp(-abs(margin))) + max(0.0, -margin)
