"""Whether a script's own backward, or a hook of its on a gradient, computes with each row for itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

_register = Tensor.register_hook
_detach = Tensor.detach
_OUT = ("tolist", "numpy", "__array__")  # which dispatch does not see


class HooksSeen:
    """What somebody has done with tensors."""

    any = False  # registered a hook on one, or taken one out of the graph: gradients may go another way than values
    values = False  # taken all its values out of torch


@contextmanager
def hooks_seen() -> Iterator[HooksSeen]:
    """Within, what is done is noted."""
    seen = HooksSeen()

    def register(tensor: Tensor, hook: Any) -> Any:
        seen.any = True
        return _register(tensor, hook)  # type: ignore[no-untyped-call]

    def noting(plain: Any) -> Any:
        def taken(tensor: Tensor, *given: Any, **named: Any) -> Any:
            seen.values = True
            return plain(tensor, *given, **named)

        return taken

    def detach(tensor: Tensor) -> Tensor:
        seen.any = True
        return _detach(tensor)

    before = {name: vars(Tensor).get(name) for name in (*_OUT, "detach")}
    Tensor.detach = detach  # type: ignore[assignment]
    Tensor.register_hook = register  # type: ignore[method-assign]
    for name in _OUT:
        setattr(Tensor, name, noting(getattr(Tensor, name)))
    try:
        yield seen
    finally:
        Tensor.register_hook = _register  # type: ignore[method-assign]
        for name, plain in before.items():
            if plain is None:
                delattr(Tensor, name)
            else:
                setattr(Tensor, name, plain)


def has_own_function(outputs: Sequence[Any]) -> bool:
    """Whether a `torch.autograd.Function` of the script's is in their graph."""
    ahead = [one.grad_fn for one in outputs if isinstance(one, Tensor) and one.grad_fn is not None]
    seen: set[Any] = set(ahead)
    while ahead:
        node: Any = ahead.pop()
        if isinstance(node, BackwardCFunction) and _is_scripts(node._forward_cls):  # type: ignore[attr-defined]
            return True
        fresh = [inner for inner, _ in node.next_functions if inner is not None and inner not in seen]
        seen.update(fresh)
        ahead += fresh
    return False


def _is_scripts(function: type) -> bool:
    """Those of `torch.library.custom_op` are made in torch."""
    return not function.__module__.startswith(("torch.", "manyhands.")) or function.__module__.startswith(
        "torch._library"
    )


def gradients_of(outputs: Sequence[Any], weights: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Of the sum of weighted outputs; zeros where an input has none. A weight of None: the output does not count."""
    pairs = [(output, weight) for output, weight in zip(outputs, weights, strict=True) if weight is not None]
    total = torch.stack([(output * weight).sum().double() for output, weight in pairs]).sum()
    found = torch.autograd.grad(total, list(inputs), allow_unused=True)
    return [torch.zeros_like(one) if got is None else got for one, got in zip(inputs, found, strict=True)]
