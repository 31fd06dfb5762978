"""The command `manyhands`: parses, calls the library, prints. Commands import torch only when they need it."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import shellingham
import typer
from typer.core import TyperGroup

from manyhands.checkpoint.paths import path_of
from manyhands.cli import data, evidence, inference, options, tables
from manyhands.cli.config import text_of
from manyhands.cli.options import stamped, task_fields, with_fields
from manyhands.cli.options import started as _started
from manyhands.engines.driver import supervisor
from manyhands.engines.torchrun import launchers
from manyhands.errors import BadInput, ManyhandsError, is_whole, whole_of
from manyhands.own_loop.observed.script import DISTRIBUTED
from manyhands.units import count

if TYPE_CHECKING:
    from manyhands.callbacks.base import Callback
    from manyhands.engines.base import Engine

INTERRUPTED = 130
SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")


class Commands(TyperGroup):
    """All commands. Errors are one message and an exit code: 1 failed, 2 bad input, 75 preempted, 130 Ctrl-C."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the arguments name."""
        try:
            return super().invoke(ctx)
        except ManyhandsError as error:
            if ctx.meta.get(options.DEBUG):
                traceback.print_exception(error)
            else:
                typer.echo(f"manyhands: {error}", err=True)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt as interrupt:
            notes = "".join(f"; {note}" for note in getattr(interrupt, "__notes__", []))
            typer.echo(f"manyhands: interrupted{notes}", err=True)
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """The entry point of the command."""
    if {"--show-completion", "--install-completion"} & set(sys.argv[1:]) and (shell := _shell_here()) not in SHELLS:
        found = f"{shell} is here" if shell else "none was found"
        typer.echo(
            f"manyhands: completion needs a shell, one of {', '.join(SHELLS)}; {found}: start it from one of these",
            err=True,
        )
        sys.exit(BadInput.exit_code)
    supervisor.command = list(sys.argv)
    app(prog_name="manyhands")


def _shell_here() -> str:
    """The name of the shell that started this process, "" without one."""
    try:
        return str(shellingham.detect_shell()[0])
    except shellingham.ShellDetectionFailure:
        return ""


def _show_version(value: bool) -> None:
    if value:
        typer.echo(tables.version_line())
        raise typer.Exit


@app.callback()
def manyhands(
    version: Annotated[
        bool, typer.Option("--version", help="Show versions and leave.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Train a PyTorch program on many workers, and measure whether they helped.

    A ready-made task on two workers, a task of your own, your own script:

    [bold]manyhands train digits --workers 2[/bold]
    [bold]manyhands train my.py:task -n 4 --strategy local-sgd:period=8[/bold]
    [bold]manyhands run -n 4 train.py --its-own-arguments[/bold]

    Over a parameter server; that run again, bit for bit; with other hosts:

    [bold]manyhands train digits -n 4 --strategy dynsgd --run-dir runs/mine[/bold]
    [bold]manyhands replay runs/mine[/bold]
    [bold]manyhands train my.py:task -n 4 --listen 10.0.0.1[/bold]

    The trained model at work, on all rows of a file:

    [bold]manyhands predict runs/mine rows.npy -o out.parquet -n 2[/bold]
    [bold]manyhands evaluate runs/mine[/bold]

    Exit codes: 0 done, 1 failed, 2 bad input, 75 preempted and resumable (SIGTERM), 130 Ctrl-C.
    """


@app.command()
def train(
    ctx: typer.Context,
    task: options.TrainedTask = None,
    workers: options.ElasticWorkers = None,
    strategy: options.TrainedBy = None,
    engine: options.Engine = "auto",
    servers: options.Servers = 1,
    device: options.Device = "auto",
    threads_per_worker: options.Threads = None,
    timeout: options.Timeout = 300.0,
    max_seconds: options.MaxSeconds = None,
    max_losses: options.MaxLosses = None,
    max_restarts: options.MaxRestarts = None,
    copies: options.Copies = None,
    survive: options.Survival = None,
    listen: options.Listen = None,
    advertise: options.Advertise = None,
    local_workers: options.LocalWorkers = None,
    ports: options.Ports = None,
    tls: options.Tls = True,
    plain_network: options.PlainNetwork = False,
    wait: options.Wait = None,
    network: options.Network = None,
    compute: options.Compute = None,
    faults: options.Faults = None,
    sim_seed: options.SimSeed = None,
    profile: options.SimProfile = None,
    epochs: options.Epochs = None,
    max_steps: options.MaxSteps = None,
    batch_size: options.BatchSize = None,
    batch_size_per_worker: options.BatchSizePerWorker = None,
    micro_batch_size: options.MicroBatchSize = None,
    seed: options.Seed = None,
    precision: options.Precision = None,
    clip_norm: options.ClipNorm = None,
    no_shuffle: options.NoShuffle = False,
    batches: options.TaskBatches = None,
    sync_batch_norm: options.SyncBatchNorm = None,
    loader_processes: options.LoaderProcesses = None,
    run_dir: options.RunDirectory = None,
    resume: options.Resume = False,
    validate_every: options.ValidateEvery = "epoch",
    checkpoint_every: options.CheckpointEvery = "epoch",
    check_replicas_every: options.CheckReplicasEvery = None,
    keep: options.Keep = "last",
    nonfinite: options.Nonfinite = "raise",
    partition: options.Partition = "none",
    model_parallel: options.ModelParallel = None,
    memory_per_worker: options.MemoryPerWorker = None,
    early_stopping: options.Stopping = None,
    tensorboard: options.TensorBoardFolder = None,
    mlflow: options.MLflowExperiment = None,
    wandb: options.WandBProject = None,
    log: options.Log = "auto",
    config: options.Config = None,
    print_config: options.PrintConfig = False,
    debug: options.Debug = False,
) -> None:
    """Train a task and print what came of it.

    [bold]manyhands train digits --workers 2[/bold]
    [bold]manyhands train digits:batch_size=32,epochs=5 -n 2 -s local-sgd:period=8[/bold]
    [bold]manyhands train my.py:task --run-dir runs/mine --resume[/bold]
    [bold]manyhands train digits --log json | jq .values.loss[/bold]
    [bold]manyhands train digits -n 4 -s downpour:bound=2 --servers 2[/bold]
    [bold]manyhands train word2vec:path=corpus.txt,dim=100 -n 2 -s hogwild[/bold]
    [bold]manyhands train digits -n 2 --print-config > run.toml[/bold]
    [bold]manyhands train --config run.toml --epochs 3[/bold]
    [bold]manyhands train digits -n 4 --max-losses 2[/bold]
    [bold]manyhands train digits -n 4 --listen 10.0.0.1[/bold]
    [bold]manyhands train digits -n 64 -s downpour --network latency=1ms,bandwidth=1Gbit --compute row=1e-4,3=5x[/bold]

    With --listen the engine is hosts: it prints the command by which others join.
    With --network, --compute or --faults it is sim: any number of workers, in
    virtual time.
    """
    if print_config:
        typer.echo(text_of(ctx))
        return
    if task is None:
        raise BadInput(
            'train needs a task: manyhands train digits, or task = "digits" in the file of --config (manyhands tasks lists them)'
        )
    engine = with_fields(
        engine,
        "hosts",
        listen=listen,
        advertise=advertise or None,
        local_workers=local_workers,
        ports=ports,
        tls=None if tls else tls,
        plain_network=plain_network or None,
        wait_s=wait,
    )
    engine = with_fields(engine, "sim", network=network, compute=compute, faults=faults, seed=sim_seed, profile=profile)
    if resume and run_dir is None:
        raise BadInput("--resume needs --run-dir: give the directory of the run to continue")
    count, surviving = options.survival_of(workers, survive, max_losses, max_restarts, copies)
    if surviving is not None and surviving.max_restarts and supervisor.is_wanted() and launchers.run_id() is None:
        directory = run_dir or str(stamped("", task))
        more = [] if run_dir else ["--run-dir", directory]
        hosts = engine.partition(":")[0] == "hosts"
        raise typer.Exit(supervisor.supervise(surviving.max_restarts, directory, more=more, hosts=hosts))
    with _started(engine, count) as place:
        from manyhands.engines.cores import usable_cores
        from manyhands.engines.single_process import running_threads
        from manyhands.training.train import train as train_task

        with running_threads(usable_cores()):  # of this process, for which no program has set how many
            run = train_task(
                task,
                strategy=strategy,
                engine=place,
                workers=count,
                survive=surviving,
                servers=servers,
                device=device,
                threads_per_worker=threads_per_worker,
                run_dir=stamped("", task) if run_dir is None else path_of(run_dir),
                resume=resume,
                callbacks=_callbacks(log, early_stopping, tensorboard, mlflow, wandb),
                validate_every=_steps(validate_every),
                checkpoint_every=_steps(checkpoint_every),
                check_replicas_every=check_replicas_every,
                keep=keep,
                nonfinite=nonfinite,
                partition=partition,
                model_parallel=model_parallel,
                memory_per_worker=memory_per_worker,
                max_seconds=max_seconds,
                timeout_s=timeout,
                **task_fields(ctx.params),
            )
    typer.echo(run.summary(), err=log == "json")


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    script: options.Script,
    arguments: options.ScriptArguments = None,
    workers: options.Workers = None,
    strategy: options.ScriptStrategy = "allreduce",
    servers: options.ScriptServers = None,
    engine: options.ScriptEngine = "auto",
    threads_per_worker: options.Threads = None,
    timeout: options.Timeout = 300.0,
    auto: options.Auto = False,
    runs_as: options.RunsAs = None,
    verify: options.Verify = None,
    batches: options.Batches = None,
    own_batches: options.OwnBatches = False,
    read: options.Read = None,
    share_gpu: options.ShareGpu = False,
    roles: options.ScriptRoles = None,
    until: options.Until = None,
    tensorboard: options.ScriptTensorBoard = None,
    max_restarts: options.MaxRestarts = None,
    debug: options.Debug = False,
) -> None:
    """Run a script on many workers: the same file that `python` runs alone.

    [bold]manyhands run --auto -n 4 train.py[/bold]
    [bold]manyhands run --auto -n 4 --strategy local-sgd:period=8 train.py --its-own-arguments[/bold]

    With --auto the script is unchanged: its model, optimizer and loaders are
    found as it runs, and each batch is shared by all workers. Without, it calls
    mh.prepare:

    [bold]manyhands run -n 4 prepared.py[/bold]

    With --as distributed it is a program that torchrun would start; where it
    asks for gloo, or for no backend by name, it gets manyhands:

    [bold]manyhands run --as distributed -n 4 ddp.py[/bold]

    With --roles it is another framework's own program (TensorFlow,
    torch.distributed, JAX), which finds its cluster in the environment:

    [bold]manyhands run --roles worker=2 ddp.py[/bold]
    [bold]manyhands run --roles chief=1,worker=2,ps=1 --until chief --tensorboard logs tf.py[/bold]
    """
    if behind := options.behind_the_script(arguments or []):
        typer.echo(
            f"manyhands: {behind} stands behind the script, so the script gets it; manyhands' own options stand before it: "
            f"manyhands run {behind} {script} ...",
            err=True,
        )
    engine = options.script_engine(engine, roles)
    observation = options.observation_of(
        script,
        auto=auto,
        runs_as=runs_as,
        verify=verify,
        batches=batches,
        own_batches=own_batches,
        read=read,
        share_gpu=share_gpu,
        workers=workers,
        strategy=strategy,
        roles=roles,
        engine=engine,
    )
    distributed = observation is not None and observation.kind == DISTRIBUTED
    cast = options.cast_of(roles, workers, until, tensorboard, DISTRIBUTED if distributed else None)
    if distributed and (strategy != "allreduce" or servers is not None):
        raise BadInput(
            f"{script} runs as distributed, a program that averages for itself: leave --strategy and --servers out, or give a plain loop, and --as loop"
        )
    workers = workers if cast is None else len(cast.members)
    with _started(engine, workers) as place:
        from manyhands.own_loop.launch import run_script

        if observation is not None and observation.verify:
            _verify(
                script,
                arguments or [],
                workers or place.default_workers(),
                observation.verify,
                place,
                timeout,
                options.around_of(observation, strategy, timeout),
            )

        code = run_script(
            script,
            arguments or [],
            workers=workers,
            strategy=strategy,
            batches=batches,
            servers=servers,
            engine=place,
            threads_per_worker=threads_per_worker,
            timeout_s=timeout,
            roles=cast,
            replaces_gloo=distributed,
            tensorboard=None if tensorboard is None else str(tensorboard),
            max_restarts=max_restarts or 0,
            around=None if observation is None else options.around_of(observation, strategy, timeout),
        )
    raise typer.Exit(code)


def _verify(
    script: Path,
    arguments: list[str],
    workers: int,
    steps: int,
    engine: Engine,
    timeout_s: float,
    observed: Any,
) -> None:
    """Raise ManyhandsError where the workers' first steps are not one process's."""
    from manyhands.evidence.check.rehearsal import rehearse

    if workers == 1:
        raise BadInput("--verify compares several workers with one process: add -n 2")
    if not script.is_file():
        return  # the run itself says so
    typer.echo(
        f"manyhands: comparing {count(workers, 'worker')} with one process, without noise and in float64", err=True
    )
    found = rehearse(
        script,
        arguments,
        workers=workers,
        steps=steps,
        engine=engine,
        observed=observed,
        timeout_s=timeout_s,
    )
    if found.difference:
        raise ManyhandsError(f"{workers} workers are not one process: {found.difference}. Nothing was trained")
    typer.echo(
        f"manyhands: {count(found.steps, 'step')}: parameters, losses, rates and rows are one process's (largest relative difference {found.largest:.1g})",
        err=True,
    )


@app.command()
def replay(
    run: options.RunToReplay,
    task: options.ReplayedTask = None,
    strategy: options.ReplayedStrategy = None,
    debug: options.Debug = False,
) -> None:
    """Compute an asynchronous run again, in the order in which it happened, and compare its parameters bit for bit.

    [bold]manyhands replay runs/mine[/bold]

    It takes a finished run of a strategy with a parameter server, or of
    update-sharing, and the memory of all its workers. Refused are:

    - runs that were resumed: the journal is of one launch;
    - hogwild, which has no order;
    - strategies in step without a server (allreduce, local-sgd, …): train again
    with the same seed, which gives the same bits;
    - tasks given as objects from Python: mh.replay(directory, task=…) takes them;
    - a task or strategy in a file, unless you name it with --task or --strategy:
    the directory may name any file, and importing it runs it.

    Exit codes: 0 the same bits, 1 something differs (another version of torch,
    another machine, changed code or data), 2 refused.
    """
    from manyhands.evidence.replay.replay import replay as replay_run

    folder = path_of(run)
    with tables.bar_of("steps") as progress:
        replayed = replay_run(folder, task=task, strategy=strategy, progress=progress)
    if not replayed.identical:
        known = (
            replayed.otherwise
            or "nothing that the run recorded. Did the code, the data or the number of threads change?"
        )
        raise ManyhandsError(
            f"the replay (steps: {replayed.ticks:,}, workers: {replayed.workers}) gave parameters that differ by up to "
            f"{replayed.difference:.3g} from {folder / 'model.safetensors'}. Changed since the run: {known}"
        )
    typer.echo(
        f"{folder}: replayed {count(replayed.ticks, 'step')} of {count(replayed.workers, 'worker')}: the same bits"
    )


for _using in (inference.predict, inference.evaluate):
    app.command()(_using)
for _measuring in (evidence.compare, evidence.check, evidence.calibrate, evidence.estimate, evidence.plan):
    app.command()(_measuring)

app.command()(data.data)


@app.command()
def join(
    address: options.DriverAddress,
    workers: options.OwnWorkers,
    listen: options.OwnAddress = "",
    advertise: options.Advertise = None,
    ports: options.Ports = None,
    tls: options.Tls = True,
    plain_network: options.PlainNetwork = False,
    wait: options.Wait = None,
    debug: options.Debug = False,
) -> None:
    """Give workers of this host to a run on another, until it is over.

    The run was started there with --listen (--engine hosts), which printed this
    command. A run that survives lost workers takes hosts at any time; SIGTERM lets
    this one leave in order. MANYHANDS_CREDENTIALS names a copy of its credentials. What runs here
    is the run's own code: join only runs that you trust.

    [bold]MANYHANDS_CREDENTIALS=run.pem manyhands join 10.0.0.1:40123 --workers 2[/bold]
    """
    from manyhands.engines.hosts.join import Join
    from manyhands.engines.hosts.join import join as join_run

    offer = Join(
        address=address,
        workers=workers,
        listen=listen,
        advertise=advertise or "",
        ports=ports or "",
        tls=tls,
        plain_network=plain_network,
        wait_s=wait or Join.wait_s,
    )
    join_run(offer, lambda line: typer.echo(line, err=True))


@app.command()
def summary(run: options.RunToSummarize, debug: options.Debug = False) -> None:
    """Print what came of a run again, with its curves; of a comparison, its tables, and write its report anew.

    [bold]manyhands summary runs/mine[/bold]

    A run that is under way, or was killed, is told as far as it came.
    """
    from manyhands.cli.summaries import text_of_directory

    typer.echo(text_of_directory(path_of(run), *tables.width()))


for _listing in (tables.strategies, tables.tasks, tables.engines):
    app.command()(_listing)


def _callbacks(
    log: str, early_stopping: str | None, tensorboard: Path | None, mlflow: str | None, wandb: str | None
) -> list[Callback]:
    from manyhands.callbacks import EarlyStopping, MLflow, Progress, TensorBoard, WandB

    callbacks: list[Callback] = [Progress(log)]
    if early_stopping is not None:
        metric, colon, text = early_stopping.partition(":")
        patience = whole_of(text) if colon else EarlyStopping.patience
        if not is_whole(patience):
            raise BadInput(
                "--early-stopping must be METRIC or METRIC:PATIENCE, where PATIENCE is a number of validations (at "
                f"least 1); not {early_stopping!r}"
            )
        callbacks.append(EarlyStopping(metric=metric, patience=patience))
    if tensorboard is not None:
        callbacks.append(TensorBoard(tensorboard))
    if mlflow is not None:
        callbacks.append(MLflow(mlflow))
    if wandb is not None:
        callbacks.append(WandB(wandb))
    return callbacks


def _steps(value: str) -> str | int:
    number = whole_of(value)
    return value if number is None else number  # train() refuses texts other than "epoch"
