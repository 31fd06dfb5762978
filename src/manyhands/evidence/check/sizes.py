"""Which batches a proof takes: the task's own, and some that do not divide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from manyhands.data.source import Indexed
from manyhands.errors import BadInput
from manyhands.evidence.check.reading import feed_of, source_of
from manyhands.evidence.check.trial_config import TrialConfig
from manyhands.task import Task
from manyhands.training.plan import global_batch

LEAST_BATCHES = 3
"""In an epoch of the proof: with fewer, all steps see the same rows."""
FULL_BATCHES = 2
"""Of an uneven epoch, before its last."""


def even(task: Task, workers: int, steps: int) -> TrialConfig:
    """The task's own batch size, less where rows are few. Raises BadInput where it cannot be."""
    source = source_of(task)
    size = global_batch(task, workers, source.batch_size)
    explicit = task.with_fields(batch_size=size) if _sized(task, source.batch_size) else task
    feed = feed_of(explicit)
    total = _total_steps(explicit, feed.ticks, steps)
    if isinstance(source, Indexed) and feed.rows is not None and feed.rows < LEAST_BATCHES * size:
        size = max(workers, feed.rows // LEAST_BATCHES)
    return TrialConfig(steps=steps, batch_size=size if explicit is not task else None, total_steps=total)


def uneven(task: Task, workers: int, setting: TrialConfig, one_row: Callable[[], bool]) -> TrialConfig | None:
    """A batch size that does not divide by the workers and, where rows are numbered, an epoch that ends with a single row.

    one_row: whether the task stands that. None where the data has batches of its own that cannot be cut otherwise.
    """
    source = source_of(task)
    own = setting.batch_size or source.batch_size
    if own is None:
        return None
    size = next(b for b in (own - 1, own + 1, own - 2, own + 2) if b >= workers and b % workers)
    try:
        rows = feed_of(task.with_fields(batch_size=size)).rows
    except BadInput:
        return None
    cut = replace(setting, batch_size=size)
    if rows is None or not isinstance(source, Indexed):
        return cut
    if rows <= size or not one_row():
        return cut
    return replace(cut, rows=min(FULL_BATCHES, (rows - 1) // size) * size + 1, of_rows=source.rows)


def _sized(task: Task, own: int | None) -> bool:
    """Whether the batch size is said, or there is none that the data has by itself."""
    return task.batch_size is not None or task.batch_size_per_worker is not None or own is None


def _total_steps(task: Task, ticks: int | None, steps: int) -> int | None:
    """Of the whole training, as its schedule is told; at least those of the proof."""
    sized = None if ticks is None else ticks * task.epochs
    total = min((n for n in (sized, task.max_steps) if n is not None), default=None)
    if total is None and task.schedule is not None:
        raise BadInput("a schedule needs the number of steps, and a stream has no length: give max_steps")
    return None if total is None else max(total, steps)
