"""The arguments of train(), resolved to objects and checked before anything starts."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from manyhands import units
from manyhands.checkpoint.paths import AnyPath
from manyhands.data.dataframe_rows import DistributedFrame
from manyhands.data.feed import check_kind, check_partition
from manyhands.data.open_source import is_function, open_source
from manyhands.data.source import Unsized
from manyhands.data.strata import no_cells_of_a_stream
from manyhands.engines.base import Engine, check_brings, check_count, check_seconds, check_threads
from manyhands.engines.single_process import pick_device
from manyhands.engines.survive import Survive
from manyhands.engines.torchrun.launchers import restart_count
from manyhands.errors import BadInput, UnknownName, Unsupported, is_number, is_whole
from manyhands.own_loop.argument_checks import check_launch
from manyhands.parallel.spec import ModelParallel
from manyhands.parallel.trace import check_not_compiled
from manyhands.replica.block_executor import two_fields
from manyhands.replica.layout import layouts_of
from manyhands.server.base import ServerSpec
from manyhands.strategies import CATALOGUE, strategy_of
from manyhands.strategies.base import Strategy
from manyhands.task import Task, check_fields
from manyhands.tasks.finding import task_of
from manyhands.training.best_model import BestModelPolicy
from manyhands.training.loop import own_pace_on_a_stream
from manyhands.training.plan import global_batch
from manyhands.training.whole_batches import check_together


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The arguments of train(), resolved to objects."""

    task: Task
    strategy: Strategy
    engine: Engine
    workers: int | None
    directory: AnyPath | None
    survive: Survive | None = None
    partition: str = "none"
    model_parallel: ModelParallel | None = None

    @property
    def replicas(self) -> int:
        """How many copies of the model there are."""
        return self.count // (self.model_parallel.workers if self.model_parallel is not None else 1)

    @property
    def server(self) -> ServerSpec | None:
        """The strategy's, with a center for each part of a replica; None: it has none."""
        spec, parallel = self.strategy.server(), self.model_parallel
        return spec if spec is None or parallel is None else replace(spec, coordinates=parallel.workers)

    @property
    def count(self) -> int:
        if self.workers is not None:
            return self.workers
        return self.engine.default_workers()

    @property
    def spmd(self) -> bool:
        """Every rank makes this call: one program on several processes."""
        return self.engine.capabilities.spmd and self.count > 1

    @property
    def started_again(self) -> bool:
        """Whether the launcher has started all workers again, to go on from the newest checkpoint."""
        return self.spmd and self.survive is not None and self.survive.max_restarts > 0 and restart_count() > 0

    @property
    def owns_run_dir(self) -> bool:
        """Whether this process writes the run directory."""
        return not self.spmd or self.engine.own_rank() == 0

    def check(self, *, servers: int, nonfinite: str, max_seconds: float | None, timeout_s: float, resume: bool) -> None:
        """Raise BadInput for what cannot be, before anything starts."""
        if self.workers is not None:
            check_count("workers", self.workers)
        check_count("servers", servers)
        if nonfinite not in ("raise", "skip"):
            raise BadInput(f'nonfinite must be "raise" or "skip", not {nonfinite!r}')
        check_kind(self.partition)
        check_seconds("timeout_s", timeout_s)
        if max_seconds is not None and not (is_number(max_seconds) and 0 < max_seconds < math.inf):
            raise BadInput(f"max_seconds must be a positive number of seconds, not {max_seconds!r}")
        if resume and self.directory is None:
            raise BadInput("resume needs a run directory: give run_dir (--run-dir)")
        check_launch(self.strategy, self.engine, self.count, servers)
        self._check_kernel()
        self.check_model_parallel()
        self._check_worker_callback()
        batch_size, stream = self._check_data()
        if stream and self.strategy.needs.kernel:
            raise Unsupported(no_cells_of_a_stream(self.strategy.name))
        self._check_micro_batches(batch_size)
        self._check_survive(batch_size, stream)
        stages = self.model_parallel is not None
        changing = self.survive is not None and not self.survive.restarts_only
        check_together(
            self.task, self.strategy, self.engine, partition=self.partition, members_change=changing, stages=stages
        )

    def _check_kernel(self) -> None:
        """That the strategy trains a kernel, where the task has one."""
        kernel, strategy = self.task.kernel, self.strategy
        if kernel is None:
            if strategy.needs.kernel:
                raise Unsupported(
                    f"strategy {strategy.name} cuts the tables of a kernel, and this task has a model: give a task with kernel=, such as factors, or use allreduce"
                )
            return
        if strategy.needs.kernel:
            two_fields(kernel)
            if self.task.evaluate is not None:
                raise Unsupported(
                    f"strategy {strategy.name}: no worker holds a whole model for evaluate(model, batch): leave it out, and the kernel measures"
                )
        if why := strategy.exchanges_gradients():
            others = [strategy_of(name) for name in CATALOGUE]
            able = [
                one.name
                for one in others
                if not one.exchanges_gradients() and one.needs.one_model and not one.needs.one_worker
            ]
            raise Unsupported(
                f"strategy {strategy.name} {why}, and kernel {kernel.name} moves its tables without any: use one that exchanges parameters or updates "
                f"({', '.join(able)})"
            )
        if not strategy.needs.one_model and self.task.evaluate is None:
            raise Unsupported(
                f"strategy {strategy.name} averages the outputs of several models, and what kernel {kernel.name} measures is of one: give the task a function "
                "evaluate(model, batch), whose model.members they are, or use another strategy"
            )
        if self.model_parallel is not None:
            raise Unsupported(
                f"model_parallel: kernel {kernel.name} is no torch model with stages: leave model_parallel out; strategy rotate cuts the tables of a kernel"
            )

    def check_model_parallel(self) -> None:
        """That a replica may span several workers."""
        spec, strategy, task = self.model_parallel, self.strategy, self.task
        if spec is None:
            return
        spec.check(self.count)
        if why := strategy.whole_replicas():
            raise Unsupported(
                f"model_parallel: strategy {strategy.name} takes replicas of one worker each, because {why}; else use plain allreduce, local-sgd or diloco, or leave "
                "model_parallel out"
            )
        if self.engine.capabilities.simulated and spec.workers > 1 and strategy.server() is not None:
            raise Unsupported(
                f"model_parallel: the server of engine {self.engine.name} does not hold a center for each stage yet: use engine local or hosts, or a strategy "
                "over the group"
            )
        if task.executor is not None or task.worker_callback is not None:
            raise Unsupported(
                "model_parallel: the task makes its steps by an executor or a callback of its own, as Keras models do, and stages are spans of a torch model: leave model_parallel out"
            )
        if isinstance(task.model, nn.Module):
            check_not_compiled(task.model)
        self._check_lost_replicas(spec)

    def _check_lost_replicas(self, spec: ModelParallel) -> None:
        """That a run may go on without a replica of several workers, where it is to."""
        survive, strategy, members = self.survive, self.strategy, spec.workers
        if survive is None or survive.restarts_only:
            return
        if members > 1 and not (strategy.needs.mean_gradient and not strategy.compresses()):
            raise Unsupported(
                f"model_parallel: replicas of several workers that may be lost make each step together, and strategy {strategy.name} does not, or "
                'compresses: use plain allreduce, or give max_restarts alone (survive="max_restarts=3")'
            )
        if members > 1 and self.engine.capabilities.simulated:
            raise Unsupported(
                f"model_parallel: engine {self.engine.name} does not play lost replicas of several workers yet: use engine local or hosts, or give max_restarts alone"
            )
        if survive.max_workers is not None and survive.max_workers % members:
            raise BadInput(
                f"model_parallel: max_workers={survive.max_workers} are no whole replicas of {members} workers: give a multiple of {members}"
            )

    def _check_micro_batches(self, batch_size: int) -> None:
        """That each of a replica's micro-batches has a row."""
        wanted = None if self.model_parallel is None else self.model_parallel.micro_batches
        most = -(-batch_size // self.replicas)
        if wanted is not None and wanted > most:
            raise BadInput(
                f"model_parallel: micro_batches={wanted} is more than the {units.count(most, 'row')} that a replica gets of a global batch: give at most {most}, "
                "or raise batch_size"
            )

    def _check_survive(self, batch_size: int, stream: bool) -> None:
        """That the run can go on as it is to. stream: the training data is one; a function's is known to workers alone."""
        survive, strategy, engine = self.survive, self.strategy, self.engine
        if survive is None:
            return
        survive.check(self.count, batch_size, strategy.server() is not None)
        if survive.max_restarts and self.directory is None:
            raise BadInput(
                "survive: max_restarts starts the run again from its newest checkpoint, and without a run directory "
                "there is none: give run_dir (--run-dir)"
            )
        if survive.restarts_only:
            return
        if not engine.capabilities.survives:
            raise Unsupported(
                f"survive: engine {engine.name} cannot go on without a worker that is lost: use engine local or hosts, or give "
                'max_restarts alone (survive="max_restarts=3"), which starts the whole run again from its newest checkpoint'
            )
        if survive.copies > 1 and not engine.capabilities.copies:
            raise Unsupported(
                f"survive: engine {engine.name} keeps no copies of server shards yet: use engine local or hosts, or leave copies out"
            )
        if survive.copies > 1 and survive.max_losses == 0:
            if survive.max_workers not in (None, self.count):
                raise Unsupported(
                    f"survive: with copies={survive.copies} and max_losses=0 the run keeps its {self.count} workers; got "
                    f"max_workers={survive.max_workers}: leave it out"
                )
            if why := strategy.fixed_shards():
                raise Unsupported(
                    f"survive: strategy {strategy.name} cannot go on without a shard that is lost, because {why}: leave overlap "
                    "out, or give max_restarts alone"
                )
            return  # all workers stay
        if self.partition == "fixed":
            raise Unsupported(
                "survive: with partition=fixed each worker has rows of its own, and nobody else would train those of one that is lost: leave "
                "partition out, or give max_restarts alone, which starts the whole run again from its newest checkpoint"
            )
        if why := strategy.fixed_members():
            raise Unsupported(
                f"survive: strategy {strategy.name} cannot go on without a worker that is lost, because {why}: use "
                "plain allreduce, leave such options out, or give max_restarts alone, which starts the whole run again from its newest checkpoint"
            )
        if survive.max_workers not in (None, self.count) and (why := strategy.fixed_places()):
            raise Unsupported(
                f"survive: strategy {strategy.name} takes no more than the {self.count} workers with which it starts, because "
                f"{why}; got max_workers={survive.max_workers}: leave it out, or start with as many"
            )
        if stream and strategy.leasing() is not None:
            raise Unsupported(own_pace_on_a_stream(strategy.name))
        if strategy.needs.one_host and not engine.capabilities.one_host:
            raise Unsupported(
                f"survive: the workers of strategy {strategy.name} share memory, and hosts may join a run on engine "
                f"{engine.name}: use engine local, or give max_restarts alone"
            )
        if self.task.worker_callback is not None:
            raise Unsupported(
                "survive: the task has a callback on each worker, as Keras models do, and what it remembers is lost "
                "with its worker: give max_restarts alone, which starts the whole run again from its newest checkpoint"
            )

    def _check_worker_callback(self) -> None:
        if self.task.worker_callback is not None:
            self.task.worker_callback.check(self.strategy.needs.one_model)

    def _check_data(self) -> tuple[int, bool]:
        """Open the data on the driver, except functions, which only workers call; the global batch size, checked, and
        whether the training data is a stream."""
        if isinstance(self.task.model, nn.Module):
            layouts_of(self.task.model)  # raises for parameters that cannot be trained
        own, stream = None, False
        for data in (self.task.train_data, self.task.validation_data, self.task.test_data):
            if isinstance(data, DistributedFrame):
                check_brings(self.engine)
            elif data is not None and not is_function(data):
                source = open_source(data, collate=self.task.collate, loader_processes=self.task.loader_processes)
                if data is self.task.train_data:
                    own, stream = source.batch_size, isinstance(source, Unsized)
                    if self.partition == "fixed":
                        check_partition(source, self.replicas, self.task.order is not None)
        return global_batch(self.task, self.replicas, own), stream


def default_strategy(task: Task, engine: Engine, workers: int | None) -> str:
    """What trains a task where nothing is said: the result of one process, or what goes with a kernel."""
    count = engine.default_workers() if workers is None else workers
    if task.kernel is None:
        return "allreduce"
    if count == 1:
        return "solo"
    return "hogwild" if is_whole(count) and engine.on_one_host(count) else "local-sgd"


def task_from(task: Task | str | None, task_fields: dict[str, Any]) -> Task:
    if isinstance(task, str):
        task = task_of(task)
    if isinstance(task, Task):
        return task.with_fields(**task_fields)
    if task is not None:
        raise BadInput(
            f"task must be a Task, a string such as 'digits' or 'my.py:task', or None; got {type(task).__name__}"
        )
    check_fields(task_fields)
    needed = ("kernel", "rate") if "kernel" in task_fields else ("model", "loss", "optimizer")
    missing = [name for name in (*needed, "train_data") if name not in task_fields]
    if missing:
        raise BadInput(
            f"nothing to train: {', '.join(missing)} missing; give a task, or its fields (model=, loss=, optimizer=, train_data=, or kernel=, rate=, "
            "train_data=)"
        )
    return Task(**task_fields)


def check_resources(device: str, threads: int | None, engine: Engine) -> None:
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", str(device)):
        raise UnknownName(f"no device {device!r}: give auto, cpu, cuda (each worker its own GPU) or cuda:0")
    if device not in ("auto", "cpu") and engine.capabilities.one_host:  # workers see the GPUs that this process sees
        pick_device(device, 0)
    check_threads(threads)


def every(name: str, value: str | int) -> str | int:
    if isinstance(value, str | int) and (value == "epoch" or is_whole(value)):
        return value
    raise BadInput(f'{name} must be "epoch" or a number of steps of at least 1, not {value!r}')


def checks_of(steps: int | None, strategy: Strategy) -> int | None:
    """Raises BadInput for what is no number of steps, Unsupported for a strategy that never promises equal replicas."""
    if steps is None:
        return None
    check_count("check_replicas_every", steps)
    if type(strategy).agreed is Strategy.agreed and not strategy.needs.mean_gradient:
        raise Unsupported(
            f"strategy {strategy.name} does not keep replicas equal, so there is nothing to compare: leave check_replicas_every out, "
            "or use one that does (allreduce, local-sgd, diloco, quorum)"
        )
    return steps


def keep_of(text: str, task: Task) -> BestModelPolicy:
    keep = BestModelPolicy.parse(text)
    if keep.metric and task.validation_data is None:
        raise BadInput(f"keep={text!r} needs validation_data to judge by: give the task some, or keep the last")
    return keep
