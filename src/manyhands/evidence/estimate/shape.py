"""What of the real model, optimizer and data decides what a step takes: lengths, not values."""

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
from manyhands.replica.layout import Layout
from manyhands.replica.replica import Replica
from manyhands.task import Task
from manyhands.training.plan import build_model, global_batch

Matrix = tuple[int, int, int]  # where it begins in the flat vector [D'], its rows, its columns


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of one replica."""

    numbers: int  # D: trainable
    padded: int  # D': of the flat vector, which is what travels
    dtype: torch.dtype
    parameters: int  # how many tensors they are
    matrices: tuple[Matrix, ...]  # those of two or more dimensions, in the vector's order
    slices: tuple[int, ...]  # numbers of the slices in which gradients become ready
    state: Mapping[str, Any]
    """What the optimizer keeps for the largest parameter, by name: a tensor like it, or a number."""
    largest: torch.Size  # that parameter's

    @property
    def item(self) -> int:
        """Bytes of a number."""
        return self.dtype.itemsize


def shape_of(task: Task) -> Shape:
    """Build the task's model once, and step its optimizer with a gradient of zeros, to see what it keeps.

    Takes the memory of one replica. A given module, and the random state, are left as they are. Raises BadInput for what
    `train` would refuse.
    """
    with rng.kept():
        given = task.with_fields(model=copy.deepcopy(task.model)) if isinstance(task.model, nn.Module) else task
        model = build_model(given).to("cpu")
        replica = Replica(model, task.optimizer, group=SoloGroup(), loss=task.loss)
        _step(replica)
        slices = _slices(replica)
    layout = replica.layout
    largest = max(layout.parameters, key=Tensor.numel)
    state = {name: _like(value) for name, value in replica.optimizer.state.get(largest, {}).items()}
    return Shape(
        numbers=layout.size,
        padded=layout.padded,
        dtype=layout.dtype,
        parameters=len(layout.names),
        matrices=_matrices(layout),
        slices=slices,
        state=state,
        largest=largest.shape,
    )


def _step(replica: Replica) -> None:
    replica.begin_tick()
    for parameter, view in zip(replica.layout.parameters, replica.layout.views(replica.gradients), strict=True):
        parameter.grad = view
    replica.collect()
    replica.weight = 1.0
    replica.apply()


def _slices(replica: Replica) -> tuple[int, ...]:
    lengths: list[int] = []
    replica.on_ready(lambda gradients: lengths.append(len(gradients)))
    replica.begin_tick()
    replica.backward(None)
    return tuple(lengths)


def _matrices(layout: Layout) -> tuple[Matrix, ...]:
    """As they lie in memory: the outermost dimension is the rows."""
    found = []
    for start, shape, stride in zip(layout.offsets, layout.shapes, layout.strides, strict=True):
        if len(shape) > 1 and shape.numel():
            rows = max(zip(stride, shape, strict=True))[1]
            found.append((start, rows, shape.numel() // rows))
    return tuple(found)


def _like(value: Any) -> Any:
    """The same without memory, where it is a tensor."""
    return value.to("meta") if isinstance(value, Tensor) else value


@dataclass(frozen=True, kw_only=True)
class ReadingPlan:
    """The data as so many workers read it."""

    batch_size: int  # global rows
    rows: int | None  # an epoch; None: a stream, whose end nobody knows
    ticks: int | None  # global batches an epoch

    def steps(self, task: Task) -> int | None:
        """Global batches in the whole training; None where nobody knows."""
        sized = None if self.ticks is None else self.ticks * task.epochs
        return min((n for n in (sized, task.max_steps) if n is not None), default=None)

    def rows_of(self, tick: int) -> int:
        """Of global batch `tick` of an epoch."""
        return self.batch_size if self.rows is None else min(self.batch_size, self.rows - tick * self.batch_size)


def reading_plan(task: Task, source: Source, workers: int) -> ReadingPlan:
    """Raises BadInput for fewer than one row a worker.

    Batches of a sampler of the user's own, which may differ, count as equally large.
    """
    size = global_batch(task, workers, source.batch_size)
    feed = Feed(source, size=workers, batch_size=size, seed=task.seed, shuffle=task.shuffle, order=task.order)
    if feed.rows is None or feed.ticks is None:
        return ReadingPlan(batch_size=size, rows=None, ticks=None)
    even = -(-feed.rows // size) == feed.ticks
    size = size if even else -(-feed.rows // feed.ticks)
    return ReadingPlan(batch_size=size, rows=feed.rows, ticks=-(-feed.rows // size))
