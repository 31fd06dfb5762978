"""What an executor of a Spark cluster needs for its workers: vectors counted, the rest measured on two workers here.

A worker of N holds what one of two does, with the rows of a worker of N. Only what depends on the number of workers is
computed: how much of the others' shared memory a worker maps, and what a server shard and a codec keep for each worker.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyhands import rng
from manyhands.comm.codecs import codec_of
from manyhands.comm.codecs.base import LinearCodec
from manyhands.comm.codecs.powersgd import PowerSGD
from manyhands.data.dataframe_rows import DistributedFrame
from manyhands.data.open_source import open_source
from manyhands.engines import engine_of
from manyhands.engines.base import Engine, LaunchSpec, check_count
from manyhands.engines.local.engine import Local
from manyhands.engines.spark.engine import Spark
from manyhands.errors import BadInput, Unsupported
from manyhands.evidence.estimate.message_lengths import codec_named, payload_bytes
from manyhands.evidence.estimate.model_sizes import reading_plan, shape_of
from manyhands.process_memory import resident
from manyhands.replica.flat_vector import nbytes, tensors_in
from manyhands.strategies import spec_of, strategy_of
from manyhands.strategies.base import Strategy
from manyhands.strategies.quorum import Quorum
from manyhands.task import Task, check_differentiable
from manyhands.training.config import TrainConfig, task_from
from manyhands.training.joining import join
from manyhands.training.loop import peak_bytes
from manyhands.training.plan import WorkerPlan, global_batch
from manyhands.training.worker_main import make_loop
from manyhands.worker import Worker

FORMAT = 1
HEAP_MB = 1024  # spark.executor.memory's own default
MARGIN = 0.1
_MEASURED = 2  # workers
_STEPS = 4  # that are measured; the last one ends an open window
_NEVER = 1 << 40
_START_S = 300
_MB = 1 << 20
_SPARK_TASK = (
    "import pyspark.worker, pandas, pyarrow.compute, manyhands.engines.spark.stage, resource; "
    "print(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of an executor's memory."""

    name: str
    bytes: int
    """Of one."""
    count: int = 1
    """So many in an executor."""
    how: str
    """`counted`, `measured`, or the setting or rule that it follows from."""

    @property
    def total(self) -> int:
        return self.bytes * self.count


@dataclass(frozen=True, kw_only=True)
class MeasuredWorker:
    """What one of two workers held here, in bytes."""

    base: int  # resident before the task is there: Python, torch and manyhands
    data: int  # that came with the program: rows in memory
    parameters: int  # of the model, frozen ones and buffers too; padding included
    gradients: int
    optimizer: int
    strategy: int
    peers: int  # of the other worker's shared memory, and of the server's
    peak: int  # the largest resident memory
    fork_server: int
    shards: int  # resident, of all shards together
    center: int  # of a whole center

    @property
    def rest(self) -> int:
        """Activations, batches, a checkpoint while it is written, and what allocators keep."""
        counted = self.data + self.parameters + self.gradients + self.optimizer + self.strategy + self.peers
        return max(0, self.peak - self.base - counted)


@dataclass(frozen=True, kw_only=True)
class ExecutorMemory:
    """The memory of each executor, and the settings that give it."""

    task: str
    strategy: str
    workers: int
    workers_per_executor: int
    heap_mb: int
    parts: tuple[Part, ...]

    @property
    def executors(self) -> int:
        return -(-self.workers // self.workers_per_executor)

    @property
    def worker_bytes(self) -> int:
        """Resident, of one worker at its peak."""
        return sum(part.bytes for part in self.parts if part.name.startswith("worker: "))

    @property
    def overhead_mb(self) -> int:
        """spark.executor.memoryOverhead, in MiB."""
        return math.ceil(sum(part.total for part in self.parts) / _MB)

    @property
    def settings(self) -> dict[str, str]:
        """Of Spark, by name."""
        return {
            "spark.executor.instances": str(self.executors),
            "spark.executor.cores": str(self.workers_per_executor),
            "spark.task.cpus": "1",
            "spark.executor.memory": f"{self.heap_mb}m",
            "spark.executor.memoryOverhead": f"{self.overhead_mb}m",
        }

    def to_json(self) -> str:
        values = asdict(self) | {"worker_bytes": self.worker_bytes, "settings": self.settings}
        return json.dumps({"format": FORMAT, **values}, indent=2)


def executor_memory(
    task: Task | str | None = None,
    *,
    workers: int,
    workers_per_executor: int = 4,
    strategy: Strategy | str = "allreduce",
    servers: int = 1,
    engine: Spark | str = "spark",
    heap_mb: int = HEAP_MB,
    say: Callable[[str], None] = lambda line: None,
    **task_fields: Any,
) -> ExecutorMemory:
    """The memory that each executor needs for `workers_per_executor` of the run's workers.

    task, task_fields, strategy, servers: as in `train`.
    engine: spark, with its memory_mb.
    heap_mb: of the executor's JVM.
    say: called with a line about each stage.

    Trains a few steps on two workers of this machine, on the CPU, which takes the memory of two workers here. Raises
    BadInput without pyspark, and what `train` raises for a task or strategy that cannot run.
    """
    place = engine_of(engine)
    if not isinstance(place, Spark):
        raise BadInput(f"the memory of executors is that of engine spark, not of {engine!r}: give engine='spark'")
    if find_spec("pyspark") is None:
        raise BadInput(
            "the memory of a Spark task is measured here, and pyspark is missing: pip install 'manyhands[spark]'"
        )
    counts = {"workers": workers, "workers_per_executor": workers_per_executor, "servers": servers, "heap_mb": heap_mb}
    for name, value in counts.items():
        check_count(name, value)
    own, chosen = task_from(task, task_fields), strategy_of(strategy)
    check_differentiable(own, "estimate")
    _check(own, chosen, place, workers, servers)
    payload = _payload(own, chosen)
    say("a few steps on two workers of this machine")
    measured = measure(own, chosen, workers, servers)
    say("a Spark task's Python")
    parts = parts_of(
        measured,
        workers=workers,
        here=min(workers, workers_per_executor),
        servers=servers if chosen.server() is not None else 0,
        spark_task=_spark_task(),
        rows=place.memory_mb * 1_000_000 if isinstance(own.train_data, DistributedFrame) else 0,
        payload=payload,
        heap_mb=heap_mb,
    )
    return ExecutorMemory(
        task=own.name,
        strategy=spec_of(chosen),
        workers=workers,
        workers_per_executor=min(workers, workers_per_executor),
        heap_mb=heap_mb,
        parts=tuple(parts),
    )


def parts_of(
    measured: MeasuredWorker,
    *,
    workers: int,
    here: int,
    servers: int,
    spark_task: int,
    rows: int,
    payload: int = 0,
    heap_mb: int = HEAP_MB,
) -> list[Part]:
    """The parts of an executor with `here` of `workers` workers, and with the shards, which are in the first one.

    payload: bytes of a compressed gradient, of which every worker holds each other's; 0 where it does not.
    """
    parts = list(_resident(measured, workers, here, servers, spark_task, rows, payload))
    return [
        *parts,
        Part(name="margin", bytes=round(MARGIN * sum(part.total for part in parts)), how=f"{MARGIN:.0%}"),
        Part(name="JVM beyond its heap", bytes=max(384 * _MB, round(0.1 * heap_mb * _MB)), how="Spark's default"),
    ]


def _resident(
    measured: MeasuredWorker, workers: int, here: int, servers: int, spark_task: int, rows: int, payload: int
) -> Iterator[Part]:
    each = partial(Part, count=here)
    yield each(name="worker: Python and PyTorch", bytes=measured.base, how="measured")
    yield each(name="worker: parameters", bytes=measured.parameters, how="counted")
    yield each(name="worker: gradients", bytes=measured.gradients, how="counted")
    yield each(name="worker: optimizer", bytes=measured.optimizer, how="counted")
    yield each(name="worker: strategy", bytes=measured.strategy, how="counted")
    # Of each other worker's vectors a worker maps 1/here to compute its share of a mean: (here - 1)/here of a vector,
    # where one of two maps half. What it maps whole (a broadcast's source) is counted up to twice.
    yield each(name="worker: others' shared memory", bytes=round(measured.peers * 2 * (here - 1) / here), how="scaled")
    yield each(name="worker: others' payloads", bytes=max(0, workers - _MEASURED) * payload, how="counted")
    yield each(name="worker: activations, batches, checkpoint", bytes=measured.rest, how="measured")
    yield each(name="worker: rows that came with the program", bytes=measured.data, how="measured")
    yield Part(name="the program", bytes=measured.data, how="counted")
    yield Part(name="fork server", bytes=measured.fork_server, how="measured")
    yield each(name="Spark task", bytes=spark_task, how="measured")
    yield each(name="rows of a Spark task", bytes=rows, how="memory_mb")
    if servers:
        inboxes = max(0, workers - _MEASURED) * measured.center  # a shard receives from each worker apart
        yield Part(name="server shards", bytes=measured.shards + inboxes, how="measured, scaled")


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure(task: Task, strategy: Strategy, workers: int, servers: int = 1) -> MeasuredWorker:
    """Train a few steps on two workers of this machine, each with the rows of one of `workers`."""
    rows = _rows_per_worker(task, workers)
    if isinstance(strategy, Quorum) and strategy.backups >= _MEASURED:
        strategy = replace(strategy, backups=_MEASURED - 1)  # it changes no worker's memory
    whole = strategy.traits.exchanges_next and getattr(strategy, strategy.traits.period) == _STEPS
    steps = _STEPS + whole  # an exchange among them
    if isinstance(task.train_data, DistributedFrame):
        task = task.with_fields(train_data=sample(task.train_data, _MEASURED * rows))
    bare = task.with_fields(
        validation_data=None,
        test_data=None,
        batch_size=None,
        batch_size_per_worker=rows,
        epochs=_NEVER,
        max_steps=steps,
    )
    with Local() as engine, tempfile.TemporaryDirectory(prefix="manyhands-") as folder, rng.kept():
        try:
            _check(bare, strategy, engine, _MEASURED, servers)
        except BadInput as error:
            raise BadInput(
                f"two workers of this machine, on which memory is measured, cannot stand for {workers} of {spec_of(strategy)}: "
                f"{error}. Estimate with other options of the strategy, or with allreduce"
            ) from error
        plan = WorkerPlan(
            task=bare,
            strategy=strategy,
            validate_every=_NEVER,
            checkpoint_every=steps,
            checkpoints=Path(folder) / "checkpoints",
        )
        launch = partial(LaunchSpec, workers=_MEASURED, device="cpu")
        bases = engine.launch(_base, launch())
        found = engine.launch(partial(_probe, plan), launch(server=strategy.server(), servers=servers))
    values = max(found, key=lambda one: int(one["peak"]))
    loaded, base = values.pop("loaded"), max(bases)
    return MeasuredWorker(base=base, data=max(0, loaded - base), **values)


def _check(task: Task, strategy: Strategy, engine: Engine, workers: int, servers: int) -> None:
    """What `train` checks before it starts anything."""
    config = TrainConfig(task=task, strategy=strategy, engine=engine, workers=workers, directory=None)
    config.check(servers=servers, nonfinite="raise", max_seconds=None, timeout_s=300.0, resume=False)


def sample(frame: DistributedFrame, rows: int) -> tuple[Tensor, ...] | Tensor:
    """At most so many of the frame's first rows, as tensors. Raises BadInput where it has none."""
    import pyarrow as pa

    if frame.files:
        from manyhands.data.readers import shared_files

        batches: list[pa.RecordBatch] = []
        for file in frame.files:
            own = min(rows, *shared_files.count([file], 0, 1))
            batches += shared_files.read([file], [own], frame.sources, 0, 1)
            rows -= own
            if not rows:
                break
    else:
        table = frame.table.select(*frame.sources).limit(rows)
        batches = pa.Table.from_pandas(table.toPandas(), preserve_index=False).to_batches()
    if not sum(batch.num_rows for batch in batches):
        raise BadInput("the DataFrame has no rows: expected at least one. Is the filter or split the right one?")
    arrays = ([column.of(batch) for batch in batches if batch.num_rows] for column in frame.columns)
    tensors = tuple(torch.from_numpy(np.concatenate(list(own))) for own in arrays)
    return tensors if len(tensors) > 1 else tensors[0]


def _rows_per_worker(task: Task, workers: int) -> int:
    """Of a full global batch, rounded up."""
    if task.batch_size_per_worker is not None:
        return task.batch_size_per_worker
    if isinstance(task.train_data, DistributedFrame):
        return -(-global_batch(task, workers) // workers)
    source = open_source(task.train_data, collate=task.collate, loader_processes=task.loader_processes)
    return -(-reading_plan(task, source, workers).batch_size // workers)


def _base(worker: Worker) -> int:
    worker.group.barrier()
    return resident(os.getpid())


def _probe(plan: WorkerPlan, worker: Worker) -> dict[str, int]:
    """Train, and say what this worker held."""
    loaded = resident(os.getpid())
    loop = make_loop(plan, worker)
    join(loop)
    loop.run()
    loop.outcome()  # makes the consensus
    replica = loop.replica
    vectors = [*replica.parameters.parts, *(replica.gradients.parts if replica.executor.has_gradients else ())]
    model = [*replica.parameters.parts, *replica.model.buffers()]
    model += [one for one in replica.model.parameters() if not one.requires_grad]
    held = {
        "parameters": nbytes(model),
        "gradients": nbytes(vectors) - nbytes(replica.parameters.parts),
        "optimizer": nbytes(tensors_in(list(replica.optimizer.state.values()))),
        "strategy": nbytes(tensors_in(loop.state), without=vectors),
    }
    pids = worker.group.all_gather_json(os.getpid())
    parent = os.getppid()
    children = map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
    shards = sum(resident(pid, "VmHWM") for pid in children if pid not in pids)
    own = held["parameters"] + held["gradients"] + held["strategy"]  # of shared memory, at most
    found = {
        **held,
        "loaded": loaded,
        "peers": max(0, resident(os.getpid(), "RssShmem") - own),
        "peak": peak_bytes(torch.device("cpu")),
        "fork_server": resident(parent, "VmHWM"),
        "shards": shards,
        "center": nbytes(replica.parameters.parts),
    }
    worker.group.barrier()  # nobody ends before all have looked
    replica.detach()
    return found


def _spark_task() -> int:
    """Resident, of a Python in which Spark runs a task of the barrier stage."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _SPARK_TASK], capture_output=True, text=True, timeout=_START_S, check=False
        )
        problem = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1] if done.returncode else ""
    except subprocess.TimeoutExpired:
        problem = f"it took more than {_START_S} s"
    if problem:
        raise BadInput(
            f"a Spark task's Python does not start here ({problem}): pip install 'manyhands[spark]' in this environment"
        )
    return int(done.stdout.split()[-1])


def _payload(task: Task, strategy: Strategy) -> int:
    """Bytes of a compressed gradient that every worker gathers from each other; 0 where none is gathered."""
    if strategy.server() is not None:
        return 0
    codec = codec_of(codec_named(strategy))
    if codec is None or isinstance(codec, LinearCodec | PowerSGD):
        return 0
    shape = shape_of(task)
    try:
        return payload_bytes(codec, shape, 0, shape.padded)
    except Unsupported as error:
        raise Unsupported(
            f"the payloads of compress={codec.name} are as long as the gradients make them, so their memory cannot be "
            "estimated: use a codec of fixed length such as topk:0.01"
        ) from error
