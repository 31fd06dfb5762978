"""What a loss's graph shows before backward uses it up: whether the loss adds up over rows, what it divides by."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


Node = Any  # torch.autograd.graph.Node, whose saved attributes have no types

_MEAN, _SUM = 1, 2  # `_saved_reduction` of torch's losses
_LEAST_FACTOR = 0.5  # of a sum; a smaller one may divide by what was counted
_ROUNDING = 1e-6
_CLASS_LOSSES = ("NllLoss", "NllLoss2D")  # of cross entropy, too
_ROW_BY_ROW = _names(
    "Abs Add Addcdiv Addcmul Alias BinaryCrossEntropy BinaryCrossEntropyWithLogits Cat Clamp ClampMax ClampMin Clone Cos Div Erf Exp Expm1 "
    "Gelu HardTanh HuberLoss KlDiv LeakyRelu Log Log10 Log1P Log2 LogSigmoid MaskedFill Maximum Minimum MseLoss Mul Neg NllLoss "
    "NllLoss2D Pow Reciprocal Relu Rsqrt Rsub Sgn Sigmoid Silu Sin SmoothL1Loss Softplus Sqrt Sub Tanh ToCopy UnsafeView Unsqueeze View "
    "Reshape Squeeze Where Select Slice"
)
"""Functions that leave rows apart, or would be seen by the length if they did not."""
_ALONG_DIMENSIONS = _names("LogSoftmax Mean Permute Softmax Sum Transpose")
_LAYERS = _names(
    "Addmm Addbmm Baddbmm Bmm Mm Mv Dot Linear Convolution ConvolutionOverrideable MkldnnLinear MkldnnConvolution Embedding "
    "NativeLayerNorm NativeBatchNorm NativeGroupNorm FusedRmsNorm NativeDropout MaxPool2DWithIndices AvgPool2D AdaptiveAvgPool2D "
    "ScaledDotProductFlashAttentionForCpu ScaledDotProductEfficientAttention ScaledDotProductFlashAttention"
)
"""Where a model's output begins."""
_PRODUCTS = _names("Addmm Mm")
_SAME = {"Neg", "View", "UnsafeView", "Reshape", "Squeeze", "Unsqueeze", "ToCopy", "Clone", "Alias", "Permute"}


MEAN, SUM = "a mean", "a sum"
EITHER = "a sum or a mean"  # of so few rows that both are the same
UNKNOWN = "not known"
MIXED = "a sum in part"


@dataclass(frozen=True)
class OverRows:
    """What a loss is over the rows of a batch."""

    kind: str  # MEAN, SUM, EITHER, UNKNOWN or MIXED
    divisor: float | None = None  # of a mean: what it divides by, where that is not the rows
    why: str = ""  # MIXED


def over_rows(loss: Tensor, rows: float) -> OverRows:
    """As far as the graph of a loss of one number shows it; rows: of the batch, at least 1.

    A penalty, which is computed from parameters alone, counts as a mean. What a divisor may make a mean is no sum.
    """
    kinds, weighted, why = set[str](), [], ""
    ahead = list(_terms(loss.grad_fn)) if loss.numel() == 1 else []
    if not ahead:
        return OverRows(UNKNOWN)
    while ahead:
        node, factor = ahead.pop()
        name, reduction = _name(node), getattr(node, "_saved_reduction", None)
        if reduction == _MEAN and not _is_row_by_row(node.next_functions[0][0]):
            kinds.add(UNKNOWN)
        elif reduction == _MEAN and name in _CLASS_LOSSES:
            weighted.append(node)
        elif reduction is not None:
            saved = getattr(node, "_saved_self", None)
            kinds.add(MEAN if reduction == _MEAN else _sum_kind(factor, rows, [] if saved is None else saved.shape))
        elif name in ("Sum", "Mean") and math.prod(_sizes(node)) == 1:
            ahead += _terms(node.next_functions[0][0], factor)
        elif name == "Sum" and _name(node.next_functions[0][0]) == "Stack":
            ahead += [term for part in _parts(node.next_functions[0][0]) for term in _terms(part, factor)]
        elif name in ("Sum", "Mean"):
            kinds.add(_kind_of_reduction(node, factor, rows))
        else:
            kinds.add(UNKNOWN)
        if MIXED in kinds and not why:
            why = f"it adds up over rows ({name}), and is divided by a number that may be theirs, or everybody's"
    if why:
        return OverRows(MIXED, why=why)
    if SUM in kinds:
        alone = kinds <= {SUM, EITHER} and not weighted
        return (
            OverRows(SUM) if alone else OverRows(MIXED, why="a part of it is a sum over rows, and another part is none")
        )
    if weighted and not kinds and (divisor := _one_divisor(weighted)) is not None:
        return OverRows(MEAN, divisor)
    if not all(map(_counts_rows, weighted)):
        return OverRows(
            MIXED, why="one part of it divides by the targets that count, and another part by another number"
        )
    return OverRows(EITHER if kinds == {EITHER} and not weighted else UNKNOWN if UNKNOWN in kinds else MEAN)


def _kind_of_reduction(node: Node, factor: float, rows: float) -> str:
    """Of a sum or a mean, which may be of what was reduced over rows before: `x.mean(0).sum()` is a mean over rows."""
    if _name(node) == "Sum" and _is_penalty(node.next_functions[0][0], _sizes(node)):
        return MEAN
    over, sizes = node, _sizes(node)
    below = node.next_functions[0][0]
    while len(parts := _parts(below)) == 1:
        if _name(below) in ("Mean", "Sum") and not _keeps_first(below):
            over, sizes = below, _sizes(below)
        (below,) = parts
    apart = _is_row_by_row(over.next_functions[0][0])
    if _name(over) == "Mean":
        return MEAN if apart else UNKNOWN
    kind = _sum_kind(factor, rows, sizes)
    return kind if apart or kind == UNKNOWN else MIXED


def _sum_kind(factor: float, rows: float, sizes: Sequence[int]) -> str:
    """Of what is added up over a tensor of these sizes, and multiplied by a factor. A small one may divide by this slice's
    rows, or by what is the same for all slices."""
    if sizes and sizes[0] % rows:
        return UNKNOWN  # no rows of the batch
    if abs(factor) < _LEAST_FACTOR:
        return MIXED
    return EITHER if abs(factor * rows - 1) < _ROUNDING else SUM


def _counts_rows(node: Node) -> bool:
    """Of cross entropy's or nll_loss's mean: whether it divides by all targets."""
    return node._saved_weight is None and not bool((node._saved_target == node._saved_ignore_index).any())


def _sizes(node: Node) -> tuple[int, ...]:
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    return tuple(node._saved_self.shape if sizes is None else sizes)


def divisor_of(loss: Tensor) -> float | None:
    """What the mean of a loss divides by, where that is cross entropy's or nll_loss's sum of class weights over the
    targets that are not ignored; None where it is none of these, or has terms that divide by another number."""
    terms = [node for node, _ in _terms(loss.grad_fn)]
    means = all(_name(node) in _CLASS_LOSSES and node._saved_reduction == _MEAN for node in terms)
    return _one_divisor(terms) if means else None


def _one_divisor(means: Sequence[Node]) -> float | None:
    """What means of cross entropy or nll_loss divide by; None where they divide by several numbers."""
    found = {float(node._saved_total_weight) for node in means}
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
    return float(other) if not isinstance(other, Tensor) or other.numel() == 1 else None


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
        if not (name in _ROW_BY_ROW or name in _ALONG_DIMENSIONS):
            return False
        if getattr(one, "_saved_reduction", 0) or not _leaves_first(one, name):
            return False
        ahead += [part for part in _parts(one) if part not in seen]
        seen.update(_parts(one))
    return True


def _leaves_first(node: Node, name: str) -> bool:
    """Of a function along dimensions: whether the first one, of rows, is none of them."""
    if name in ("Mean", "Sum"):
        return _keeps_first(node)
    if name not in _ALONG_DIMENSIONS:
        return True
    n = len(node._input_metadata[0].shape)  # of the result
    if name == "Permute":
        return not n or _is_first(node._saved_dims[0], n)
    dims = [node._saved_dim0, node._saved_dim1] if name == "Transpose" else [node._saved_dim]
    return not any(_is_first(dim, n) for dim in dims)


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
    dims, n = getattr(node, "_saved_dim", None), len(_sizes(node))
    return bool(dims) and not any(_is_first(dim, n) for dim in dims or ())


def _is_first(dim: int, dims: int) -> bool:
    """Of a dimension that was counted from behind or not, and saved with its sign or without."""
    return dim % 2**64 in (0, 2**64 - dims)
