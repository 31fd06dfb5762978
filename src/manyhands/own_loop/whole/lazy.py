"""Outputs of a call that was cut: tensors of the whole batch, gathered when the script first looks at their values.

`ShardedOutput` holds this worker's rows, `PartialSum` what this worker has summed over its rows. Both have the shape and
dtype of the whole. Functions of `sharded_functions` work on the parts; whatever else is called gets the gathered tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override

from manyhands.errors import Unsupported
from manyhands.own_loop.whole.exchange import Gather, SumOfParts, Workers, applied
from manyhands.own_loop.whole.layout import RowLayout

View = Callable[[Tensor], Tensor]


class Lazy(torch.Tensor):
    """A tensor of which this worker holds a part until somebody asks for the whole."""

    part: Tensor
    workers: Workers
    base: Lazy | None  # this is a view of it
    replay: View  # made from the base's whole
    _whole: Tensor | None

    @classmethod
    def _of(cls, part: Tensor, shape: Sequence[int], workers: Workers) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=part.dtype, device=part.device)
        made.part, made.workers, made.base, made._whole = part, workers, None, None
        return made

    @property
    def gathered(self) -> bool:
        """Whether the script has looked at it: it is whole from then on, so that hooks and changes in place hold."""
        return self._whole is not None or (self.base is not None and self.base.gathered)

    def whole(self) -> Tensor:
        """The tensor of all rows. A collective, the first time."""
        if self._whole is None:
            with torch.set_grad_enabled(self.part.requires_grad):  # whatever it is where the script looks first
                self._whole = self._made() if self.base is None else self.replay(self.base.whole())
        return self._whole

    def _made(self) -> Tensor:
        raise NotImplementedError

    def viewed(self, view: Self, replay: View) -> Self:
        """`view`, of whose memory this one's is part: once this one is gathered, `view` is a view of the gathered one."""
        view.base, view.replay = self, replay
        return view

    @classmethod
    @override
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from manyhands.own_loop.whole.sharded_functions import on_parts

        named = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = on_parts(function, args, named)
            if result is NotImplemented:
                args, named = gathered((args, named), getattr(function, "__name__", str(function)))
                result = function(*args, **named)
        return result

    @classmethod
    @override
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """What passes `__torch_function__` by, such as scripted functions, gets the whole; gradients would be lost there."""
        named = kwargs or {}
        lazy = [one for one in pytree.tree_leaves((args, named)) if isinstance(one, Lazy)]
        wants_gradient = torch.is_grad_enabled() and function is not torch.ops.aten.detach.default
        if wants_gradient and any(one.part.requires_grad for one in lazy):
            raise Unsupported(
                f"{function.__name__} of an output of a call that workers have cut takes a way that its gradient cannot follow (a scripted or compiled function): "
                'call it within a module, or let each worker have its own rows: batches="slices"'
            )
        args, named = gathered((args, named), function.__name__)
        return function(*args, **named)


class ShardedOutput(Lazy):
    """This worker's rows of an output."""

    shard: RowLayout

    @classmethod
    def of(cls, part: Tensor, shard: RowLayout, workers: Workers) -> ShardedOutput:
        made = cls._of(part, shard.whole_shape(part.shape), workers)
        made.shard = shard
        return made

    @override
    def _made(self) -> Tensor:
        self.workers.check_thread()
        return applied(Gather, self.part, self.shard, self.workers)


class PartialSum(Lazy):
    """What this worker has summed over its rows; the whole is the sum over workers."""

    value: Tensor | None  # the whole, where it came along with gradients

    @property
    def known(self) -> bool:
        """Whether the sum over workers was taken."""
        return self.value is not None or self.gathered

    def know(self, value: Tensor) -> None:
        """The sum over workers, which a backward brought along."""
        self.value = value

    @classmethod
    def of(cls, part: Tensor, workers: Workers) -> PartialSum:
        """Without a gradient to come it is summed at once: 8 bytes cost little, and one worker alone may look at it."""
        made = cls._of(part, part.shape, workers)
        made.value = None
        if not part.requires_grad:
            made.whole()
        return made

    @override
    def _made(self) -> Tensor:
        value = self.value
        if value is None:
            self.workers.check_thread()
            value = self.workers.sum_(self.part.detach().clone())
        return applied(SumOfParts, self.part, value, self.workers)


def gathered(values: Any, function: str = "a module or a function of the script") -> Any:
    """The same nested values with whole tensors. function: who needs them."""

    if not any(isinstance(leaf, Lazy) for leaf in pytree.tree_leaves(values)):
        return values  # the script's own lists and dicts, which a function may fill

    def whole(one: Lazy) -> Tensor:
        before, one.workers.looking = one.workers.looking, function
        try:
            return one.whole()
        finally:
            one.workers.looking = before

    return pytree.tree_map_only(Lazy, whole, values)
