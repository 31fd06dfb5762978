"""Calls of modules that hold parameters: each worker computes its rows of a call, where that is proven to be the same."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from manyhands import rng
from manyhands.errors import calling_line
from manyhands.own_loop.loss_graph import divisor_of
from manyhands.own_loop.whole.batch_norm import Statistics
from manyhands.own_loop.whole.equality import EqualFacts, digest_of
from manyhands.own_loop.whole.exchange import Workers, cut, replicated
from manyhands.own_loop.whole.layout import Shard
from manyhands.own_loop.whole.lazy import Lazy, PartialSum, ShardedOutput, gathered
from manyhands.own_loop.whole.proof import Plan, Whole, found_plan, shapes_of

_plain: Callable[..., Any] = nn.Module.__call__


class Calls:
    """The outermost calls of a script's modules, by the thread that made this."""

    def __init__(
        self, workers: Workers, say: Callable[[str], None], begins: Callable[[nn.Module], None], facts: EqualFacts
    ) -> None:
        """begins: told of the module before it is computed. facts: gets the digests of what it is called with."""
        self.workers, self._say, self._begins, self._facts = workers, say, begins, facts
        self.statistics = Statistics(workers)
        self._within = False
        self._plans: weakref.WeakKeyDictionary[nn.Module, dict[Any, Plan | Whole]] = weakref.WeakKeyDictionary()
        self._noise = rng.TorchScope(workers.rank)

    def install(self) -> None:
        """From now on calls of modules are this one's."""

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._within or not self.workers.in_own_thread or not _has_parameters(module):
                return _plain(module, *args, **kwargs)
            return self._call(module, args, kwargs)

        nn.Module.__call__ = call  # type: ignore[method-assign]
        self.statistics.install()

    def remove(self) -> None:
        nn.Module.__call__ = _plain  # type: ignore[method-assign]
        self.statistics.remove()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._begins(module)
        leaves, structure = _flattened(args, kwargs)
        self._within = True
        try:
            if any(map(_is_symbolic, (next(module.parameters()), *leaves))):
                return _plain(module, *args, **kwargs)
            plan = self._plan(module, leaves, structure)
            self._note(module, leaves)
            rows = 0 if isinstance(plan, Whole) or not _can_cut(plan, leaves) else _rows(plan, leaves)
            if isinstance(plan, Whole) or rows < self.workers.size:
                args, kwargs = gathered((args, kwargs))
                return _plain(module, *args, **kwargs)
            parts = [
                self._same(leaf) if dim is None else self._part(leaf, Shard(dim, rows))
                for leaf, dim in zip(leaves, plan.inputs, strict=True)
            ]
            args, kwargs = (tuple(parts), {}) if structure is _ONE else pytree.tree_unflatten(parts, structure)
            synchronized = self.statistics.of_all_workers() if module.training else nullcontext()
            with synchronized, self._noise if plan.draws else nullcontext():
                result = _plain(module, *args, **kwargs)
        finally:
            self._within = False
        return self._outputs(result, plan, rows)

    def _plan(self, module: nn.Module, leaves: Sequence[Any], structure: Any) -> Plan | Whole:
        plans = self._plans.setdefault(module, {})
        key = module.training, structure, tuple(_kind(leaf) for leaf in leaves)
        found = plans.get(key)
        if found is None:
            found = plans[key] = found_plan(
                _plain, module, gathered(list(leaves)), structure, self.workers, self.statistics
            )
            if isinstance(found, Plan):
                self._say(f"{type(module).__name__}: each of {self.workers.size} workers computes its rows of a call")
            else:
                self._say(f"{type(module).__name__} is computed whole by every worker: {found.why}")
        return found

    def _note(self, module: nn.Module, leaves: Sequence[Any]) -> None:
        """What all workers must have alike. Of a part nothing is known, and where a GPU would be waited for."""
        line = calling_line()
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, Lazy) and not (isinstance(leaf, Tensor) and leaf.device.type != "cpu"):
                self._facts.add(line, f"argument {i} of the call of {type(module).__name__}", digest_of(leaf))

    def _same(self, leaf: Any) -> Any:
        leaf = leaf.whole() if isinstance(leaf, Lazy) else leaf
        return replicated(leaf, self.workers) if isinstance(leaf, Tensor) else leaf

    def _part(self, leaf: Tensor, shard: Shard) -> Tensor:
        if isinstance(leaf, ShardedOutput) and not leaf.gathered and leaf.shard == shard:
            return leaf.part
        return cut(leaf.whole() if isinstance(leaf, Lazy) else leaf, shard, self.workers)

    def _outputs(self, result: Any, plan: Plan, rows: int) -> Any:
        leaves, structure = ([result], None) if isinstance(result, Tensor) else pytree.tree_flatten(result)
        done: list[Any] = []
        for leaf, output in zip(leaves, plan.outputs, strict=True):
            if output.reduced:
                done.append(PartialSum.of(self._summed(leaf, output.reduced, rows), self.workers))
            elif output.dim is not None:
                times = leaf.shape[output.dim] // self.workers.own_rows(rows)[1]
                done.append(ShardedOutput.of(leaf, output.shard(rows, times), self.workers))
            else:
                done.append(leaf)
        return done[0] if structure is None else pytree.tree_unflatten(done, structure)

    def _summed(self, leaf: Tensor, how: str, rows: int) -> Tensor:
        """This worker's part of a number to which rows were reduced."""
        if how == "sum":
            return leaf
        if how == "mean":
            return leaf * (self.workers.own_rows(rows)[1] / rows)
        own = divisor_of(leaf) or 0.0
        total = float(self.workers.sum_(torch.tensor(own, dtype=torch.float64)))
        # without a counted target its mean is NaN, and it stays in the graph all the same
        return leaf * (own / total) if own else torch.where(torch.tensor(True), torch.zeros_like(leaf), leaf)


_ONE = pytree.tree_flatten(((None,), {}))[1]


def _flattened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """(leaves, structure) of a call's arguments: mostly it is one tensor."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
        return list(args), _ONE
    return pytree.tree_flatten((args, kwargs))


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_symbolic(leaf: Any) -> bool:
    """A tensor without values, of which shapes alone are asked for: torch's meta tensors, Keras' own."""
    return leaf.is_meta if isinstance(leaf, Tensor) else type(leaf).__name__ == "KerasTensor"


def _can_cut(plan: Plan, leaves: Sequence[Any]) -> bool:
    """Whether what a loss divides by is seen, without gradients it has no graph; and whether its outputs lie as they did."""
    if plan.shapes is not None and plan.shapes != shapes_of(leaves):
        return False
    return torch.is_grad_enabled() or all(o.reduced != "divided" for o in plan.outputs)


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.dtype, tuple(length == 1 for length in leaf.shape)  # one column may lie before the rows or behind
    return leaf if isinstance(leaf, bool | str | None) else type(leaf)


def _rows(plan: Plan, leaves: Sequence[Any]) -> int:
    """How many rows the call has; 0 where its arguments disagree."""
    found = {leaf.shape[dim] for leaf, dim in zip(leaves, plan.inputs, strict=True) if dim is not None}
    return found.pop() if len(found) == 1 else 0
