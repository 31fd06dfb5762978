"""The adaptive sum of a group: orthogonal vectors add up, parallel ones are averaged."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.comm.group import Group


def adasum_(group: Group, vector: Tensor, parts: Sequence[tuple[int, int]]) -> None:
    """Replace `vector` [n] on every rank by the adaptive sum over ranks, each part of it by itself. A collective.

    parts: [start, stop) of each, in order; what lies in none is summed. The sum of two is

        (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b

    and of more that of the sums of both halves, so that `group.size` must be a power of two. The result has the same
    bits on every rank. A part that is zero on a rank leaves the others' as it is. Each rank sends 2n (1 - 1/size)
    numbers: at each level it keeps half of what it has, and sends its partner the other half (recursive vector
    halving). Besides, at level k it sends three products of each part k times. Products are taken in float64.

    Source: Scaling Distributed Training with Adaptive Summation, Saeed Maleki, Madan Musuvathi, Todd Mytkowicz, Olli
    Saarikivi, Tianju Xu, Vadim Eksarevskiy, Jaliya Ekanayake, Emad Barsoum, 2021.
    """
    size, rank, n = group.size, group.rank, len(vector)
    assert size & (size - 1) == 0, f"expected a power of two, got {size} ranks"
    whole = vector if n % size == 0 else torch.nn.functional.pad(vector, (0, -n % size))  # halves of one length
    low, high, distance = 0, len(whole), 1
    kept: list[tuple[int, int, int]] = []  # (partner, [low, high) before)
    while distance < size:
        partner, middle, first = rank ^ distance, (low + high) // 2, not rank & distance
        kept.append((partner, low, high))
        given = whole[middle:high] if first else whole[low:middle]
        low, high = (low, middle) if first else (middle, high)
        own, other = whole[low:high], torch.empty_like(given)
        group.swap(given, partner, other, partner)
        inside = [(max(start, low) - low, min(stop, high) - low) for start, stop in parts]
        a, b = (own, other) if first else (other, own)
        products = _products(a, b, inside)
        _sum_over(group, products, 2 * distance)
        shares = torch.where(products[1:] > 0, 1 - products[0] / (2 * products[1:]), 1.0).tolist()
        of_own, of_other = shares if first else reversed(shares)
        for (start, stop), share, others in zip(inside, of_own, of_other, strict=True):
            own[start : max(start, stop)].mul_(share)
            other[start : max(start, stop)].mul_(others)
        own.add_(other)
        distance *= 2
    for partner, before_low, before_high in reversed(kept):
        received = (high, before_high) if low == before_low else (before_low, low)
        group.swap(whole[low:high], partner, whole[slice(*received)], partner)
        low, high = before_low, before_high
    if whole is not vector:
        vector.copy_(whole[:n])


def _products(a: Tensor, b: Tensor, parts: Sequence[tuple[int, int]]) -> Tensor:
    """[3, parts] a·b, |a|² and |b|² of each part."""
    found = torch.zeros(3, len(parts), dtype=torch.float64)
    for number, (start, stop) in enumerate(parts):
        if start < stop:
            x, y = a[start:stop].double(), b[start:stop].double()
            for row, product in enumerate((torch.dot(x, y), torch.dot(x, x), torch.dot(y, y))):
                found[row, number] = product
    return found


def _sum_over(group: Group, numbers: Tensor, block: int) -> None:
    """The sum over the ranks of this one's block of so many, in place, the same bits on all of them."""
    flat, distance = numbers.view(-1), 1
    while distance < block:
        partner = group.rank ^ distance
        other = torch.empty_like(flat)
        group.swap(flat.clone(), partner, other, partner)
        flat.add_(other)
        distance *= 2
