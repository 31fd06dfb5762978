"""What `evaluate` measures: means and sums over batches, and the states of torchmetrics' objects, merged over workers."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from manyhands.comm.group import Group
from manyhands.errors import BadInput, Unsupported
from manyhands.inference.program import Function, Measurement
from manyhands.replica.evaluation import Measured, means_of, of_model, results_of
from manyhands.task import Evaluate, Metrics, Task, named


@dataclass
class Means(Measurement):
    """What a function of (model, batch) finds: means, means with weights, and `Summed`, as Task.evaluate gives them."""

    evaluate: Evaluate | None
    task: Task | None = None  # in its place
    _measured: Measured = field(default_factory=Measured)

    @override
    def add(self, model: nn.Module, batch: Any, rows: int) -> None:
        self._measured.add(self._of(model, batch), rows)

    @override
    def result(self, group: Group) -> dict[str, float]:
        return means_of(group.all_gather_json(self._measured.means)) | results_of(self._measured.summed, group)

    def _of(self, model: nn.Module, batch: Any) -> Metrics:
        if self.evaluate is not None:
            return self.evaluate(model, batch)
        assert self.task is not None
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        return of_model(self.task, model, device)(batch)


class OfTorchmetrics(Measurement):
    """torchmetrics' objects, updated with (outputs, targets) of each batch.

    A worker's states are sums, extremes or lists of rows; those of all workers together are what one process would have
    had, but for the order of rows. Raises Unsupported for a metric that averages a state over processes: that is no
    process's number.
    """

    def __init__(self, metrics: Mapping[str, Any], function: Function) -> None:
        self._metrics = {name: copy.deepcopy(metric) for name, metric in metrics.items()}
        self._function = function
        self._placed = False
        for name, metric in self._metrics.items():
            metric.reset()
            if averaged := [state for state, merge in metric._reductions.items() if _name(merge) == "dim_zero_mean"]:
                raise Unsupported(
                    f"metric {name!r} ({type(metric).__name__}) averages its state {averaged[0]!r} over processes, which is not the mean over rows: give "
                    "of_all=, a function of all outputs, or a mean with its weight"
                )

    @override
    def add(self, model: nn.Module, batch: Any, rows: int) -> None:
        given = self._function(model, batch)
        if not isinstance(given, tuple | list) or not all(isinstance(one, Tensor) for one in given):
            raise BadInput(
                f"metrics of torchmetrics are updated with what function(model, batch) returns, a tuple of tensors such as (outputs, targets), not {named(given)}"
            )
        for metric in self._metrics.values():
            if not self._placed:
                metric.to(given[0].device)
            metric.update(*given)
        self._placed = True

    @override
    def result(self, group: Group) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, metric in self._metrics.items():
            metric.cpu()
            merge(metric, group)
            value = metric.compute()
            values = value.items() if isinstance(value, Mapping) else [("", value)]
            for part, one in values:
                found |= _numbers(f"{name}_{part}" if part else name, torch.as_tensor(one))
        return found


def merge(metric: Any, group: Group) -> None:
    """Give this metric of torchmetrics the states of all workers that saw rows; a collective."""
    if group.size == 1:
        return
    states = list(metric._reductions)
    own = {state: getattr(metric, state) for state in states}
    updated = metric._update_count > 0
    shapes = {
        state: [list(map(_kind, value))] if isinstance(value, list) else _kind(value) for state, value in own.items()
    }
    tensors = [one for value in own.values() for one in (value if isinstance(value, list) else [value])]
    headers = group.all_gather_json([updated, metric._update_count, shapes if updated else {}])
    everyone = gather(tensors if updated else [], group)
    of_workers = [_rebuilt(header[2], data) for header, data in zip(headers, everyone, strict=True) if header[0]]
    if not of_workers:
        return
    metric._update_count = sum(header[1] for header in headers)
    metric._computed = None
    for state, reduction in metric._reductions.items():
        values = [one[state] for one in of_workers]
        setattr(metric, state, _merged(values, reduction))


def _merged(values: Sequence[Any], reduction: Any) -> Any:
    if isinstance(values[0], list):
        return [one for value in values for one in value]
    if len(values) == 1:
        return values[0]
    if _name(reduction) == "dim_zero_cat":
        return torch.cat([value.reshape(1) if value.dim() == 0 else value for value in values])
    stacked = torch.stack(list(values))
    return stacked if reduction is None else reduction(stacked)


def gather(tensors: Sequence[Tensor], group: Group) -> list[bytes]:
    """The memory of all ranks' tensors, by rank; a collective."""
    data = b"".join(bytes(one.contiguous().reshape(-1).view(torch.uint8).numpy()) for one in tensors)
    sizes = group.all_gather_json(len(data))
    longest = max(1, *sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    if data:
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    everyone = group.all_gather(padded)  # [N, longest]
    return [everyone[rank, :size].numpy().tobytes() for rank, size in enumerate(sizes)]


def _kind(tensor: Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def _rebuilt(shapes: Mapping[str, Any], data: bytes) -> dict[str, Any]:
    """{state: tensor, or list of tensors}, as `merge` sent them."""
    found: dict[str, Any] = {}
    at = 0

    def take(kind: Sequence[Any]) -> Tensor:
        nonlocal at
        dtype: torch.dtype = getattr(torch, kind[0])
        count = math.prod(kind[1])
        start, at = at, at + count * dtype.itemsize
        if not count:
            return torch.empty(kind[1], dtype=dtype)
        return torch.frombuffer(bytearray(data[start:at]), dtype=dtype).reshape(kind[1])

    for state, kinds in shapes.items():
        found[state] = [take(kind) for kind in kinds[0]] if isinstance(kinds[0], list) else take(kinds)
    return found


def _name(reduction: Any) -> str:
    return getattr(reduction, "__name__", "")


def _numbers(name: str, value: Tensor) -> dict[str, float]:
    """{name: value}, or {name_0: …, name_1: …} of several."""
    flat = value.reshape(-1).tolist()
    return {name: float(flat[0])} if len(flat) == 1 else {f"{name}_{i}": float(one) for i, one in enumerate(flat)}


def torchmetrics_of(given: Any) -> dict[str, Any] | None:
    """{name: metric} of a metric, a collection, or a dict of metrics of torchmetrics; None for anything else."""
    library = sys.modules.get("torchmetrics")
    if library is None:
        return None
    if isinstance(given, library.MetricCollection):
        return dict(given.items(keep_base=False, copy_state=True))
    if isinstance(given, library.Metric):
        return {type(given).__name__: given}
    if isinstance(given, Mapping) and given and all(isinstance(one, library.Metric) for one in given.values()):
        return dict(given)
    return None
