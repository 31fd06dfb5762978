"""How a module's call is cut by rows: found, and proven on its first call, which is computed whole and in parts."""

from __future__ import annotations

import copy
import io
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import product, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from manyhands import rng
from manyhands.errors import BadInput
from manyhands.own_loop import loss_graph
from manyhands.own_loop.whole.batch_norm import Statistics
from manyhands.own_loop.whole.equality import digest_of, other_values
from manyhands.own_loop.whole.exchange import Workers
from manyhands.own_loop.whole.layout import Shard

_MOST_TRIES = 6
_RELATIVE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@dataclass(frozen=True)
class Plan:
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

    def shard(self, rows: int, times: int) -> Shard:
        """Of a call with so many rows. times: what its dimension counts for each row; of sequences it differs from call to call."""
        assert self.dim is not None
        if self.is_fixed:
            return Shard(self.dim, rows, self.outer, self.inner)
        return Shard(self.dim, rows, *((1, times) if self.inner > 1 else (times, 1)))


def shapes_of(leaves: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves)


@dataclass(frozen=True)
class Whole:
    """The call is computed whole by every worker."""

    why: str


def found_plan(
    call: Any, module: nn.Module, leaves: Sequence[Any], structure: Any, workers: Workers, statistics: Statistics
) -> Plan | Whole:
    """Of the module's first call with arguments of this structure. A collective.

    call: what computes the module, `call(module, *args, **kwargs)`.

    Raises BadInput where the workers' arguments differ.
    """
    _check_equal(leaves, workers)
    trial = _Trial(call, module, leaves, structure, workers, statistics)
    try:
        return trial.plan()
    finally:
        trial.put_back()


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
        self.tensors = [*module.parameters(), *module.buffers()]
        self.before = [t.detach().clone() for t in self.tensors]
        self.attributes = {sub: _attributes(sub) for sub in module.modules()}
        # a gate that begins at zero would hide that rows meet behind it
        self.zeros = [p for p in module.parameters() if p.is_floating_point() and not p.any()]

    def plan(self) -> Plan | Whole:
        whole, after, drew, changed = self._computed(self.leaves, self.statistics.kept(), fills=True)
        if changed:  # once, perhaps: a mask that is made at first, say
            whole, after, drew, changed = self._computed(self.leaves, self.statistics.kept())
        if changed:
            return Whole(f"it keeps something from call to call ({changed})")
        if not any(isinstance(leaf, Tensor) for leaf in whole[0]):
            return Whole("it gives back no tensor")
        reasons = Counter[str]()
        for dims, rows in self._candidates():
            start, own = self.workers.own_rows(rows)
            parts = [
                leaf if dim is None else leaf.narrow(dim, start, own)
                for leaf, dim in zip(self.leaves, dims, strict=True)
            ]
            try:
                outputs, ends, draws, changed = self._computed(parts, self.statistics.given())
                found: Any = self._compared(outputs, whole, rows)
                if changed:
                    found = f"it keeps something of all rows from call to call ({changed})"
                elif not all(map(_close, ends, after)):
                    found = "its buffers depend on all rows"
                elif (drawn := _row_draws(drew, draws)) is None:
                    found = "it draws random numbers for the batch as a whole"
            except Exception as error:  # noqa: BLE001 - a model of one batch size, for instance
                found = f"with a part of the rows it fails ({type(error).__name__})"
            everyone = self.workers.group.all_gather_json(found)
            if reason := next((one for one in everyone if isinstance(one, str)), None):
                reasons[reason] += 1
            elif all(one == everyone[0] for one in everyone) and (
                done := self._reduced(found, parts, outputs[0], whole[0], rows)
            ):
                return Plan(dims, done, bool(drawn), shapes_of(self.leaves) if any(o.is_fixed for o in done) else None)
            else:
                reasons["its outputs are no rows, sums or means"] += 1
        return Whole(next(iter(reasons), "no dimension of its arguments counts rows"))

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

    def put_back(self) -> None:
        """What calls have changed in the module."""
        for sub, kept in self.attributes.items():
            _put_back(sub, kept)

    def _computed(self, leaves: Sequence[Any], statistics: Any, *, gradients: bool = False, fills: bool = False) -> Any:
        """(outputs and their structure, parameters and buffers afterwards, what was drawn, which attribute changed)

        fills: what it keeps in attributes stays for the next calls.
        """
        args, kwargs = pytree.tree_unflatten(list(leaves), self.structure)
        attributes = {sub: _attributes(sub) for sub in self.module.modules()}
        draws = _Quiet()
        for p in self.zeros:
            p.data.copy_(torch.linspace(-0.5, 0.4, p.numel(), dtype=p.dtype, device=p.device).view(p.shape))
        try:
            with torch.set_grad_enabled(gradients), rng.kept(), statistics, redirect_stdout(io.StringIO()), draws:
                outputs = pytree.tree_flatten(self.call(self.module, *args, **kwargs))
            return outputs, [t.detach().clone() for t in self.tensors], draws.shapes, _changed(attributes)
        finally:
            with torch.no_grad():
                for tensor, value in zip(self.tensors, self.before, strict=True):
                    tensor.data.copy_(value)
            for sub, kept in attributes.items():
                if not fills:
                    _put_back(sub, kept)

    def _compared(self, outputs: Any, whole: Any, rows: int) -> list[list[Any]] | str:
        """By leaf of the outputs: [dim, outer, inner], [] of what is the same, or ["reduced"]."""
        if outputs[1] != whole[1]:
            return "its outputs have another structure with fewer rows"
        found: list[list[Any]] = []
        for part, all_ in zip(outputs[0], whole[0], strict=True):
            if not isinstance(all_, Tensor):
                if part != all_:
                    return "it gives back a value that depends on all rows"
                found.append([])
            elif part.shape == all_.shape:
                found.append([] if _close(part, all_) else ["reduced"])
            elif (shard := self._shard_of(part, all_, rows)) is None:
                return "its rows depend on each other"
            else:
                found.append([shard.dim, shard.outer, shard.inner])
        return found

    def _shard_of(self, part: Tensor, whole: Tensor, rows: int) -> Shard | None:
        """Where the rows of an output lie."""
        own = self.workers.own_rows(rows)[1]
        for dim in range(whole.dim()):
            times = whole.shape[dim] // rows
            if whole.shape[dim] != times * rows or part.shape[dim] != times * own:
                continue
            for outer in [n for n in range(1, times + 1) if times % n == 0][:16]:
                shard = Shard(dim, rows, outer, times // outer)
                if shard.whole_shape(part.shape) == whole.shape and _close(part, self.workers.cut(whole, shard)):
                    return shard
        return None

    def _reduced(
        self, found: list[list[Any]], parts: Sequence[Any], outputs: Any, whole: Any, rows: int
    ) -> tuple[Output, ...] | None:
        """With the numbers that rows were reduced to. A collective where there are any."""
        if ["reduced"] not in found:
            return tuple(Output(*how) for how in found)
        graphs, _, _, _ = self._computed(parts, self.statistics.given(), gradients=True)
        done, share = [], self.workers.own_rows(rows)[1] / rows
        for how, graph, part, all_ in zip(found, graphs[0], outputs, whole, strict=True):
            if how != ["reduced"]:
                done.append(Output(*how))
                continue
            if not part.is_floating_point():
                return None
            divisor = loss_graph.divisor_of(graph) if graph.numel() == 1 else None
            own = [part, part * share, part.nan_to_num() * (divisor or 0.0), torch.full_like(part, divisor or 0.0)]
            total, mean, divided, weight = self.workers.sum_(torch.stack(own).double())
            if _close(total.to(all_), all_):
                done.append(Output(reduced="sum"))
            elif divisor is not None and _close((divided / weight).to(all_), all_):
                done.append(Output(reduced="divided"))
            elif _close(mean.to(all_), all_) and loss_graph.is_mean(graph):
                done.append(Output(reduced="mean"))
            else:
                return None
        return tuple(done)


class _Quiet(TorchDispatchMode):
    """Random numbers become constants, so that both ways can be compared; the shapes that were drawn are kept."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return function(*args, **kwargs)
        name = function._schema.name.partition("::")[2]
        names = function._schema.arguments
        defaults = {one.name: one.default_value for one in names}
        given = {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
        rate = next(
            (one for one in ("dropout_p", "dropout", "p") if one in given and not name.startswith("bernoulli")), ""
        )
        if rate and (not given[rate] or given.get("train") is False):
            return function(*args, **kwargs)
        if name == "native_dropout":
            self.shapes.append(tuple(args[0].shape))
            return args[0] / max(1 - args[1], 1e-9), torch.ones_like(args[0], dtype=torch.bool)
        if rate:  # of attention and recurrent layers, which drop out within
            result = function(**{**given, rate: 0.0})
            self.shapes.append(tuple(result[0].shape))
            return result
        result = function(*args, **kwargs)
        self.shapes.append(tuple(result.shape) if isinstance(result, Tensor) else ())
        if not isinstance(result, Tensor) or name.startswith(("randperm", "multinomial")):
            return result
        return result.fill_(1 if name.startswith("bernoulli") else 0.5 if result.is_floating_point() else 0)


def _row_draws(whole: list[tuple[int, ...]], part: list[tuple[int, ...]]) -> bool | None:
    """Whether numbers were drawn for each row; None where they were drawn for all rows together."""
    if len(whole) != len(part) or any(a == b for a, b in zip(whole, part, strict=True)):
        return None
    return bool(whole)


_KEPT = ("_parameters", "_buffers", "_modules")


def _attributes(module: nn.Module) -> dict[str, tuple[Any, Any, Any]]:
    """(value, a copy of a container, a tensor's version) of what a module holds beside parameters, buffers and modules."""
    found = {}
    for name, value in vars(module).items():
        if name not in _KEPT:
            container = (
                copy.copy(value) if isinstance(value, list | dict | set) or type(value).__name__ == "deque" else None
            )
            found[name] = (
                value,
                container,
                (value._version, value.detach().clone()) if type(value) is Tensor else None,
            )
    return found


def _changed(before: dict[nn.Module, dict[str, tuple[Any, Any, Any]]]) -> str:
    for module, attributes in before.items():
        now = vars(module)
        for name in [*attributes.keys(), *(now.keys() - attributes.keys() - set(_KEPT))]:
            value, container, version = attributes.get(name, (None, None, None))
            same = name in now and name in attributes and (now[name] is value or _same_plain(now[name], value))
            if same and container is not None:
                same = len(container) == len(value) and all(map(_is_or_equal, container, value))
            if not same or (version is not None and value._version != version[0]):
                return name
    return ""


def _same_plain(one: Any, other: Any) -> bool:
    return type(one) is type(other) and isinstance(one, int | float | str | bool | tuple) and one == other


def _is_or_equal(one: Any, other: Any) -> bool:
    return one is other or _same_plain(one, other)


def _put_back(module: nn.Module, attributes: dict[str, tuple[Any, Any, Any]]) -> None:
    for name in vars(module).keys() - attributes.keys() - set(_KEPT):
        del vars(module)[name]
    for name, (value, container, version) in attributes.items():
        vars(module)[name] = value
        if container is not None and not (len(container) == len(value) and all(map(_is_or_equal, container, value))):
            value.clear()
            (value.update if isinstance(value, dict | set) else value.extend)(container)
        if version is not None and value._version != version[0]:
            value.data.copy_(version[1])


def _close(one: Tensor, other: Tensor) -> bool:
    """But for rounding."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    tolerance = _RELATIVE.get(one.dtype.to_real() if one.is_complex() else one.dtype, 1e-5)
    if not other.numel():
        return True
    apart, largest = (float(torch.linalg.vector_norm(x, math.inf)) for x in (one.detach() - other, other.detach()))
    if math.isfinite(apart) and math.isfinite(largest):
        return apart <= tolerance * max(largest, 1e-30)
    largest = float(torch.nan_to_num(other.detach().abs().float(), 0, 0, 0).max())
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * max(largest, 1e-30), equal_nan=True)
