"""The tables that the command prints: strategies, tasks, engines."""

from __future__ import annotations

import inspect
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from manyhands import spec


def version_line() -> str:
    """`manyhands 0.1.0, Python 3.11.9, torch 2.13.0`; torch is not imported for it."""
    return f"manyhands {_version('manyhands')}, Python {platform.python_version()}, torch {_version('torch')}"


def strategies() -> None:
    """List the strategies: what they exchange, their options, their papers."""
    from manyhands.strategies import CATALOGUE

    rows: dict[str, list[str | list[str]]] = {}
    for name in CATALOGUE:
        maker = spec.find(name, CATALOGUE, "strategy")
        consistency = "" if maker.consistency == "-" else f" ({maker.consistency})"
        rows[name] = [f"{maker.summary}{consistency}", options_of(maker), maker.source]
    _print(
        ("strategy", "what replicas exchange; options and their defaults; source"),
        rows,
        "Options go behind the name: --strategy local-sgd:period=16,warmup=100. Your own: --strategy my.py:Mine:alpha=.1",
    )


def tasks() -> None:
    """List the ready-made tasks."""
    from manyhands.tasks import SUMMARIES

    _print(
        ("task", "what it is"),
        {name: [summary] for name, summary in SUMMARIES.items()},
        "Fields go behind the name: digits:batch_size=32,epochs=5. Your own: my.py:task, a Task or a function that returns one.",
    )


def engines() -> None:
    """List the engines: where workers can run, and their options."""
    from manyhands.engines import CATALOGUE

    makers = {name: spec.find(name, CATALOGUE, "engine") for name in CATALOGUE}
    _print(
        ("engine", "where workers run; options and their defaults"),
        {name: [(inspect.getdoc(maker) or "").partition("\n")[0], options_of(maker)] for name, maker in makers.items()},
        "Options go behind the name: --engine hosts:listen=10.0.0.1,local_workers=2.\n"
        "auto, the default, is torchrun in what torchrun, mpirun or srun started, hosts with --listen, sim with --network, --compute or --faults,\n"
        "and local anywhere else.",
    )


@contextmanager
def bar_of(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal's standard error; gives the function to call with (done, in all)."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

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
    text = str(field.default)
    return text.lower() if field.default is None or isinstance(field.default, bool) else text


def _print(titles: tuple[str, str], rows: dict[str, list[str | list[str]]], footer: str) -> None:
    """rows: {name: its lines}; a list among them is words, in as few lines as hold them, three spaces apart."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 1, 0))
    table.add_column(titles[0], no_wrap=True, overflow="fold", style="cyan")
    table.add_column(titles[1], overflow="fold")
    width = console.width - max(map(len, rows)) - 2
    for name, parts in rows.items():
        lines = [line for part in parts for line in ([part] if isinstance(part, str) else _packed(part, width))]
        table.add_row(name, "\n".join(lines))
    console.print(table)
    console.print(footer, markup=False, soft_wrap=True)


def _packed(words: list[str], width: int) -> list[str]:
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + 3 + len(word) <= width:
            lines[-1] += f"   {word}"
        else:
            lines.append(word)
    return lines


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"
