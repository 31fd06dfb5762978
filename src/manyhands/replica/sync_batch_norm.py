"""Batch normalization over the rows of all workers, of which each has some.

Source: Ioffe and Szegedy, Batch normalization: accelerating deep network training by reducing internal covariate shift, 2015.
Moments of parts are joined as by Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for computing sample
variances, 1979.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd import grad as _grad
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from manyhands import units
from manyhands.comm.group import Group

Moments = tuple[Tensor, Tensor, int]
"""Mean and variance [C] of each channel, and of how many values a channel they are."""


@dataclass(frozen=True)
class Rows:
    """The workers that share a batch's rows. Each use is two collectives, one of them in the backward."""

    group: Group
    weight: Callable[[], float] = lambda: 1.0
    """Of this worker's loss in the mean of all; 0: its rows are none of the batch's."""

    def moments(self, x: Tensor) -> Moments:
        """Of all workers' `x` [rows, C, …]."""
        channels = x.shape[1]
        mean, variance = own_moments(x)
        count = float(x.numel() // channels) if self.weight() else 0.0
        own = torch.cat([mean, variance * count, mean.new_tensor([count])])
        means, squares, counts = self.group.all_gather(own).split([channels, channels, 1], dim=1)
        total = counts.sum()
        mean = (means * counts).sum(0) / total
        variance = (squares.sum(0) + (counts * (means - mean).square()).sum(0)) / total
        return mean, variance, int(total.item())

    def sum_(self, own: Tensor) -> Tensor:
        """Of gradients: those of a worker whose loss counts more count more, in this worker's measure."""
        weight = self.weight()
        total = own * weight if weight else torch.zeros_like(own)
        self.group.all_reduce_(total)
        return total / weight if weight else torch.zeros_like(own)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def own_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance [C] of this worker's values: on CPUs in a third of the time of `torch.var_mean`."""
    return torch.batch_norm_update_stats(_wide(x.detach()), None, None, 0.0)


class _Normalized(Function):
    """x [rows, C, …], scale and shift [C] or None -> (normalized x, mean, variance, [count])"""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, scale: Tensor | None, shift: Tensor | None, eps: float, rows: Rows) -> Any:
        mean, variance, count = rows.moments(x)
        ctx.save_for_backward(x, scale, shift, mean, variance)
        ctx.eps, ctx.rows, ctx.count, ctx.counted = eps, rows, count, float(bool(rows.weight()))
        found = mean, variance, torch.tensor(count)
        ctx.mark_non_differentiable(*found)
        scale, shift = (None if one is None else one.to(mean.dtype) for one in (scale, shift))
        return F.batch_norm(x, mean, variance, scale, shift, False, 0.0, eps), *found

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> Any:
        x, scale, shift, mean, variance = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *_differentiable(ctx, gradient, x, scale, shift), None, None
        inverse = (variance + ctx.eps).rsqrt()
        ones, zeros = torch.ones_like(mean), torch.zeros_like(mean)
        gradient = gradient.contiguous()
        _, of_scale, of_shift = torch.ops.aten.native_batch_norm_backward(
            gradient, x, ones, mean, variance, mean, inverse, False, ctx.eps, [False, True, True]
        )
        slopes, offsets = ctx.rows.sum_(torch.cat([of_scale, of_shift]).to(mean.dtype)).div_(ctx.count).chunk(2)
        factor = inverse if scale is None else inverse * scale.to(inverse.dtype)
        by_x = factor * inverse * slopes
        # factor * gradient - by_x * x + the rest, in two passes
        of_x = F.batch_norm(gradient, zeros, ones, factor, by_x * mean - factor * offsets, False, 0.0, 0.0)
        of_x = of_x.addcmul_(x, by_x.to(x.dtype).view([1, -1] + [1] * (x.dim() - 2)), value=-1)
        of_scale, of_shift = (
            None if one is None else found.to(one.dtype) for one, found in ((scale, of_scale), (shift, of_shift))
        )
        return of_x, of_scale, of_shift, None, None


class _Sum(Function):
    """What each worker has -> the sum. In gradients a worker counts by its weight, in those of a gradient by 1 again."""

    @staticmethod
    @override
    def forward(ctx: Any, own: Tensor, rows: Rows, weighted: bool) -> Tensor:
        ctx.rows, ctx.weighted = rows, weighted
        if weighted:
            return rows.sum_(own)
        total = own.clone()
        rows.group.all_reduce_(total)
        return total

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Sum.apply(gradient.contiguous(), ctx.rows, not ctx.weighted), None, None  # type: ignore[no-untyped-call]


def _differentiable(ctx: Any, gradient: Tensor, x: Tensor, scale: Tensor | None, shift: Tensor | None) -> list[Any]:
    """The gradients, which can be differentiated again."""
    rows, dims, wide = ctx.rows, [d for d in range(x.dim()) if d != 1], _wide(x)
    shape = [1, -1] + [1] * (x.dim() - 2)
    mean = _Sum.apply(wide.sum(dims) * ctx.counted, rows, False) / ctx.count  # type: ignore[no-untyped-call]
    apart = wide - mean.view(shape)
    variance = _Sum.apply(apart.square().sum(dims) * ctx.counted, rows, False) / ctx.count  # type: ignore[no-untyped-call]
    result = apart * (variance + ctx.eps).rsqrt().view(shape)
    result = result if scale is None else result * scale.view(shape)
    result = (result if shift is None else result + shift.view(shape)).to(x.dtype)
    wanted = [one for one in (x, scale, shift) if one is not None and one.requires_grad]
    found = dict(zip(map(id, wanted), _grad(result, wanted, gradient, create_graph=True), strict=True))
    return [found.get(id(one)) for one in (x, scale, shift)]


def batch_norm(
    rows: Rows,
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:
    """`torch.nn.functional.batch_norm` of a model that trains, over all workers' rows. A collective."""
    result: Tensor
    result, mean, variance, count = _Normalized.apply(x, scale, shift, eps, rows)  # type: ignore[no-untyped-call]
    note_moments((mean, variance, int(count)), running_mean, running_var, momentum)
    return result


@torch.no_grad()
def note_moments(found: Moments, running_mean: Tensor | None, running_var: Tensor | None, momentum: float) -> None:
    """Move running statistics towards these."""
    mean, variance, count = found
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_((variance * (count / max(1, count - 1))).to(running_var.dtype), momentum)


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """The layers of a model whose statistics are of a batch's rows."""
    return [one for one in model.modules() if isinstance(one, _BatchNorm) and not isinstance(one, nn.SyncBatchNorm)]


def unsynchronized(model: nn.Module) -> str:
    """What to say of a model whose layers take each worker's statistics; "" where there are none."""
    layers = batch_norms(model)
    if not layers:
        return ""
    return (
        f"{type(layers[0]).__name__} ({units.count(len(layers), 'layer')}) takes the statistics of each worker's own rows: sync_batch_norm=True takes those of "
        'all rows, for two messages a layer and step, and batches="whole" makes every number one process\'s'
    )


def synchronize(model: nn.Module, rows: Rows) -> None:
    """From now on its batch normalizations take the statistics of all workers' rows while they train.

    A copy, and what is pickled, has layers of torch's own.
    """
    for layer in batch_norms(model):
        kind = layer.kind if isinstance(layer, _OfAllRows) else type(layer)
        names = {"kind": kind, "rows": rows, "__module__": kind.__module__}
        layer.__class__ = type(kind.__name__, (_OfAllRows, kind), names)


def buffers_of_all_rows(model: nn.Module) -> set[int]:
    """By identity, those of synchronized layers."""
    return {id(one) for layer in model.modules() if isinstance(layer, _OfAllRows) for one in layer.buffers()}


class _OfAllRows(_BatchNorm):
    """The class of a synchronized layer, before its own."""

    kind: ClassVar[type[_BatchNorm]]
    rows: ClassVar[Rows]

    @override
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        self._check_input_dim(x)  # type: ignore[no-untyped-call]
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # the mean of all batches so far
                momentum = 1.0 / float(self.num_batches_tracked)
        return batch_norm(self.rows, x, self.running_mean, self.running_var, self.weight, self.bias, momentum, self.eps)

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__new__, (self.kind,), self.__dict__
