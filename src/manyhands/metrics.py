"""What a task measures on a batch: means over its rows, and sums of which a metric is made at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Measure = Tensor | tuple[Tensor, Any]  # a mean over the batch, or (mean, weight)


@dataclass(frozen=True)
class Summed:
    """Metrics that are no means over rows (AUC, perplexity): what to sum over batches and workers, and the result."""

    sums: Tensor
    """[k] of this batch."""
    result: Callable[[Tensor], Mapping[str, float]]
    """(the sum of all batches, float64 [k] on the CPU) -> {name: metric}; the names take the place of this one's."""


Metrics = Mapping[str, Measure | Summed | tuple[float, float]]
