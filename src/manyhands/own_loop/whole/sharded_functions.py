"""Functions of torch that work on this worker's part of an output. Each gives what it gives for the gathered one.

What is not named here, or is called in another way, gets the gathered output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from manyhands.errors import ManyhandsError
from manyhands.own_loop.whole.exchange import Gather, applied, cut, replicated
from manyhands.own_loop.whole.layout import RowLayout
from manyhands.own_loop.whole.lazy import Lazy, PartialSum, ShardedOutput

T = torch.Tensor
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class _GatherFirst(Exception):
    """This call needs the whole."""


def on_parts(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a call in which there is a lazy tensor; NotImplemented where it must be gathered first."""
    if function in _FACTS:
        return function(*args, **kwargs)
    handler = _HANDLERS.get(function)
    if handler is None or kwargs.get("out") is not None:
        return NotImplemented
    try:
        return handler(function, args, kwargs)
    except ManyhandsError:
        raise
    except Exception:  # noqa: BLE001 - called in a way that no handler knows: the whole's own result, or error
        return NotImplemented


def _functions(names: str) -> set[Any]:
    """Those of these names, wherever torch has them."""
    places = (torch, T, F, torch.special)
    return {found for place in places for name in names.split() if (found := getattr(place, name, None)) is not None}


def _sharded(x: Any) -> ShardedOutput:
    if not isinstance(x, ShardedOutput) or x.gathered:
        raise _GatherFirst
    return x


def _first_sharded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedOutput:
    values = pytree.tree_leaves((args, kwargs))
    if any(isinstance(x, Lazy) and (x.gathered or isinstance(x, PartialSum)) for x in values):
        raise _GatherFirst
    return next(x for x in values if isinstance(x, ShardedOutput))


# -- element by element --------------------------------------------------------------------------------------------------

_ELEMENTWISE = """
abs absolute neg negative exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square sin cos tan asin acos atan sinh cosh tanh
asinh acosh atanh sigmoid relu erf erfc ceil floor round trunc frac sign reciprocal isnan isinf isfinite logical_not clone
clamp clip clamp_min clamp_max nan_to_num gelu silu mish softplus elu selu celu leaky_relu hardtanh hardswish hardsigmoid
relu6 logsigmoid softsign tanhshrink add sub subtract rsub mul multiply div divide true_divide pow maximum minimum fmod
remainder floor_divide atan2 where lerp addcmul addcdiv logical_and logical_or logical_xor eq ne gt lt ge le not_equal
greater less greater_equal less_equal bitwise_and bitwise_or bitwise_xor bitwise_not masked_fill xlogy
__neg__ __pos__ __abs__ __invert__ __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__
__rdiv__ __floordiv__ __rfloordiv__ __pow__ __rpow__ __mod__ __and__ __or__ __xor__ __eq__ __ne__ __gt__ __lt__ __ge__ __le__
"""


def _elementwise(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedOutput:
    if kwargs.get("inplace"):
        raise _GatherFirst
    x = _first_sharded(args, kwargs)
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    behind = x.shard.dim - x.dim()  # of the dimension with the rows, from the right
    parts = _aligned(x, behind)
    args, kwargs = pytree.tree_map_only(Tensor, parts, (args, kwargs))
    shard = replace(x.shard, dim=max(t.dim() for t in tensors) + behind)
    return ShardedOutput.of(function(*args, **kwargs), shard, x.workers)


def _aligned(x: ShardedOutput, behind: int) -> Callable[[Tensor], Tensor]:
    """What gives the part of a tensor that is broadcast with x, of which dimension `behind` counts the rows."""

    def part(t: Tensor) -> Tensor:
        if isinstance(t, ShardedOutput):
            if replace(t.shard, dim=t.shard.dim - t.dim()) != replace(x.shard, dim=behind):
                raise _GatherFirst
            return t.part
        if t.dim() < -behind or t.shape[behind] == 1:
            return replicated(t, x.workers)
        if t.shape[behind] != x.shard.length:
            raise _GatherFirst
        return cut(t, replace(x.shard, dim=t.dim() + behind), x.workers)

    return part


# -- views and conversions -------------------------------------------------------------------------------------------------


def _view(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shard: RowLayout) -> ShardedOutput:
    """Of the first argument, with the same other ones."""
    x = args[0]
    made = ShardedOutput.of(function(x.part, *args[1:], **kwargs), shard, x.workers)
    return x.viewed(made, lambda whole: function(whole, *args[1:], **kwargs))  # type: ignore[no-any-return]


_CONVERSIONS = "float double half bfloat16 bool int long short to type_as contiguous detach cpu cuda"


def _conversion(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedOutput:
    x = _sharded(args[0])
    like = pytree.tree_map_only(Lazy, lambda t: t.part, (args[1:], kwargs))
    return _view(function, (x, *like[0]), like[1], x.shard)


def _permute(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedOutput:
    x = _sharded(args[0])
    dims = [d % x.dim() for d in _whole_numbers(args[1:], kwargs, "dims", "dim0", "dim1")]
    order = list(range(x.dim()))
    if function in _functions("permute"):
        order = dims
    else:
        order[dims[0]], order[dims[1]] = dims[1], dims[0]
    return _view(function, args, kwargs, x.shard.permuted(order))


def _whole_numbers(args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> list[int]:
    """Of a list of dimensions or a shape, however it was given."""
    given = list(args) + [kwargs[name] for name in names if name in kwargs]
    found = [number for one in given for number in (one if isinstance(one, Sequence) else [one])]
    if len(kwargs) > sum(name in kwargs for name in names) or not all(type(number) is int for number in found):
        raise _GatherFirst
    return found


def _transposed(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedOutput:
    """`x.T`, `x.mT`, `x.t()`"""
    x = _sharded(args[0])
    order = list(range(x.dim()))
    order[-2:] = order[:-3:-1]
    if x.dim() < 2 or (function is not T.mT.__get__ and x.dim() != 2):  # type: ignore[attr-defined]
        raise _GatherFirst
    return _view(function, args, kwargs, x.shard.permuted(order))


def _reshape(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedOutput:
    """view, reshape, flatten, unflatten, unsqueeze, squeeze: the elements keep their order."""
    x = _sharded(args[0])
    if any(isinstance(one, torch.dtype) for one in (*args[1:], *kwargs.values())):
        raise _GatherFirst
    shape = list(x.shape)
    new = list(function(torch.empty(shape, device="meta"), *args[1:], **kwargs).shape)
    shard = x.shard.reshaped(shape, new)
    if shard is None:
        raise _GatherFirst
    part = x.part.reshape(shard.part_shape(new, x.workers.own_rows(shard.rows)[1]))
    made = ShardedOutput.of(part, shard, x.workers)
    return x.viewed(made, lambda whole: function(whole, *args[1:], **kwargs))


def _item(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedOutput:
    """`x[:, -1]`, `x[..., :3]`: all rows of other dimensions' parts."""
    x = _sharded(args[0])
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if not all(one is None or one is Ellipsis or type(one) in (int, slice) for one in index):
        raise _GatherFirst
    named = sum(one is not None and one is not Ellipsis for one in index)
    if Ellipsis not in index:
        index = (*index, Ellipsis)
    at = index.index(Ellipsis)
    index = (*index[:at], *[slice(None)] * (x.dim() - named), *index[at + 1 :])
    dim = behind = 0  # of x, and of the result
    for one in index:
        if one is None:
            behind += 1
            continue
        if dim == x.shard.dim:
            if one != slice(None):
                raise _GatherFirst
            return _view(function, args, kwargs, replace(x.shard, dim=behind))
        dim += 1
        behind += type(one) is slice
    raise _GatherFirst


def _joined(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedOutput:
    """cat and stack of outputs along another dimension than the rows'."""
    tensors, (dim,) = args[0], [kwargs["dim"]] if "dim" in kwargs else args[1:2] or [0]
    x = _first_sharded((tensors,), {})
    stacks = function is torch.stack
    dim %= x.dim() + stacks
    if (not stacks and dim == x.shard.dim) or any(t.dim() != x.dim() for t in tensors):
        raise _GatherFirst
    part = _aligned(x, x.shard.dim - x.dim())
    moved = x.shard.dim + (stacks and dim <= x.shard.dim)
    return ShardedOutput.of(function([part(t) for t in tensors], dim=dim), replace(x.shard, dim=moved), x.workers)


# -- along dimensions ------------------------------------------------------------------------------------------------------

_SAME_SHAPE = "softmax log_softmax softmin cumsum cumprod logcumsumexp normalize"
_REDUCTIONS = "sum mean amax amin argmax argmin max min prod logsumexp any all nansum count_nonzero norm"


def _along(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = _sharded(args[0])
    name = function.__name__
    dims = _dims_of(name, args, kwargs)
    same = name in _SAME_SHAPE.split()
    if dims is None:
        if same:
            raise _GatherFirst
        dims = range(x.dim())
    dims = [d % x.dim() for d in ([dims] if isinstance(dims, int) else dims)] or list(range(x.dim()))
    if x.shard.dim in dims:
        return _over_rows(name, x, dims, args, kwargs)
    keeps = same or _keeps(name, args, kwargs)
    shard = replace(x.shard, dim=x.shard.dim - (0 if keeps else sum(d < x.shard.dim for d in dims)))

    def wrapped(part: Tensor) -> ShardedOutput:
        return ShardedOutput.of(part, shard, x.workers)

    result = function(x.part, *args[1:], **kwargs)
    return wrapped(result) if isinstance(result, Tensor) else type(result)([wrapped(part) for part in result])


_DIM_AT = {"normalize": 2, "norm": 2}  # place of the argument `dim`, if it is not 1


def _dims_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    at = _DIM_AT.get(name, 1)
    return kwargs.get("dim", args[at] if len(args) > at else 1 if name == "normalize" else None)


def _keeps(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    at = _DIM_AT.get(name, 1) + 1
    return bool(kwargs.get("keepdim", args[at] if len(args) > at else False))


def _over_rows(name: str, x: ShardedOutput, dims: list[int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A sum or a mean over rows."""
    if name not in ("sum", "mean") or kwargs.keys() - {"dim", "keepdim"} or len(args) > 3:
        raise _GatherFirst
    part = x.part.sum(dims, _keeps(name, args, kwargs))
    return PartialSum.of(part if name == "sum" else part / math.prod(x.shape[d] for d in dims), x.workers)


# -- losses ----------------------------------------------------------------------------------------------------------------

_ELEMENT_LOSSES = "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div soft_margin_loss"


def _element_loss(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = _first_sharded(args, kwargs)
    named = {name: value for name, value in kwargs.items() if value is not None}
    given = dict(zip(("input", "target"), args, strict=False)) | named
    reduction = given.pop("reduction", "mean")
    tensors = [given["input"], given["target"]]
    if len(args) > 2 or given.keys() & {"size_average", "reduce"} or tensors[0].shape != tensors[1].shape:
        raise _GatherFirst
    if reduction not in ("none", "mean", "sum", "batchmean"):
        raise _GatherFirst
    part = _aligned(x, x.shard.dim - x.dim())
    own = pytree.tree_map_only(Tensor, part, given)
    if reduction == "none":
        return ShardedOutput.of(function(**own, reduction="none"), x.shard, x.workers)
    total = function(**own, reduction="sum")
    count = {"sum": 1, "mean": tensors[0].numel(), "batchmean": tensors[0].shape[0]}[reduction]
    return PartialSum.of(total / count, x.workers)


def _class_loss(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """cross_entropy and nll_loss: over rows, each of which has one weight."""
    named = {name: value for name, value in kwargs.items() if value is not None}
    given = dict(zip(("input", "target", "weight"), args, strict=False)) | named
    given = {name: value for name, value in given.items() if value is not None}
    x, target = _sharded(given["input"]), given["target"]
    target = target.whole() if isinstance(target, Lazy) and target.gathered else target
    reduction = given.pop("reduction", "mean")
    if len(args) > 3 or given.keys() & {"size_average", "reduce"} or reduction not in ("none", "mean", "sum"):
        raise _GatherFirst
    if x.dim() < 2 or x.shard.dim == 1:
        raise _GatherFirst
    soft = target.is_floating_point()
    shard = x.shard if soft or not x.shard.dim else replace(x.shard, dim=x.shard.dim - 1)
    if isinstance(target, Lazy):
        if not isinstance(target, ShardedOutput) or target.shard != shard:
            raise _GatherFirst
        own = target.part
    else:
        if target.shape[shard.dim] != shard.length:
            raise _GatherFirst
        own = cut(target, shard, x.workers)
    rest = {name: value for name, value in given.items() if name not in ("input", "target")}
    if reduction == "none":
        made = function(x.part, own, reduction="none", **rest)
        return ShardedOutput.of(made, x.shard if not x.shard.dim else replace(x.shard, dim=x.shard.dim - 1), x.workers)
    total = function(x.part, own, reduction="sum", **rest)
    if reduction == "sum":
        return PartialSum.of(total, x.workers)
    if soft:
        return PartialSum.of(total / (x.numel() // x.shape[1]), x.workers)
    seen = own if isinstance(target, Lazy) else target
    counted = seen != rest.get("ignore_index", -100)
    if (weight := rest.get("weight")) is not None:
        count = (weight[seen.where(counted, 0)] * counted).sum()
    else:
        count = counted.sum()
    if isinstance(target, Lazy):  # of a loader's rows, of which each worker has its own
        count = x.workers.sum_(count.detach().clone())
    return PartialSum.of(total / count, x.workers)


# -- sums over rows --------------------------------------------------------------------------------------------------------

_LINEAR = "neg negative __neg__ mul multiply __mul__ __rmul__ div divide true_divide __truediv__ add __add__ __radd__ sub subtract __sub__ __rsub__ sum mean"


def _linear(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PartialSum:
    """Of sums whose whole nobody has looked at."""
    sums = [a for a in args if isinstance(a, PartialSum) and not a.gathered]
    if not sums or len(sums) < sum(isinstance(a, Lazy) for a in args) or kwargs:
        raise _GatherFirst
    name, workers = function.__name__.strip("_"), sums[0].workers
    if name in ("sum", "mean", "neg", "negative") and len(args) > 1:
        raise _GatherFirst
    if name in ("mul", "multiply", "rmul") and len(sums) > 1:
        raise _GatherFirst
    if name in ("div", "divide", "true_divide", "truediv") and (len(sums) > 1 or args[0] is not sums[0]):
        raise _GatherFirst
    adds = name in ("add", "radd", "sub", "subtract", "rsub")

    def part(value: Any) -> Any:
        if isinstance(value, PartialSum):
            return value.part
        if not adds:
            return replicated(value, workers) if isinstance(value, Tensor) else value
        if isinstance(value, Tensor) and value.requires_grad:
            return value / workers.size
        if workers.rank == 0:
            return value
        return torch.zeros_like(value) if isinstance(value, Tensor) else 0  # of an infinite value, too

    return PartialSum.of(function(*map(part, args)), workers)


def _elementwise_or_linear(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if any(isinstance(a, PartialSum) for a in args):
        return _linear(function, args, kwargs) if function in _LINEAR_FUNCTIONS else NotImplemented
    return _elementwise(function, args, kwargs)


def _along_or_linear(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(args[0], PartialSum):
        return _linear(function, args, kwargs) if function in _LINEAR_FUNCTIONS else NotImplemented
    if isinstance(args[1] if len(args) > 1 else kwargs.get("other"), Tensor):  # max(x, y)
        return _elementwise(function, args, kwargs)
    return _along(function, args, kwargs)


def _backward(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x, gradient, *rest = (*args, None)[: max(2, len(args))]
    names = ("retain_graph", "create_graph")
    named = dict(zip(names, rest, strict=False)) | kwargs
    gradient = named.pop("gradient", gradient)
    torch.autograd.backward(x, gradient, **named)


def parts_of(tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor | None]]:
    """What a backward starts from instead: parts, whose gradients are N times as large as the whole's."""
    pairs = [_part_of(*one) for one in zip(tensors, gradients, strict=True)]
    return [tensor for tensor, _ in pairs], [gradient for _, gradient in pairs]


def _part_of(tensor: Tensor, gradient: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if not isinstance(tensor, Lazy) or tensor.gathered:
        return tensor.whole() if isinstance(tensor, Lazy) else tensor, gradient
    gradient = gradient.whole() if isinstance(gradient, Lazy) else gradient
    size = tensor.workers.size
    if isinstance(tensor, PartialSum):
        return tensor.part, torch.full_like(tensor.part, size) if gradient is None else gradient * size
    if gradient is None or not isinstance(tensor, ShardedOutput):
        return tensor.whole(), gradient
    return tensor.part, cut(gradient, tensor.shard, tensor.workers) * size


def _requires_grad(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    x = args[0]
    return bool((x.part if x._whole is None else x._whole).requires_grad)


def _number(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of a sum that came along with gradients."""
    x = args[0]
    if isinstance(x, PartialSum) and x.value is not None and not x.gathered:
        return function(x.value, *args[1:], **kwargs)
    return _conversion(function, args, kwargs) if function is T.detach else NotImplemented


# -- gradients of outputs whose part is in use -------------------------------------------------------------------------


def _of_part(x: Any) -> ShardedOutput:
    if not _sharded(x).part.requires_grad:
        raise _GatherFirst
    return x  # type: ignore[no-any-return]


def whole_gradient(x: ShardedOutput, of_part: Tensor) -> Tensor:
    """Of an output, from that of this worker's part. A collective."""
    return applied(Gather, of_part, x.shard, x.workers) / x.workers.size


def _register_hook(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, hook = _of_part(args[0]), args[1]

    def of_part(gradient: Tensor) -> Tensor | None:
        changed = hook(whole_gradient(x, gradient))
        return None if changed is None else cut(changed, x.shard, x.workers) * x.workers.size

    return x.part.register_hook(of_part)


def _retain_grad(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _of_part(args[0]).part.retain_grad()


def _grad(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    x = _of_part(args[0])
    return None if x.part.grad is None else whole_gradient(x, x.part.grad)


_LIKE = "zeros_like ones_like empty_like full_like rand_like randn_like randint_like"


def _like(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A new tensor of the whole shape, which all workers make alike."""
    x = args[0]
    whole = torch.empty((), dtype=x.dtype, device=x.device).expand(x.shape)
    if any(isinstance(value, Lazy) for value in args[1:]):
        raise _GatherFirst
    made: Tensor = function(whole, *args[1:], **{"memory_format": torch.contiguous_format, **kwargs})
    return made


# -- by function -----------------------------------------------------------------------------------------------------------


def _properties(names: str) -> set[Any]:
    return {getattr(T, name).__get__ for name in names.split()}


_FACTS = _properties(
    "shape dtype device layout ndim is_cuda is_sparse is_meta itemsize nbytes is_quantized"
) | _functions("size dim numel nelement __len__ is_floating_point is_complex element_size stride is_contiguous")
_LINEAR_FUNCTIONS = _functions(_LINEAR)
_HANDLERS: dict[Any, Handler] = {
    **dict.fromkeys(_functions(_SAME_SHAPE + " " + _REDUCTIONS), _along_or_linear),
    **dict.fromkeys(_functions(_ELEMENTWISE), _elementwise_or_linear),
    **dict.fromkeys(_functions(_CONVERSIONS), _conversion),
    **dict.fromkeys(_functions("transpose permute swapaxes swapdims"), _permute),
    **dict.fromkeys({*_properties("T mT"), *_functions("t")}, _transposed),
    **dict.fromkeys(_functions("view reshape flatten unflatten unsqueeze squeeze ravel"), _reshape),
    **dict.fromkeys({torch.cat, torch.stack}, _joined),
    **dict.fromkeys(_functions(_ELEMENT_LOSSES), _element_loss),
    **dict.fromkeys(_functions("cross_entropy nll_loss"), _class_loss),
    **dict.fromkeys(_functions(_LIKE), _like),
    T.__getitem__: _item,
    T.backward: _backward,
    **dict.fromkeys(_properties("requires_grad"), _requires_grad),
    **dict.fromkeys(_properties("grad"), _grad),
    T.register_hook: _register_hook,
    T.retain_grad: _retain_grad,
    **dict.fromkeys(_functions("item tolist __float__ __format__ detach"), _number),
}
