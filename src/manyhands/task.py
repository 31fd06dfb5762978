"""A task: one program to train, declared, so that it can be run anywhere, compared, checked and resumed."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyhands.errors import BadInput, UnknownName, Unsupported, is_number, is_whole
from manyhands.sparse.kernel import Kernel, LossOfKernel, ModelOfKernel, RateOfKernel, measured
from manyhands.sparse.kernel import Measure as Measure
from manyhands.sparse.kernel import Metrics as Metrics
from manyhands.sparse.kernel import Summed as Summed
from manyhands.worker_callback import WorkerCallbackFactory

CONVEX = "convex"
PRECISIONS = ("float32", "bf16-mixed")
Loss = Callable[[nn.Module, Any], Measure]
Evaluate = Callable[[nn.Module, Any], Metrics]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained. Every field is data or a function, so that each worker can build it from the same seed."""

    model: nn.Module | Callable[[], nn.Module] = None  # type: ignore[assignment]
    """A module, which holds the final weights afterwards; or a function that builds one on every worker."""
    loss: Loss = None  # type: ignore[assignment]
    """(model, batch) -> the mean over the batch, or (mean, weight) if the mean does not divide by the rows."""
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = None  # type: ignore[assignment]
    """(model) -> its optimizer."""
    kernel: Kernel | None = None
    """In the place of model, loss and optimizer: an algorithm that changes rows of tables without gradients, such as
    word2vec's (see docs/sparse.md). A run's model holds its tables."""
    rate: float | None = None
    """Of a kernel: how far a step goes."""
    last_rate: float | None = None
    """Of a kernel: the rate falls to this, in a line over all steps. Default: it stays."""
    rate_decay: float | None = None
    """Of a kernel, in the place of `last_rate`: the rate is multiplied by this after each epoch."""
    train_data: Any = None
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
    batches: str = "slices"
    """What loss and evaluate see on each worker: "slices", its own rows of a batch; or "whole", the whole batch, of which it
    computes its rows of the model's calls: a loss in which rows meet is then one process's (see docs/zero.md)."""
    sync_batch_norm: bool = False
    """Whether batch normalization takes the statistics of all workers' rows, with batches="slices"; with "whole" it does."""
    epochs: int = 1
    """Passes over the training data by all workers together."""
    max_steps: int | None = None
    """End after so many steps (global batches), wherever the epoch is. Where rows are counted, `epochs` may end sooner; on a
    stream that is an error once its rows are out."""
    schedule: Callable[[torch.optim.Optimizer, int], Any] | None = None
    """(optimizer, total_steps) -> a PyTorch scheduler, stepped after every optimizer step. A ReduceLROnPlateau is
    stepped at each validation, on its `validation_loss`; return (scheduler, "validation_accuracy") for another metric."""
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
    optimum: Any = None
    """The trainable parameters with which the loss over all training rows is least, {name: tensor}: `mh.compare` then says
    how far each variant ends from them. "convex": the loss is convex and smooth, and full-batch L-BFGS finds them."""
    name: str = "task"
    """How the summary calls it."""

    def __post_init__(self) -> None:
        if self.kernel is not None:
            self._take_kernel()
        elif own := [name for name in _OF_KERNELS if getattr(self, name) is not None]:
            raise BadInput(
                f"{own[0]} is of tasks with a kernel: the optimizer has a rate of its own, and schedule moves it"
            )
        self._check_functions()
        if self.batch_size is not None and self.batch_size_per_worker is not None:
            raise BadInput(
                f"batch_size={self.batch_size} (global) and batch_size_per_worker={self.batch_size_per_worker} were both given: give one of them"
            )
        for field in ("batch_size", "batch_size_per_worker", "micro_batch_size", "epochs", "max_steps"):
            _check_count(field, getattr(self, field))
        if self.clip_norm is not None and not (is_number(self.clip_norm) and self.clip_norm > 0):
            raise BadInput(f"clip_norm must be a number above 0, not {self.clip_norm!r}; leave it out to not clip")
        if self.batches not in ("slices", "whole"):
            raise BadInput(f"batches must be whole or slices, not {self.batches!r}")
        if self.precision not in PRECISIONS:
            raise UnknownName(f"no precision {self.precision!r}: choose one of {', '.join(PRECISIONS)}")
        if not (isinstance(self.seed, int | np.integer) and 0 <= self.seed < 1 << 64):
            raise BadInput(f"seed must be a whole number of at least 0 and below 2^64, not {self.seed!r}")
        if not is_whole(self.loader_processes, 0):
            raise BadInput(f"loader_processes must be a whole number of at least 0, not {self.loader_processes!r}")
        for field in ("shuffle", "sync_batch_norm"):
            if not isinstance(given := getattr(self, field), bool):
                raise BadInput(f"{field} must be True or False, not {given!r}")
        if not (self.optimum is None or self.optimum == CONVEX or isinstance(self.optimum, Mapping)):
            raise BadInput(
                f'optimum must be {{name: tensor}} of the trainable parameters, or "{CONVEX}", not {named(self.optimum)}'
            )
        if not isinstance(self.name, str):
            raise BadInput(f"name must be a text, not {self.name!r}")

    def _take_kernel(self) -> None:
        """Check what goes with a kernel, and put what builds its model in the place of model, loss and optimizer."""
        kernel, rate, last, decay = self.kernel, self.rate, self.last_rate, self.rate_decay
        if not isinstance(kernel, Kernel):
            raise BadInput(f"kernel must be a manyhands.Kernel, such as one of manyhands.kernels, not {named(kernel)}")
        derived = {"model": ModelOfKernel, "loss": LossOfKernel, "optimizer": RateOfKernel}
        given = [name for name, kind in derived.items() if not isinstance(getattr(self, name), kind | type(None))]
        given += [
            name for name in ("executor", "clip_norm", "micro_batch_size", "optimum") if getattr(self, name) is not None
        ]
        if given or self.precision != PRECISIONS[0]:
            raise BadInput(
                f"a task has a kernel or {(given or ['precision'])[0]}, not both: a kernel builds its model, and makes its steps itself, without gradients"
            )
        for name, value in (("rate", rate), ("last_rate", last), ("rate_decay", decay)):
            if (value is not None or name == "rate") and not (is_number(value) and 0 < value < math.inf):
                raise BadInput(f"{name} of a kernel must be a number above 0, not {value!r}: rate=0.025, for example")
        if len(both := [n for n in ("last_rate", "rate_decay", "schedule") if getattr(self, n) is not None]) > 1:
            raise BadInput(f"{both[0]} and {both[1]} both say how the rate falls: give one of them")
        assert rate is not None
        object.__setattr__(self, "model", ModelOfKernel(kernel, int(self.seed)))
        object.__setattr__(self, "loss", LossOfKernel(kernel))
        object.__setattr__(self, "optimizer", RateOfKernel(rate))

    def _check_functions(self) -> None:
        for field in _FUNCTIONS:
            if (given := getattr(self, field)) is not None or field not in _OPTIONAL:
                check_function(field, given)
        callback: Any = self.worker_callback
        if callback is not None and not isinstance(callback, WorkerCallbackFactory):
            raise BadInput(
                f"worker_callback must be a manyhands.WorkerCallbackFactory, which makes a callback on each worker, not {named(callback)}; "
                "callbacks that run on the driver are an argument of train(callbacks=[...])"
            )
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
        """`evaluate`; else what the kernel measures, or the loss alone."""
        if self.evaluate is not None:
            return self.evaluate(model, batch)
        return {"loss": self.loss(model, batch)} if self.kernel is None else measured(model, batch)


_OF_KERNELS = ("rate", "last_rate", "rate_decay")
_OPTIONAL = ("evaluate", "schedule", "order", "collate", "executor")
_FUNCTIONS = {  # the arguments that each is called with
    "model": (),
    "loss": ("model", "batch"),
    "optimizer": ("model",),
    "evaluate": ("model", "batch"),
    "schedule": ("optimizer", "total_steps"),
    "order": ("epoch",),
    "collate": ("rows",),
    "executor": ("task", "worker"),
}


def check_function(field: str, given: Any) -> None:
    """Raise BadInput, with the right form, for what cannot be called as this field of a Task is."""
    if field == "model" and isinstance(given, nn.Module):
        return
    if right := _RIGHT_FORMS[field](given) if field in _RIGHT_FORMS else "":
        raise BadInput(right)
    arguments = ", ".join(_FUNCTIONS[field])
    wanted = f"{field} must be {'an nn.Module, or ' if field == 'model' else ''}a function of ({arguments})"
    if not callable(given):
        raise BadInput(f"{wanted}, not {named(given)}")
    try:
        inspect.signature(given).bind(*_FUNCTIONS[field])
    except TypeError as problem:
        own = f"{field}=lambda{' ' if arguments else ''}{arguments}: {_name(given)}(...)"
        raise BadInput(
            f"{wanted}, and {named(given)} does not take {'these arguments' if arguments else 'no arguments'} ({problem}): give {own}"
        ) from None
    except ValueError:  # a builtin without a signature
        return


def _right_model(given: Any) -> str:
    if isinstance(given, type) and not issubclass(given, nn.Module):
        return f"model must be an nn.Module, or a function that makes one, not the class {_name(given)}"
    return ""


def _right_optimizer(given: Any) -> str:
    made = given.func if isinstance(given, partial) else given
    if isinstance(given, torch.optim.Optimizer):
        what, made = f"a {type(given).__name__} that is made already, because every worker makes its own", type(given)
    elif isinstance(made, type) and issubclass(made, torch.optim.Optimizer):
        what = f"the class {made.__name__}, which takes parameters and not a model"
    else:
        return ""
    options = ", ".join(f"{name}={value!r}" for name, value in getattr(given, "keywords", {}).items()) or "lr=..."
    return (
        f"optimizer must be a function of (model), not {what}: "
        f"optimizer=lambda model: torch.optim.{made.__name__}(model.parameters(), {options})"
    )


def _right_loss(given: Any) -> str:
    made = given.func if isinstance(given, partial) else given
    kind = made if isinstance(made, type) else type(made)
    module = made.__module__ if inspect.isroutine(made) else ""
    if not issubclass(kind, nn.modules.loss._Loss) and module not in ("torch.nn.functional", "torch._C._nn"):
        return ""
    return (
        f"loss must be a function of (model, batch), and {_name(made)} is a criterion of (outputs, targets): give "
        f"loss=lambda model, batch: criterion(model(batch[0]), batch[1]), or make the task by mh.Task.supervised(criterion=...)"
    )


def _right_schedule(given: Any) -> str:
    """PyTorch's classes whose second argument is the number of steps (CosineAnnealingLR) are right as they are."""
    made = given.func if isinstance(given, partial) else given
    scheduler = torch.optim.lr_scheduler.LRScheduler
    if isinstance(given, scheduler):
        what, made = f"a {type(given).__name__} that is made already, because every worker makes its own", type(given)
    elif isinstance(made, type) and issubclass(made, scheduler):
        second = list(inspect.signature(made).parameters)[1:2]
        if second in (["T_max"], ["total_iters"]) and made is given:
            return ""
        what = f"the class {made.__name__}, whose second argument is not the number of steps"
    else:
        return ""
    return (
        f"schedule must be a function of (optimizer, total_steps), not {what}: "
        f"schedule=lambda optimizer, total_steps: torch.optim.lr_scheduler.{made.__name__}(optimizer, ...)"
    )


_RIGHT_FORMS: dict[str, Callable[[Any], str]] = {
    "model": _right_model,
    "optimizer": _right_optimizer,
    "loss": _right_loss,
    "evaluate": lambda given: _right_loss(given).replace("loss", "evaluate"),
    "schedule": _right_schedule,
}


def is_one_number(value: Any) -> bool:
    """Whether it is a number, or a tensor or array that holds one."""
    if isinstance(value, Tensor | np.ndarray):
        return math.prod(value.shape) == 1
    return isinstance(value, int | float | np.number)


def named(given: Any) -> str:
    """How an error calls what was given: `the class Linear`, `the function loss`, `a Tensor of shape [64, 2]`, `3`."""
    if isinstance(given, Tensor):
        return f"a Tensor of shape {list(given.shape)}"
    if isinstance(given, type):
        return f"the class {given.__name__}"
    if inspect.isroutine(given):
        return "the lambda" if given.__name__ == "<lambda>" else f"the function {given.__name__}"
    text = repr(given)
    return (
        text
        if given is None or (isinstance(given, str | int | float | list | tuple | dict) and len(text) < 60)
        else f"a {type(given).__name__}"
    )


def _name(given: Any) -> str:
    return getattr(given, "__name__", type(given).__name__).replace("<lambda>", "your_function")


def check_differentiable(task: Task, what: str) -> None:
    """Unsupported for a task with a kernel, where `what` it is for needs gradients of a model."""
    if task.kernel is not None:
        raise Unsupported(
            f"{what} works with the gradients of a model, and kernel {task.kernel.name} has none: manyhands compare measures what a kernel gains by more workers"
        )


def check_fields(names: Mapping[str, Any]) -> None:
    """Raise UnknownName for a name that is no field of Task."""
    known = [field.name for field in fields(Task)]
    for name in names:
        if name == "model_parallel":
            raise UnknownName(
                "model_parallel is an option of mh.train and manyhands train, by which one replica spans several workers: compare, check and estimate take "
                "replicas of one worker each, so leave it out there"
            )
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
        inputs, targets = _pair(batch)
        mean = self.criterion(model(inputs), targets)
        weight = counted(self.criterion, targets)
        return mean if weight is None else (mean, weight)


@dataclass(frozen=True)
class SupervisedMetrics:
    """{"loss", "accuracy"} of one forward; accuracy only where targets are class numbers, over those not ignored."""

    criterion: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Measure]:
        inputs, targets = _pair(batch)
        outputs = model(inputs)
        mean = self.criterion(outputs, targets)
        weight = counted(self.criterion, targets)
        metrics: dict[str, Measure] = {"loss": mean if weight is None else (mean, weight)}
        if not targets.is_floating_point() and outputs.dim() == targets.dim() + 1:
            metrics["accuracy"] = _accuracy(outputs.argmax(1), targets, _ignored(self.criterion))
        return metrics


def _pair(batch: Any) -> tuple[Tensor, Tensor]:
    """(inputs, targets); BadInput for a batch of other columns."""
    if isinstance(batch, Mapping) or (isinstance(batch, tuple | list) and len(batch) != 2):
        has = f"columns {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else f"{len(batch)} columns"
        raise BadInput(
            f"a task of Task.supervised takes batches (inputs, targets), and the data has {has}: give mh.Task(loss=lambda model, batch: ...), which "
            "takes the columns itself, or data of two columns without names; collate= makes a batch of rows"
        )
    inputs, targets = batch
    return inputs, targets


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
