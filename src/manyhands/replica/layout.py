"""Flat vectors: all trainable parameters of a model in one allocation, so that an exchange is one call."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from manyhands import units
from manyhands.errors import BadInput, Unsupported

ALIGNMENT_BYTES = 128  # tight packing changes results by an ulp: vectorised kernels treat unaligned ends apart


class Layout:
    """Where parameters of one dtype lie in a flat vector [D'].

    Parameters stand in the order of `model.named_parameters()`, a tied one once, each from a 128-byte boundary; the
    gaps are padding, always zero. D is the number of trainable numbers, D' ≥ D the length with padding.
    `numbers`: each parameter's number among all of the model's trainable parameters, whose bit says in a mask that it
    got a gradient.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], numbers: Sequence[int]) -> None:
        self.names, self.parameters, self.numbers = list(named), list(named.values()), list(numbers)
        self.dtype, self.device = self.parameters[0].dtype, self.parameters[0].device
        self.shapes = [p.shape for p in self.parameters]
        self.strides = [_dense_stride(p) for p in self.parameters]
        self.sizes = [p.numel() for p in self.parameters]
        unit = max(1, ALIGNMENT_BYTES // self.dtype.itemsize)
        self.offsets: list[int] = []
        end = 0
        for size in self.sizes:
            self.offsets.append(end)
            end += -(-size // unit) * unit
        self.padded = end  # D'
        self.size = sum(self.sizes)  # D

    @classmethod
    def joined(cls, layouts: Sequence[Layout]) -> Layout:
        """The layout of `FlatVector.joined()`: the only one itself, else one after the other, in the widest dtype."""
        first = layouts[0]
        if len(layouts) == 1:
            return first
        joined = copy.copy(first)
        for name in ("names", "parameters", "numbers", "shapes", "strides", "sizes"):
            setattr(joined, name, [value for layout in layouts for value in getattr(layout, name)])
        joined.offsets, joined.padded = [], 0
        for layout in layouts:
            joined.dtype = torch.promote_types(joined.dtype, layout.dtype)
            joined.offsets += [joined.padded + offset for offset in layout.offsets]
            joined.padded += layout.padded
        joined.size = sum(joined.sizes)
        return joined

    def views(self, vector: Tensor) -> list[Tensor]:
        """Every parameter's part of `vector` [D'], in its shape and memory format."""
        return [
            vector.as_strided(shape, stride, vector.storage_offset() + offset)
            for shape, stride, offset in zip(self.shapes, self.strides, self.offsets, strict=True)
        ]

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """{parameter name: its view of `vector` [D']}"""
        return dict(zip(self.names, self.views(vector), strict=True))

    def unpadded(self, vector: Tensor) -> Tensor:
        """[D'] -> [D], a copy, each parameter in row-major order."""
        return torch.cat([view.reshape(-1) for view in self.views(vector)])

    def attach(self, vector: Tensor) -> None:
        """Copy the parameters into `vector` [D'], whose memory becomes theirs."""
        with torch.no_grad():
            for p, view in zip(self.parameters, self.views(vector), strict=True):
                view.copy_(p)
        self.alias(vector)

    def alias(self, vector: Tensor) -> None:
        """Make the memory of `vector` [D'], which holds the parameters' values, theirs.

        To torch each parameter has a storage of its own, as long as itself. A file of a model, or a deep copy of a part
        of it, is then what it is without manyhands; of views it would hold the whole vector.
        """
        for p, shape, stride, offset, size in zip(
            self.parameters, self.shapes, self.strides, self.offsets, self.sizes, strict=True
        ):
            own = torch.from_dlpack(vector.detach()[offset : offset + size])  # type: ignore[attr-defined]
            p.data = own.as_strided(shape, stride)

    def detach(self) -> None:
        """Give every parameter memory of its own again."""
        for p in self.parameters:
            p.data = p.data.clone(memory_format=torch.preserve_format)
            p.grad = None

    def check_attached(self, model: nn.Module, vector: Tensor) -> None:
        """Unsupported, by name, if a parameter of `model` was replaced or no longer lies in `vector`."""
        now, start, item = dict(model.named_parameters()), vector.data_ptr(), self.dtype.itemsize
        moved = [
            name
            for name, p, offset in zip(self.names, self.parameters, self.offsets, strict=True)
            if now.get(name) is not p or (p.numel() and p.data_ptr() != start + offset * item) or p.dtype != self.dtype
        ]
        if moved:
            raise Unsupported(
                f"parameters were moved or replaced after training began: {units.listed(moved, 5)}. Call "
                "model.to(...), .double() and load_state_dict(assign=True) before training begins; load_state_dict "
                "without assign may be called at any time"
            )


def layouts_of(model: nn.Module) -> list[Layout]:
    """One for each dtype of the model's trainable parameters, in the order in which it first has them.

    Raises BadInput, by name, for no trainable parameters, lazy ones, and parameters on several devices.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise BadInput("the model has no trainable parameters: at least one must have requires_grad=True")
    lazy = [name for name, p in trainable.items() if isinstance(p, UninitializedParameter)]
    if lazy:
        raise BadInput(
            f"the shape of these parameters is not known yet (lazy modules): {', '.join(lazy[:5])}. Run the model once "
            "on a batch in the function that builds it"
        )
    devices: dict[torch.device, list[str]] = {}
    for name, p in trainable.items():
        devices.setdefault(p.device, []).append(name)
    if len(devices) > 1:
        listing = "; ".join(f"{device}: {units.listed(names, 5)}" for device, names in devices.items())
        raise BadInput(
            f"the trainable parameters lie on several devices ({listing}): move the model to one, or freeze the others"
        )
    numbers: dict[torch.dtype, list[int]] = {}
    for number, p in enumerate(trainable.values()):
        numbers.setdefault(p.dtype, []).append(number)
    items = list(trainable.items())
    return [Layout(dict(items[n] for n in of_dtype), of_dtype) for of_dtype in numbers.values()]


def _dense_stride(p: Tensor) -> tuple[int, ...]:
    """The parameter's own strides if it fills its memory without gaps (channels_last, say), else row-major ones."""
    order = sorted(range(p.dim()), key=lambda d: p.stride(d))
    expected = 1
    for d in order:
        if p.size(d) != 1 and p.stride(d) != expected:
            return torch.empty(p.shape, device="meta").stride()
        expected *= p.size(d)
    return p.stride()
