"""Calls of modules that hold parameters: each worker computes its rows of a call, where that is proven to be the same."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from manyhands import rng
from manyhands.errors import ManyhandsError, calling_line
from manyhands.own_loop.loss_graph import divisor_of
from manyhands.own_loop.whole.batch_norm import Statistics
from manyhands.own_loop.whole.equality import EqualFacts, digest_of
from manyhands.own_loop.whole.exchange import Workers, cut, replicated
from manyhands.own_loop.whole.layout import RowLayout, flattened
from manyhands.own_loop.whole.lazy import Lazy, PartialSum, ShardedOutput, gathered
from manyhands.own_loop.whole.module_state import ModuleState
from manyhands.own_loop.whole.proof import CallCut, Whole, found_plan, shapes_of

_plain: Callable[..., Any] = nn.Module.__call__


_MOST_STATES = 16  # of a module, in which a kind of call is proven; and of kinds, 8 times as many
_FILLING = 2  # calls that may fill attributes


@dataclass
class _Proof:
    plan: CallCut | Whole | None = None
    calls: int = 0

    @property
    def is_due(self) -> bool:
        """Whether it is time to prove again that the call can be cut: what decides it may be nothing that `ModuleState` sees."""
        return isinstance(self.plan, CallCut) and (self.calls in (99, 999) or self.calls % 10_000 == 9_999)


@dataclass
class _Proofs:
    """Of one kind of call."""

    settled: _Proof | None = None  # whatever the state is
    _by_state: dict[Any, _Proof] = field(default_factory=dict)

    def of(self, state: int, leaves: Sequence[Any]) -> _Proof:
        """In this state of the module, with these numbers among the arguments. See `_of_number`."""
        key = state, *[_of_number(leaf) for leaf in leaves if type(leaf) in (int, float)]
        if key not in self._by_state and len(self._by_state) == _MOST_STATES:
            self.settled = _Proof(Whole("its attributes or whole numbers among its arguments are others in each call"))
            return self.settled
        return self._by_state.setdefault(key, _Proof())


@dataclass
class _Known:
    """What is known of a module."""

    state: ModuleState
    proofs: dict[Any, _Proofs] = field(default_factory=dict)  # by kind of call


class Calls:
    """The outermost calls of a script's modules, by the thread that made this."""

    def __init__(
        self,
        workers: Workers,
        say: Callable[[str], None],
        begins: Callable[[nn.Module], None],
        know: Callable[[nn.Module], None],
        facts: EqualFacts,
    ) -> None:
        """begins: told of the module before it is computed. know: told of one whose parameters may be new. facts: gets the
        digests of what it is called with."""
        self.workers, self._say, self._begins, self._know, self._facts = workers, say, begins, know, facts
        self.statistics = Statistics(workers)
        self._within = False
        self._known: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()
        self._noise = rng.TorchScope(workers.rank)

    def install(self) -> None:
        """From now on calls of modules are this one's."""

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._within or not self.workers.in_own_thread or not _has_parameters(module):
                if (
                    isinstance(module, torch.jit.ScriptModule) or type(module).__name__ == "OptimizedModule"
                ):  # which would not see what is lazy
                    args, kwargs = gathered((args, kwargs), type(module).__name__)
                return _plain(module, *args, **kwargs)
            if torch._C._current_graph_task_id() != -1 and module not in self._known:
                return self._again(module, args, kwargs)
            return self._call(module, args, kwargs)

        nn.Module.__call__ = call  # type: ignore[method-assign]

    @contextmanager
    def plainly(self) -> Iterator[None]:
        """Within, calls are computed as they are given."""
        before, self._within = self._within, True
        try:
            yield
        finally:
            self._within = before

    def remove(self) -> None:
        nn.Module.__call__ = _plain  # type: ignore[method-assign]

    def _again(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Within a backward, for `torch.utils.checkpoint`: what was computed within a call, of the same rows."""
        with self.plainly(), self.statistics.of_all_workers():
            return _plain(module, *args, **kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, structure = _flattened(args, kwargs)
        symbolic = torch._C._is_tracing() or any(map(_is_symbolic, (next(module.parameters()), *leaves)))
        self._within = True
        try:
            if symbolic:
                return _plain(module, *args, **kwargs)
            self._begins(module)
            proof = self._proof(module, leaves, structure)
            plan = proof.plan
            self._note(module, leaves)
            rows = 0 if not isinstance(plan, CallCut) or not _can_cut(plan, leaves) else _rows(plan, leaves)
            if not isinstance(plan, CallCut) or rows < self.workers.size:
                args, kwargs = gathered((args, kwargs))
                result = _plain(module, *args, **kwargs)
            else:
                result = self._in_parts(module, plan, leaves, structure, rows)
            if proof.calls <= _FILLING or not isinstance(plan, CallCut):
                self._known[module].state.follow(module)
            return result
        finally:
            self._within = False

    def _in_parts(self, module: nn.Module, plan: CallCut, leaves: Sequence[Any], structure: Any, rows: int) -> Any:
        parts = [
            self._same(leaf) if dim is None else self._part(leaf, RowLayout(dim, rows))
            for leaf, dim in zip(leaves, plan.inputs, strict=True)
        ]
        args, kwargs = (tuple(parts), {}) if structure is _ONE else pytree.tree_unflatten(parts, structure)
        with self.statistics.of_all_workers(), self._noise if plan.draws else nullcontext():
            result = _plain(module, *args, **kwargs)
        return self._outputs(result, plan, rows, type(module).__name__)

    def _proof(self, module: nn.Module, leaves: Sequence[Any], structure: Any) -> _Proof:
        """A collective where it is made: at the first call in this state of the module, and now and then again."""
        known = self._known.get(module)
        if known is None:
            known = self._known[module] = _Known(ModuleState(module))
        kind = _kind_of(module, leaves, structure)
        few = _has_few_rows(leaves, self.workers.size)
        if kind not in known.proofs and len(known.proofs) == 8 * _MOST_STATES:
            return _Proof(Whole("it is called in ever new ways"))
        proofs = known.proofs.setdefault(kind, _Proofs())
        proof = proofs.settled or proofs.of(known.state.number(module), leaves)
        if proof is proofs.settled and not proof.calls:
            self._tell(module, proof.plan, _Proof())
        if proof.plan is None or (proof.is_due and not few):
            if any(map(is_lazy, module.parameters())):
                return _Proof(Whole("its parameters are not made yet"))
            self._know(module)
            plan = found_plan(_plain, module, gathered(list(leaves)), structure, self.workers, self.statistics)
            if few and isinstance(plan, Whole):
                return _Proof(plan)  # of a batch of fewer rows than workers, which says nothing of others
            if proof.plan is None or not _is_same_cut(plan, proof.plan):
                self._tell(module, plan, proof)
                proof.plan = plan
        proof.calls += 1
        return proof

    def _tell(self, module: nn.Module, plan: CallCut | Whole | None, before: _Proof) -> None:
        how = f": each of {self.workers.size} workers computes its rows of a call"
        if isinstance(plan, Whole):
            how = f" is computed whole by every worker: {plan.why}"
        late = ""
        if before.plan is not None:
            late = (
                f". That is from its call {before.calls + 1} on, and was otherwise when it was proven last, by a call of the same kind: what decides it is none of its "
                "attributes or arguments, and numbers since then may not be one process's"
            )
        self._say(f"{type(module).__name__}{how}{late}")

    def _note(self, module: nn.Module, leaves: Sequence[Any]) -> None:
        """What all workers must have alike. Of a part nothing is known, and where a GPU would be waited for."""
        line = calling_line()
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, Lazy) and not (isinstance(leaf, Tensor) and leaf.device.type != "cpu"):
                self._facts.add(line, f"argument {i} of the call of {type(module).__name__}", digest_of(leaf))

    def _same(self, leaf: Any) -> Any:
        leaf = leaf.whole() if isinstance(leaf, Lazy) else leaf
        return replicated(leaf, self.workers) if isinstance(leaf, Tensor) else leaf

    def _part(self, leaf: Tensor, shard: RowLayout) -> Tensor:
        if isinstance(leaf, ShardedOutput) and not leaf.gathered and leaf.shard == shard:
            return leaf.part
        return cut(leaf.whole() if isinstance(leaf, Lazy) else leaf, shard, self.workers)

    def _outputs(self, result: Any, plan: CallCut, rows: int, module_name: str) -> Any:
        leaves, structure = ([result], None) if isinstance(result, Tensor) else flattened(result)
        done: list[Any] = []
        line, own = calling_line(), self.workers.own_rows(rows)[1]
        for leaf, output in zip(leaves, plan.outputs, strict=True):
            if output.reduced:
                done.append(PartialSum.of(self._summed(leaf, output.reduced, rows), self.workers))
            elif output.dim is not None:
                times, over = divmod(leaf.shape[output.dim], own)
                if over:
                    raise ManyhandsError(
                        f"an output of a {module_name} has {leaf.shape[output.dim]} values for {own} rows of this worker: its size follows values, and it was not so "
                        'when the call was proven to be cut by rows. Let each worker have its own rows: batches="slices"'
                    )
                apart = [*leaf.shape[: output.dim], times, *leaf.shape[output.dim + 1 :]]
                self._facts.add(line, f"the shape of what a {module_name} gives", zlib.crc32(repr(apart).encode()))
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
    return flattened((args, kwargs))


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_symbolic(leaf: Any) -> bool:
    """A nested tensor, one without values, or one of a transformation of torch.func: torch's meta tensors, Keras' and torch.fx's own."""
    if isinstance(leaf, Tensor):
        return leaf.is_meta or leaf.is_nested or torch._C._functorch.is_functorch_wrapped_tensor(leaf)
    return type(leaf).__name__ in ("KerasTensor", "Proxy")


def _can_cut(plan: CallCut, leaves: Sequence[Any]) -> bool:
    """Whether what a loss divides by is seen, without gradients it has no graph; and whether its outputs lie as they did."""
    if plan.shapes is not None and plan.shapes != shapes_of(leaves):
        return False
    return torch.is_grad_enabled() or all(o.reduced != "divided" for o in plan.outputs)


def _is_same_cut(one: CallCut | Whole, other: CallCut | Whole) -> bool:
    """Of sequences of other lengths outputs lie otherwise, too."""
    if isinstance(one, Whole) or isinstance(other, Whole):
        return isinstance(one, Whole) and isinstance(other, Whole)
    return one.inputs == other.inputs and [(o.dim, o.reduced) for o in one.outputs] == [
        (o.dim, o.reduced) for o in other.outputs
    ]


def _of_number(value: float) -> float | None:
    """Of a float it counts whether it is 0 or 1, where a weight hides what it weighs."""
    return value if type(value) is int or value in (0.0, 1.0) else None


def _has_few_rows(leaves: Sequence[Any], size: int) -> bool:
    """Whether the first tensor has fewer rows than there are workers."""
    first = next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), None)
    return first is not None and first.shape[0] < size


def _kind_of(module: nn.Module, leaves: Sequence[Any], structure: Any) -> Any:
    return module.training, torch.is_grad_enabled(), structure, tuple(map(_kind, leaves))


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.dtype, tuple(length == 1 for length in leaf.shape)  # one column may lie before the rows or behind
    return leaf if isinstance(leaf, bool | str | None) else type(leaf)


def _rows(plan: CallCut, leaves: Sequence[Any]) -> int:
    """How many rows the call has; 0 where its arguments disagree."""
    found = {leaf.shape[dim] for leaf, dim in zip(leaves, plan.inputs, strict=True) if dim is not None}
    return found.pop() if len(found) == 1 else 0
