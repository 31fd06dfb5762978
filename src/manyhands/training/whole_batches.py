"""`Task(batches="whole")`: a step's loss is computed of the whole batch, and each worker computes its rows of its models' calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor
from typing_extensions import override

from manyhands.data.batch import columns, map_columns, rows_of
from manyhands.engines.base import Engine
from manyhands.errors import Unsupported
from manyhands.own_loop.batches import WHOLE, batches_of
from manyhands.own_loop.whole.layout import RowLayout
from manyhands.own_loop.whole.lazy import ShardedOutput
from manyhands.own_loop.whole.script import WholeScript
from manyhands.replica.executor import Allocate, AutogradExecutor, StepLoss
from manyhands.strategies.base import Strategy
from manyhands.task import Evaluate, Metrics, Summed, Task, named
from manyhands.worker import Worker


def check_together(
    task: Task, strategy: Strategy, engine: Engine, *, partition: str, members_change: bool, stages: bool
) -> None:
    """Unsupported where a task's batches are whole, or its batch normalization is of all rows, and its workers cannot
    compute one batch together.

    members_change: a run may go on without a worker that is lost. stages: several workers hold a replica.
    """
    if task.batches == WHOLE:
        batches_of(task.batches, strategy)
        option, why = f"batches={WHOLE}", _not_whole(engine, partition)
    elif task.sync_batch_norm:
        option, why = "sync_batch_norm=True", _not_synchronized(strategy, engine)
    else:
        return
    if task.kernel is not None or task.executor is not None:
        why = (
            "the task makes its steps by a kernel or an executor of its own, and not by calls of a model: leave it out"
        )
    elif task.micro_batch_size is not None:
        why = "with micro_batch_size a step has several losses, each of a part of the batch: leave it out"
    elif not why and members_change:
        why = 'a batch of all workers ends with any of them: give max_restarts alone (survive="max_restarts=3")'
    elif not why and stages:
        why = "with model_parallel a model has stages in several workers: leave one of them out"
    if why:
        raise Unsupported(f"{option}: {why}")


def _not_synchronized(strategy: Strategy, engine: Engine) -> str:
    if engine.capabilities.simulated:
        return f"on engine {engine.name} no worker can wait for others within a backward: use engine local"
    if not strategy.needs.mean_gradient or strategy.leasing() is not None:
        return f"with strategy {strategy.name} workers do not make each step together: use allreduce"
    return ""


def _not_whole(engine: Engine, partition: str) -> str:
    if engine.capabilities.simulated:
        return f"engine {engine.name} runs all workers in this process, whose functions of torch are not each worker's own: use engine local"
    if partition != "none":
        return f"with partition={partition} each worker has rows of its own, and not its part of a batch of all: leave it out"
    return ""


class WholeBatchExecutor(AutogradExecutor):
    """Of a batch this worker gets its rows, and sees all: `loss` and `evaluate` get a batch that is gathered where they look.

    Their numbers are one process's, so every worker finds the same ones; gradients are of its rows, times N.
    """

    computes_together = True

    def __init__(self, worker: Worker, **how: Any) -> None:
        """how: as of AutogradExecutor."""
        super().__init__(**how)
        self._script = WholeScript(worker, counts_steps=False)
        self._workers = self._script.workers
        self._no_rows: Any = None  # a batch without rows, once there was one with some

    @override
    def build(self, allocate: Allocate) -> None:
        super().build(allocate)
        self._script.average_elsewhere(p for shard in self.shards for p in shard.layout.parameters)

    @override
    def backward(self, batch: Any | None) -> StepLoss:
        with self._computing(batch) as whole:
            found = super().backward(whole)
        return replace(found, weight=found.weight / self._workers.size)

    @override
    def evaluate(self, function: Evaluate, batch: Any) -> Metrics:
        """Of a batch of which others may have all rows: then `batch` is None. What is `Summed`, worker 0 alone returns."""
        with self._computing(batch) as whole:
            found = {} if whole is None else super().evaluate(function, whole)
        return {name: one for name, one in found.items() if not self._workers.rank or not isinstance(one, Summed)}

    @override
    def close(self) -> None:
        self._script.tell_costs()
        super().close()

    @contextmanager
    def _computing(self, batch: Any | None) -> Iterator[Any | None]:
        """Within, calls of modules are cut. The whole batch, None where no worker has rows. A collective."""
        own = 0 if batch is None else rows_of(batch)
        kinds = [f"{path} {list(one.shape[1:])} {one.dtype}" for path, one in columns(batch) if isinstance(one, Tensor)]
        everyone = self._workers.group.all_gather_json([own, kinds if own else None])
        rows, found = sum(count for count, _ in everyone), [kinds for _, kinds in everyone if kinds is not None]
        if any(kinds != found[0] for kinds in found):
            raise Unsupported(
                f"batches={WHOLE}: the workers' rows of a batch are not of one shape ({found[0]} and others): each worker collates its own, so pad to a fixed length"
            )
        try:
            with self._script.within():
                yield self._seen_whole(batch, rows) if rows else None
        finally:
            self._workers.group.line = 0

    def _seen_whole(self, batch: Any | None, rows: int) -> Any:
        if batch is not None:
            self._no_rows = map_columns(batch, lambda column: column[:0])
        elif self._no_rows is None:
            raise Unsupported(
                f"batches={WHOLE}: the first batch has fewer rows ({rows}) than there are workers: use fewer workers, or larger batches"
            )
        own = self._no_rows if batch is None else batch
        for path, column in columns(own):
            if not isinstance(column, Tensor):
                raise Unsupported(
                    f"batches={WHOLE} takes batches of tensors, which workers can put together, and {path or 'this one'} is {named(column)}: make it a tensor in collate"
                )
        return map_columns(own, lambda column: ShardedOutput.of(column, RowLayout(0, rows), self._workers))
