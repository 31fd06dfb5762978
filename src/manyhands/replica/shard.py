"""A parameter shard: what one worker holds of a replica's parameters of one dtype, as flat vectors."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from manyhands.replica.layout import Layout


@dataclass(frozen=True, kw_only=True)
class ParameterSlice:
    """Which part of a parameter a worker holds."""

    shape: tuple[int, ...]  # of the whole parameter
    start: tuple[int, ...]
    stop: tuple[int, ...]  # of the part, one a dimension
    counted: bool = True  # of several copies of a parameter one counts in a checkpoint

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
