"""Whether a loss is a mean or a sum over rows: one gradient of a whole batch, and those of its parts. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.own_loop.observed.loops import Scale

EXACT = 1e-3
"""A prediction of the whole gradient that is off by less, as a share of its norm, decides."""
LOW_PRECISION = 0.05
"""The same where numbers have 8 bits or 11: the prediction that is wrong is off by half at least."""
MEAN_BELOW, SUM_ABOVE = 0.3, 0.7
"""Where noise hides both predictions, the losses decide; on their scale 0 is a mean, and 1 is a sum."""


@dataclass(frozen=True)
class Unclear:
    """Neither a mean nor a sum, as far as one batch shows it."""

    mean_error: float  # how far the prediction for a mean is off, as a share of the gradient's norm
    sum_error: float
    position: float | None  # of the losses: 0 is a mean, 1 a sum; None: they do not show it

    @property
    def reason(self) -> str:
        far = f"the parts' gradients miss the whole one's by {self.mean_error:.0%} as a mean and by {self.sum_error:.0%} as a sum"
        return far if self.position is None else f"{far}; by the losses it is {self.position:.2f} between mean and sum"


def predictions(parts: Sequence[Tensor], rows: Sequence[float], total: float) -> tuple[Tensor, Tensor]:
    """The gradient [D] of a whole batch that its parts' gradients [D] predict, if the loss is a mean; if it is a sum.

    rows: what each part's loss counts (rows, tokens); total: what the batch's counts. Of a batch that was given twice,
    the sum is one half of its gradient. A group computes the same by two collectives.
    """
    covered = sum(rows)
    counted = [(part, weight) for part, weight in zip(parts, rows, strict=True) if weight]
    zero = torch.zeros_like(parts[0])
    mean = sum((part * (weight / covered) for part, weight in counted), start=zero)
    added = sum((part * (total / covered) for part, _ in counted), start=zero)
    return mean, added


def loss_scale(
    whole: Tensor,
    mean: Tensor,
    added: Tensor,
    rows: Sequence[float],
    total: float,
    losses: tuple[float, Sequence[float]],
    noisy: bool,
    exact: float = EXACT,
) -> Scale | Unclear:
    """MEAN where the whole gradient is the mean of its parts' by rows, SUM where it is their sum.

    whole: [D], the gradient of a batch. mean, added: [D], its `predictions`. losses: of the whole, and of the parts.
    noisy: whether gradients differ by what was drawn (dropout, augmentation) or by the parts themselves (batch norm).
    exact: how far a prediction may be off to decide, as a share of the whole's norm.

    Without noise gradients decide, and the losses must agree: contrast within a batch that is given twice has the same
    gradient, and another loss. With noise the losses decide where no prediction holds: they vary far less.
    """
    size = float(torch.linalg.vector_norm(whole, dtype=torch.float64))
    if not math.isfinite(size) or size == 0:
        return Unclear(math.inf, math.inf, None)
    errors = [
        float(torch.linalg.vector_norm(prediction - whole, dtype=torch.float64)) / size for prediction in (mean, added)
    ]
    if min(errors) <= exact < max(errors):
        scale = Scale.MEAN if errors[0] < errors[1] else Scale.SUM
        if noisy or _loss_agrees(losses, rows, total, scale, exact):
            return scale
    position = _position(losses, rows, total)
    if noisy and position is not None and position < MEAN_BELOW:
        return Scale.MEAN
    if noisy and position is not None and position > SUM_ABOVE:
        return Scale.SUM
    return Unclear(errors[0], errors[1], position)


def _loss_agrees(
    losses: tuple[float, Sequence[float]], rows: Sequence[float], total: float, scale: Scale, exact: float
) -> bool:
    """Whether the parts' losses predict the whole one, as their gradients do."""
    whole, parts = losses
    covered = sum(rows)
    if scale is Scale.MEAN:
        predicted = sum(weight * loss for weight, loss in zip(rows, parts, strict=True)) / covered
    else:
        predicted = sum(parts) * total / covered
    return abs(predicted - whole) <= exact * max(abs(whole), *(abs(loss) for loss in parts))


def _position(losses: tuple[float, Sequence[float]], rows: Sequence[float], total: float) -> float | None:
    """Where the parts' losses lie between those of a mean, 0, and those of a sum, 1; None: they do not show it.

    The mean of the parts' losses by rows is the whole loss, if that is a mean; of a sum each part's loss has its share.
    """
    whole, parts = losses
    covered = sum(rows)
    ratio_of_sum = sum(weight * weight for weight in rows) / (covered * total) if covered and total else 1.0
    found = sum(weight * loss for weight, loss in zip(rows, parts, strict=True)) / covered if covered else 0.0
    if abs(math.log(ratio_of_sum)) < math.log(1.3) or not whole or not found / whole > 0:
        return None
    return math.log(found / whole) / math.log(ratio_of_sum)
