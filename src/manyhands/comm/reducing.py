"""Sums and weighted means over the same piece of every rank's memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK = 1 << 18  # bytes: pieces of this size stay in a core's cache (L2) from the first pass over them to the last

ACCUMULATED_WIDER = (torch.bfloat16, torch.float16)


def naive_mean(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The reference: sum of tensor·(weight/total), in rank order, over the ranks of positive weight; total > 0."""
    total = 0.0
    for weight in weights:
        total += weight
    shares = [tensor * (weight / total) for tensor, weight in zip(tensors, weights, strict=True) if weight]
    mean = shares[0]
    for share in shares[1:]:
        mean = mean + share
    return mean


def shares_of(weights: Sequence[float], total: float) -> list[float | None]:
    """Each rank's factor in the mean; None for a rank of weight 0, whose values do not count, NaN included."""
    return [weight / total if weight else None for weight in weights]


def reduce_everywhere(
    pieces: Sequence[Tensor], shares: Sequence[float | None] | None, lost: Tensor | None = None
) -> None:
    """Replace the pieces [m] of all ranks by the sum of piece·share (shares None: the plain sum), in rank order.

    Ranks whose share is None are left out. 16-bit numbers are added up in float32, or in the dtype of `lost` [m], which
    gets what rounding the sum took away.
    """
    live = [rank for rank in range(len(pieces)) if shares is None or shares[rank] is not None]
    first = pieces[live[0]]
    mean = first.to(added_up_as(first.dtype, lost))
    counted = None if shares is None else [shares[rank] or 0.0 for rank in live]
    accumulate(mean, [pieces[rank] for rank in live], counted)
    for piece in pieces:
        if piece is not mean:
            piece.copy_(mean)
    if lost is not None:
        lost.copy_(mean - first)


def added_up_as(dtype: torch.dtype, lost: Tensor | None = None) -> torch.dtype:
    """The dtype in which numbers of this one are added up."""
    if lost is not None:
        return lost.dtype
    return torch.float32 if dtype in ACCUMULATED_WIDER else dtype


def accumulate(result: Tensor, pieces: Sequence[Tensor], shares: Sequence[float] | None) -> None:
    """`result` [m], which holds the first piece, becomes the sum of piece·share."""
    if shares is None:
        for piece in pieces[1:]:
            result.add_(piece)
        return
    result.mul_(shares[0])
    for piece, share in zip(pieces[1:], shares[1:], strict=True):
        result.add_(piece, alpha=share)


def sum_of(pieces: Sequence[Tensor]) -> Tensor:
    """The sum of the pieces [m] in rank order, in memory of its own."""
    first = pieces[0]
    result = first.float() if first.dtype in ACCUMULATED_WIDER else first.clone()
    accumulate(result, pieces, None)
    return result.to(first.dtype)
