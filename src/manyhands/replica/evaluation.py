"""Metrics of the one answer: the consensus of all replicas, evaluated on all workers together."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from manyhands import rng
from manyhands.comm.group import Group
from manyhands.data.batch import merged, naming_columns, rows_of
from manyhands.data.feed import Feed
from manyhands.errors import BadInput, Unsupported
from manyhands.replica.flat_vector import FlatVector
from manyhands.replica.replica import Replica
from manyhands.task import Evaluate, Metrics, Summed, Task, is_one_number, named

HIGHER = {"acc", "accuracy", "auc", "auroc", "f1", "precision", "recall", "r2", "top1", "top5", "score", "likelihood"}
HIGHER |= {"iou", "miou", "dice", "ap", "map", "psnr", "ssim", "bleu", "rouge"}  # of images and texts
LOWER = {"loss", "error", "perplexity", "bits", "nll", "mse", "mae", "rmse", "wer", "cer"}
NEGATED = {"neg", "negative"}  # what such a name means is anybody's guess


def higher_is_better(metric: str) -> bool | None:
    """Which way a metric gets better, from the words of its name (`validation_f1_macro`); None if unknown."""
    words = set(re.split(r"[^a-z0-9]+", metric.casefold()))
    higher, lower = bool(words & HIGHER), bool(words & LOWER)
    return None if higher == lower or words & NEGATED else higher


class AveragedOutputs(nn.Module):
    """An ensemble as one model: its output is the mean of the members' outputs (tensors, tuples, dicts)."""

    def __init__(self, members: list[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        outputs = [member(*inputs, **named) for member in self.members]
        return merged(outputs, lambda parts: torch.stack(parts).mean(0))


def mean_buffers(model: nn.Module, group: Group) -> dict[str, Tensor]:
    """A copy of the model's buffers: floating and complex ones averaged over the group, others their maximum."""
    mean = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    if group.size > 1:
        for buffer in mean.values():
            if buffer.is_floating_point():
                group.mean_(buffer)
            elif buffer.is_complex():
                group.mean_(torch.view_as_real(buffer))
            else:
                buffer.copy_(group.all_gather(buffer.to(torch.int64).reshape(-1)).amax(0).reshape(buffer.shape))
    return mean


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode and without gradients; afterwards each of its modules is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def holding(replica: Replica, parameters: FlatVector, buffers: dict[str, Tensor]) -> Iterator[nn.Module]:
    """The replica's model in evaluation mode with these parameters and buffers; all is restored afterwards."""
    model = replica.model
    own = None if parameters is replica.parameters else replica.parameters.clone()
    own_buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    with torch.no_grad(), rng.kept():
        replica.set_parameters(parameters)
        _fill_buffers(model, buffers)
        try:
            with evaluating(model):
                yield model
        finally:
            _fill_buffers(model, own_buffers)
            if own is not None:
                replica.set_parameters(own)


Member = tuple[FlatVector, dict[str, Tensor]]
"""Parameters, and buffers by name, of a model of an ensemble, or of one worker's part of it."""


def members_of(replica: Replica, group: Group) -> list[Member]:
    """What each rank holds. A collective."""
    parts = [group.all_gather(part) for part in replica.parameters.parts]  # of each shard [N, D']
    held = dict(replica.model.named_buffers())
    buffers = {name: group.all_gather(buffer.reshape(-1)) for name, buffer in held.items()}  # [N, …]
    return [
        (
            FlatVector([part[rank] for part in parts]),
            {name: rows[rank].view(held[name].shape) for name, rows in buffers.items()},
        )
        for rank in range(group.size)
    ]


def ensemble_of(replica: Replica, members: Sequence[Member]) -> AveragedOutputs:
    """Whole models as one."""
    models = [copy.deepcopy(replica.model) for _ in members]
    for model, (parameters, buffers) in zip(models, members, strict=True):
        load(model, replica.named(parameters), buffers)
    return AveragedOutputs(models).eval()


def of_parts(replica: Replica, members: Sequence[Member], metrics: Evaluate) -> Callable[[Any], Metrics]:
    """What measures a batch with an ensemble whose models are cut: the replica's workers run one after the other, and in the
    last run the model gives the mean of all outputs. A collective of these workers."""

    def measure(batch: Any) -> Metrics:
        outputs: list[Any] = []  # of the worker that ends the program; the others never see one

        def take(model: nn.Module, inputs: Any, output: Any) -> Any:
            outputs.append(output)
            return merged(outputs, lambda parts: torch.stack(parts).mean(0)) if len(outputs) == len(members) else None

        found: Metrics = {}
        with replica.model.register_forward_hook(take):
            for member in members:
                with holding(replica, *member):
                    found = replica.executor.evaluate(metrics, batch)
        if len(outputs) not in (0, len(members)):
            raise Unsupported(
                f"evaluate(model, batch) called the model {len(outputs)} times for {len(members)} models of an ensemble: call it once"
            )
        return found

    return measure


def load(model: nn.Module, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    """Copy values by name into a model's parameters and buffers."""
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in parameters.items():
            own[name].copy_(value)
        _fill_buffers(model, buffers)


def _fill_buffers(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    own = dict(model.named_buffers())
    for name, value in buffers.items():
        own[name].copy_(value.reshape(own[name].shape))


def of_model(task: Task, model: nn.Module, device: torch.device) -> Callable[[Any], Metrics]:
    """What measures a batch with a model in this process, as `AutogradExecutor.evaluate` does."""

    def measure(batch: Any) -> Metrics:
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=task.precision == "bf16-mixed"):
            return task.metrics(model, batch)

    return measure


def evaluate(
    measure: Callable[[Any], Metrics],
    feed: Feed,
    group: Group,
    progress: Callable[[int], None],
    *,
    together: bool = False,
) -> dict[str, float]:
    """What `measure` finds over all rows of `feed`, the same on every rank: weighted means over batches and ranks, or of
    their sums.

    progress: called with each batch's number. together: all ranks measure each batch, also those that have None of it.
    """
    measured = Measured()
    with closing(feed.epoch(0)) as slices:
        for part in slices:
            progress(part.index)
            if part.batch is not None:
                with naming_columns(part.batch):
                    found = measure(part.batch)
                measured.add(found, rows_of(part.batch))
            elif together:
                measured.add(measure(None), 0)
    return means_of(group.all_gather_json(measured.means)) | results_of(measured.summed, group)


@dataclass
class Measured:
    """What was measured on some batches: of means (total, weight), where anything has weight; and what is `Summed`."""

    means: dict[str, tuple[float, float]] = field(default_factory=dict)
    summed: dict[str, Summed] = field(default_factory=dict)

    def add(self, metrics: Metrics, rows: int) -> None:
        """One batch of so many rows. BadInput for what `evaluate` must not return."""
        if not isinstance(metrics, Mapping):
            raise BadInput(
                f'evaluate(model, batch) must return its metrics by name, {{"accuracy": mean over the batch}}, not {named(metrics)}'
            )
        for name, measure in metrics.items():
            if isinstance(measure, Summed):
                sums = measure.sums.detach().to("cpu", torch.float64)
                sums = self.summed[name].sums + sums if name in self.summed else sums
                self.summed[name] = Summed(sums, measure.result)
                continue
            mean, weight = measure if isinstance(measure, tuple) and len(measure) == 2 else (measure, rows)
            if not (is_one_number(mean) and is_one_number(weight)):
                raise BadInput(
                    f"evaluate(model, batch): metric {name!r} must be one number, the mean over the batch, or (mean, weight); "
                    f"got {named(measure)}: average it over rows"
                )
            if isinstance(mean, Tensor) and not (mean.is_floating_point() or mean.dtype == torch.bool):
                raise BadInput(
                    f"evaluate(model, batch): metric {name!r} is a whole number ({int(mean)}), and metrics are means over the batch: return the mean "
                    "(.double().mean() instead of .sum()), or manyhands.task.Summed for what is a sum"
                )
            if weight:
                total, weights = self.means.get(name, (0.0, 0.0))
                self.means[name] = total + float(mean) * float(weight), weights + float(weight)


def means_of(everyone: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """The means of what several processes measured (`Measured.means`)."""
    means = {}
    for name in dict.fromkeys(name for one in everyone for name in one):
        parts = [one[name] for one in everyone if name in one]
        means[name] = sum(total for total, _ in parts) / sum(weight for _, weight in parts)
    return means


def results_of(summed: Mapping[str, Summed], group: Group) -> dict[str, float]:
    """What the sums over all ranks say, the same on every rank; a rank without rows has none of its own."""
    everyone = group.all_gather_json({name: one.sums.tolist() for name, one in summed.items()})
    if not any(everyone):
        return {}
    own: dict[str, float] = {}
    for name, one in summed.items():
        total = torch.tensor([sums[name] for sums in everyone if name in sums], dtype=torch.float64).sum(0)
        own |= {metric: float(value) for metric, value in one.result(total).items()}
    return {name: value for said in reversed(group.all_gather_json(own)) for name, value in said.items()}
