"""Loss and metrics of (features, label, weight) rows: means by the rows' weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.errors import BadInput

Rows = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class WeightedLoss:
    """Σ weight · criterion / Σ weight. `criterion` accepts reduction="none", as torch's functions do."""

    criterion: Callable[..., Tensor]

    def __call__(self, model: nn.Module, batch: Rows) -> tuple[Tensor, Tensor]:
        features, label, weight = batch
        return self.mean(model(features), label, weight)

    def mean(self, outputs: Tensor, label: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """(mean, weight)"""
        try:
            each = self.criterion(outputs, label, reduction="none")
        except TypeError as error:
            raise BadInput(
                f"weight_col needs a criterion that takes reduction='none', as torch.nn.functional's do ({error}): give "
                "one, or a task whose loss takes (features, label, weight)"
            ) from error
        return _mean(each.reshape(len(weight), -1).mean(1), weight)


@dataclass(frozen=True)
class WeightedMetrics:
    """{"loss", "accuracy"}; accuracy only if labels are class numbers."""

    criterion: Callable[..., Tensor]

    def __call__(self, model: nn.Module, batch: Rows) -> dict[str, Any]:
        features, label, weight = batch
        outputs = model(features)
        metrics: dict[str, Any] = {"loss": WeightedLoss(self.criterion).mean(outputs, label, weight)}
        if not label.is_floating_point() and outputs.dim() == label.dim() + 1:
            metrics["accuracy"] = _mean((outputs.argmax(1) == label).float(), weight)
        return metrics


def _mean(values: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(mean of [rows] values, weight); 0 if the weights are 0."""
    total = weight.sum()
    return (values * weight).sum() / total.clamp_min(torch.finfo(torch.float32).tiny), total
