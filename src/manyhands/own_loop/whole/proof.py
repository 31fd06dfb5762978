"""How a module's call is cut by rows: found, and proven on its first call, which is computed whole and in parts."""

from __future__ import annotations

import io
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import product, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from manyhands import rng
from manyhands.errors import BadInput
from manyhands.own_loop import loss_graph
from manyhands.own_loop.whole.backward_proof import gradients_of, has_own_function, hooks_seen
from manyhands.own_loop.whole.batch_norm import Statistics
from manyhands.own_loop.whole.equality import digest_of, other_values
from manyhands.own_loop.whole.exchange import Workers
from manyhands.own_loop.whole.layout import RowLayout, flattened
from manyhands.own_loop.whole.module_state import Kept, Variable, has_backward_hooks, variables_of
from manyhands.own_loop.whole.tried_call import Observer, TriedCall, is_close, needs_all_rows

_MOST_TRIES = 6


@dataclass(frozen=True)
class CallCut:
    """How a call is cut."""

    inputs: tuple[int | None, ...]  # by leaf of the arguments: which dimension counts the batch's rows
    outputs: tuple[Output, ...]
    draws: bool  # random numbers, for each row its own
    shapes: tuple[Any, ...] | None = None  # of the arguments, where other ones may have other outputs


@dataclass(frozen=True)
class Output:
    """A leaf of what the call gives back. `dim` None: no tensor, or the same on all workers."""

    dim: int | None = None
    outer: int = 1
    inner: int = 1
    reduced: str = ""  # "sum" or "mean" over rows, or a mean that is "divided" by what the loss's graph says

    @property
    def is_fixed(self) -> bool:
        """Whether a dimension counts both what lies before the rows and behind them, so that a new length does not show which."""
        return self.outer > 1 and self.inner > 1

    def shard(self, rows: int, times: int) -> RowLayout:
        """Of a call with so many rows. times: what its dimension counts for each row; of sequences it differs from call to call."""
        assert self.dim is not None
        if self.is_fixed:
            return RowLayout(self.dim, rows, self.outer, self.inner)
        return RowLayout(self.dim, rows, *((1, times) if self.inner > 1 else (times, 1)))


def shapes_of(leaves: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves)


@dataclass(frozen=True)
class Whole:
    """The call is computed whole by every worker."""

    why: str


def found_plan(
    call: Any, module: nn.Module, leaves: Sequence[Any], structure: Any, workers: Workers, statistics: Statistics
) -> CallCut | Whole:
    """Of the module's first call with arguments of this structure. A collective.

    call: what computes the module, `call(module, *args, **kwargs)`.

    Raises BadInput where the workers' arguments differ.
    """
    _check_equal(leaves, workers)
    if has_backward_hooks(module):
        return Whole("a hook of the script sees gradients in it")
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        return Whole("none of its arguments is a tensor")
    if any(isinstance(leaf, Tensor) and leaf.layout != torch.strided for leaf in leaves):
        return Whole("an argument is sparse")
    variables = variables_of(module)
    before, cached = Kept(module.modules(), variables), parametrize._cache_enabled
    parametrize._cache_enabled = 0  # else `parametrize.cached` would keep what a trial computes
    try:
        return _Trial(call, module, variables, leaves, structure, workers, statistics).plan()
    finally:
        parametrize._cache_enabled = cached
        before.put_back()


def _check_equal(leaves: Sequence[Any], workers: Workers) -> None:
    """Every worker has drawn and read the same."""
    everyone = workers.group.all_gather_json([digest_of(leaf) for leaf in leaves])
    for rank, theirs in enumerate(everyone[1:], start=1):
        for at, (one, other) in enumerate(zip_longest(everyone[0], theirs)):
            if one != other:
                raise BadInput(other_values(f"argument {at} of this call", one, rank, other))


class _Trial:
    """The first call, computed whole and in parts, without gradients; what it changes is put back."""

    def __init__(
        self,
        call: Any,
        module: nn.Module,
        variables: Sequence[Variable],
        leaves: Sequence[Any],
        structure: Any,
        workers: Workers,
        stats: Statistics,
    ) -> None:
        self.call, self.module, self.variables, self.structure = call, module, variables, structure
        self.leaves = [
            _spread_copy(leaf) if isinstance(leaf, Tensor) and _is_constant(leaf) else leaf for leaf in leaves
        ]
        self.workers, self.statistics = workers, stats
        self.parameters, self.buffers = list(module.parameters()), list(module.buffers())
        self.scripted = any(isinstance(inner, torch.jit.ScriptModule) for inner in module.modules())
        """Whether TorchScript runs some of it, which holds on to tensors, and can give none away."""
        self.constants = [one for one in (*self.parameters, *self.buffers) if _is_constant(one)]
        """Spread while it is tried: a gate that begins at zero or one would hide that rows meet behind it."""
        written = [one for one in {*self.buffers, *self.constants} if 0 not in one.stride()]
        self.before = [(one, one.detach().clone()) for one in written]
        # `torch.utils.checkpoint` counts what is saved for a backward
        self.gradients = torch.is_grad_enabled() and torch._C._autograd._top_saved_tensors_default_hooks(True) is None

    def plan(self) -> CallCut | Whole:
        whole = self._whole()
        if why := next(filter(None, self.workers.group.all_gather_json(whole if isinstance(whole, str) else "")), ""):
            return Whole(why)
        assert isinstance(whole, TriedCall)
        reasons = Counter[str]()
        for dims, rows in self._candidates():
            found: Any
            own_backward = False
            try:
                parts = self._parts(self.leaves, dims, rows)
                part = self._computed(parts, self.statistics.given(), gradients=self.gradients, dims=dims)
                found = needs_all_rows(part, whole) or self._compared(part, whole, rows)
                own_backward = part.hooked or has_own_function(part.outputs)
            except Exception as error:  # noqa: BLE001 - a model of one batch size, for instance
                found = f"with a part of the rows it fails ({type(error).__name__})"
            everyone = self.workers.group.all_gather_json([found, own_backward])
            if reason := next((one for one, _ in everyone if isinstance(one, str)), None):
                reasons[reason] += 1
                continue
            done = None
            if all(one == everyone[0][0] for one, _ in everyone):
                done = self._reduced(found, parts, part.outputs, whole.outputs, rows)
            if not self._all(done is not None):
                reasons["its outputs are no rows, sums or means"] += 1
                continue
            assert done is not None
            if any(own for _, own in everyone) and not self._all(self._has_same_gradients(dims, done, rows)):
                reasons["its rows depend on each other in a backward of the script's own"] += 1
                continue
            shapes = shapes_of(self.leaves) if any(output.is_fixed for output in done) else None
            return CallCut(dims, done, bool(whole.drawn), shapes)
        return Whole(next(iter(reasons), "no dimension of its arguments counts rows"))

    def _all(self, own: bool) -> bool:
        """Whether it is so on all workers."""
        return all(self.workers.group.all_gather_json(own))

    def _parts(self, leaves: Sequence[Any], dims: Sequence[int | None], rows: int) -> list[Any]:
        start, own = self.workers.own_rows(rows)
        return [leaf if dim is None else leaf.narrow(dim, start, own) for leaf, dim in zip(leaves, dims, strict=True)]

    def _whole(self) -> TriedCall | str:
        """The call of all rows; or why it is not cut."""
        try:
            if flags := [one for one in self.buffers if one.numel() == 1 and one.is_floating_point()]:
                before = [one.clone() for one in flags]  # of what a first call initializes, say
                plain = self._computed(self.leaves, self.statistics.kept(), spreads=False)
                ends = [end for end, one in zip(plain.ends, self.buffers, strict=True) if any(one is f for f in flags)]
                if not all(map(torch.equal, ends, before)):
                    return "it keeps something from call to call (a buffer)"
            whole = self._computed(self.leaves, self.statistics.kept(), fills=True)
            if whole.kept:  # once, perhaps: a mask that is made at first, say
                whole = self._computed(self.leaves, self.statistics.kept())
        except Exception as error:  # noqa: BLE001 - the call itself raises the script's own errors
            return f"it cannot be tried ({type(error).__name__})"
        if whole.kept:
            return f"it keeps something from call to call ({whole.kept})"
        return whole if any(isinstance(leaf, Tensor) for leaf in whole.outputs) else "it gives back no tensor"

    def _candidates(self) -> Iterator[tuple[tuple[int | None, ...], int]]:
        """Which dimension of each argument may count the rows, the most likely first."""
        sizes = Counter[int]()
        for leaf in self.leaves:
            if isinstance(leaf, Tensor):
                sizes.update(set(leaf.shape[:2]))
        made = 0
        first = next((list(leaf.shape[:2]) for leaf in self.leaves if isinstance(leaf, Tensor)), [])
        for rows in sorted(sizes, key=lambda n: (n not in first[:1], n not in first, -sizes[n])):
            if rows < self.workers.size:
                continue
            choices = []
            for leaf in self.leaves:
                places = [d for d in (0, 1) if isinstance(leaf, Tensor) and leaf.dim() > d and leaf.shape[d] == rows]
                choices.append([*places, None])
            for dims in product(*choices):
                if all(d is None for d in dims):
                    continue
                made += 1
                if made > _MOST_TRIES:
                    return
                yield tuple(dims), rows

    def _computed(
        self,
        leaves: Sequence[Any],
        statistics: Any,
        *,
        gradients: bool = False,
        fills: bool = False,
        spreads: bool = True,
        dims: Sequence[int | None] = (),
        then: Callable[[list[Any]], list[Tensor]] | None = None,
    ) -> TriedCall:
        """fills: what it keeps in attributes stays for the next calls. dims: of arguments, where the rows are a part of all.
        then: what computes gradients of the outputs."""
        with torch.set_grad_enabled(gradients):
            own = [_copy(leaf) if isinstance(leaf, Tensor) and then is None else leaf for leaf in leaves]
        rows = [leaf for leaf, dim in zip(own, dims, strict=True) if dim is not None] if dims else []
        versions = [(leaf, leaf._version) for leaf in own if isinstance(leaf, Tensor)]
        args, kwargs = pytree.tree_unflatten(own, self.structure)
        before, seen, printed = (
            Kept(self.module.modules(), self.variables),
            Observer(self.parameters, rows),
            io.StringIO(),
        )
        seen.note(own)
        try:
            with torch.no_grad():
                for constant in self.constants if spreads else ():
                    _spread(constant)
            quiet = redirect_stdout(printed)
            with torch.set_grad_enabled(gradients), rng.kept(), statistics, quiet, seen, hooks_seen() as hooks:
                found = self.call(self.module, *args, **kwargs)
            outputs, structure = flattened(found)
            ends, changed = [one.detach().clone() for one in self.buffers], before.changed
            del found
            wanted = [] if then is None else then(outputs)
        finally:
            with torch.no_grad():
                for tensor, value in (*seen.written.values(), *self.before):  # the first have spread values
                    tensor.data.copy_(value)
            for generator, state in seen.generators.values():
                generator.set_state(state)
            if not fills:
                before.put_back()
        if seen.written:
            changed = changed or "a parameter"
        if any(map(seen.is_of_rows, self.buffers)):
            changed = changed or "a buffer"
        if hooks.values:
            changed = changed or "values that leave torch"
        now = pytree.tree_flatten((args, kwargs))
        if (
            now[1] != self.structure
            or not all(map(operator.is_, now[0], own))
            or any(t._version != v for t, v in versions)
        ):
            changed = changed or "its arguments"
        del args, kwargs, own, versions, now, rows
        known = [*outputs, *self.parameters, *self.buffers, *self.leaves, *self.statistics.held]
        if not (gradients or changed or self.scripted) and seen.alive(known):
            changed = "a tensor that is not among its outputs"
        of_rows = list(map(seen.is_of_rows, outputs))
        return TriedCall(
            outputs,
            structure,
            ends,
            seen.drawn,
            seen.decides,
            of_rows,
            printed.getvalue(),
            changed,
            hooks.any,
            wanted,
        )

    def _compared(self, part: TriedCall, whole: TriedCall, rows: int) -> list[list[Any]] | str:
        """By leaf of the outputs: [dim, outer, inner], [] of what is the same, or ["reduced"]."""
        if part.structure != whole.structure:
            return "its outputs have another structure with fewer rows"
        found: list[list[Any]] = []
        for own, all_, follows in zip(part.outputs, whole.outputs, part.of_rows, strict=True):
            if not isinstance(all_, Tensor):
                if own != all_:
                    return "it gives back a value that depends on all rows"
                found.append([])
            elif own.shape == all_.shape:
                if is_close(own, all_) and follows:
                    return "an output is the same for fewer rows, and follows from them"
                found.append([] if not follows else ["reduced"])
            elif (shard := self._shard_of(own, all_, rows)) is None:
                return "its rows depend on each other"
            else:
                found.append([shard.dim, shard.outer, shard.inner])
        return found

    def _shard_of(self, part: Tensor, whole: Tensor, rows: int) -> RowLayout | None:
        """Where the rows of an output lie."""
        own = self.workers.own_rows(rows)[1]
        for dim in range(whole.dim()):
            times = whole.shape[dim] // rows
            if whole.shape[dim] != times * rows or part.shape[dim] != times * own:
                continue
            for outer in [n for n in range(1, times + 1) if times % n == 0][:16]:
                shard = RowLayout(dim, rows, outer, times // outer)
                if shard.whole_shape(part.shape) == whole.shape and is_close(part, self.workers.cut(whole, shard)):
                    return shard
        return None

    def _reduced(
        self, found: list[list[Any]], parts: Sequence[Any], outputs: Any, whole: Any, rows: int
    ) -> tuple[Output, ...] | None:
        """With the numbers that rows were reduced to. A collective where there are any."""
        if ["reduced"] not in found:
            return tuple(Output(*how) for how in found)
        if not self.gradients:  # the graph says what a loss divides by
            outputs = self._computed(parts, self.statistics.given(), gradients=True).outputs
        done, share = [], self.workers.own_rows(rows)[1] / rows
        for how, graph, all_ in zip(found, outputs, whole, strict=True):
            if how != ["reduced"]:
                done.append(Output(*how))
                continue
            if not graph.is_floating_point():
                return None
            part = graph.detach()
            divisor = loss_graph.divisor_of(graph) if graph.numel() == 1 else None
            own = [part, part * share, part.nan_to_num() * (divisor or 0.0), torch.full_like(part, divisor or 0.0)]
            total, mean, divided, weight = self.workers.sum_(torch.stack(own).double())
            if is_close(total.to(all_), all_):
                done.append(Output(reduced="sum"))
            elif divisor is not None and is_close((divided / weight).to(all_), all_):
                done.append(Output(reduced="divided"))
            elif is_close(mean.to(all_), all_) and loss_graph.is_mean(graph):
                done.append(Output(reduced="mean"))
            else:
                return None
        return tuple(done)

    def _has_same_gradients(self, dims: Sequence[int | None], done: Sequence[Output], rows: int) -> bool:
        """Whether gradients of the parts add up to the whole's. A collective."""
        if any(output.reduced == "divided" for output in done):
            return False
        leaves = [_differentiable(leaf) for leaf in self.leaves]
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        inputs = [*parameters, *(leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad)]
        share = self.workers.own_rows(rows)[1] / rows
        own = weights = None
        statistics = self.statistics.given

        def of_whole(outputs: list[Any]) -> list[Tensor]:
            nonlocal weights
            weights = [_weights(output) for output in outputs]
            return gradients_of(outputs, weights, inputs)

        def of_part(outputs: list[Any]) -> list[Tensor]:
            assert weights is not None
            how = [self._part_weight(w, output, rows, share) for w, output in zip(weights, done, strict=True)]
            return gradients_of(outputs, how, inputs)

        try:
            with torch.enable_grad():
                expected = self._computed(leaves, statistics(), gradients=True, then=of_whole).gradients
                parts = self._parts(leaves, dims, rows)
                own = self._computed(parts, statistics(), gradients=True, then=of_part).gradients
        except Exception:  # noqa: BLE001 - an argument is changed in place, a backward wants all rows
            own = None
        if not self._all(own is not None):
            return False
        assert own is not None
        sums = [self.workers.sum_(part) for part in own]
        return all(map(is_close, sums, expected))

    def _part_weight(self, weight: Tensor | None, output: Output, rows: int, share: float) -> Tensor | None:
        if weight is None or output.dim is None:
            return weight if weight is None or output.reduced == "sum" else weight * share
        times = weight.shape[output.dim] // rows
        return self.workers.cut(weight, output.shard(rows, times))


def _differentiable(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        return leaf.detach().clone().requires_grad_()
    return leaf


def _weights(output: Any) -> Tensor | None:
    """Of each element another one; None for what has no gradient."""
    if not isinstance(output, Tensor) or not output.requires_grad:
        return None
    return torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype, device=output.device).view(output.shape)


def _is_constant(tensor: Tensor) -> bool:
    """Whether all of it is one number."""
    if not tensor.is_floating_point() or not tensor.numel() or tensor.layout != torch.strided:
        return False
    if not tensor.is_contiguous() and 0 in tensor.stride():  # expanded
        return False
    flat = tensor.detach().reshape(-1)
    return bool(flat[0] == flat[-1]) and bool((flat == flat[0]).all())


def _spread(constant: Tensor) -> None:
    """Instead of one value, others of the order of 1; zeros become numbers of both signs."""
    value, count = float(constant.reshape(-1)[0]), constant.numel()
    around = (0.75, 1.3) if value else (-0.5, 0.4)
    values = torch.linspace(*around, count, device=constant.device).view(constant.shape)
    constant.copy_(values * (value if abs(value) > 0.1 else 1.0))


def _copy(leaf: Tensor) -> Tensor:
    """For a trial, without the graph from which it comes."""
    return leaf.detach().clone().requires_grad_(leaf.requires_grad and torch.is_grad_enabled())


def _spread_copy(constant: Tensor) -> Tensor:
    """Of an argument whose rows could not be told apart."""
    made = constant.detach().clone()
    _spread(made)
    return made.requires_grad_(constant.requires_grad)
