"""The sizes of the real model, optimizer state and data, on which the time of a step depends."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyhands import rng
from manyhands.comm.solo import SoloGroup
from manyhands.data.feed import Feed
from manyhands.data.source import Source
from manyhands.errors import Unsupported
from manyhands.replica.layout import Layout
from manyhands.replica.replica import Replica
from manyhands.task import Task
from manyhands.training.plan import global_batch, make_executor
from manyhands.worker import Worker

Matrix = tuple[int, int, int]  # start in the flat vector [D'], rows, columns


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of one replica."""

    numbers: int  # D: trainable numbers
    padded: int  # D': of the flat vector, which is what travels
    dtype: torch.dtype
    parameters: int  # trainable tensors
    matrices: tuple[Matrix, ...]  # parameters of two or more dimensions, in the vector's order
    slices: tuple[int, ...]  # lengths of the slices in which gradients become ready
    state: Mapping[str, Any]  # the optimizer's state of the largest parameter, by name: a tensor like it, or a number
    largest: torch.Size  # the shape of the largest parameter

    @property
    def item(self) -> int:
        """Bytes of a number."""
        return self.dtype.itemsize


def shape_of(task: Task) -> Shape:
    """Build the task's model once, and step its optimizer with a zero gradient to find its state.

    Takes the memory of one replica. Neither a given module nor the random state changes. Raises BadInput for what
    `train` would refuse.
    """
    if task.executor is not None:
        raise Unsupported(
            "estimate finds sizes by a step of the task's optimizer, and this task has an executor of its own: try it on few "
            "workers, or leave executor out"
        )
    with rng.kept():
        given = task.with_fields(model=copy.deepcopy(task.model)) if isinstance(task.model, nn.Module) else task
        replica = Replica(make_executor(given, Worker()), group=SoloGroup())
        replica.begin_tick()  # a step with a zero gradient, after which the optimizer has its state
        for parameter, view in zip(replica.trainable, replica.named(replica.gradients).values(), strict=True):
            parameter.grad = view
        replica.collect()
        replica.weight = 1.0
        replica.apply()
        slices: list[int] = []
        replica.on_ready(lambda gradients: slices.append(len(gradients)))
        replica.begin_tick()
        replica.backward(None)
    layout = replica.layout
    largest = max(layout.parameters, key=Tensor.numel)
    state = {
        name: value.to("meta") if isinstance(value, Tensor) else value  # without memory
        for name, value in replica.optimizer.state.get(largest, {}).items()
    }
    return Shape(
        numbers=layout.size,
        padded=layout.padded,
        dtype=layout.dtype,
        parameters=len(layout.names),
        matrices=_matrices(layout),
        slices=tuple(slices),
        state=state,
        largest=largest.shape,
    )


def _matrices(layout: Layout) -> tuple[Matrix, ...]:
    """In memory order: the outermost dimension is the rows."""
    found = []
    for start, shape, stride in zip(layout.offsets, layout.shapes, layout.strides, strict=True):
        if len(shape) > 1 and shape.numel():
            rows = max(zip(stride, shape, strict=True))[1]
            found.append((start, rows, shape.numel() // rows))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class ReadingPlan:
    """How a number of workers reads the data."""

    batch_size: int  # global rows
    rows: int | None  # rows of an epoch; None: a stream of unknown length
    ticks: int | None  # global batches of an epoch

    def steps(self, task: Task) -> int | None:
        """Global batches in the whole training; None if unknown."""
        sized = None if self.ticks is None else self.ticks * task.epochs
        return min((n for n in (sized, task.max_steps) if n is not None), default=None)

    def rows_of(self, tick: int) -> int:
        """Rows of global batch `tick` of an epoch."""
        return self.batch_size if self.rows is None else min(self.batch_size, self.rows - tick * self.batch_size)


def reading_plan(task: Task, source: Source, workers: int) -> ReadingPlan:
    """Raises BadInput for fewer than one row a worker. The user's own batch samplers count as equally large batches."""
    size = global_batch(task, workers, source.batch_size)
    feed = Feed(source, size=workers, batch_size=size, seed=task.seed, shuffle=task.shuffle, order=task.order)
    if feed.rows is None or feed.ticks is None:
        return ReadingPlan(batch_size=size, rows=None, ticks=None)
    even = -(-feed.rows // size) == feed.ticks
    size = size if even else -(-feed.rows // feed.ticks)
    return ReadingPlan(batch_size=size, rows=feed.rows, ticks=-(-feed.rows // size))
