"""The options of the command, one line each; `commands` and `evidence` say which command takes which."""

from __future__ import annotations

import importlib
import itertools
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyhands.cli import config
from manyhands.engines import under_torchrun
from manyhands.engines.roles import TRAINING, WORKER, Roles
from manyhands.engines.survive import Survive
from manyhands.engines.torchrun import launchers
from manyhands.errors import BadInput, whole_of
from manyhands.own_loop.batches import WHOLE, batches_of, check_batches, check_read
from manyhands.own_loop.observed.script import (
    DISTRIBUTED,
    KERAS,
    KINDS,
    LOOP,
    Observation,
    Observed,
    check_libraries,
    kind_of,
    visible_gpus,
)
from manyhands.spec import parse
from manyhands.strategies import CATALOGUE as STRATEGIES

if TYPE_CHECKING:
    from manyhands.engines.base import Engine as StartedEngine

DEBUG = "manyhands.debug"  # set in the context by --debug
TASK_FIELDS = (
    *("epochs", "max_steps", "batch_size", "batch_size_per_worker", "micro_batch_size"),
    *("seed", "precision", "clip_norm", "loader_processes", "batches", "sync_batch_norm"),
)


def _debug(ctx: typer.Context, value: bool) -> bool:
    ctx.meta[DEBUG] = value
    return value


def completing(catalogue: str) -> Callable[[str], list[str]]:
    """What a shell completes: the names of a catalogue, the last one of several with commas between them."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        names = importlib.import_module(f"manyhands.{catalogue}").CATALOGUE
        return [f"{before}{comma}{name}" for name in names if name.startswith(last)]

    return complete


_run = partial(typer.Option, rich_help_panel="The run")
_task = partial(typer.Option, rich_help_panel="The task's fields (each overrides the task's own)")
_hosts = partial(typer.Option, rich_help_panel="Several hosts")
_survival = partial(typer.Option, rich_help_panel="Lost workers, and others that join")
_frameworks = partial(typer.Option, rich_help_panel="Another framework's own cluster")
_simulated = partial(typer.Option, rich_help_panel="A simulated cluster (engine sim)")
_watch = partial(typer.Option, rich_help_panel="What is shown and kept")

TaskSpec = Annotated[
    str,
    typer.Argument(
        help="A name, digits:batch_size=32 with options, or file.py:NAME.", autocompletion=completing("tasks")
    ),
]
TrainedTask = Annotated[
    str | None,
    typer.Argument(
        metavar="TASK",
        help="A name, digits:batch_size=32 with options, or file.py:NAME; here or in --config.",
        autocompletion=completing("tasks"),
    ),
]
Config = Annotated[
    Path | None,
    _run(
        "--config",
        help="Options from a TOML file, epochs = 3 and so on; those given here override it.",
        callback=config.read,
        is_eager=True,
    ),
]
PrintConfig = Annotated[bool, _run("--print-config", help="Print such a file with these options, and leave.")]
RunToReplay = Annotated[str, typer.Argument(help="The directory of a finished run, --run-dir of `train`.")]
ReplayedTask = Annotated[
    str | None, _run("--task", help="The run's task, where it lies in a file: my.py:task, with its options.")
]
ReplayedStrategy = Annotated[
    str | None, _run("--strategy", "-s", help="The run's strategy, where it lies in a file: my.py:Strategy.")
]
Script = Annotated[Path, typer.Argument(help="A Python script that calls manyhands.prepare(...).")]
ScriptArguments = Annotated[list[str] | None, typer.Argument(help="All that follows the script is the script's.")]

Workers = Annotated[int | None, _run("--workers", "-n", help="How many; default: one per GPU, else 1.")]
ElasticWorkers = Annotated[
    str | None,
    _run(
        "--workers",
        "-n",
        metavar="N|MIN:MAX",
        help="How many; default: one per GPU, else 1. 2:4 starts with 4 and goes on with 2, whoever is lost.",
    ),
]
MaxLosses = Annotated[
    str | None, _survival("--max-losses", metavar="N|any", help="Lost workers that the run survives; default: 0.")
]
MaxRestarts = Annotated[
    int | None, _survival("--max-restarts", help="How often the run may start again from its newest checkpoint.", min=0)
]
Copies = Annotated[int | None, _survival("--copies", help="Of each server shard: 2 is a primary and a backup.")]
Survival = Annotated[
    str | None,
    _survival("--survive", metavar="SPEC", help="All that a run survives: max_losses=3,replace=false,silence_s=30 …"),
]
_strategy = partial(
    _run,
    "--strategy",
    "-s",
    help="How they agree: see `manyhands strategies`.",
    autocompletion=completing("strategies"),
)
Strategy = Annotated[str, _strategy()]
TrainedBy = Annotated[str | None, _strategy(show_default="allreduce; for a kernel solo or hogwild")]
ScriptStrategy = Annotated[str, _strategy(envvar="MANYHANDS_STRATEGY")]
ScriptRoles = Annotated[
    str | None, _frameworks("--roles", help="Who is there: chief=1,worker=2,ps=1,evaluator=1; worker may be --workers.")
]
_unchanged = partial(typer.Option, rich_help_panel="A script that knows of no workers")
Auto = Annotated[
    bool,
    _unchanged(
        "--auto", help="Run it unchanged: find its model, optimizer and loaders, and share the rows of each batch."
    ),
]
RunsAs = Annotated[
    str | None,
    _unchanged(
        "--as",
        metavar="loop|keras|distributed",
        help="What the script is, where --auto is not to choose: a loop over a DataLoader, a call of Keras' fit, or a program for "
        "torchrun, whose gloo is then the backend manyhands.",
    ),
]
Verify = Annotated[
    int | None,
    _unchanged(
        "--verify",
        metavar="K",
        help="First compare K steps of the workers with one process's, without noise, in float64.",
    ),
]
ShareGpu = Annotated[
    bool, _unchanged("--share-gpu", help="More workers than there are GPUs: several share one in turn.")
]
Batches = Annotated[
    str | None,
    _run(
        "--batches",
        metavar="whole|slices",
        help="What each worker's loop sees of a batch: all of it (calls of its models are cut by rows), or its slice, which is all that strategies have whose workers' models differ.",
    ),
]
Read = Annotated[
    str | None,
    _unchanged(
        "--read",
        metavar="rows|whole",
        help="What each worker reads of a DataLoader's batch, with --batches whole; default: its rows, where they are shown to make the batch.",
    ),
]
OwnBatches = Annotated[
    bool,
    _unchanged(
        "--own-batches",
        help="A loop without DataLoader: each worker draws batches of its own, N times as many rows a step.",
    ),
]
Until = Annotated[
    str | None, _frameworks("--until", help="The run ends when these roles have returned; default: chief,worker.")
]
ScriptTensorBoard = Annotated[
    Path | None, _frameworks("--tensorboard", help="Start TensorBoard on this folder, beside the chief.")
]
ScriptEngine = Annotated[
    str, _run("--engine", help="Where it runs: local, hosts:listen=ADDRESS …; auto: torchrun's workers, else local.")
]
Engine = Annotated[
    str, _run("--engine", help="Where they run: see `manyhands engines`.", autocompletion=completing("engines"))
]
Servers = Annotated[int, _run("--servers", help="Shards of the parameter server, where a strategy has one.", min=1)]
ScriptServers = Annotated[
    int | None,
    _run(
        "--servers",
        help="Shards of the parameter server. Given, there is one whatever the strategy: mh.worker().server.",
        min=1,
    ),
]
Device = Annotated[str, _run("--device", help="auto, cpu or cuda.")]
Threads = Annotated[int | None, _run("--threads-per-worker", help="Default: usable cores / workers.", min=1)]
Timeout = Annotated[float, _run("--timeout", help="Seconds without progress that end a run.")]
Listen = Annotated[str | None, _hosts("--listen", help="Engine hosts: an address of this host that the others reach.")]
Advertise = Annotated[
    str | None,
    _hosts("--advertise", help="Where others reach this host, if not at --listen: published ports of a container."),
]
LocalWorkers = Annotated[
    int | None, _hosts("--local-workers", help="Engine hosts: so many workers on this host; default: half.", min=1)
]
Ports = Annotated[
    str | None, _hosts("--ports", help="Listen on these, 7000-7100, one a worker and shard; default: any free ones.")
]
Tls = Annotated[
    bool,
    _hosts(
        "--tls/--no-tls",
        help="Encrypt all between hosts. Without, whoever is on the way reads and changes all, the program included.",
    ),
]
PlainNetwork = Annotated[bool, _hosts("--plain-network", help="With --no-tls: also on addresses other than loopback.")]
Wait = Annotated[float | None, _hosts("--wait", help="Seconds to wait for the other hosts; default: 600.", min=0.001)]
Network = Annotated[
    str | None, _simulated("--network", help="What messages cost: latency=1ms,bandwidth=1Gbit,workers_per_host=4 …")
]
Compute = Annotated[
    str | None,
    _simulated("--compute", help="What gradients and codecs cost: row=1e-4,jitter=lognormal:0.2,3=5x,topk=15ns/1ns …"),
]
Faults = Annotated[
    str | None,
    _simulated(
        "--faults",
        help="What goes wrong: kill=2@step:100,pause=1@2.5s+3,drop=0.01 …; with --engine local or --listen by real signals.",
    ),
]
SimSeed = Annotated[
    int | None, _simulated("--sim-seed", help="Of jitter, faults, and the order of what happens at once.")
]
SimProfile = Annotated[Path | None, _simulated("--profile", help="A machine that `manyhands calibrate` measured.")]
CalibratedWorkers = Annotated[int, _run("--workers", "-n", help="How many, at the same time; at least 2.")]
CalibratedStrategies = Annotated[
    str,
    _run(
        "--strategies",
        "-s",
        help="Compare their real and simulated steps; options go behind a colon, none compares nothing.",
    ),
]
CalibratedSteps = Annotated[int, _run("--steps", help="Of each real run; at least three times a strategy's period.")]
ComparedStrategies = Annotated[
    str | None,
    _run(
        "--strategies",
        "-s",
        help="With commas between them; options go behind a colon. See `manyhands strategies`.",
        autocompletion=completing("strategies"),
    ),
]
ComparedWorkers = Annotated[str, _run("--workers", "-n", help="Each strategy on so many; solo is always one.")]
Repeats = Annotated[int, _run("--repeats", help="Of each variant; below 3 nothing is called different.", min=1)]
Target = Annotated[
    str | None, _run("--target", help="Measure the time to it: test_accuracy=0.97, 'validation_loss<=1.8'.")
]
Partitions = Annotated[
    str, _run("--partitions", help="How rows are dealt, each strategy with each: none, fixed, or none,fixed.")
]
ReportDirectory = Annotated[
    Path | None, _watch("--output", "-o", help="report.html and report.json go there; default: runs/compare-TASK-TIME.")
]
Markdown = Annotated[str | None, _watch("--markdown", help="A table for pull requests, into this file; - prints it.")]
TimeMargin = Annotated[float, _run("--time-margin", help="Ratios of time nearer to 1 are no difference.")]
MetricMargin = Annotated[float, _run("--metric-margin", help="The same of the metric, as a share of solo's.")]
Validations = Annotated[int, _run("--validations", help="Validations in a trial.", min=1)]
CheckedWorkers = Annotated[int, _run("--workers", "-n", help="Compared with one; at least 2.")]
CheckedSteps = Annotated[int, _run("--steps", help="To compare, one by one.", min=1)]
_written = partial(typer.Option, rich_help_panel="Writing the rows in another form")
DataPaths = Annotated[
    list[str],
    typer.Argument(metavar="PATH...", help="Files, globs, folders or URLs of one format, or an .npz or .npy."),
]
DataWorkers = Annotated[int, _run("--workers", "-n", help="To which the rows would be dealt.", min=1)]
DataBatchSize = Annotated[int, _run("--batch-size", help="Rows of all workers together in a step.", min=1)]
DataShuffle = Annotated[
    str | None,
    _run(
        "--shuffle",
        metavar="blocks:K|rows|none",
        help="How rows are mixed; with --to, rows writes them in a random order.",
        show_default="blocks:16; with --to none",
    ),
]
DataColumns = Annotated[
    str | None, _run("--columns", metavar="A,B", help="Those that are read or written; default: all.")
]
DataRows = Annotated[int, _run("--rows", help="How many first rows are shown.", min=0)]
DataCount = Annotated[
    bool | None,
    _run(
        "--count/--no-count",
        help="Read whole files that do not say how many rows they have; default: those of this machine.",
    ),
]
DataTo = Annotated[
    str | None,
    _written("--to", metavar="FILE|FOLDER", help="Write the rows: .parquet, .arrow, .tfrecord, .tar or a folder."),
]
DataFormat = Annotated[
    str | None,
    _written("--format", help="Of the files in the folder: parquet, arrow, tfrecord or tar; default: parquet."),
]
DataRowsPerFile = Annotated[
    int | None, _written("--rows-per-file", help="In the folder; default: about 256 MB of rows.", min=1)
]
DataRowGroupBytes = Annotated[
    str | None, _written("--row-group-bytes", metavar="SIZE", help="Of Parquet and Arrow, in memory; default: 16MB.")
]
DataSeed = Annotated[int, _written("--seed", help="Of --shuffle rows.")]
AsJson = Annotated[bool, _watch("--json", help="Print JSON instead of a table.")]
EstimateProfile = Annotated[
    Path | None, _run("--profile", "-p", help="What `manyhands calibrate` wrote, on such a machine as the cluster has.")
]
EstimatedWorkers = Annotated[
    str | None,
    _run("--workers", "-n", help="With commas between them; default: 8,64,512. Engine spark: one number, 8."),
]
EstimatedEngine = Annotated[
    str, _run("--engine", help="sim: time, by a profile. spark, spark:memory_mb=64: memory of its executors.")
]
WorkersPerExecutor = Annotated[
    int | None, _run("--workers-per-executor", help="Engine spark: workers in an executor; default: 4.", min=1)
]
EstimatedSteps = Annotated[int | None, _run("--steps", help="To simulate of each; default: until the mean is steady.")]
Quick = Annotated[bool, _run("--quick", help="Each run once instead of three times.")]
Output = Annotated[Path, _run("--output", "-o", help="Where the profile goes.")]
DriverAddress = Annotated[str, typer.Argument(help="HOST:PORT, as the driver printed it.", metavar="ADDRESS")]
OwnWorkers = Annotated[int, _hosts("--workers", "-n", help="How many workers this host gives.", min=1)]
OwnAddress = Annotated[
    str, _hosts("--listen", help="Where other hosts reach this one; default: as it reaches the driver.")
]

_rows = partial(typer.Option, rich_help_panel="The rows, and what is made of them")
TrainedRun = Annotated[
    str, typer.Argument(metavar="RUN", help="The directory of a finished run, --run-dir of `train`.")
]
Rows = Annotated[
    str,
    typer.Argument(
        metavar="DATA",
        help="Rows: .npy, .npz, .txt, .parquet, .tfrecord, a folder or URL; or my.py:NAME, any data there.",
    ),
]
RowsOrTests = Annotated[
    str | None,
    typer.Argument(metavar="[DATA]", help="Rows, as of `predict`; default: the task's test or validation data."),
]
Predicted = Annotated[
    Path,
    _rows("--output", "-o", metavar="FILE", help="Where the outputs go: .parquet or .arrow. A file there is replaced."),
]
OutputFunction = Annotated[
    str | None,
    _rows(
        "--function",
        metavar="FILE.py:NAME",
        help="(model, batch) -> a tensor, or a tuple or dict of them; default: the model of the batch, or of its first part.",
    ),
]
MetricsFunction = Annotated[
    str | None,
    _rows(
        "--metrics",
        metavar="FILE.py:NAME",
        help="(model, batch) -> {name: mean or (mean, weight)}; default: the task's own.",
    ),
]
KeptColumns = Annotated[
    list[str] | None, _rows("--keep", metavar="COLUMN", help="A column of the data that goes along; may be repeated.")
]
TaskOfRun = Annotated[
    str | None, _rows("--task", help="The run's task, where it lies in a file: my.py:task, with its options.")
]
RowLoaders = Annotated[int | None, _rows("--loader-processes", help="Load rows in so many, per worker.")]
RowsOfACall = Annotated[int, _rows("--batch-size", help="Rows of one call of the model.", min=1)]

MaxSeconds = Annotated[float | None, _run("--max-seconds", help="Stop after so long.")]
Debug = Annotated[bool, _run("--debug", help="Show the traceback of every error.", callback=_debug)]

Epochs = Annotated[int | None, _task("--epochs", help="Passes over the data.")]
MaxSteps = Annotated[int | None, _task("--max-steps", help="End after so many (global batches).")]
BatchSize = Annotated[int | None, _task("--batch-size", help="GLOBAL rows a step.")]
BatchSizePerWorker = Annotated[int | None, _task("--batch-size-per-worker", help="The other way to say it.")]
MicroBatchSize = Annotated[int | None, _task("--micro-batch-size", help="Rows a forward, to save memory.")]
Seed = Annotated[int | None, _task("--seed", help="Of parameters, order and dropout.")]
Precision = Annotated[str | None, _task("--precision", help="float32 or bf16-mixed.")]
ClipNorm = Annotated[float | None, _task("--clip-norm", help="Clip the gradient's norm to it.")]
NoShuffle = Annotated[bool, _task("--no-shuffle", help="Rows in their own order.")]
TaskBatches = Annotated[
    str | None,
    _task(
        "--batches",
        metavar="whole|slices",
        help="What loss and evaluate see: the whole batch, whose losses are one process's, or each worker's slice.",
    ),
]
SyncBatchNorm = Annotated[
    bool | None, _task("--sync-batch-norm", help="Batch normalization over all workers' rows, with slices.")
]
LoaderProcesses = Annotated[int | None, _task("--loader-processes", help="Load rows in so many, per worker.")]

RunDirectory = Annotated[
    str | None,
    _watch("--run-dir", help="Events, checkpoints, result: a path, hdfs://…, s3://…; default: runs/TASK-TIME."),
]
Resume = Annotated[bool, _watch("--resume", help="Go on from the newest checkpoint in it.")]
ValidateEvery = Annotated[str, _watch("--validate-every", help="epoch, or a number of steps (global batches).")]
CheckpointEvery = Annotated[str, _watch("--checkpoint-every", help="epoch, or a number of steps (global batches).")]
CheckReplicasEvery = Annotated[
    int | None,
    _watch(
        "--check-replicas-every", help="Compare the replicas every so many steps, besides before checkpoints.", min=1
    ),
]
Keep = Annotated[str, _watch("--keep", help="last, or best:METRIC.")]
Nonfinite = Annotated[str, _watch("--nonfinite", help="Gradients with NaN: raise, or skip them.")]
Partition = Annotated[
    str, _run("--partition", help="none: rows are dealt anew in each epoch; fixed: each worker keeps its part.")
]
ModelParallel = Annotated[
    str | None,
    _run(
        "--model-parallel",
        metavar="SPEC|auto|FILE",
        help="Several workers for one replica: stages=2, stages=3,micro_batches=8 …; auto, or the file of a plan.",
    ),
]
MemoryPerWorker = Annotated[
    str | None,
    _run("--memory-per-worker", metavar="SIZE", help="What a plan may take of each worker: 2GB, or 4GB,2GB,2GB,2GB."),
]
PlannedWorkers = Annotated[int, typer.Option("--workers", "-n", help="Workers of the run that is planned.")]
PlanFile = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Write the plan to take, for --model-parallel FILE."),
]
Stopping = Annotated[str | None, _watch("--early-stopping", help="Stop when METRIC\\[:PATIENCE] gets no better.")]
TensorBoardFolder = Annotated[Path | None, _watch("--tensorboard", help="Write event files to this folder.")]
MLflowExperiment = Annotated[
    str | None, _watch("--mlflow", help="Log to this MLflow experiment; MLFLOW_TRACKING_URI says where it is.")
]
WandBProject = Annotated[str | None, _watch("--wandb", help="Log to this Weights & Biases project.")]
RunToSummarize = Annotated[Path, typer.Argument(help="The directory of a run, or of a comparison.")]
Log = Annotated[str, _watch("--log", help="auto (a bar on a terminal), json (events), quiet.")]


# -- what several commands make of them ------------------------------------------------------------------------------


@contextmanager
def started(engine: str, workers: int | None) -> Iterator[StartedEngine]:
    """The engine; where it will start workers, they load torch while this process does.

    How other hosts join, and who came, is said on standard error.
    """
    from manyhands.engines import engine_of

    made = engine_of(engine)
    made.announce(lambda text: typer.echo(f"manyhands: {text}", err=True))
    if (workers or 1) > 1:
        made.prestart()
    try:
        yield made
    finally:
        made.close()


def task_fields(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of Task among a command's options, those that it has and that were given."""
    fields = {name: given[name] for name in TASK_FIELDS if given.get(name) is not None}
    return fields | ({"shuffle": False} if given.get("no_shuffle") else {})


def with_fields(engine: str, kind: str, **fields: Any) -> str:
    """The engine's spec with the fields that were given as options of the command; they are those of engine `kind`."""
    given = ",".join(f'{name}="{value}"' for name, value in fields.items() if value is not None)
    if not given:
        return engine
    return f"{kind if engine == 'auto' else engine}{',' if ':' in engine else ':'}{given}"


def survival_of(
    workers: str | None, spec: str | None, max_losses: str | None, max_restarts: int | None, copies: int | None
) -> tuple[int | None, Survive | None]:
    """How many workers start, and what the run survives: -n, --survive, and the options that override it."""
    given: dict[str, Any] = {}
    count = whole_of(workers) if workers is not None else None
    if workers is not None and count is None:
        low, high = (whole_of(part) for part in workers.split(":")) if workers.count(":") == 1 else (None, None)
        if low is None or high is None or not 1 <= low <= high:
            raise BadInput(
                f"--workers (-n) must be a number, or MIN:MAX with 1 <= MIN <= MAX, such as 4 or 2:4; not {workers!r}"
            )
        count, given = high, {"min_workers": low, "max_workers": high, "max_losses": "any"}
    if spec is not None:
        given |= parse(f"survive:{spec}")[1]
    given |= {
        name: value
        for name, value in (("max_losses", max_losses), ("max_restarts", max_restarts), ("copies", copies))
        if value is not None
    }
    return count, Survive.of(",".join(f"{name}={value}" for name, value in given.items()))


def cast_of(
    roles: str | None,
    workers: int | None,
    until: str | None,
    tensorboard: Path | None,
    runs_as: str | None = None,
) -> Roles | None:
    """What --roles, --until, --as distributed and --workers say of another framework's cluster; None: there is none."""
    if runs_as == DISTRIBUTED:
        return Roles(workers=workers or 1, others={})
    if roles is None:
        if until is not None or tensorboard is not None:
            raise BadInput(
                "--until and --tensorboard need --roles, which describes another framework's cluster: add --roles worker=2, or leave them out"
            )
        return None
    counts: dict[str, int] = {}
    for part in roles.split(","):
        role, _, text = part.strip().partition("=")
        count = whole_of(text)
        if count is None or role in counts:
            raise BadInput(
                f"--roles must list each role once with its number, such as chief=1,worker=2,ps=1; not {roles!r}"
            )
        counts[role] = count
    named = counts.pop(WORKER, None)
    if workers is not None and named is not None:
        raise BadInput(
            f"--workers {workers} and --roles worker={named} both give the number of workers: leave one of them out"
        )
    asked = workers or named or 1
    return Roles(workers=asked, others=counts, until=TRAINING if until is None else tuple(until.split(",")))


def script_engine(given: str, roles: str | None) -> str:
    """Where a script runs: the workers that torchrun started, where it did, else on this machine."""
    if given != "auto":
        return given
    return "torchrun" if roles is None and under_torchrun() else "local"


def observation_of(
    script: Path,
    *,
    auto: bool,
    runs_as: str | None,
    verify: int | None,
    batches: str | None,
    own_batches: bool,
    read: str | None,
    share_gpu: bool,
    workers: int | None,
    strategy: str,
    roles: str | None,
    engine: str,
) -> Observation | None:
    """What --auto, --as, --verify, --batches, --own-batches and --read say of a script that knows of no workers; None: it knows of them."""
    if runs_as is not None and runs_as not in KINDS:
        raise BadInput(f"--as must be one of {', '.join(KINDS)}; not {runs_as!r}")
    if runs_as is not None and roles is not None:
        raise BadInput(f"--as {runs_as} and --roles both say whose program this is: leave one of them out")
    if auto and roles is not None:
        raise BadInput("--auto watches a loop, and --roles starts another framework's cluster: leave one of them out")
    check_batches(batches)
    check_read(read)
    of_loops = {"--verify": verify is not None, "--own-batches": own_batches, "--read": read is not None}
    if not auto and runs_as is None:
        if given := _first_given({**of_loops, "--share-gpu": share_gpu}):
            raise BadInput(f"{given} is of a script that knows of no workers: add --auto")
        return None
    gpus = visible_gpus()
    text = script.read_text(encoding="utf-8", errors="replace") if script.is_file() else ""
    check_libraries(text)
    kind = runs_as or kind_of(text, gpus=gpus)
    check_gpus(workers, gpus, share_gpu)
    if own_batches and batches == WHOLE:
        raise BadInput(
            "--own-batches gives each worker a batch of its own, and --batches whole the same to all: leave one of them out"
        )
    if read is not None and not _sees_whole(batches, own_batches, strategy):
        raise BadInput(f"--read {read} is of whole batches, and of slices each worker reads its rows: leave it out")
    if batches == WHOLE:
        _sees_whole(batches, own_batches, strategy)
    if auto and kind != DISTRIBUTED and engine != "local" and not _sees_whole(batches, own_batches, strategy):
        raise BadInput(
            f"--auto shares slices of batches on engine local, not on {engine}: leave --engine out, call mh.prepare in the script, or give --batches whole"
        )
    if verify is not None and verify < 1:
        raise BadInput(f"--verify takes the number of steps to compare, at least 1, not {verify}")
    if kind == KERAS and _sees_whole(batches, own_batches, strategy):
        del of_loops["--verify"]
    if kind != LOOP and (given := _first_given(of_loops)):
        raise BadInput(f"{given} is of a loop, and {script} runs as {kind}: leave it out, or give --as loop")
    if own_batches and verify is not None:
        raise BadInput(
            "--verify compares with one process, and with --own-batches the batch is N times as large: leave one of them out"
        )
    if verify is not None:
        check_exact(strategy)
    if runs_as is None and kind != LOOP:
        typer.echo(f"manyhands: {script.name} is run as {kind} (--as decides otherwise)", err=True)
    return Observation(
        kind=kind, batches=batches, own_batches=own_batches, read=read, verify=verify or 0, chosen=runs_as is None
    )


def _first_given(options: dict[str, bool]) -> str:
    return next((option for option, given in options.items() if given), "")


def _sees_whole(batches: str | None, own_batches: bool, strategy: str) -> bool:
    from manyhands.strategies import strategy_of

    return not own_batches and batches_of(batches, strategy_of(strategy)) == WHOLE


def check_gpus(workers: int | None, gpus: int, share_gpu: bool) -> None:
    """BadInput for more workers than GPUs, where there are any: two on one are slower than one."""
    if gpus and workers is not None and workers > gpus and not share_gpu:
        raise BadInput(
            f"--workers {workers} are more than the {gpus} GPUs that are visible here, so several would share one: give --workers {gpus}, or --share-gpu"
        )


def around_of(
    observation: Observation, strategy: str, timeout_s: float
) -> Callable[[str], AbstractContextManager[None]] | None:
    """What watches the script on each worker."""
    if observation.kind == KERAS:
        from manyhands.keras.fit import FitOnWorkers

        return FitOnWorkers(strategy, observation.batches)
    if observation.kind == DISTRIBUTED and not observation.chosen:
        return None
    return Observed(
        strategy,
        batches=observation.batches,
        own_batches=observation.own_batches,
        read=observation.read,
        may_make_group=observation.kind == DISTRIBUTED,
        timeout_s=timeout_s,
    )


def check_exact(strategy: str) -> None:
    """BadInput for a strategy of which N workers are not one process."""
    from manyhands.strategies import strategy_of

    chosen = strategy_of(strategy)
    if not (chosen.traits.exact and chosen.averages_exactly):
        raise BadInput(
            f"--verify compares the workers with one process step by step, and with strategy {chosen.name} they are not meant to be equal: give --verify with "
            f"allreduce, whose rows and losses are the same, and compare results by `manyhands compare`"
        )


def behind_the_script(arguments: list[str]) -> str:
    """`-n 4`: an option among a script's arguments that reads as one of `manyhands run`; "" where none does."""
    for option, value in itertools.pairwise([*arguments, ""]):
        if option in ("-n", "--workers") and whole_of(value) is not None:
            return f"{option} {value}"
        if option in ("-s", "--strategy") and value.partition(":")[0] in STRATEGIES:
            return f"{option} {value}"
    return ""


def stamped(kind: str, task: str) -> Path:
    """runs/digits-20250131-142501-4711 for digits:epochs=5: date, time, process; runs/compare-digits-… for a `kind`.

    Under torchrun or mpirun, whose processes must agree, the launch's name ends it.
    """
    name, _, rest = task.partition(":")
    if name.endswith(".py"):
        name = f"{Path(name).stem}-{rest.partition(':')[0]}"
    end = launchers.run_id() or f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    return Path("runs") / re.sub(r"[^A-Za-z0-9_.-]+", "-", "-".join(filter(None, [kind, name or "task", end])))
