"""Fresh copies of a task, as workers have them, configured for one trial."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from manyhands import rng
from manyhands.data.batch import map_leaves, rows_of, slice_rows
from manyhands.data.open_source import is_function, open_source
from manyhands.data.readers.streams import LoadedStream
from manyhands.data.sharding import epoch_order, slice_of
from manyhands.engines.local.serialization import deserialize, serialize
from manyhands.errors import BadInput, ManyhandsError
from manyhands.evidence.check import source_locations
from manyhands.evidence.check.interventions import BATCH_NORM, DROPOUT, IN_PLACE, RANDOMNESS, FunctionMode
from manyhands.evidence.check.report import BREAKS, Finding, finding
from manyhands.task import Measure, Task
from manyhands.training.plan import build_model
from manyhands.worker import Worker, as_current


@contextmanager
def errors_located(what: str) -> Iterator[None]:
    """Turn an exception of the user's code into a BadInput that names the line."""
    try:
        yield
    except ManyhandsError:
        raise
    except Exception as error:
        place = source_locations.of_error(error)
        where = "" if place is None else f" ({place})"
        raise BadInput(f"{what} failed: {type(error).__name__}: {error}{where}") from error


class Copies:
    """Makes independent copies of a task: serialized as for worker processes, or else by `copy.deepcopy`.

    A change to one copy affects neither the other copies nor the user's own task.
    """

    def __init__(self, task: Task, fd: int | None) -> None:
        """fd: the result of `serialize`, or None for a task that cannot be serialized."""
        self._task, self._fd = task, fd

    @property
    def sendable(self) -> bool:
        """Whether the task can be sent to worker processes."""
        return self._fd is not None

    @property
    def usable(self) -> bool:
        """Whether the task can be copied at all."""
        try:
            self.fresh()
        except BadInput:
            return False
        return True

    def fresh(self) -> Task:
        """A new copy. Tensors and arrays share memory until they are written to. Raises BadInput if copying fails."""
        if self._fd is not None:
            task: Task = deserialize(self._fd, mapped=True)
            return task
        try:
            return copy.deepcopy(self._task)
        except Exception as error:  # user classes raise what they like
            raise BadInput(
                f"check needs a copy of the task, and it can be neither sent nor copied ({type(error).__name__}: "
                f"{error}): build the model and open the data inside functions (model=lambda: …)"
            ) from error

    def built(self) -> tuple[Task, nn.Module]:
        """(a new copy, the model that it builds from its seed)"""
        task = self.fresh()
        rng.seed_all(task.seed)
        return task, build_model(task)


@contextmanager
def copies_of(task: Task) -> Iterator[tuple[Copies, list[Finding]]]:
    """(copies, a finding for each field that cannot be sent to another process)"""
    try:
        fd = serialize(task, "the task")
    except BadInput:
        yield Copies(task, None), unsendable_fields(task)
        return
    try:
        yield Copies(task, fd), []
    finally:
        os.close(fd)


@contextmanager
def with_materialized_data(copies: Copies) -> Iterator[Copies]:
    """Copies of the task whose data functions were called once. They stay functions if the data cannot be sent."""
    task = materialized_data(copies)
    if task is None:
        yield copies
        return
    with copies_of(task) as (own, problems):
        yield copies if problems else own


def materialized_data(copies: Copies) -> Task | None:
    """The task with the results of its data functions, called as the loop calls them: after the seeded model is built.

    Data that can be read only once stays a function. None if there is nothing to call.
    """
    task = copies.fresh()
    given = {name: getattr(task, name) for name in ("train_data", "validation_data", "test_data")}
    functions = {name: data for name, data in given.items() if data is not None and is_function(data)}
    if not functions:
        return None
    rng.seed_all(task.seed)
    with errors_located("model() or a function that gives data"):
        build_model(task)
        results = {name: function() for name, function in functions.items()}
    read_once = (Iterator, IterableDataset, DataLoader)
    data = {name: result for name, result in results.items() if not isinstance(result, read_once)}
    return task.with_fields(**data) if data else None


def unsendable_fields(task: Task) -> list[Finding]:
    """A finding for each field of a task that cannot be sent to a worker process."""
    found = []
    for field in fields(task):
        value = getattr(task, field.name)
        try:
            os.close(serialize(value, field.name))
        except BadInput as error:
            is_function = callable(value) and not isinstance(value, nn.Module)
            place = (
                source_locations.of_function(value) if is_function else source_locations.of_method(value, "__init__")
            )
            text = f"{error} Several processes cannot train this task: each needs a copy of it."
            found.append(finding("not-picklable", BREAKS, text, place, field=field.name))
    return found


# -- one trial ---------------------------------------------------------------------------------------------------------

BUFFERS, WORKERS, REBUILT, DATA = "buffers", "depends-on-workers", "not-rebuilt", "data"
SUMMED, SLICES = "summed-loss", "slices"

FUNCTIONS = frozenset([BATCH_NORM, DROPOUT, RANDOMNESS, IN_PLACE])  # causes that a FunctionMode removes
REMEDIES = FUNCTIONS | {BUFFERS, WORKERS, REBUILT, DATA, SUMMED, SLICES}
"""Causes that a trial can remove.

buffers: they are reset before each step. depends-on-workers: each worker sees a group of one, with the rates of one
worker. not-rebuilt: all workers start from one model. data: batches are read once and cut. summed-loss: the loss is divided by the rows. slices: the
single worker computes the loss of each of N workers' slices and takes their mean by weight, so that each row is
computed with the same rows as on N workers.
"""


@dataclass(frozen=True, kw_only=True)
class TrialConfig:
    """How a task is run in one trial."""

    steps: int
    batch_size: int | None  # of the global batch; None: the task's own
    rows: int | None = None  # an epoch takes only this many rows, the first of its order; None: all
    total_rows: int = 0  # the number of rows in the data, if `rows` is given
    total_steps: int | None = None  # the number of steps passed to the schedule
    double: bool = True  # compute in float64 instead of the model's own dtype
    without: frozenset[str] = frozenset()  # causes to remove, of REMEDIES
    batches: tuple[Any, ...] = ()  # for `data`: the global batches
    model: nn.Module | None = None  # for `not-rebuilt`: the model that all workers start from
    rates: tuple[tuple[dict[str, Any], ...], ...] = ()
    """For `depends-on-workers`: one worker's options of each parameter group, by step."""
    nudge: float = 0.0  # add random noise of this share of the largest gradient, to see how rounding errors grow
    slices: int = 0
    """For `slices`: the number of slices in which the single worker computes each batch; 0: it is computed whole."""
    adds: bool = False  # the loss adds up over rows, so the losses of slices are added too
    record_rows: bool = False  # record which rows each worker takes in the first epoch


def configured(task: Task, config: TrialConfig) -> Task:
    """A copy of a task, set up for this trial."""
    without, loss = config.without, task.loss
    if SUMMED in without:
        loss = partial(_mean_loss, loss)
    if config.slices:
        loss = partial(_sliced_loss, loss, config, task.micro_batch_size)
    changes: dict[str, Any] = {
        "model": partial(model_for, config.model if REBUILT in without else task.model, config),
        "loss": loss,
        "optimizer": partial(_optimizer_of_single_worker, task.optimizer) if WORKERS in without else task.optimizer,
        "epochs": 1 << 40,  # `max_steps` ends the trial
        "max_steps": config.steps,
        "batch_size": config.batch_size,
        "loader_processes": 0,
        "precision": "float32",
        **dict.fromkeys(("validation_data", "test_data", "evaluate")),
    }
    if task.schedule is not None:
        changes["schedule"] = partial(_schedule_of_whole_training, task.schedule, config.total_steps)
    if config.slices:
        changes["micro_batch_size"] = None  # _sliced_loss cuts slices into micro-batches
    if isinstance(task.train_data, DataLoader) and not isinstance(open_source(task.train_data), LoadedStream):
        task.train_data.num_workers = 0  # rows load in the worker itself
    if DATA in without:
        batches: Any = config.batches  # for the loader a sequence is a dataset
        loader = DataLoader(batches, batch_size=None, collate_fn=identity)
        changes |= {"train_data": loader, "order": None, "collate": None}
    elif config.rows is not None:
        changes["order"] = partial(_first_rows, task, config)
    return task.with_fields(**changes)


def model_for(source: Any, config: TrialConfig) -> nn.Module:
    """A copy of the module, or the model that the function builds under the current seed."""
    model = copy.deepcopy(source) if isinstance(source, nn.Module) else source()
    if not isinstance(model, nn.Module):
        return model  # type: ignore[no-any-return] # the loop reports it
    return model.double() if config.double else model


def _schedule_of_whole_training(make: Any, total: int | None, optimizer: torch.optim.Optimizer, _steps: int) -> Any:
    return make(optimizer, total)


def _first_rows(task: Task, config: TrialConfig, epoch: int) -> Any:
    """The first rows of an epoch's order."""
    if task.order is not None:
        return np.asarray(task.order(epoch))[: config.rows]
    whole = epoch_order(config.total_rows, task.seed, epoch) if task.shuffle else np.arange(config.total_rows)
    return whole[: config.rows]


def identity(value: Any) -> Any:
    return value


def _mean_loss(loss: Any, model: nn.Module, batch: Any) -> Measure:
    """A loss that adds up over rows, divided by its weight or else by the rows."""
    measure = loss(model, batch)
    total, weight = measure if isinstance(measure, tuple) else (measure, rows_of(batch))
    return (total / weight, weight) if weight else measure


def _sliced_loss(loss: Any, config: TrialConfig, micro_batch_size: int | None, model: nn.Module, batch: Any) -> Measure:
    """The loss of a global batch, computed on each of N workers' slices and each of their micro-batches."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()} if BUFFERS in config.without else {}
    drawn = rng.capture() if RANDOMNESS in config.without else None
    parts = []
    for rank in range(config.slices):
        for name, buffer in buffers.items():  # a new tensor: the backward pass may need the present one
            owner, _, own = name.rpartition(".")
            model.get_submodule(owner)._buffers[own] = buffer.clone()
        if drawn is not None:  # workers are seeded alike
            rng.restore(*drawn)
        start, stop = slice_of(rows_of(batch), rank, config.slices)
        step = micro_batch_size or max(1, stop - start)
        for at in range(start, stop, step):
            part = slice_rows(batch, at, min(at + step, stop))
            measure = loss(model, part)
            parts.append(measure if isinstance(measure, tuple) else (measure, rows_of(part)))
    total = sum(weight for _, weight in parts)
    if config.adds and SUMMED not in config.without:  # as a single worker does where the loss adds up
        return sum(mean for mean, _ in parts), total
    counted = [(mean, weight) for mean, weight in parts if weight] or parts
    return sum(mean * (weight / (total or 1)) for mean, weight in counted), total


@contextmanager
def interventions_of(config: TrialConfig, model: nn.Module) -> Iterator[None]:
    """Run the user's code with the precision and the removed causes of a trial."""
    functions = config.without & FUNCTIONS
    mode = FunctionMode(double=config.double, without=functions, guarded=storages_of(model))
    with as_current(Worker()) if WORKERS in config.without else nullcontext(), mode:
        yield


def storages_of(model: nn.Module) -> frozenset[int]:
    """The addresses of the storages of a model's parameters."""
    return frozenset(p.untyped_storage().data_ptr() for p in model.parameters())


def batch_in_float64(batch: Any) -> Any:
    """The batch with floating tensors in float64."""

    def cast(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return map_leaves(batch, cast)


def _optimizer_of_single_worker(make: Any, model: nn.Module) -> Any:
    with as_current(Worker()):
        return make(model)
