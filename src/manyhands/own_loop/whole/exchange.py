"""What workers tell each other around and within a call that is cut: parts gathered, sums, and their gradients.

Two rules make gradients right. Behind a gathered output every worker computes the same, so its gradient is known everywhere:
each worker takes its own part of it, times N, and the mean over workers of a parameter's gradient is then the sum over rows.
Before a cut input every worker computes the same, too: the parts' gradients are gathered, and the N is taken back.
Each function is made of the others' and can be differentiated again.

Source of the two rules: Xu et al., GSPMD: general and scalable parallelization for ML computation graphs, 2021.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from typing_extensions import override

from manyhands.comm.group import Group
from manyhands.data.sharding import slice_of
from manyhands.errors import Line, Unsupported, calling_line
from manyhands.own_loop.whole.layout import RowLayout


class Leaves:
    """Tensors that require gradients, numbered in the order in which they came, alike on all workers; not kept alive."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}  # by identity
        self._references: dict[int, weakref.ref[Tensor]] = {}
        self._count = 0

    def add(self, leaf: Tensor) -> None:
        key = id(leaf)
        if key in self._numbers:
            return
        number, self._count = self._count, self._count + 1
        self._numbers[key] = number
        self._references[number] = weakref.ref(leaf, lambda _: self._forget(key, number))

    def _forget(self, key: int, number: int) -> None:
        self._references.pop(number, None)
        if self._numbers.get(key) == number:
            del self._numbers[key]

    def __contains__(self, leaf: Tensor) -> bool:
        return id(leaf) in self._numbers

    def number_of(self, leaf: Tensor) -> int:
        """KeyError for one that is not among them."""
        return self._numbers[id(leaf)]

    def numbered(self, numbers: Sequence[int] | None = None) -> Iterator[tuple[int, Tensor]]:
        """(number, leaf) of all that live, or of those."""
        for number in list(self._references) if numbers is None else numbers:
            reference = self._references.get(number)
            leaf = None if reference is None else reference()
            if leaf is not None and leaf.is_leaf:  # else it is gone, or was changed in place
                yield number, leaf


@dataclass
class Gathered:
    """What gathering whole tensors has cost."""

    times: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Workers:
    """Those that run the same script, of which this is one."""

    def __init__(self, group: Group) -> None:
        self.group, self.rank, self.size = group, group.rank, group.size
        self.gathered: dict[tuple[str, Line], Gathered] = {}  # by function and line that looked at an output
        self.looking = ""  # the function of torch that needs a whole output
        self.leaves = Leaves()  # whose gradients are of each worker's rows
        self._thread = threading.get_ident()

    @property
    def in_own_thread(self) -> bool:
        """Whether the script's thread runs: in others workers would come in no common order."""
        return threading.get_ident() == self._thread

    def check_thread(self) -> None:
        """Unsupported in another thread than the script's."""
        if not self.in_own_thread:
            raise Unsupported(
                "a thread of the script looks at an output of a call that workers have cut, and only the thread that computed it can gather it from them: look "
                'at it there (loss.item()), and hand the number on, or let each worker have its own rows: batches="slices"'
            )

    def own_rows(self, rows: int) -> tuple[int, int]:
        """(first, how many) of a batch's rows are this worker's."""
        start, stop = slice_of(rows, self.rank, self.size)
        return start, stop - start

    def cut(self, whole: Tensor, shard: RowLayout) -> Tensor:
        """This worker's part of a tensor that all hold."""
        return shard.narrow(whole, *self.own_rows(shard.rows))

    def join(self, part: Tensor, shard: RowLayout) -> Tensor:
        """The whole tensor of all workers' parts. A collective."""
        counts = [stop - start for start, stop in (slice_of(shard.rows, rank, self.size) for rank in range(self.size))]
        shape, own = list(part.shape), part.detach().contiguous()
        shapes = [(*shape[: shard.dim], shard.outer * rows * shard.inner, *shape[shard.dim + 1 :]) for rows in counts]
        lengths = [torch.Size(one).numel() * own.element_size() for one in shapes]
        sent = own.new_empty(max(lengths), dtype=torch.uint8)
        sent[: lengths[self.rank]] = own.view(-1).view(torch.uint8)
        self._show_line()
        began = time.perf_counter()
        received = self.group.all_gather(sent)
        parts = [
            row[:length].view(own.dtype).view(one) for row, length, one in zip(received, lengths, shapes, strict=True)
        ]
        cost = self.gathered.setdefault((self.looking or "a cut input", calling_line()), Gathered())
        cost.times, cost.bytes = cost.times + 1, cost.bytes + sum(lengths)
        cost.seconds += time.perf_counter() - began
        return shard.joined(parts)

    def sum_(self, tensor: Tensor) -> Tensor:
        """The sum over workers, in place. A collective."""
        flat = real_view(tensor.contiguous()).view(-1)
        self._show_line()
        self.group.all_reduce_(flat)
        return like(tensor, flat)

    def _show_line(self) -> None:
        """In errors of the group, for workers that come to different operations."""
        self.group.line = calling_line().number


def real_view(tensor: Tensor) -> Tensor:
    """A complex tensor as one of real numbers, which messages hold."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def like(tensor: Tensor, flat: Tensor) -> Tensor:
    """The numbers of `flat`, of real parts and imaginary ones where `tensor` is complex, in its shape."""
    return torch.view_as_complex(flat.view(*tensor.shape, 2)) if tensor.is_complex() else flat.view(tensor.shape)


def applied(function: type[Function], *args: Any) -> Tensor:
    """`function.apply`, with types."""
    return function.apply(*args)  # type: ignore[no-any-return]


class Gather(Function):
    """This worker's part of an output -> the whole."""

    @staticmethod
    @override
    def forward(ctx: Any, part: Tensor, shard: RowLayout, workers: Workers) -> Tensor:
        ctx.shard, ctx.workers = shard, workers
        return workers.join(part, shard)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return applied(TakeRows, gradient, ctx.shard, ctx.workers) * ctx.workers.size, None, None


class TakeRows(Function):
    """A whole input -> this worker's part."""

    @staticmethod
    @override
    def forward(ctx: Any, whole: Tensor, shard: RowLayout, workers: Workers) -> Tensor:
        ctx.shard, ctx.workers = shard, workers
        return workers.cut(whole, shard)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return applied(Gather, gradient, ctx.shard, ctx.workers) / ctx.workers.size, None, None


class SumOfParts(Function):
    """What each worker has summed over its rows -> the sum over all, which is `value`."""

    @staticmethod
    @override
    def forward(ctx: Any, part: Tensor, value: Tensor, workers: Workers) -> Tensor:
        ctx.workers = workers
        return value.clone()

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.workers.size, None, None


class SumWithin(Function):
    """A sum over workers within a call that is cut, such as a statistic of all rows: its gradients are summed as well."""

    @staticmethod
    @override
    def forward(ctx: Any, part: Tensor, workers: Workers) -> Tensor:
        ctx.workers = workers
        return workers.sum_(part.clone())

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return applied(SumWithin, gradient, ctx.workers), None


class Replicated(Function):
    """What all hold, and each computes its rows with -> itself. Its gradient is of this worker's rows: the mean is taken."""

    @staticmethod
    @override
    def forward(ctx: Any, value: Tensor, workers: Workers) -> Tensor:
        ctx.workers = workers
        return value.view_as(value)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return mean_of_workers(gradient, ctx.workers), None


def mean_of_workers(own: Tensor, workers: Workers) -> Tensor:
    """Of a gradient that is differentiated again."""
    return applied(SumWithin, own, workers) / workers.size


def replicated(value: Tensor, workers: Workers) -> Tensor:
    """To be computed with rows. A leaf's gradient is averaged where backward ends: see `Workers.leaves`."""
    if not value.requires_grad or not torch.is_grad_enabled():
        return value
    if value.is_leaf:
        workers.leaves.add(value)
        return value
    return applied(Replicated, value, workers)


def cut(whole: Tensor, shard: RowLayout, workers: Workers) -> Tensor:
    """`TakeRows`, without a node in the graph where nobody differentiates."""
    if whole.requires_grad and torch.is_grad_enabled():
        return applied(TakeRows, whole, shard, workers)
    return workers.cut(whole, shard)
