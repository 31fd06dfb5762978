"""What a worker of a training run gets, its position in the training, and what it returns."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from manyhands import rng
from manyhands.checkpoint.checkpoints import Checkpoint
from manyhands.checkpoint.launch_lock import Claim
from manyhands.checkpoint.paths import AnyPath
from manyhands.data.feed import Feed
from manyhands.data.open_source import open_source
from manyhands.data.strata import KeyBlocks, Strata, count_keys
from manyhands.errors import BadInput
from manyhands.own_loop.batches import WHOLE
from manyhands.parallel.spec import ModelParallel
from manyhands.parallel.staged import staged
from manyhands.replica.block_executor import BlockExecutor, two_fields
from manyhands.replica.executor import AutogradExecutor, StepExecutor
from manyhands.replica.kernel_executor import KernelExecutor
from manyhands.replica.shard import ParameterShard
from manyhands.strategies.base import Strategy
from manyhands.task import Task
from manyhands.training.best_model import KEEP_LAST, BestModelPolicy
from manyhands.training.whole_batches import WholeBatchExecutor
from manyhands.worker import Worker


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """What each worker of a training run gets: the task, the strategy and the settings of the run."""

    task: Task
    strategy: Strategy
    validate_every: str | int = "epoch"
    checkpoint_every: str | int = "epoch"
    check_replicas_every: int | None = None
    keep: BestModelPolicy = KEEP_LAST
    nonfinite: str = "raise"
    partition: str = "none"
    model_parallel: ModelParallel | None = None
    predicted: Mapping[str, Any] | None = None  # by the plan that chose it: see `plans.predicted_of`
    max_seconds: float | None = None
    checkpoints: AnyPath | None = None  # the folder; None: write none
    resume_from: Checkpoint | None = None
    claim: Claim | None = None  # of this launch on the run directory
    every_rank_returns: bool = (
        False  # every rank is a driver of its own (torchrun, a script's train()) and gets the answer
    )
    finished: bool = False  # rank 0 found a finished run: nobody trains

    def copy_for_thread(self) -> WorkerPlan:
        """The same for one of several workers of a process: modules are its own where the task holds any, and no
        processes load its rows."""
        task = self.task.with_fields(loader_processes=0) if self.task.loader_processes else self.task
        for name in ("loss", "evaluate"):
            if isinstance(module := getattr(task, name), nn.Module):
                task = task.with_fields(**{name: copy.deepcopy(module)})
        make = task.model
        if isinstance(make, nn.Module):
            task = task.with_fields(model=copy.deepcopy(make))
        elif (
            self.model_parallel is None and task.kernel is None
        ):  # a function may give the same module each time; `build` sees that by itself
            task = task.with_fields(model=lambda: copy.deepcopy(make()))
        return replace(self, task=task)


State = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]
"""By name: the trainable parameters, the buffers, and for a run directory the rest of the model's state_dict (frozen
parameters, further names of tied ones)."""


@dataclass(kw_only=True)
class Outcome:
    """What each worker returns. The same on all ranks, except `states`, which are empty where nobody needs them."""

    states: list[State]  # the answer's; an ensemble's, one a member; none of a preempted run whose workers hold parts
    file: str  # of the run directory, which the workers wrote: `states` has what it lacks. "": they wrote none
    saved: list[str]  # the names in the model's state_dict
    metrics: dict[str, float]
    workers: list[dict[str, Any]]  # by rank: rows, unused, ledger, memory
    steps: int
    ticks: int
    rounds: int
    reason: str  # why it stopped before the end, or ""
    seconds: float  # since this worker began, on its clock
    facts: dict[str, Any]
    callback_result: Any = None  # of worker 0's callback


@dataclass
class TrainingPosition:
    """Where the loop stands; JSON in a checkpoint."""

    epoch: int = 0
    epoch_tick: int = 0  # ticks done in this epoch
    tick: int = 0  # global batches done in the run
    local_steps: int = 0  # this worker's, in the run
    left: list[list[int]] | None = None  # of an epoch that was stopped half way at the workers' own pace: see Segment
    parts: int = 0  # slices of a global batch in that epoch
    until: int = 0  # where that segment was to end
    rows: int = 0
    unused: int = 0
    rounds: int = 0
    shards: dict[str, Any] | None = None  # of an epoch of shards that nobody has counted: ShardPositions


def cut_keys(plan: WorkerPlan, worker: Worker) -> KeyBlocks | None:
    """How the strategy cuts the keys of the training data; None: it cuts nothing.

    Raises Unsupported for a kernel whose tables are not named by two fields, BadInput for more blocks than keys.
    """
    task, blocks = plan.task, plan.strategy.blocks_of(worker.size)
    if not blocks or task.kernel is None:
        return None
    rows = two_fields(task.kernel)
    if blocks > min(rows.values()):
        listed = ", ".join(f"{field} {count:,}" for field, count in rows.items())
        raise BadInput(
            f"strategy {plan.strategy.name}: {blocks} blocks are more than there are keys ({listed}): give fewer blocks, or use fewer workers"
        )
    source = open_source(task.train_data, collate=task.collate, loader_processes=task.loader_processes)
    return KeyBlocks.of(count_keys(source, rows, partial(task.kernel.prepare, random=0)), blocks, task.seed)


def make_feed(
    plan: WorkerPlan,
    worker: Worker,
    data: Any,
    shard: tuple[int, int],
    *,
    train: bool,
    blocks: KeyBlocks | None = None,
) -> Feed:
    """Of a worker's slices of data. shard: its number among those who share the rows, and how many these are. blocks: the
    rows come in cells of these."""
    (rank, size), task = shard, plan.task
    source = open_source(data, collate=task.collate, loader_processes=task.loader_processes)
    own = source.batch_size if not train else None  # a validation loader's batches have nothing to do with a step's
    in_step = train and plan.strategy.leasing() is None
    if blocks is not None:
        assert task.kernel is not None
        source = Strata(source, blocks, partial(task.kernel.prepare, random=0), rank, size)
        own = source.batch_size
    return Feed(
        source,
        rank=rank,
        size=size,
        batch_size=own or global_batch(task, size, source.batch_size),
        seed=task.seed,
        shuffle=train and task.shuffle,
        order=task.order if train else None,
        partition=plan.partition if train else "none",
        device=worker.device,
        threads=not worker.shares_process,
        keeps=in_step and worker.elastic,
        # else each is at a batch of its own, somebody reads what others read, or all have the same loader
        states=in_step and not (worker.elastic or worker.shares_process) and plan.checkpoints is not None,
    )


def first_rows(plan: WorkerPlan, worker: Worker, shard: tuple[int, int]) -> Any:
    """The first training batch that a worker would get, read apart from all training."""
    with closing(make_feed(plan, worker, plan.task.train_data, shard, train=False).epoch(0)) as slices:
        return next(slices).batch


def build_model(task: Task) -> nn.Module:
    """The task's module, or what its function builds under the current seed."""
    model = task.model if isinstance(task.model, nn.Module) else task.model()
    if not isinstance(model, nn.Module):
        raise BadInput(f"model must be an nn.Module or a function that returns one; it returned {type(model).__name__}")
    return model


def make_executor(
    task: Task,
    worker: Worker,
    model_parallel: ModelParallel | None = None,
    first_rows: Callable[[], Any] = lambda: None,
    blocks: KeyBlocks | None = None,
) -> StepExecutor:
    """What makes this worker's steps: the task's own, its kernel, a stage of its model, or autograd with its optimizer.

    first_rows: gives a batch of this worker's rows, on which a model is traced that is to be cut. blocks: into which the
    tables of a kernel are cut.
    """
    if task.executor is not None:
        executor: StepExecutor = task.executor(task, worker)
        return executor
    if task.kernel is not None and blocks is not None:
        assert task.rate is not None
        beside = not worker.shares_process
        return BlockExecutor(task.kernel, int(task.seed), task.rate, blocks, worker.mesh.model, beside=beside)
    if task.kernel is not None:
        return KernelExecutor(task.model, task.optimizer)
    if model_parallel is not None:
        return staged(task, worker, model_parallel, first_rows)
    how: dict[str, Any] = {
        "model": lambda: build_model(task).to(worker.device),
        "optimizer": task.optimizer,
        "loss": task.loss,
        "precision": task.precision,
        "micro_batch_size": task.micro_batch_size,
    }
    if task.batches == WHOLE and worker.size > 1:
        return WholeBatchExecutor(worker, **how)
    group = worker.mesh.data
    return AutogradExecutor(**how, statistics=group if task.sync_batch_norm and group.size > 1 else None)


def check_executor(task: Task, shards: Sequence[ParameterShard]) -> None:
    """Raise BadInput where a task's own executor has other parameters than the task's model, which holds the answer."""
    if task.executor is None:
        return
    with rng.kept():
        known = {name: tuple(p.shape) for name, p in build_model(task).named_parameters() if p.requires_grad}
    found = {name: part.shape for shard in shards for name, part in shard.slices.items()}
    if wrong := [name for name, shape in found.items() if known.get(name) != shape]:
        there = f"has the shape {list(known[wrong[0]])}" if wrong[0] in known else "does not exist"
        raise BadInput(
            f"the executor's parameters must be parameters of the task's model, or slices of them, and {wrong[0]} of "
            f"shape {list(found[wrong[0]])} is not (in the model it {there}): give parameters of the same name and shape"
        )


def global_batch(task: Task, workers: int, own: int | None = None) -> int:
    """Rows of a global batch: as given, per worker times workers, a DataLoader's own, or 64."""
    size = task.batch_size or (task.batch_size_per_worker or 0) * workers or own or 64
    if size < workers:
        raise BadInput(
            f"batch_size={size} leaves some of the {workers} workers without a row: raise batch_size to at least "
            f"{workers}, or use fewer workers"
        )
    return size
