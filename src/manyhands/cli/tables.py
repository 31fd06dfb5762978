"""The tables that the command prints: strategies, tasks, engines."""

from __future__ import annotations

import inspect
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from manyhands import spec


def version_line() -> str:
    """`manyhands 0.1.0, Python 3.11.9, torch 2.13.0`; torch is not imported for it."""
    return f"manyhands {_version('manyhands')}, Python {platform.python_version()}, torch {_version('torch')}"


def print_strategies() -> None:
    """Name, what is exchanged, consistency, options with their defaults, source."""
    from manyhands.strategies import CATALOGUE

    table = _table("strategy", "what replicas exchange; options and their defaults; source")
    width = Console().width - max(map(len, CATALOGUE)) - 2
    for name in CATALOGUE:
        maker = spec.find(name, CATALOGUE, "strategy")
        consistency = "" if maker.consistency == "-" else f" ({maker.consistency})"
        lines = [f"{maker.summary}{consistency}", *_packed(options_of(maker), width), maker.source]
        table.add_row(name, "\n".join(lines))
    _print(
        table,
        "Options go behind the name: --strategy local-sgd:period=16,warmup=100. Your own: --strategy my.py:Mine:alpha=.1",
    )


def _packed(words: list[str], width: int) -> list[str]:
    """The words in as few lines as hold them, three spaces apart."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + 3 + len(word) <= width:
            lines[-1] += f"   {word}"
        else:
            lines.append(word)
    return lines


def print_tasks() -> None:
    """Name and what it trains."""
    from manyhands.tasks import SUMMARIES

    table = _table("task", "what it is")
    for name, summary in SUMMARIES.items():
        table.add_row(name, summary)
    _print(
        table,
        "Fields go behind the name: digits:batch_size=32,epochs=5. Your own: my.py:task, a Task or a function that returns one.",
    )


def print_engines() -> None:
    """Name, where its workers run (the first line of each engine's docstring), options with their defaults."""
    from manyhands.engines import CATALOGUE

    table = _table("engine", "where workers run; options and their defaults")
    width = Console().width - max(map(len, CATALOGUE)) - 2
    for name in CATALOGUE:
        maker = spec.find(name, CATALOGUE, "engine")
        what = (inspect.getdoc(maker) or "").partition("\n")[0]
        table.add_row(name, "\n".join([what, *_packed(options_of(maker), width)]))
    _print(
        table,
        "Options go behind the name: --engine hosts:listen=10.0.0.1,local_workers=2.\n"
        "auto, the default, is torchrun in what torchrun, mpirun or srun started, hosts with --listen, sim with --network, --compute or --faults,\n"
        "and local anywhere else.",
    )


@contextmanager
def bar_of(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal's standard error; gives the function to call with (done, in all)."""
    columns = (
        TextColumn("{task.completed:,} of {task.total:,} {task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        bar = progress.add_task(what, total=1)
        yield lambda done, total: progress.update(bar, completed=done, total=total)


def options_of(maker: type[Any]) -> list[str]:
    """[`period=8 (int | end)`, …]"""
    hints = spec.options_of(maker)
    return [f"{f.name}={_default(f)} ({spec.type_text(hints[f.name])})" for f in spec.option_fields(maker)]


def _default(field: Any) -> str:
    if field.default is MISSING:
        return "..."
    return (
        str(field.default).lower() if field.default is None or isinstance(field.default, bool) else str(field.default)
    )


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 1, 0))
    for i, column in enumerate(columns):
        table.add_column(column, no_wrap=i == 0, overflow="fold", style="cyan" if i == 0 else "")
    return table


def _print(table: Table, footer: str) -> None:
    console = Console(highlight=False)
    console.print(table)
    console.print(footer, markup=False, soft_wrap=True)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"
