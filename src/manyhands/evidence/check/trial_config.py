"""A task as one trial wants it: float64, so many rows, and without what is to be taken away."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from manyhands import rng
from manyhands.data.batch import map_leaves, rows_of, slice_rows
from manyhands.data.readers.streams import LoadedStream
from manyhands.data.sharding import epoch_order, slice_of
from manyhands.data.sources import open_source
from manyhands.evidence.check.function_mode import FunctionMode
from manyhands.evidence.check.interventions import BATCH_NORM, DROPOUT, IN_PLACE, RANDOMNESS
from manyhands.task import Measure, Task
from manyhands.worker import Worker, current, set_current

BUFFERS, FOREIGN, WORKERS, REBUILT, DATA = "buffers", "foreign-parameters", "depends-on-workers", "not-rebuilt", "data"
SUMMED, SLICES = "summed-loss", "slices"

FUNCTIONS = frozenset([BATCH_NORM, DROPOUT, RANDOMNESS, IN_PLACE])
"""What a Lens takes away."""
REMEDIES = FUNCTIONS | {BUFFERS, FOREIGN, WORKERS, REBUILT, DATA, SUMMED, SLICES}
"""All that can be taken away. buffers: they are put back before each step; foreign-parameters: those that the model has not
stay as they are; depends-on-workers: each worker sees itself alone, with the rates that one has; not-rebuilt: all start
from one model; data: batches are read once, and cut; summed-loss: divided by the rows; slices: one worker
computes the loss of each of N workers' slices, and takes their mean by weight, so that no row sees others than it does there."""

NEVER = 1 << 40


@dataclass(frozen=True, kw_only=True)
class TrialConfig:
    """How a task is run in one trial."""

    steps: int
    batch_size: int | None
    """Global; None: as the task has it."""
    rows: int | None = None
    """Of each epoch, the first so many of its order; None: all."""
    of_rows: int = 0
    """All rows there are, where `rows` cuts them."""
    total_steps: int | None = None
    """What a schedule is told."""
    double: bool = True
    """float64; else in the model's own dtype."""
    without: frozenset[str] = frozenset()
    """Of REMEDIES."""
    batches: tuple[Any, ...] = ()
    """For `data`: the global batches."""
    model: nn.Module | None = None
    """For `not-rebuilt`."""
    rates: tuple[tuple[dict[str, Any], ...], ...] = ()
    """For `depends-on-workers`: by step, what one worker's groups of the optimizer hold."""
    nudge: float = 0.0
    """Gradients are off by such a share of their largest number, at random: to see what becomes of rounding."""
    slices: int = 0
    """For `slices`: in how many one worker computes each batch; 0: as a whole, as it does, and as each of N workers does."""
    adds: bool = False
    """The loss is known to add up over rows: so do the losses of slices."""
    count: bool = False
    """Say which rows are handed out."""


def arranged(task: Task, setting: TrialConfig) -> Task:
    """The task, which is the caller's own copy, for this setting."""
    without = setting.without
    changes: dict[str, Any] = {
        "model": partial(model_of_setting, setting.model if REBUILT in without else task.model, setting),
        "loss": _loss(task, setting),
        "optimizer": partial(_as_alone, task.optimizer) if WORKERS in without else task.optimizer,
        "epochs": NEVER,
        "max_steps": setting.steps,
        "batch_size": setting.batch_size,
        "loader_processes": 0,
        "precision": "float32",
        **dict.fromkeys(("validation_data", "test_data", "evaluate")),
    }
    if task.schedule is not None:
        changes["schedule"] = partial(_schedule, task.schedule, setting.total_steps)
    if setting.slices:
        changes["micro_batch_size"] = None  # the slices are cut into them
    if isinstance(task.train_data, DataLoader) and not isinstance(open_source(task.train_data), LoadedStream):
        task.train_data.num_workers = 0  # rows load in the worker itself
    if DATA in without:
        changes |= {"train_data": _Batches(setting.batches), "order": None, "collate": None}
    elif setting.rows is not None:
        changes["order"] = partial(_first_rows, task, setting)
    return task.with_fields(**changes)


def model_of_setting(made: Any, setting: TrialConfig) -> nn.Module:
    """A copy of the module, or what the function builds under the current seed."""
    model = copy.deepcopy(made) if isinstance(made, nn.Module) else made()
    if not isinstance(model, nn.Module):
        return model  # type: ignore[no-any-return] # the loop says what is wrong with it
    return model.double() if setting.double else model


def _schedule(make: Any, total: int | None, optimizer: torch.optim.Optimizer, _steps: int) -> Any:
    """The user's schedule over the whole training, although a trial ends sooner."""
    return make(optimizer, total)


def _first_rows(task: Task, setting: TrialConfig, epoch: int) -> Any:
    """The beginning of the order that an epoch has."""
    if task.order is not None:
        return np.asarray(task.order(epoch))[: setting.rows]
    whole = epoch_order(setting.of_rows, task.seed, epoch) if task.shuffle else np.arange(setting.of_rows)
    return whole[: setting.rows]


class _Batches(DataLoader[Any]):
    """Batches as they are, for one epoch."""

    def __init__(self, batches: Sequence[Any]) -> None:
        super().__init__(batches, batch_size=None, collate_fn=_same)  # type: ignore[arg-type]


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class MeanLoss:
    """A loss that adds up, as a mean."""

    loss: Any

    def __call__(self, model: nn.Module, batch: Any) -> Measure:
        return divided(self.loss(model, batch), batch)


@dataclass(frozen=True, kw_only=True)
class SlicedLoss:
    """The loss of a global batch as N workers have it: of each slice apart, and of each of its micro-batches."""

    loss: Any
    slices: int
    micro_batch_size: int | None
    adds: bool
    """It is the sum over slices, which is what one worker has of a loss that adds up; else their mean by weight."""
    without: frozenset[str]

    def __call__(self, model: nn.Module, batch: Any) -> Measure:
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()} if BUFFERS in self.without else {}
        drawn = rng.capture() if RANDOMNESS in self.without else None
        parts = []
        for rank in range(self.slices):
            for name, buffer in buffers.items():
                _put_back(model, name, buffer.clone())
            if drawn is not None:  # workers are seeded alike
                rng.restore(*drawn)
            start, stop = slice_of(rows_of(batch), rank, self.slices)
            step = self.micro_batch_size or max(1, stop - start)
            for at in range(start, stop, step):
                part = slice_rows(batch, at, min(at + step, stop))
                measure = self.loss(model, part)
                parts.append(measure if isinstance(measure, tuple) else (measure, rows_of(part)))
        total = sum(weight for _, weight in parts)
        if self.adds:
            return sum(mean for mean, _ in parts), total
        counted = [(mean, weight) for mean, weight in parts if weight] or parts
        return sum(mean * (weight / (total or 1)) for mean, weight in counted), total


def _put_back(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """A buffer as another tensor: the one that is there may be needed on the way back."""
    owner, _, own = name.rpartition(".")
    model.get_submodule(owner)._buffers[own] = value


def _loss(task: Task, setting: TrialConfig) -> Any:
    mean = SUMMED in setting.without
    loss = MeanLoss(task.loss) if mean else task.loss
    if not setting.slices:
        return loss
    adds = setting.adds and not mean
    return SlicedLoss(
        loss=loss,
        slices=setting.slices,
        micro_batch_size=task.micro_batch_size,
        adds=adds,
        without=setting.without,
    )


@contextmanager
def seen_through(setting: TrialConfig, model: nn.Module) -> Iterator[None]:
    """Within, the user's code computes as the setting has it."""
    functions = setting.without & FUNCTIONS
    mode = FunctionMode(double=setting.double, without=functions, guarded=memory_of(model))
    with alone(WORKERS in setting.without), mode:
        yield


def divided(measure: Measure, batch: Any) -> Measure:
    """A sum, as a mean over what it says it counts, else over rows."""
    total, weight = measure if isinstance(measure, tuple) else (measure, rows_of(batch))
    return (total / weight, weight) if weight else measure


def memory_of(model: nn.Module) -> frozenset[int]:
    """The addresses of the storages in which its parameters lie."""
    return frozenset(p.untyped_storage().data_ptr() for p in model.parameters())


def in_double(batch: Any) -> Any:
    """The batch with its floating tensors in float64."""

    def cast(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return map_leaves(batch, cast)


@contextmanager
def alone(wanted: bool = True) -> Iterator[None]:
    """Within, this process sees itself as the only worker."""
    before = current()
    if wanted:
        set_current(Worker())
    try:
        yield
    finally:
        set_current(before)


def _as_alone(make: Any, model: nn.Module) -> Any:
    with alone():
        return make(model)
