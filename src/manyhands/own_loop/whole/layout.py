"""Where the rows of a batch lie in a tensor, and this worker's part of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class RowLayout:
    """Dimension `dim` of the whole tensor counts `outer` × `rows` × `inner`, of which each worker has some of the rows.

    A batch of B rows has dimension 0 with outer = inner = 1. A sequence [T, B, C] that was flattened to [T·B, C] has
    outer = T; an image's patches [B·P, C] have inner = P.
    """

    dim: int
    rows: int
    outer: int = 1
    inner: int = 1

    @property
    def length(self) -> int:
        """Of the whole tensor in `dim`."""
        return self.outer * self.rows * self.inner

    def whole_shape(self, part: Sequence[int]) -> torch.Size:
        """Of the tensor of which a worker has a part of this shape."""
        return torch.Size((*part[: self.dim], self.length, *part[self.dim + 1 :]))

    def narrow(self, whole: Tensor, start: int, rows: int) -> Tensor:
        """The rows [start, start + rows) of a whole tensor; a view where outer is 1."""
        if self.outer == 1:
            return whole.narrow(self.dim, start * self.inner, rows * self.inner)
        apart = whole.unflatten(self.dim, (self.outer, self.rows, self.inner))
        own: Tensor = apart.narrow(self.dim + 1, start, rows)
        return own.flatten(self.dim, self.dim + 2)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor of all workers' parts, in the order of ranks."""
        if self.outer == 1:
            return torch.cat(list(parts), self.dim)
        apart = [part.unflatten(self.dim, (self.outer, -1, self.inner)) for part in parts if part.shape[self.dim]]
        return torch.cat(apart, self.dim + 1).flatten(self.dim, self.dim + 2)

    def permuted(self, order: Sequence[int]) -> RowLayout:
        """After `tensor.permute(order)`."""
        dims = len(order)
        return replace(self, dim=[d % dims for d in order].index(self.dim))

    def reshaped(self, shape: Sequence[int], new: Sequence[int]) -> RowLayout | None:
        """After a whole tensor of `shape` was reshaped to `new`; None where the rows do not lie in one dimension then."""
        before = math.prod(shape[: self.dim]) * self.outer
        behind = self.inner * math.prod(shape[self.dim + 1 :])
        for dim, (prefix, length) in enumerate(zip(accumulate(new, int.__mul__, initial=1), new, strict=False)):
            suffix = math.prod(new[dim + 1 :])
            if not prefix or not suffix or before % prefix or behind % suffix:
                continue
            outer, inner = before // prefix, behind // suffix
            if outer * self.rows * inner == length:
                return RowLayout(dim, self.rows, outer, inner)
        return None

    def part_shape(self, new: Sequence[int], rows: int) -> tuple[int, ...]:
        """Of a worker with so many rows, of a whole tensor of shape `new` with this layout."""
        return (*new[: self.dim], self.outer * rows * self.inner, *new[self.dim + 1 :])


def flattened(values: Any) -> tuple[list[Any], Any]:
    """(leaves, structure) of nested values; a script's dataclasses are nested values, too, from the first one on."""
    leaves, structure = pytree.tree_flatten(values)
    kinds = {type(leaf) for leaf in leaves if is_dataclass(leaf) and not isinstance(leaf, type)}
    if not kinds:
        return leaves, structure
    for kind in kinds:
        _register(kind)
    return flattened(values)


def _register(kind: Any) -> None:
    names = [field.name for field in fields(kind)]

    def made(values: Any, names: Any) -> Any:
        one = object.__new__(kind)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(one, name, value)
        return one

    pytree.register_pytree_node(kind, lambda one: ([getattr(one, name) for name in names], tuple(names)), made)
