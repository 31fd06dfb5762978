"""Whether a script's own backward, or a hook of its on a gradient, computes with each row for itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

_register = Tensor.register_hook


class HooksSeen:
    """`with hooks_seen() as seen`: whether within somebody has registered a hook on a tensor."""

    any = False


@contextmanager
def hooks_seen() -> Iterator[HooksSeen]:
    seen = HooksSeen()

    def register(tensor: Tensor, hook: Any) -> Any:
        seen.any = True
        return _register(tensor, hook)  # type: ignore[no-untyped-call]

    Tensor.register_hook = register  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        Tensor.register_hook = _register  # type: ignore[method-assign]


def has_own_function(outputs: Sequence[Any]) -> bool:
    """Whether a `torch.autograd.Function` of the script's is in their graph."""
    ahead = [one.grad_fn for one in outputs if isinstance(one, Tensor) and one.grad_fn is not None]
    seen: set[Any] = set(ahead)
    while ahead:
        node: Any = ahead.pop()
        if isinstance(node, BackwardCFunction) and node._forward_cls.__module__.partition(".")[0] != "torch":  # type: ignore[attr-defined]
            return True
        fresh = [inner for inner, _ in node.next_functions if inner is not None and inner not in seen]
        seen.update(fresh)
        ahead += fresh
    return False


def gradients_of(outputs: Sequence[Any], weights: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Of the sum of weighted outputs; zeros where an input has none. A weight of None: the output does not count."""
    pairs = [(output, weight) for output, weight in zip(outputs, weights, strict=True) if weight is not None]
    total = torch.stack([(output * weight).sum().double() for output, weight in pairs]).sum()
    found = torch.autograd.grad(total, list(inputs), allow_unused=True)
    return [torch.zeros_like(one) if got is None else got for one, got in zip(inputs, found, strict=True)]
