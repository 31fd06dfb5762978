"""`predict`: a model's outputs for all rows of some data, computed by all workers, in the data's order."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from manyhands import rng, units
from manyhands.data.batch import Collate
from manyhands.data.dataframe_rows import DistributedFrame
from manyhands.engines import engine_of
from manyhands.engines.base import Engine, LaunchSpec, check_brings, check_count
from manyhands.engines.driver.row_collector import RowCollector
from manyhands.engines.torch_settings import WithSettings
from manyhands.errors import BadInput, ManyhandsError, is_whole
from manyhands.inference.deal import Deal
from manyhands.inference.program import Function, Program, call_model, on_cpu
from manyhands.inference.trained import trained
from manyhands.recording.run import Run
from manyhands.signals import sigterm_to
from manyhands.task import Task, named
from manyhands.training.config import check_resources

DEFAULT_BATCH_SIZE = 256
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """What `predict` wrote."""

    path: Path
    """The file."""
    rows: int
    """In it: as many as the data has."""
    seconds: float
    """From the call to the complete file."""
    rows_of_workers: list[int]
    """How many each worker computed, by rank."""

    def __repr__(self) -> str:
        return f"<Predictions of {units.count(self.rows, 'row')} in {self.path}, {units.seconds(self.seconds)}>"


def predict(
    model: nn.Module | Run | str | Path,
    data: Any,
    *,
    function: Function | None = None,
    output: str | Path | None = None,
    keep: Sequence[str] = (),
    workers: int | None = None,
    engine: Engine | str = "auto",
    batch_size: int = DEFAULT_BATCH_SIZE,
    collate: Collate | None = None,
    loader_processes: int = 0,
    task: Task | str | None = None,
    device: str = "auto",
    threads_per_worker: int | None = None,
    timeout_s: float = 300.0,
    progress: Progress | None = None,
) -> Any:
    """The model's outputs for all rows of `data`, each once, in the data's own order, whatever the number of workers.

    Returns them in memory, on the CPU: a tensor [rows, …], or a tuple or dict of such, as `function` gives them. With
    `output` it returns a `Predictions`.

    model: an nn.Module, a Run, or the directory of a finished run. It goes to the workers once, is in evaluation mode there,
        and computes no gradients; the caller's own module stays as it is.
    data: anything that a task takes as data. A stream's order is the order in which it gives rows. A DataLoader stands for
        its dataset, in the dataset's order.
    function: (model, batch) -> a tensor whose first dimension counts the batch's rows, or a tuple or dict of such.
        Default: the model is called on the batch, or on the first of a batch that is a tuple.
    output: a file, `.parquet` or `.arrow`, into which rows are written as they come; it appears when it is complete. A
        single tensor is the column `prediction`, those of a tuple are `prediction_0` and so on, those of a dict have
        their names. At most about 64 MB wait for the rows of a slow worker, then the others wait, too.
    keep: columns of the data, whose batches are dicts then, that go along: ("id",). What is returned in memory is then a
        dict of all columns.
    workers, engine, device, threads_per_worker, timeout_s: as of `train`.
    batch_size: rows of one call of the function. Batches are cut as one process would cut them, so that each row is
        computed in the same batch, where the driver leases them; where each worker reads a whole stream, or loader
        processes load, they are cut anew.
    collate, loader_processes: as of a Task.
    task: where `model` is a directory whose task lies in a file (my.py:task), or was given as an object.
    progress: called on the driver with (rows so far, all rows, or 0 where nobody knows).

    Where every rank makes this call (torchrun, `manyhands run`), each gets all rows, and the first writes the file.

    Raises BadInput for what cannot be, WorkerFailed when a worker raises, dies or hangs, ManyhandsError where the disk is
    full, and Preempted after SIGTERM. No file, and no part of one, is left then.
    """
    start = time.monotonic()
    module, _ = trained(model, task, "predict")
    if isinstance(keep, str) or not all(isinstance(name, str) for name in keep):
        raise BadInput(f"keep must be a tuple of columns' names, such as ({str(keep)!r},), not {keep!r}")
    if function is not None and not callable(function):
        raise BadInput(f"function must be a function of (model, batch), not {named(function)}")
    place, spec = launch_spec(engine, workers, data, batch_size, device, threads_per_worker, timeout_s)
    deal = deal_of(place, data, batch_size, collate, loader_processes)
    program = Program(
        model=module, deal=deal, outputs=function or call_model, keep=tuple(keep), spmd=place.capabilities.spmd
    )
    with RowCollector(output, writes=place.own_rank() == 0, progress=progress) as collector:
        launched(place, program, spec, collector)
        collector.finish()
        if output is None:
            return collector.values()
        rows = [collector.rows_of_workers.get(rank, 0) for rank in range(spec.workers)]
        return Predictions(
            path=Path(output).expanduser(),
            rows=collector.rows,
            seconds=time.monotonic() - start,
            rows_of_workers=rows,
        )


def launch_spec(
    engine: Engine | str,
    workers: int | None,
    data: Any,
    batch_size: int,
    device: str,
    threads_per_worker: int | None,
    timeout_s: float,
) -> tuple[Engine, LaunchSpec]:
    """The engine, and what it is to start. BadInput or Unsupported for what cannot be, before anything starts."""
    if not is_whole(batch_size):
        raise BadInput(f"batch_size must be a whole number of at least 1, not {batch_size!r}")
    place = engine_of(engine)
    check_resources(device, threads_per_worker, place)
    count = place.default_workers() if workers is None else workers
    check_count("workers", count)
    frames = (data,) if isinstance(data, DistributedFrame) else ()
    if frames:
        check_brings(place)
    spec = LaunchSpec(
        workers=count, threads_per_worker=threads_per_worker, device=device, timeout_s=timeout_s, frames=frames
    )
    place.check(spec)
    return place, spec


def deal_of(place: Engine, data: Any, batch_size: int, collate: Collate | None, loader_processes: int) -> Deal:
    """How the rows go to the workers of this engine."""
    return Deal(
        data=data,
        batch_size=batch_size,
        collate=collate,
        loader_processes=loader_processes,
        leases=place.capabilities.serves and not place.capabilities.spmd,
    )


def launched(place: Engine, program: Program, spec: LaunchSpec, collector: RowCollector) -> list[dict[str, Any]]:
    """What the workers returned, whose rows the collector has. SIGTERM asks them to stop.

    ManyhandsError where rows were lost on the way: an engine that passes them on to nobody must not pass unseen.
    """
    capabilities = place.capabilities
    if spec.workers > 1 and not (capabilities.spmd or capabilities.simulated):
        program = replace(program, model=on_cpu(program.model))  # each worker moves its own to its device
    with rng.kept(), sigterm_to(collector.stop) if not capabilities.spmd else nullcontext():
        values = place.launch(WithSettings.of_here(program), replace(spec, observer=collector))
    if program.outputs is not None:
        for rank, value in enumerate(values):
            came = collector.rows_of_workers.get(rank, 0)
            if value is not None and came != value["rows"]:
                raise ManyhandsError(
                    f"worker {rank} delivered {value['rows']} rows, and {came} came: engine {place.name} lost rows. Please report this"
                )
    return values
