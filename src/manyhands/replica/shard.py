"""A parameter shard: what one worker holds of a replica's parameters of one dtype, as flat vectors."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from manyhands.replica.layout import Layout


@dataclass(frozen=True, kw_only=True)
class ParameterSlice:
    """Which part of a parameter a worker holds."""

    shape: tuple[int, ...]  # of the whole parameter
    start: tuple[int, ...]
    stop: tuple[int, ...]  # of the part, one a dimension
    counted: bool = True  # of several copies within a replica one counts: in norms, dot products and checkpoints

    @property
    def whole(self) -> bool:
        """Whether it is all of the parameter."""
        return not any(self.start) and self.stop == self.shape


@dataclass(kw_only=True)
class ParameterShard:
    """The local parameters of one dtype and their gradients, each a flat vector [D'] as `layout` says.

    `slices` gives, by name, which part of the model's parameter each is; all of it where a worker holds the model.
    """

    layout: Layout
    parameters: Tensor
    gradients: Tensor
    slices: dict[str, ParameterSlice] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, shape in zip(self.layout.names, self.layout.shapes, strict=True):
            whole = ParameterSlice(shape=tuple(shape), start=(0,) * len(shape), stop=tuple(shape))
            self.slices.setdefault(name, whole)

    def dot(self, one: Tensor, other: Tensor) -> float:
        """The dot product of two vectors [D'] in float64, without copies that do not count."""
        if all(part.counted for part in self.slices.values()):
            return float(torch.dot(one.double(), other.double()))
        views, others = self.layout.named(one), self.layout.named(other)
        return sum(
            float((views[n].double() * others[n].double()).sum()) for n, part in self.slices.items() if part.counted
        )
