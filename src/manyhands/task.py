"""A task: one program to train, declared, so that it can be run anywhere, compared, checked and resumed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyhands.errors import BadInput, UnknownName, is_whole
from manyhands.worker_callback import WorkerCallbackFactory

PRECISIONS = ("float32", "bf16-mixed")
Measure = Tensor | tuple[Tensor, Any]  # a mean over the batch, or (mean, weight)
Loss = Callable[[nn.Module, Any], Measure]


@dataclass(frozen=True)
class Summed:
    """Metrics that are no means over rows (AUC, perplexity): what to sum over batches and workers, and the result."""

    sums: Tensor
    """[k] of this batch."""
    result: Callable[[Tensor], Mapping[str, float]]
    """(the sum of all batches, float64 [k] on the CPU) -> {name: metric}; the names take the place of this one's."""


Metrics = Mapping[str, Measure | Summed]
Evaluate = Callable[[nn.Module, Any], Metrics]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained. Every field is data or a function, so that each worker can build it from the same seed."""

    model: nn.Module | Callable[[], nn.Module]
    """A module, which holds the final weights afterwards; or a function that builds one on every worker."""
    loss: Loss
    """(model, batch) -> the mean over the batch, or (mean, weight) if the mean does not divide by the rows."""
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    """(model) -> its optimizer."""
    train_data: Any
    """Dataset, dict or tuple of equally long arrays, DataLoader, IterableDataset, DataFrame, path, or a function."""
    validation_data: Any = None
    """Rows on which `evaluate` runs during training."""
    test_data: Any = None
    """Rows on which `evaluate` runs once, with the final parameters."""
    evaluate: Evaluate | None = None
    """(model, batch) -> {name: mean, (mean, weight) or Summed}, in one forward. Default: {"loss": loss}."""
    batch_size: int | None = None
    """GLOBAL rows a step: rank r of N gets rows [r·b//N, (r+1)·b//N). Default: 64, or a DataLoader's own."""
    batch_size_per_worker: int | None = None
    """The other way to say it; the global batch is then this times the number of workers."""
    micro_batch_size: int | None = None
    """Rows a forward; lower it when memory is short. The gradient of a step stays that of the whole batch."""
    epochs: int = 1
    """Passes over the training data by all workers together."""
    max_steps: int | None = None
    """End after so many steps (global batches), wherever the epoch is."""
    schedule: Callable[[torch.optim.Optimizer, int], Any] | None = None
    """(optimizer, total_steps) -> a PyTorch scheduler, stepped after every optimizer step."""
    clip_norm: float | None = None
    """Clip the gradient's 2-norm to this before each step."""
    precision: str = "float32"
    """float32: no autocast (float64 comes from the model); bf16-mixed: forward under bfloat16 autocast."""
    order: Callable[[int], Any] | None = None
    """epoch -> row indices, for weighted or curriculum sampling. Default: mh.epoch_order(rows, seed, epoch)."""
    loader_processes: int = 0
    """Processes that load rows for each worker; raise it if the summary says input-bound and rows take Python time."""
    seed: int = 0
    """Of initial parameters, order and dropout."""
    shuffle: bool = True
    """False: rows in their own order, every epoch."""
    collate: Callable[[list[Any]], Any] | None = None
    """[row, …] -> batch. Default: torch's default_collate."""
    executor: Callable[[Task, Any], Any] | None = None
    """(task, worker) -> the `StepExecutor` that makes the steps there, in the place of autograd and the optimizer. Its
    parameters are those of `model`, by name and shape, or slices of them: `model` holds the answer."""
    worker_callback: WorkerCallbackFactory | None = None
    """Callbacks on every worker (`mh.keras.task` uses them); `callbacks` of train() run on the driver."""
    name: str = "task"
    """How the summary calls it."""

    def __post_init__(self) -> None:
        self._check_functions()
        if self.batch_size is not None and self.batch_size_per_worker is not None:
            raise BadInput(
                f"batch_size={self.batch_size} (global) and batch_size_per_worker={self.batch_size_per_worker} were both given: give one of them"
            )
        for field in ("batch_size", "batch_size_per_worker", "micro_batch_size", "epochs", "max_steps"):
            _check_count(field, getattr(self, field))
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise BadInput(f"clip_norm must be a number above 0, not {self.clip_norm!r}; leave it out to not clip")
        if self.precision not in PRECISIONS:
            raise UnknownName(f"no precision {self.precision!r}: choose one of {', '.join(PRECISIONS)}")
        if not (isinstance(self.seed, int | np.integer) and 0 <= self.seed < 1 << 64):
            raise BadInput(f"seed must be a whole number of at least 0 and below 2^64, not {self.seed!r}")
        if self.loader_processes < 0:
            raise BadInput(f"loader_processes must be 0 or more, not {self.loader_processes}")

    def _check_functions(self) -> None:
        if isinstance(self.optimizer, torch.optim.Optimizer):
            raise BadInput(
                f"optimizer must be a function (model) -> optimizer, not a {type(self.optimizer).__name__} instance, because every worker builds "
                f"its own: optimizer=lambda model: torch.optim.{type(self.optimizer).__name__}(model.parameters(), ...)"
            )
        schedule: Any = self.schedule
        if isinstance(schedule, torch.optim.lr_scheduler.LRScheduler):
            kind = type(schedule).__name__
            raise BadInput(
                f"schedule must be a function (optimizer, total_steps) -> scheduler, not a {kind} instance, because every worker builds its "
                f"own: schedule=lambda optimizer, total_steps: torch.optim.lr_scheduler.{kind}(optimizer, ...)"
            )
        for field, form in _FUNCTIONS.items():
            given = getattr(self, field)
            if not callable(given) and not (field in _OPTIONAL and given is None):
                raise BadInput(f"{field} must be {form} -> ..., a function; got {given!r}")
        if self.train_data is None:
            raise BadInput(
                "train_data is missing: give a Dataset, arrays, a DataLoader, a path, or a function giving one of these"
            )

    def with_fields(self, **changes: Any) -> Self:
        """A copy with these fields changed; a field that does not exist is an UnknownName that lists those that do."""
        check_fields(changes)
        if "batch_size" in changes and "batch_size_per_worker" not in changes:
            changes["batch_size_per_worker"] = None
        if "batch_size_per_worker" in changes and "batch_size" not in changes:
            changes["batch_size"] = None
        return replace(self, **changes)

    @classmethod
    def supervised(cls, *, criterion: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy, **task_fields: Any) -> Self:
        """A task on (inputs, targets) batches: loss = criterion(model(inputs), targets); accuracy for class targets."""
        check_fields(task_fields)
        reduction = _argument(criterion, "reduction", "mean")
        if reduction not in ("mean", "batchmean"):  # batchmean: KL divergence's name for the mean over rows
            raise BadInput(f"criterion must average over the batch (reduction='mean'), not reduction={reduction!r}")
        return cls(**{"loss": SupervisedLoss(criterion), "evaluate": SupervisedMetrics(criterion), **task_fields})

    def metrics(self, model: nn.Module, batch: Any) -> Metrics:
        """`evaluate`, or the loss alone."""
        return self.evaluate(model, batch) if self.evaluate is not None else {"loss": self.loss(model, batch)}


_OPTIONAL = {
    "evaluate": "(model, batch)",
    "schedule": "(optimizer, total_steps)",
    "order": "(epoch)",
    "collate": "([row, ...])",
    "executor": "(task, worker)",
}
_FUNCTIONS = {"loss": "(model, batch)", "optimizer": "(model)", "model": "an nn.Module or ()", **_OPTIONAL}


def check_fields(names: Mapping[str, Any]) -> None:
    """Raise UnknownName for a name that is no field of Task."""
    known = [field.name for field in fields(Task)]
    for name in names:
        if name not in known:
            raise UnknownName(f"a task has no field {name!r}: its fields are {', '.join(known)}")


def _check_count(field: str, value: Any) -> None:
    if value is not None and not is_whole(value):
        raise BadInput(f"{field} must be a whole number of at least 1, not {value!r}")


@dataclass(frozen=True)
class SupervisedLoss:
    """criterion(model(inputs), targets) of (inputs, targets) batches, with the weight that its mean divides by."""

    criterion: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Measure:
        inputs, targets = batch
        mean = self.criterion(model(inputs), targets)
        weight = counted(self.criterion, targets)
        return mean if weight is None else (mean, weight)


@dataclass(frozen=True)
class SupervisedMetrics:
    """{"loss", "accuracy"} of one forward; accuracy only where targets are class numbers, over those not ignored."""

    criterion: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Measure]:
        inputs, targets = batch
        outputs = model(inputs)
        mean = self.criterion(outputs, targets)
        weight = counted(self.criterion, targets)
        metrics: dict[str, Measure] = {"loss": mean if weight is None else (mean, weight)}
        if not targets.is_floating_point() and outputs.dim() == targets.dim() + 1:
            metrics["accuracy"] = _accuracy(outputs.argmax(1), targets, _ignored(self.criterion))
        return metrics


def counted(criterion: Any, targets: Tensor) -> float | None:
    """What a criterion's mean divides by where that is not the number of rows: class weights, targets not ignored.

    Known of cross-entropy and negative log-likelihood, as module, function or functools.partial of the function; None
    for any other criterion, and for targets that are probabilities.
    """
    ignored = _ignored(criterion)
    if ignored is None or targets.is_floating_point():
        return None
    kept = targets != ignored
    weights: Tensor | None = _argument(criterion, "weight", None)
    if weights is None:
        return float(kept.count_nonzero())
    return float(weights.to(targets.device)[targets[kept]].double().sum())


def _ignored(criterion: Any) -> int | None:
    """The class number that this criterion leaves out, None where it leaves out none."""
    function = criterion.func if isinstance(criterion, partial) else criterion
    if isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss) or function in (F.cross_entropy, F.nll_loss):
        return int(_argument(criterion, "ignore_index", -100))
    return None


def _argument(criterion: Any, name: str, default: Any) -> Any:
    """An argument that a criterion was made with: a module's attribute, a functools.partial's keyword."""
    if isinstance(criterion, partial):
        return criterion.keywords.get(name, default)
    return getattr(criterion, name, default)


def _accuracy(predicted: Tensor, targets: Tensor, ignored: int | None) -> tuple[Tensor, int]:
    """(the share of right ones among the targets not ignored, their number)"""
    right = predicted == targets
    if ignored is not None:
        right = right[targets != ignored]
    return right.double().mean(), right.numel()
