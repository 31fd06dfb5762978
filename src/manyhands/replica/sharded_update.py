"""The sharded update: each worker steps its part of the parameters, and has the optimizer's state of that part alone.

Source: ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, Samyam Rajbhandari, Jeff Rasley, Olatunji
Ruwase, Yuxiong He, 2020 (stage 1); BigDL: A Distributed Deep Learning Framework for Big Data, Jason Dai et al., 2019,
which updates so by Spark's block manager.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from manyhands.comm.checks import slice_of
from manyhands.comm.group import Group
from manyhands.errors import BadInput
from manyhands.replica.layout import Layout
from manyhands.replica.shard import ParameterShard

_PROBED = (4, 6)  # the shape of the parameter on which `check_elementwise` tries an optimizer
_STEPS = 3


@dataclass(frozen=True)
class ParameterPiece:
    """Elements [start, stop) of a parameter, counted as they lie in memory, that this worker steps."""

    parameter: nn.Parameter  # [stop - start], a view of the parameters' vector; the optimizer holds it
    gradient: Tensor  # the same elements of the gradients' vector
    number: int  # of the parameter, whose bit says in a mask that it got a gradient
    start: int
    stop: int


class ShardedUpdate:
    """Of each vector [D'] rank r of N has elements [r·D'//N, (r+1)·D'//N): it alone steps them.

    The optimizer's `param_groups` hold this worker's pieces of parameters in the place of the parameters. They are the
    same dicts: whoever moves their rates finds them.
    """

    def __init__(self, shards: Sequence[ParameterShard], optimizer: torch.optim.Optimizer, group: Group) -> None:
        """Raises BadInput, by name, for an optimizer that is not elementwise."""
        check_elementwise(optimizer)
        self._shards, self._group = shards, group
        self.pieces: dict[str, ParameterPiece] = {}
        of_parameter: dict[int, list[nn.Parameter]] = {}
        for shard in shards:
            low, high = self._own(shard)
            layout = shard.layout
            for name, p, size, offset, number in zip(
                layout.names, layout.parameters, layout.sizes, layout.offsets, layout.numbers, strict=True
            ):
                start, stop = max(low, offset), min(high, offset + size)
                of_parameter[id(p)] = []
                if start < stop:
                    part = nn.Parameter(shard.parameters[start:stop])
                    piece = ParameterPiece(part, shard.gradients[start:stop], number, start - offset, stop - offset)
                    self.pieces[name] = piece
                    of_parameter[id(p)].append(part)
        for options in optimizer.param_groups:
            options["params"] = [part for p in options["params"] for part in of_parameter.get(id(p), [p])]

    def _own(self, shard: ParameterShard) -> tuple[int, int]:
        return slice_of(self._group.rank, self._group.size, len(shard.parameters))

    def reduce_scatter_gradients(self, share: float) -> None:
        """This worker's part of `gradients` becomes the sum over the workers of gradients·share, the rest zeros.

        share: of the sum of all weights. 0: what this worker computed does not count, NaN included.
        """
        for shard in self._shards:
            gradients = shard.gradients
            gradients.mul_(share) if share else gradients.zero_()
            low, high = self._own(shard)
            own = self._group.reduce_scatter(gradients)
            gradients[:low].zero_()
            gradients[low:high].copy_(own)
            gradients[high:].zero_()

    def show_gradients(self, grad_mask: int) -> None:
        """The optimizer's next step moves the parameters of the mask."""
        for piece in self.pieces.values():
            piece.parameter.grad = piece.gradient if grad_mask >> piece.number & 1 else None

    def total(self, own: float) -> float:
        """The sum over the workers, the same bits on all of them."""
        sums = torch.tensor([own], dtype=torch.float64)
        self._group.all_reduce_(sums)
        return float(sums)

    def clip(self, norm: float) -> None:
        """As `torch.nn.utils.clip_grad_norm_` of the whole gradient."""
        squares = sum(float(shard.gradients.double().square().sum()) for shard in self._shards)
        whole = math.sqrt(self.total(squares))
        for shard in self._shards:
            shard.gradients.mul_(min(1.0, norm / (whole + 1e-6)))

    def gather_parameters(self) -> None:
        """Every worker has all parameters again."""
        size = self._group.size
        for shard in self._shards:
            parameters = shard.parameters
            low, high = self._own(shard)
            mine = parameters.new_zeros(-(-len(parameters) // size))
            mine[: high - low].copy_(parameters[low:high])
            everyone = self._group.all_gather(mine)
            for rank in range(size):
                low, high = slice_of(rank, size, len(parameters))
                parameters[low:high].copy_(everyone[rank, : high - low])


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """BadInput unless element i of a step depends on elements i alone, whatever the parameters' shapes.

    The optimizer's class, with its own options, is tried on a small matrix and on its halves as two vectors.
    """
    kind = type(optimizer)
    options = {name: value for name, value in optimizer.defaults.items() if name in inspect.signature(kind).parameters}
    whole = torch.linspace(-1.0, 1.0, math.prod(_PROBED), dtype=torch.float64).reshape(_PROBED)
    matrix = nn.Parameter(whole.clone())
    halves = [nn.Parameter(half.clone()) for half in whole.reshape(-1).chunk(2)]
    generator = torch.Generator().manual_seed(0)
    try:
        steppers = [kind([matrix], **options), kind(halves, **options)]
        for _ in range(_STEPS):
            gradient = torch.randn(_PROBED, generator=generator, dtype=torch.float64)
            matrix.grad = gradient
            for half, own in zip(halves, gradient.reshape(-1).chunk(2), strict=True):
                half.grad = own.clone()
            for stepper in steppers:
                stepper.step()
        fits = bool((matrix.detach().reshape(-1) - torch.cat([half.detach() for half in halves])).abs().max() < 1e-12)
        why = "steps a part of a parameter otherwise than the whole"
    except Exception as error:  # noqa: BLE001 - a class of the user's may raise anything
        fits, why = False, f"cannot step a part of a parameter by itself ({type(error).__name__}: {error})"
    if not fits:
        raise BadInput(
            f"sharded=true needs an elementwise optimizer, such as SGD, Adam, AdamW, RMSprop or Adagrad, and {kind.__name__} {why}: use "
            "another optimizer, or leave sharded out"
        )


# -- checkpoints -------------------------------------------------------------------------------------------------------


def whole_states(
    parts: Sequence[Mapping[str, Tensor]], spans: Sequence[Mapping[str, Sequence[int]]], layout: Layout
) -> dict[str, Tensor]:
    """{"optimizer/STATE/NAME": tensor} of whole parameters, from what each worker saved of its pieces.

    parts: by worker, its tensors by such names. spans: by worker and parameter, its [start, stop).
    """
    found: dict[str, Tensor] = {}
    places = {
        name: (size, shape, stride)
        for name, size, shape, stride in zip(layout.names, layout.sizes, layout.shapes, layout.strides, strict=True)
    }
    for part, own in zip(parts, spans, strict=True):
        for key in (key for key in part if key.startswith("optimizer/")):
            tensor, name = part[key], key.split("/", 2)[2]
            start, stop = own.get(name, (0, 0))
            if tensor.dim() != 1 or len(tensor) != stop - start:  # a number about the parameter
                found[key] = tensor
                continue
            size, shape, stride = places[name]
            if key not in found:
                found[key] = tensor.new_zeros(size).as_strided(shape, stride)
            in_memory(found[key])[start:stop].copy_(tensor)
    return found


def in_memory(tensor: Tensor) -> Tensor:
    """[n] the elements of a tensor without gaps as they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
