"""A flat vector of a replica: one tensor a shard, and elementwise arithmetic that reads as if it were one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from manyhands.comm.group import Group, MeanResult


class FlatVector:
    """`parts`: one tensor [D'] for each shard of the replica, which differ in dtype; most models have one.

    Operations are elementwise, and in place where their name ends in `_`. Norms and dot products are the replica's
    (`Replica.norm`, `Replica.dot`), since a replica may span several workers.
    """

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts = tuple(parts)

    # -- new vectors -------------------------------------------------------------------------------------------------

    def clone(self) -> FlatVector:
        return FlatVector([part.clone() for part in self.parts])

    def zeros_like(self) -> FlatVector:
        return FlatVector([torch.zeros_like(part) for part in self.parts])

    def empty_like(self) -> FlatVector:
        return FlatVector([torch.empty_like(part) for part in self.parts])

    def __sub__(self, other: FlatVector) -> FlatVector:
        return FlatVector([a - b for a, b in self._with(other)])

    def __mul__(self, factor: float) -> FlatVector:
        return FlatVector([part * factor for part in self.parts])

    __rmul__ = __mul__

    # -- in place ----------------------------------------------------------------------------------------------------

    def copy_(self, other: FlatVector) -> FlatVector:
        for a, b in self._with(other):
            a.copy_(b)
        return self

    def add_(self, other: FlatVector, *, alpha: float = 1.0) -> FlatVector:
        for a, b in self._with(other):
            a.add_(b, alpha=alpha)
        return self

    def sub_(self, other: FlatVector) -> FlatVector:
        for a, b in self._with(other):
            a.sub_(b)
        return self

    def subtract_(self, minuend: FlatVector, subtrahend: FlatVector) -> FlatVector:
        """This vector becomes minuend - subtrahend; it may be either of them."""
        for part, a, b in zip(self.parts, minuend.parts, subtrahend.parts, strict=True):
            torch.sub(a, b, out=part)
        return self

    def lerp_(self, other: FlatVector, weight: float) -> FlatVector:
        for a, b in self._with(other):
            a.lerp_(b, weight)
        return self

    def mul_(self, factor: float) -> FlatVector:
        for part in self.parts:
            part.mul_(factor)
        return self

    def div_(self, divisor: float) -> FlatVector:
        for part in self.parts:
            part.div_(divisor)
        return self

    def fill_(self, value: float) -> FlatVector:
        for part in self.parts:
            part.fill_(value)
        return self

    def zero_(self) -> FlatVector:
        return self.fill_(0.0)

    # -- over a group ------------------------------------------------------------------------------------------------

    def mean_(self, group: Group, weight: float = 1.0, bits: int = 0) -> MeanResult:
        """`Group.mean_` of each part; the bits go with the first."""
        total = group.mean_(self.parts[0], weight, bits)
        for part in self.parts[1:]:
            group.mean_(part, weight)
        return total

    def all_reduce_(self, group: Group) -> None:
        for part in self.parts:
            group.all_reduce_(part)

    def broadcast_(self, group: Group, source: int) -> None:
        for part in self.parts:
            group.broadcast_(part, source)

    # -- the whole ---------------------------------------------------------------------------------------------------

    @property
    def numel(self) -> int:
        """Of all parts, padding included."""
        return sum(part.numel() for part in self.parts)

    def equal(self, other: FlatVector) -> bool:
        """Whether every number is the other's; a NaN equals nothing."""
        return all(torch.equal(a, b) for a, b in self._with(other))

    def is_finite(self) -> bool:
        """Whether every number is finite."""
        # The sum costs a twentieth of isfinite().all(), and is finite only if every element is; it may overflow by
        # itself.
        return all(bool(part.sum().isfinite()) or bool(part.isfinite().all()) for part in self.parts)

    def between(self, start: int, stop: int) -> FlatVector:
        """Views of [start, stop), counted over all parts one after the other; an empty view of a part outside."""
        views, at = [], 0
        for part in self.parts:
            low, high = (min(max(edge - at, 0), len(part)) for edge in (start, stop))
            views.append(part[low:high])
            at += len(part)
        return FlatVector(views)

    def joined(self) -> Tensor:
        """[numel] one tensor: the part itself where there is one, else a copy of all, in the widest dtype of them."""
        if len(self.parts) == 1:
            return self.parts[0]
        widest = self.parts[0].dtype
        for part in self.parts[1:]:
            widest = torch.promote_types(widest, part.dtype)
        return torch.cat([part.to(widest) for part in self.parts])

    def take_joined_(self, joined: Tensor) -> None:
        """Copy back what `joined` gave; nothing to do where that is the part itself."""
        at = 0
        for part in self.parts:
            if part is not joined:
                part.copy_(joined[at : at + len(part)])
            at += len(part)

    def _with(self, other: FlatVector) -> zip[tuple[Tensor, Tensor]]:
        return zip(self.parts, other.parts, strict=True)

    def __repr__(self) -> str:
        return f"FlatVector({', '.join(f'[{len(part)}] {part.dtype}' for part in self.parts)})"


def weighted_mean(vectors: Sequence[FlatVector], weights: Sequence[float]) -> FlatVector:
    """The weighted mean; where nothing counts, each counts the same."""
    total = sum(weights)
    shares = [weight / total if total else 1 / len(weights) for weight in weights]
    scaled = [vector * share for vector, share in zip(vectors, shares, strict=True)]
    return FlatVector([torch.stack(parts).sum(0) for parts in zip(*(vector.parts for vector in scaled), strict=True)])


def tensors_in(thing: Any) -> Iterator[Tensor]:
    """All tensors that an optimizer's or a strategy's state holds."""
    match thing:
        case Tensor():
            yield thing
        case FlatVector():
            yield from thing.parts
        case Mapping():
            for value in thing.values():
                yield from tensors_in(value)
        case list() | tuple():
            for value in thing:
                yield from tensors_in(value)
        case _ if is_dataclass(thing):
            for field in fields(thing):
                yield from tensors_in(getattr(thing, field.name))


def nbytes(tensors: Any, without: Any = ()) -> int:
    """Of the memory behind tensors, each once; without what lies behind others."""
    left_out = {one.untyped_storage().data_ptr() for one in without}
    spans = {
        (one.data_ptr(), one.nbytes): one.nbytes for one in tensors if one.untyped_storage().data_ptr() not in left_out
    }
    return sum(spans.values())
