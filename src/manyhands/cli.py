"""The command `manyhands`: parses, calls the library, prints. Torch is imported by the commands that need it, not by --help."""

from __future__ import annotations

import os
import re
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from manyhands import cli_options as options
from manyhands.errors import BadInput, ManyhandsError

if TYPE_CHECKING:
    from manyhands.callbacks.base import Callback
    from manyhands.engines.base import Engine

INTERRUPTED = 130
TASK_FIELDS = (
    *("epochs", "max_steps", "batch_size", "batch_size_per_worker", "micro_batch_size"),
    *("seed", "precision", "clip_norm", "loader_processes"),
)


class Commands(TyperGroup):
    """All commands, with manyhands' errors as one clear message and an exit code: 1 failed, 2 bad input, 75 preempted, 130 Ctrl-C."""

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
        except KeyboardInterrupt:
            typer.echo("manyhands: interrupted", err=True)
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
    app(prog_name="manyhands")


def _show_version(value: bool) -> None:
    if value:
        from manyhands.cli_tables import version_line

        typer.echo(version_line())
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

    Exit codes: 0 done, 1 failed, 2 bad input, 75 preempted and resumable (SIGTERM), 130 Ctrl-C.
    """


@app.command()
def train(
    ctx: typer.Context,
    task: options.TaskSpec,
    workers: options.Workers = None,
    strategy: options.Strategy = "allreduce",
    engine: options.Engine = "auto",
    device: options.Device = "auto",
    threads_per_worker: options.Threads = None,
    timeout: options.Timeout = 300.0,
    max_seconds: options.MaxSeconds = None,
    epochs: options.Epochs = None,
    max_steps: options.MaxSteps = None,
    batch_size: options.BatchSize = None,
    batch_size_per_worker: options.BatchSizePerWorker = None,
    micro_batch_size: options.MicroBatchSize = None,
    seed: options.Seed = None,
    precision: options.Precision = None,
    clip_norm: options.ClipNorm = None,
    no_shuffle: options.NoShuffle = False,
    loader_processes: options.LoaderProcesses = None,
    run_dir: options.RunDirectory = None,
    resume: options.Resume = False,
    validate_every: options.ValidateEvery = "epoch",
    checkpoint_every: options.CheckpointEvery = "epoch",
    keep: options.Keep = "last",
    nonfinite: options.Nonfinite = "raise",
    early_stopping: options.Stopping = None,
    tensorboard: options.TensorBoardFolder = None,
    log: options.Log = "auto",
    debug: options.Debug = False,
) -> None:
    """Train a task and print what came of it.

    [bold]manyhands train digits --workers 2[/bold]
    [bold]manyhands train digits:batch_size=32,epochs=5 -n 2 -s local-sgd:period=8[/bold]
    [bold]manyhands train my.py:task --run-dir runs/mine --resume[/bold]
    [bold]manyhands train digits --log json | jq .values.loss[/bold]
    """
    if resume and run_dir is None:
        raise BadInput("--resume needs --run-dir: name the directory of the run that is to go on")
    with _started(engine, workers) as place:
        from manyhands.training import train as train_task

        run = train_task(
            task,
            strategy=strategy,
            engine=place,
            workers=workers,
            device=device,
            threads_per_worker=threads_per_worker,
            run_dir=run_dir or default_run_dir(task),
            resume=resume,
            callbacks=_callbacks(log, early_stopping, tensorboard),
            validate_every=_steps(validate_every),
            checkpoint_every=_steps(checkpoint_every),
            keep=keep,
            nonfinite=nonfinite,
            max_seconds=max_seconds,
            timeout_s=timeout,
            **_task_fields(ctx.params),
        )
    typer.echo(run.summary(), err=log == "json")


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    script: options.Script,
    arguments: options.ScriptArguments = None,
    workers: options.Workers = None,
    strategy: options.ScriptStrategy = "allreduce",
    threads_per_worker: options.Threads = None,
    timeout: options.Timeout = 300.0,
    debug: options.Debug = False,
) -> None:
    """Run a script on many workers: the same file that `python` runs alone.

    [bold]manyhands run -n 4 train.py[/bold]
    [bold]manyhands run -n 4 --strategy local-sgd:period=8 train.py --its-own-arguments[/bold]
    """
    with _started("local", workers) as place:
        from manyhands.launching import run_script

        code = run_script(
            script,
            arguments or [],
            workers=workers,
            strategy=strategy,
            engine=place,
            threads_per_worker=threads_per_worker,
            timeout_s=timeout,
        )
    raise typer.Exit(code)


@app.command()
def strategies() -> None:
    """List the strategies: what they exchange, their options, their papers."""
    from manyhands.cli_tables import print_strategies

    print_strategies()


@app.command()
def tasks() -> None:
    """List the ready-made tasks."""
    from manyhands.cli_tables import print_tasks

    print_tasks()


@app.command()
def engines() -> None:
    """List the engines: where workers can run."""
    from manyhands.cli_tables import print_engines

    print_engines()


def default_run_dir(task: str) -> Path:
    """runs/digits-20250131-142501-4711 for digits:epochs=5: date, time, process. Under torchrun, whose processes must agree, its run's name ends it."""
    name, _, rest = task.partition(":")
    if name.endswith(".py"):
        name = f"{Path(name).stem}-{rest.partition(':')[0]}"
    end = _torchrun_id() or f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    return Path("runs") / re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{name or 'task'}-{end}")


def _torchrun_id() -> str | None:
    """What all processes of one torchrun call know; "none" is its default for every call, so its port tells them apart."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"{name}-{os.environ.get('MASTER_PORT', '')}" if name == "none" else name


def _task_fields(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of Task among the command's options, those that were given."""
    fields = {name: given[name] for name in TASK_FIELDS if given[name] is not None}
    return fields | ({"shuffle": False} if given["no_shuffle"] else {})


@contextmanager
def _started(engine: str, workers: int | None) -> Iterator[Engine | str]:
    """The engine; where it is `local` and will fork, its server loads torch while this process does."""
    from manyhands.engines import under_torchrun

    if engine not in ("auto", "local") or (workers or 1) < 2 or under_torchrun():
        yield engine
        return
    from manyhands.engines.local import Local

    local = Local().prestart()
    try:
        yield local
    finally:
        local.close()


def _callbacks(log: str, early_stopping: str | None, tensorboard: Path | None) -> list[Callback]:
    from manyhands.callbacks import EarlyStopping, Progress, TensorBoard

    callbacks: list[Callback] = [Progress(log)]
    if early_stopping is not None:
        metric, colon, patience = early_stopping.partition(":")
        callbacks.append(
            EarlyStopping(metric=metric, patience=int(patience)) if colon else EarlyStopping(metric=metric)
        )
    if tensorboard is not None:
        callbacks.append(TensorBoard(tensorboard))
    return callbacks


def _steps(value: str) -> str | int:
    return int(value) if value.lstrip("-").isdigit() else value
