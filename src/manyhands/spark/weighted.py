"""Loss and metrics of (features, label, weight) rows: weighted means, whose weight is the sum of the rows' weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from manyhands.errors import BadInput

Rows = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class WeightedLoss:
    """Σ weight · criterion / Σ weight; `criterion` takes reduction="none", as torch's functions do."""

    criterion: Callable[..., Tensor]

    def __call__(self, model: nn.Module, batch: Rows) -> tuple[Tensor, Tensor]:
        features, label, weight = batch
        return self.mean(model(features), label, weight)

    def mean(self, outputs: Tensor, label: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """(mean, weight)."""
        try:
            each = self.criterion(outputs, label, reduction="none")
        except TypeError as error:
            raise BadInput(
                f"weight_col needs a criterion that takes reduction='none', as torch.nn.functional's do ({error}): give one, or a task "
                "whose loss takes (features, label, weight)"
            ) from error
        each = each.reshape(len(weight), -1).mean(1)
        return (each * weight).sum() / weight.sum(), weight.sum()


@dataclass(frozen=True)
class WeightedMetrics:
    """{"loss", "accuracy"}, the latter where labels are class numbers."""

    criterion: Callable[..., Tensor]

    def __call__(self, model: nn.Module, batch: Rows) -> dict[str, Any]:
        features, label, weight = batch
        outputs = model(features)
        metrics: dict[str, Any] = {"loss": WeightedLoss(self.criterion).mean(outputs, label, weight)}
        if not label.is_floating_point() and outputs.dim() == label.dim() + 1:
            right = (outputs.argmax(1) == label).float()
            metrics["accuracy"] = ((right * weight).sum() / weight.sum(), weight.sum())
        return metrics
