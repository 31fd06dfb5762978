"""How a module's call is cut by rows: found, and proven on its first call, which is computed whole and in parts."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import product, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from manyhands import rng
from manyhands.errors import BadInput
from manyhands.own_loop import loss_graph
from manyhands.own_loop.whole.backward_proof import gradients_of, has_own_function, hooks_seen
from manyhands.own_loop.whole.batch_norm import Statistics
from manyhands.own_loop.whole.equality import digest_of, other_values
from manyhands.own_loop.whole.exchange import Workers
from manyhands.own_loop.whole.layout import RowLayout, flattened
from manyhands.own_loop.whole.module_state import Kept, has_backward_hooks, variables_of
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
    before = Kept(module, variables_of(module))
    try:
        return _Trial(call, module, leaves, structure, workers, statistics).plan()
    finally:
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
        self, call: Any, module: nn.Module, leaves: Sequence[Any], structure: Any, workers: Workers, stats: Statistics
    ) -> None:
        self.call, self.module, self.leaves, self.structure = call, module, list(leaves), structure
        self.workers, self.statistics = workers, stats
        self.parameters, self.buffers = list(module.parameters()), list(module.buffers())
        self.variables = variables_of(module)
        self.scripted = any(isinstance(inner, torch.jit.ScriptModule) for inner in module.modules())
        """Whether TorchScript runs some of it, which holds on to tensors, and can give none away."""
        self.constants = [one for one in (*self.parameters, *self.buffers) if _is_constant(one)]
        """Spread while it is tried: a gate that begins at zero or one would hide that rows meet behind it."""
        self.before = [(one, one.detach().clone()) for one in {*self.buffers, *self.constants}]
        self.gradients = torch.is_grad_enabled()

    def plan(self) -> CallCut | Whole:
        whole = self._whole()
        if why := next(filter(None, self.workers.group.all_gather_json(whole if isinstance(whole, str) else "")), ""):
            return Whole(why)
        assert isinstance(whole, TriedCall)
        reasons = Counter[str]()
        for dims, rows in self._candidates():
            parts = self._parts(self.leaves, dims, rows)
            own_backward = False
            try:
                with hooks_seen() as hooks:
                    part = self._computed(parts, self.statistics.given(), gradients=self.gradients)
                found: Any = needs_all_rows(part, whole) or self._compared(part, whole, rows)
                own_backward = hooks.any or has_own_function(part.outputs)
            except Exception as error:  # noqa: BLE001 - a model of one batch size, for instance
                found = f"with a part of the rows it fails ({type(error).__name__})"
            everyone = self.workers.group.all_gather_json(found)
            if reason := next((one for one in everyone if isinstance(one, str)), None):
                reasons[reason] += 1
            elif any(one != everyone[0] for one in everyone) or not (
                done := self._reduced(found, parts, part.outputs, whole.outputs, rows)
            ):
                reasons["its outputs are no rows, sums or means"] += 1
            elif own_backward and not self._has_same_gradients(dims, done, rows):
                reasons["its rows depend on each other in a backward of the script's own"] += 1
            else:
                shapes = shapes_of(self.leaves) if any(output.is_fixed for output in done) else None
                return CallCut(dims, done, bool(whole.drawn), shapes)
        return Whole(next(iter(reasons), "no dimension of its arguments counts rows"))

    def _parts(self, leaves: Sequence[Any], dims: Sequence[int | None], rows: int) -> list[Any]:
        start, own = self.workers.own_rows(rows)
        return [leaf if dim is None else leaf.narrow(dim, start, own) for leaf, dim in zip(leaves, dims, strict=True)]

    def _whole(self) -> TriedCall | str:
        """The call of all rows; or why it is not cut."""
        try:
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
        self, leaves: Sequence[Any], statistics: Any, *, gradients: bool = False, fills: bool = False
    ) -> TriedCall:
        """fills: what it keeps in attributes stays for the next calls."""
        own = [leaf.clone() if isinstance(leaf, Tensor) and not gradients else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(own, self.structure)
        del own
        before, quiet, printed = Kept(self.module, self.variables), Observer(self.parameters), io.StringIO()
        quiet.note((args, kwargs))
        with torch.no_grad():
            for constant in self.constants:
                _spread(constant)
        try:
            with torch.set_grad_enabled(gradients), rng.kept(), statistics, redirect_stdout(printed), quiet:
                outputs, structure = flattened(self.call(self.module, *args, **kwargs))
            ends, changed = [one.detach().clone() for one in self.buffers], before.changed
        finally:
            with torch.no_grad():
                for tensor, value in (*quiet.written.values(), *self.before):  # the first have spread values
                    tensor.data.copy_(value)
            if not fills:
                before.put_back()
        del args, kwargs
        if quiet.written:
            changed = changed or "a parameter"
        if not (gradients or changed or self.scripted) and quiet.alive(
            [*outputs, *self.parameters, *self.buffers, *self.leaves, *self.statistics.held]
        ):
            changed = "a tensor that is not among its outputs"
        return TriedCall(outputs, structure, ends, quiet.drawn, quiet.numbers, printed.getvalue(), changed)

    def _compared(self, part: TriedCall, whole: TriedCall, rows: int) -> list[list[Any]] | str:
        """By leaf of the outputs: [dim, outer, inner], [] of what is the same, or ["reduced"]."""
        if part.structure != whole.structure:
            return "its outputs have another structure with fewer rows"
        found: list[list[Any]] = []
        for own, all_ in zip(part.outputs, whole.outputs, strict=True):
            if not isinstance(all_, Tensor):
                if own != all_:
                    return "it gives back a value that depends on all rows"
                found.append([])
            elif own.shape == all_.shape:
                found.append([] if is_close(own, all_) else ["reduced"])
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
        try:
            with torch.enable_grad():
                whole = self._computed(leaves, self.statistics.given(), gradients=True).outputs
                weights = [_weights(output) for output in whole]
                expected = gradients_of(whole, weights, inputs)
                parts = self._computed(self._parts(leaves, dims, rows), self.statistics.given(), gradients=True).outputs
                how = [self._part_weight(w, output, rows, share) for w, output in zip(weights, done, strict=True)]
                own = gradients_of(parts, how, inputs)
        except RuntimeError:  # an argument is changed in place
            own = None
        if not all(self.workers.group.all_gather_json(own is not None)):
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
    flat = tensor.detach().reshape(-1)
    return bool(flat[0] == flat[-1]) and bool((flat == flat[0]).all())


def _spread(constant: Tensor) -> None:
    """Instead of one value, others near it; zeros become numbers of both signs."""
    scaled = bool(constant.any())
    around = (0.75, 1.3) if scaled else (-0.5, 0.4)
    values = torch.linspace(*around, constant.numel(), device=constant.device).view(constant.shape)
    (constant.mul_ if scaled else constant.add_)(values)
