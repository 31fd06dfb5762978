"""What a loss's graph shows before backward uses it up: whether the loss adds up over rows, what it divides by, when it began."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


Node = Any  # torch.autograd.graph.Node, whose saved attributes have no types

_MEAN, _SUM = 1, 2  # `_saved_reduction` of torch's losses
_LEAST_FACTOR = 0.5  # of a sum; a smaller one may divide by what was counted
LEAST_ROWS = 3  # so few rows that a factor of a half, or a size that the rows divide, is no evidence
_ROW_BY_ROW = _names(
    "Abs Add Addcdiv Addcmul Alias BinaryCrossEntropy BinaryCrossEntropyWithLogits Cat Clamp ClampMax ClampMin Clone Cos Div Erf Exp Expm1 "
    "Gelu HardTanh HuberLoss KlDiv LeakyRelu Log Log10 Log1P Log2 LogSigmoid LogSoftmax MaskedFill Maximum Minimum MseLoss Mul Neg NllLoss "
    "NllLoss2D Pow Reciprocal Relu Rsqrt Rsub Sgn Sigmoid Silu Sin SmoothL1Loss Softmax Softplus Sqrt Sub Tanh ToCopy UnsafeView Unsqueeze View "
    "Reshape Squeeze Where Select Slice"
)
"""Functions that leave rows apart, or would be seen by the length if they did not."""
_LAYERS = _names(
    "Addmm Addbmm Baddbmm Bmm Mm Mv Dot Linear Convolution ConvolutionOverrideable MkldnnLinear MkldnnConvolution Embedding "
    "NativeLayerNorm NativeBatchNorm NativeGroupNorm FusedRmsNorm NativeDropout MaxPool2DWithIndices AvgPool2D AdaptiveAvgPool2D "
    "ScaledDotProductFlashAttentionForCpu ScaledDotProductEfficientAttention ScaledDotProductFlashAttention"
)
"""Where a model's output begins."""
_PRODUCTS = _names("Addmm Mm")
_SAME = {"Neg", "View", "UnsafeView", "Reshape", "Squeeze", "Unsqueeze", "ToCopy", "Clone", "Alias", "Permute"}


@dataclass(frozen=True)
class Sum:
    """A part of a loss that is a sum."""

    function: str  # as in the graph: BinaryCrossEntropy, Sum
    length: int | None  # of the first dimension of what is added up; None: torch's losses, which add up over their rows
    proven: bool = True  # nothing that is known to the contrary lies between it and the layers whose rows it adds up

    def over(self, rows: float) -> bool:
        """Whether it can be a sum over so many rows, or over the tokens of so many."""
        return rows >= LEAST_ROWS and (self.length is None or self.length % rows == 0)


@dataclass(frozen=True)
class LossTerms:
    """The terms of a loss."""

    sums: list[Sum]  # over data
    others: bool  # whether there are more: means, penalties (sums of parameters alone), what is not known

    def scale(self, rows: float) -> bool | None:
        """Over so many rows: whether the loss is a sum; None where one part of it is, and another one is not, or may not be."""
        if not any(one.over(rows) for one in self.sums):
            return False
        proven = all(one.proven and one.over(rows) for one in self.sums)
        return True if proven and not self.others else None


def terms_of(loss: Tensor) -> LossTerms:
    """Those of a loss of one number.

    What a divisor may make a mean is no sum, nor what is not known: own functions, compiled code, small factors.
    """
    found, others = list[Sum](), False
    ahead = list(_terms(loss.grad_fn)) if loss.numel() == 1 else []
    while ahead:
        node, factor = ahead.pop()
        name, reduction = _name(node), getattr(node, "_saved_reduction", None)
        if reduction is not None:
            if reduction == _SUM and abs(factor) >= _LEAST_FACTOR:
                found.append(Sum(name, None))
            else:
                others = True
        elif name == "Sum":
            sizes = node._saved_self_sym_sizes
            below = node.next_functions[0][0]
            if math.prod(sizes) == 1:
                ahead += _terms(below, factor)
            elif _name(below) == "Stack":
                ahead += [term for part in _parts(below) for term in _terms(part, factor)]
            elif abs(factor) >= _LEAST_FACTOR and not _is_penalty(below, sizes) and not _is_reduced(below):
                found.append(Sum(name, sizes[0], _is_row_by_row(below)))
            else:
                others = True
        else:
            others = True
    return LossTerms(found, others)


def divisor_of(loss: Tensor) -> float | None:
    """What the mean of a loss divides by, where that is cross entropy's or nll_loss's sum of class weights over the
    targets that are not ignored; None where it is none of these, or has terms that divide by another number."""
    found = set[float]()
    for node, _ in _terms(loss.grad_fn):
        if not (_name(node) in ("NllLoss", "NllLoss2D") and node._saved_reduction == _MEAN):
            return None
        found.add(float(node._saved_total_weight))
    return found.pop() if len(found) == 1 else None


def is_mean(loss: Tensor) -> bool:
    """Whether all terms of a loss are means over rows, as torch's losses or `mean()` compute them."""
    terms = [node for node, _ in _terms(loss.grad_fn)]
    return bool(terms) and all(
        getattr(node, "_saved_reduction", None) == _MEAN
        or (_name(node) == "Mean" and _is_row_by_row(node.next_functions[0][0]))
        for node in terms
    )


def _terms(node: Node, factor: float = 1.0) -> Iterator[tuple[Node, float]]:
    """(node, factor) of each term that additions and constant factors make a loss of."""
    ahead = [(node, factor)]
    while ahead:
        node, factor = ahead.pop()
        name = _name(node)
        if name in ("Mul", "Div") and (constant := _constant(node)):
            ahead.append((node.next_functions[0][0], factor * constant if name == "Mul" else factor / constant))
        elif name in _SAME or name in ("Add", "Sub"):
            ahead += [(part, factor) for part in _parts(node)]
        elif name:
            yield node, factor


def first_number(loss: Tensor) -> float:
    """Autograd's number of the node that was made first; infinity where there is none."""
    return min(
        (node._sequence_nr() for node in _nodes(loss.grad_fn) if not hasattr(node, "variable")), default=math.inf
    )


def next_number() -> int:
    """Greater than those of all autograd nodes so far, less than those to come."""
    with torch.enable_grad():
        return int(cast(Node, (torch.zeros((), requires_grad=True) * 1).grad_fn)._sequence_nr())


def has_casts(loss: Tensor) -> bool:
    """Whether a tensor's dtype was changed on the way to the loss, as autocast does."""
    return any(_name(node) == "ToCopy" for node in _nodes(loss.grad_fn))


def _nodes(node: Node) -> Iterator[Node]:
    """A node, and all that lead to it."""
    seen, ahead = set[Node](), [node]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            ahead += _parts(node)


def _name(node: Node) -> str:
    """AddBackward0 is Add."""
    return "" if node is None else str(node.name()).partition("Backward")[0]


def _parts(node: Node) -> list[Node]:
    return [part for part, _ in node.next_functions if part is not None]


def _constant(node: Node) -> float | None:
    """The number that a scalar is multiplied with, or divided by; None if that has a gradient, too."""
    other = getattr(node, "_saved_other", None)
    if len(_parts(node)) != 1 or node.next_functions[0][0] is None or other is None:
        return None
    return float(other)


def _is_penalty(node: Node, sizes: tuple[int, ...]) -> bool:
    """Whether all that leads here is one parameter, of the shape that is added up."""
    leaves = [one.variable for one in _nodes(node) if hasattr(one, "variable")]
    return len(leaves) == 1 and tuple(leaves[0].shape) == tuple(sizes)


def _is_row_by_row(node: Node) -> bool:
    """Whether nothing but functions of one row at a time leads here from the layers of the model."""
    seen, ahead = {node}, [node]
    while ahead:
        one = ahead.pop()
        name = _name(one)
        if hasattr(one, "variable") or (name in _LAYERS and not _is_of_rows_with_rows(one, name)):
            continue
        if not (name in _ROW_BY_ROW or (name in ("Mean", "Sum") and _keeps_first(one))):
            return False
        if getattr(one, "_saved_reduction", 0):  # a loss that is one number already
            return False
        ahead += [part for part in _parts(one) if part not in seen]
        seen.update(_parts(one))
    return True


def rows_meet(loss: Tensor) -> bool:
    """Whether rows look at each other between the model's last layers and its loss: by a product of outputs with outputs, as
    in-batch similarities and covariances are, or by variances over rows."""
    seen, ahead = set[Node](), [cast(Node, loss.grad_fn)]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = _name(node)
        if name in ("Var", "Std", "VarMean", "StdMean") and not _keeps_first(node):
            return True
        if name in _LAYERS:
            if _is_of_rows_with_rows(node, name):
                return True
        else:
            ahead += _parts(node)
    return False


def _is_of_rows_with_rows(node: Node, name: str) -> bool:
    """Whether a product has outputs of layers on both sides, and not a layer's weights."""
    if name not in _PRODUCTS:
        return False
    return all(side is not None and _has_layers(side) for side in [part for part, _ in node.next_functions][-2:])


def _has_layers(node: Node) -> bool:
    """Whether a layer leads here; weights that are computed from parameters have none."""
    return any(_name(one) in _LAYERS - {"Mv", "Dot"} for one in _nodes(node))


def _keeps_first(node: Node) -> bool:
    """Of a mean, a sum or a variance: whether the first dimension stays."""
    dims = getattr(node, "_saved_dim", None)
    n = len(getattr(node, "_saved_self_sym_sizes", None) or node._saved_self.shape)
    return bool(dims) and not any(dim in (0, -n, 2**64 - n) for dim in dims or ())  # saved without a sign


def _is_reduced(node: Node) -> bool:
    """Whether the first dimension went before: `x.mean(0).sum()` is a mean over rows."""
    while len(_parts(node)) == 1:
        if _name(node) in ("Mean", "Sum"):
            return not _keeps_first(node)
        (node,) = _parts(node)
    return False
