"""Whether a loss adds up over the rows of its batch, read from its graph before backward uses it up."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Node = Any  # torch.autograd.graph.Node, whose saved attributes have no types

_SUM = 2  # `_saved_reduction` of torch's losses
_LEAST_FACTOR = 0.5  # of a sum; a smaller one may divide by what was counted
_LEAST_ROWS = 3  # so few rows that a factor of a half, or a size that the rows divide, is no evidence
_SAME = {"Neg", "View", "UnsafeView", "Reshape", "Squeeze", "Unsqueeze", "ToCopy", "Clone", "Alias", "Permute"}


@dataclass(frozen=True)
class Sum:
    """A part of a loss that is a sum."""

    function: str  # as in the graph: BinaryCrossEntropy, Sum
    length: int | None  # of the first dimension of what is added up; None: torch's losses, which add up over their rows

    def over(self, rows: float) -> bool:
        """Whether it can be a sum over so many rows, or over the tokens of so many."""
        return rows >= _LEAST_ROWS and (self.length is None or self.length % rows == 0)


def sums_of(loss: Tensor) -> list[Sum]:
    """The sums over data that a scalar loss consists of, without penalties (sums of parameters alone).

    Left out is what a divisor may make a mean, and what is not known: own functions, compiled code, small factors.
    """
    found = []
    ahead: list[tuple[Node, float]] = [(loss.grad_fn, 1.0)] if loss.numel() == 1 else []
    while ahead:
        node, factor = ahead.pop()
        if node is None:
            continue
        name = _name(node)
        reduction = getattr(node, "_saved_reduction", None)
        if reduction is not None:
            if reduction == _SUM and abs(factor) >= _LEAST_FACTOR:
                found.append(Sum(name, None))
        elif name == "Sum":
            sizes = node._saved_self_sym_sizes
            below = node.next_functions[0][0]
            if math.prod(sizes) == 1:
                ahead.append((below, factor))
            elif _name(below) == "Stack":
                ahead += [(part, factor) for part in _parts(below)]
            elif abs(factor) >= _LEAST_FACTOR and not _is_penalty(below, sizes) and not _is_reduced(below):
                found.append(Sum(name, sizes[0]))
        elif name in ("Mul", "Div"):
            constant = _constant(node)
            if constant:
                ahead.append((node.next_functions[0][0], factor * constant if name == "Mul" else factor / constant))
        elif name in _SAME or name in ("Add", "Sub"):
            ahead += [(part, factor) for part in _parts(node)]
    return found


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
    leaves, seen, ahead = set(), {node}, [node]
    while ahead:
        one = ahead.pop()
        if hasattr(one, "variable"):
            leaves.add(one)
            if len(leaves) > 1 or tuple(one.variable.shape) != tuple(sizes):
                return False
        for part in _parts(one):
            if part not in seen:
                seen.add(part)
                ahead.append(part)
    return bool(leaves)


def _is_reduced(node: Node) -> bool:
    """Whether the first dimension went before: `x.mean(0).sum()` is a mean over rows."""
    while len(_parts(node)) == 1:
        if _name(node) in ("Mean", "Sum"):
            dims = getattr(node, "_saved_dim", None)
            n = len(node._saved_self_sym_sizes)
            return dims is None or any(dim in (0, -n, 2**64 - n) for dim in dims)  # saved without a sign
        (node,) = _parts(node)
    return False


# -- what a backward is about to start from -------------------------------------------------------------------------------

_UNDER_WAY: list[list[Sum]] = []
"""Of each backward that runs; there is one at a time, but for workers that share a process."""
_watchers = 0
_watching = threading.Lock()
_plain_backward = torch.autograd.backward


def watch(owner: object) -> Callable[[], object]:
    """From now on `under_way` knows, until what comes back is called or `owner` is gone."""
    _count(1)
    return weakref.finalize(owner, _count, -1)


def _count(more: int) -> None:
    global _watchers
    with _watching:
        _watchers += more
        ours, theirs = (_backward, _plain_backward) if _watchers else (_plain_backward, _backward)
        if torch.autograd.backward is theirs:
            torch.autograd.backward = ours


def under_way() -> list[Sum]:
    """The sums of the loss whose backward runs, as far as they are known."""
    return _UNDER_WAY[-1] if _UNDER_WAY else []


def _backward(tensors: Any, grad_tensors: Any = None, *args: Any, **options: Any) -> None:
    """In place of torch.autograd.backward, which Tensor.backward calls, too."""
    losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    sums = [one for loss in losses for one in sums_of(loss)] if grad_tensors is None else []
    _UNDER_WAY.append(sums)
    try:
        _plain_backward(losses, grad_tensors, *args, **options)
    finally:
        _UNDER_WAY[:] = [other for other in _UNDER_WAY if other is not sums]
