"""The commands that measure: compare, check, estimate, calibrate."""

from __future__ import annotations

from pathlib import Path

import typer

from manyhands.cli import options, tables
from manyhands.cli.options import stamped, task_fields, with_fields
from manyhands.errors import BadInput, is_whole, whole_of

STANDARD_OUTPUT = "-"


def compare(
    ctx: typer.Context,
    task: options.TaskSpec,
    strategies: options.ComparedStrategies = None,
    workers: options.ComparedWorkers = "1,2",
    repeats: options.Repeats = 3,
    target: options.Target = None,
    output: options.ReportDirectory = None,
    markdown: options.Markdown = None,
    time_margin: options.TimeMargin = 0.05,
    metric_margin: options.MetricMargin = 0.01,
    validations: options.Validations = 20,
    engine: options.Engine = "auto",
    servers: options.Servers = 1,
    partitions: options.Partitions = "none",
    device: options.Device = "auto",
    threads_per_worker: options.Threads = None,
    timeout: options.Timeout = 300.0,
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
    debug: options.Debug = False,
) -> None:
    """Train a task with several strategies, and say which is worth it here, also when that is one process.

    [bold]manyhands compare digits[/bold]
    [bold]manyhands compare my.py:task --strategies allreduce,local-sgd:period=8,downpour --workers 2,4[/bold]
    [bold]manyhands compare digits --target test_accuracy=0.97 --repeats 5[/bold]
    [bold]manyhands compare digits --workers 16 --network latency=1ms,bandwidth=1Gbit[/bold]

    One process alone (solo), with one thread and with all, always takes part.
    Trials of all variants alternate; those of one repeat have the same seed and
    see the same rows. Two results are called different only where repeats and
    margins allow it (docs/compare.md). Let the machine be idle meanwhile. Ctrl-C or
    SIGTERM after the first repeat reports what is there.
    """
    from manyhands import spec
    from manyhands.evidence.compare.compare import DEFAULT, compare
    from manyhands.evidence.compare.comparison import NUMBERS
    from manyhands.evidence.compare.report import missing, save
    from manyhands.evidence.compare.text import markdown as as_markdown
    from manyhands.evidence.compare.text import text

    if lacking := missing():
        _say(f"{lacking}, so no page is made: pip install 'manyhands[report]' for it")  # now, not after all trials
    folder = output or stamped("compare", task)
    found = compare(
        task,
        strategies=DEFAULT if strategies is None else spec.split_list(strategies),
        workers=_counts(workers),
        repeats=repeats,
        target=target,
        engine=with_fields(
            engine, "sim", network=network, compute=compute, faults=faults, seed=sim_seed, profile=profile
        ),
        servers=servers,
        partitions=partitions.split(","),
        device=device,
        threads_per_worker=threads_per_worker,
        time_margin=time_margin,
        metric_margin=metric_margin,
        validations=validations,
        timeout_s=timeout,
        say=_say,
        **task_fields(ctx.params),
    )
    typer.echo(text(found, *tables.width()), err=markdown == STANDARD_OUTPUT)
    if markdown == STANDARD_OUTPUT:
        typer.echo(as_markdown(found))
    elif markdown is not None:
        Path(markdown).write_text(as_markdown(found) + "\n")
    try:
        written = f"report: {save(found, folder).resolve()}"
    except BadInput as no_page:
        written = f"numbers: {(folder / NUMBERS).resolve()}; {no_page}"
    typer.echo(written, err=markdown == STANDARD_OUTPUT)


def check(
    ctx: typer.Context,
    task: options.TaskSpec,
    workers: options.CheckedWorkers = 2,
    steps: options.CheckedSteps = 8,
    timeout: options.Timeout = 300.0,
    as_json: options.AsJson = False,
    batch_size: options.BatchSize = None,
    batch_size_per_worker: options.BatchSizePerWorker = None,
    micro_batch_size: options.MicroBatchSize = None,
    seed: options.Seed = None,
    clip_norm: options.ClipNorm = None,
    no_shuffle: options.NoShuffle = False,
    batches: options.TaskBatches = None,
    sync_batch_norm: options.SyncBatchNorm = None,
    debug: options.Debug = False,
) -> None:
    """Prove on a task of yours that N workers equal one, step by step in float64, or name what keeps them from it.

    [bold]manyhands check my.py:task[/bold]
    [bold]manyhands check my.py:task --workers 3 --steps 20[/bold]

    It tries what usually breaks it, one after the other: batch-norm, dropout, a
    loss that sums, rows that depend on the order in which they are read,
    parameters changed in place, operators that are not deterministic.
    docs/check.md says what each finding means.

    Exit codes: 0 they are equal, 1 they are not, 2 bad input.
    """
    from manyhands.evidence.check.check import check as check_task

    found = check_task(task, workers=workers, steps=steps, timeout_s=timeout, say=_say, **task_fields(ctx.params))
    typer.echo(found.to_json() if as_json else found.text())
    if not found.passed:
        raise typer.Exit(1)


def estimate(
    ctx: typer.Context,
    task: options.TaskSpec,
    engine: options.EstimatedEngine = "sim",
    profile: options.EstimateProfile = None,
    workers: options.EstimatedWorkers = None,
    workers_per_executor: options.WorkersPerExecutor = None,
    strategies: options.ComparedStrategies = None,
    steps: options.EstimatedSteps = None,
    network: options.Network = None,
    compute: options.Compute = None,
    servers: options.Servers = 1,
    as_json: options.AsJson = False,
    epochs: options.Epochs = None,
    max_steps: options.MaxSteps = None,
    batch_size: options.BatchSize = None,
    batch_size_per_worker: options.BatchSizePerWorker = None,
    debug: options.Debug = False,
) -> None:
    """Predict time, efficiency and bytes of each strategy on more workers than you have, by the calibrated simulator.

    [bold]manyhands calibrate my.py:task --output profile.json[/bold]
    [bold]manyhands estimate my.py:task --profile profile.json --workers 8,64 --batch-size-per-worker 16[/bold]
    [bold]manyhands estimate my.py:task --profile profile.json --network latency=1ms,workers_per_host=8[/bold]
    [bold]manyhands estimate my.py:task --engine spark --workers 8 --workers-per-executor 4[/bold]

    The bars are how far calibration's own predictions were off; docs/estimate.md has the rule.
    With --engine spark it is the memory that Spark's executors need, and the
    settings that give it: a few steps are trained here on two workers.
    """
    if (name := engine.partition(":")[0]) not in ("sim", "spark"):
        raise BadInput(
            f"estimate knows --engine sim (the default: time, by a profile) and --engine spark (memory), not {name!r}"
        )
    if name == "spark":
        known = {"--profile": profile, "--steps": steps, "--network": network, "--compute": compute}
        if given := [option for option, value in known.items() if value is not None]:
            raise BadInput(f"{given[0]} is of estimates of time: leave it out, or leave --engine spark out")
        count, strategy = "8" if workers is None else workers, strategies or "allreduce"
        _executor_memory(ctx, task, engine, count, workers_per_executor or 4, strategy, servers)
        return
    if engine != "sim":
        raise BadInput(f"the network and compute of {engine!r} are --network and --compute here: leave --engine out")
    if workers_per_executor is not None:
        raise BadInput("--workers-per-executor is of executors: give --engine spark, too")
    if profile is None:
        raise BadInput(
            f"estimate needs the profile of a machine: make one with `manyhands calibrate {task}`, then give --profile profile.json"
        )
    from manyhands import spec
    from manyhands.evidence.estimate.estimate import DEFAULT
    from manyhands.evidence.estimate.estimate import estimate as estimate_task
    from manyhands.evidence.estimate.table import text

    found = estimate_task(
        task,
        profile=profile,
        workers=_counts("8,64,512" if workers is None else workers),
        strategies=DEFAULT if strategies is None else spec.split_list(strategies),
        steps=steps,
        network=network,
        compute=compute,
        servers=servers,
        say=_say,
        **task_fields(ctx.params),
    )
    typer.echo(found.to_json() if as_json else text(found, *tables.width()))


def _executor_memory(
    ctx: typer.Context, task: str, engine: str, workers: str, workers_per_executor: int, strategies: str, servers: int
) -> None:
    from manyhands import spec
    from manyhands.evidence.estimate.executor_memory import executor_memory
    from manyhands.evidence.estimate.table import memory_text

    counts, chosen = _counts(workers), spec.split_list(strategies)
    if len(counts) > 1 or len(chosen) > 1:
        raise BadInput(
            f"the settings of executors are for one run: give one number of workers and one strategy, not {workers} and {strategies}"
        )
    found = executor_memory(
        task,
        workers=counts[0],
        workers_per_executor=workers_per_executor,
        strategy=chosen[0],
        servers=servers,
        engine=engine,
        say=_say,
        **task_fields(ctx.params),
    )
    typer.echo(found.to_json() if ctx.params["as_json"] else memory_text(found, *tables.width()))


def calibrate(
    ctx: typer.Context,
    task: options.TaskSpec,
    workers: options.CalibratedWorkers = 2,
    output: options.Output = Path("profile.json"),
    strategies: options.CalibratedStrategies = "allreduce,local-sgd:period=8,dynsgd",
    steps: options.CalibratedSteps = 16,
    quick: options.Quick = False,
    engine: options.Engine = "auto",
    device: options.Device = "auto",
    threads_per_worker: options.Threads = None,
    timeout: options.Timeout = 300.0,
    batch_size: options.BatchSize = None,
    batch_size_per_worker: options.BatchSizePerWorker = None,
    micro_batch_size: options.MicroBatchSize = None,
    precision: options.Precision = None,
    clip_norm: options.ClipNorm = None,
    loader_processes: options.LoaderProcesses = None,
    debug: options.Debug = False,
) -> None:
    """Measure what a task costs on this machine, and write a profile that engine sim takes.

    [bold]manyhands calibrate chars --workers 2 --output profile.json[/bold]
    [bold]manyhands train chars -n 64 -s diloco --batch-size 64 --engine sim --profile profile.json[/bold]

    It trains a little, with and without exchange, at three batch sizes; times the
    workers' group and a parameter server; and prints how far the simulated step
    of each strategy is from the real one. Let the machine be idle meanwhile.
    """
    _check_folder_of(output)
    from manyhands import spec
    from manyhands.evidence.calibrate.calibrate import calibrated
    from manyhands.evidence.calibrate.report import text

    found = calibrated(
        task,
        workers=workers,
        strategies=[] if strategies == "none" else spec.split_list(strategies),
        steps=steps,
        quick=quick,
        engine=engine,
        device=device,
        threads_per_worker=threads_per_worker,
        timeout_s=timeout,
        say=_say,
        **task_fields(ctx.params),
    )
    found.profile.save(output)
    typer.echo(text(found, task, output))


def plan(
    ctx: typer.Context,
    task: options.TaskSpec,
    workers: options.PlannedWorkers,
    strategy: options.Strategy = "allreduce",
    memory_per_worker: options.MemoryPerWorker = None,
    output: options.PlanFile = None,
    as_json: options.AsJson = False,
    threads_per_worker: options.Threads = None,
    batch_size: options.BatchSize = None,
    batch_size_per_worker: options.BatchSizePerWorker = None,
    micro_batch_size: options.MicroBatchSize = None,
    precision: options.Precision = None,
    clip_norm: options.ClipNorm = None,
    loader_processes: options.LoaderProcesses = None,
    debug: options.Debug = False,
) -> None:
    """Say how a model is best put on workers: whole on each, or cut into stages; with the memory and time of each plan.

    [bold]manyhands plan my.py:task -n 4 --memory-per-worker 2GB[/bold]
    [bold]manyhands plan my.py:task -n 4 --memory-per-worker 2GB -o plan.json[/bold]
    [bold]manyhands train my.py:task -n 4 --model-parallel plan.json[/bold]

    It measures the model here, a part at a time: the whole model need not fit.
    On one machine one process is nearly always faster while the model fits;
    stages are for models that do not. Let the machine be idle meanwhile.
    """
    if output is not None:
        _check_folder_of(output)
    from manyhands.training.plans import plan as plan_task

    found = plan_task(
        task,
        workers=workers,
        strategy=strategy,
        memory_per_worker=memory_per_worker,
        threads_per_worker=threads_per_worker,
        say=_say,
        **task_fields(ctx.params),
    )
    typer.echo(found.to_json() if as_json else found.text(*tables.width()))
    if output is not None:
        found.save(output)
        _say(f"{found.chosen} is in {output}: manyhands train {task} -n {workers} --model-parallel {output}")


def _check_folder_of(output: Path) -> None:
    if not output.absolute().parent.is_dir():
        raise BadInput(f"--output {output} is in a folder that does not exist: make it first, or name another file")


def _say(line: str) -> None:
    typer.echo(f"manyhands: {line}", err=True)


def _counts(text: str) -> list[int]:
    """`1,2,4`"""
    counts = [count for part in text.split(",") if (count := whole_of(part)) is not None and is_whole(count)]
    if len(counts) != len(text.split(",")):
        raise BadInput(
            f"--workers must be whole numbers of at least 1, separated by commas, such as 1,2,4; not {text!r}"
        )
    return counts
