"""The commands that put a trained model to work: predict, evaluate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer

from manyhands.cli import options, tables
from manyhands.cli.options import started, with_fields
from manyhands.errors import BadInput


def predict(
    run: options.TrainedRun,
    data: options.Rows,
    output: options.Predicted,
    function: options.OutputFunction = None,
    keep: options.KeptColumns = None,
    task: options.TaskOfRun = None,
    batch_size: options.RowsOfACall = 256,
    loader_processes: options.RowLoaders = None,
    workers: options.Workers = None,
    engine: options.Engine = "auto",
    device: options.Device = "auto",
    threads_per_worker: options.Threads = None,
    timeout: options.Timeout = 300.0,
    listen: options.Listen = None,
    advertise: options.Advertise = None,
    local_workers: options.LocalWorkers = None,
    ports: options.Ports = None,
    tls: options.Tls = True,
    plain_network: options.PlainNetwork = False,
    wait: options.Wait = None,
    debug: options.Debug = False,
) -> None:
    """Write a trained model's outputs for all rows of some data into a file, in the data's order.

    [bold]manyhands train digits --run-dir runs/mine[/bold]
    [bold]manyhands predict runs/mine rows.npy -o out.parquet --workers 2[/bold]

    A table (Parquet) has columns by name, so a function says what the model
    takes of them, and --keep which of them go along:

    [bold]manyhands predict runs/mine table.parquet -o out.parquet --function my.py:outputs --keep id[/bold]

    where my.py holds

    [bold]def outputs(model, batch): return model(batch["features"])[/bold]

    Several tensors in a dict become columns by their names. The file appears when
    it is complete; after an error or Ctrl-C there is none.

    Exit codes: 0 done, 1 failed, 2 bad input, 75 asked to end (SIGTERM), 130 Ctrl-C.
    """
    given = _place(engine, listen, advertise, local_workers, ports, tls, plain_network, wait)
    with started(given, workers) as place, _bar() as progress:
        from manyhands.inference.predict import predict as predict_rows

        found = predict_rows(
            run,
            _named(data, "data"),
            function=None if function is None else _named(function, "function", file=True),
            output=output,
            keep=tuple(keep or ()),
            workers=workers,
            engine=place,
            batch_size=batch_size,
            loader_processes=loader_processes or 0,
            task=task,
            device=device,
            threads_per_worker=threads_per_worker,
            timeout_s=timeout,
            progress=progress,
        )
    from manyhands import units

    shares = ", ".join(f"{rows:,}" for rows in found.rows_of_workers)
    by_worker = f" (by worker: {shares})" if len(found.rows_of_workers) > 1 else ""
    typer.echo(f"{found.path}: {units.count(found.rows, 'row')} in {units.seconds(found.seconds)}{by_worker}")


def evaluate(
    run: options.TrainedRun,
    data: options.RowsOrTests = None,
    metrics: options.MetricsFunction = None,
    task: options.TaskOfRun = None,
    batch_size: options.RowsOfACall = 256,
    loader_processes: options.RowLoaders = None,
    workers: options.Workers = None,
    engine: options.Engine = "auto",
    device: options.Device = "auto",
    threads_per_worker: options.Threads = None,
    timeout: options.Timeout = 300.0,
    listen: options.Listen = None,
    advertise: options.Advertise = None,
    local_workers: options.LocalWorkers = None,
    ports: options.Ports = None,
    tls: options.Tls = True,
    plain_network: options.PlainNetwork = False,
    wait: options.Wait = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Measure a trained model on all rows of some data, each once, and print its metrics.

    [bold]manyhands evaluate runs/mine[/bold]
    [bold]manyhands evaluate runs/mine tests.npz --workers 2[/bold]
    [bold]manyhands evaluate runs/mine table.parquet -n 4 --metrics my.py:metrics[/bold]

    Without DATA the run's task says which rows (its test data, else its validation
    data), without --metrics what is measured. A metrics function in a file is

    [bold]def metrics(model, batch): return {"accuracy": mean over the batch}[/bold]

    or returns (mean, weight). All workers together find what one finds.

    Exit codes: 0 done, 1 failed, 2 bad input, 75 asked to end (SIGTERM), 130 Ctrl-C.
    """
    given = _place(engine, listen, advertise, local_workers, ports, tls, plain_network, wait)
    with started(given, workers) as place:
        from manyhands.inference.evaluate import evaluate as evaluate_rows

        found = evaluate_rows(
            run,
            None if data is None else _named(data, "data"),
            metrics=None if metrics is None else _named(metrics, "function", file=True),
            workers=workers,
            engine=place,
            batch_size=batch_size,
            loader_processes=loader_processes or 0,
            task=task,
            device=device,
            threads_per_worker=threads_per_worker,
            timeout_s=timeout,
        )
    import json

    from manyhands import units

    if as_json:
        typer.echo(json.dumps(found))
        return
    longest = max(map(len, found), default=0)
    for name, value in found.items():
        typer.echo(f"{name:<{longest}}  {units.number(value)}")


def _place(
    engine: str,
    listen: str | None,
    advertise: str | None,
    local_workers: int | None,
    ports: str | None,
    tls: bool,
    plain_network: bool,
    wait: float | None,
) -> str:
    """The engine's spec, with what is said of several hosts."""
    return with_fields(
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


def _named(given: str, what: str, *, file: bool = False) -> Any:
    """What `my.py:NAME` names; any other text is a path, unless it has to be such a name."""
    from manyhands import spec

    if ".py:" in given:
        return spec.find(given, {}, what)
    if file:
        raise BadInput(f"a {what} is named by its file, my.py:NAME, not {given!r}")
    return given


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal; where nobody knows how many rows come, it counts them."""
    with tables.bar_of("rows") as progress:
        yield lambda done, total: progress(done, total or done)
