"""The tables that the command prints: strategies, tasks, engines."""

from __future__ import annotations

import inspect
import platform
from dataclasses import MISSING, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich.console import Console
from rich.table import Table

from manyhands import spec


def version_line() -> str:
    """`manyhands 0.1.0, Python 3.11.9, torch 2.13.0`; torch is not imported for it."""
    return f"manyhands {_version('manyhands')}, Python {platform.python_version()}, torch {_version('torch')}"


def print_strategies() -> None:
    """Name, what is exchanged, consistency, options with their defaults, source."""
    from manyhands.strategies import CATALOGUE

    table = _table("strategy", "exchanges", "consistency", "options", "source")
    for name in CATALOGUE:
        maker = spec.find(name, CATALOGUE, "strategy")
        table.add_row(name, maker.summary, maker.consistency, options_text(maker), maker.source)
    _print(
        table,
        "Options go behind the name: --strategy local-sgd:period=16,warmup=100. Your own: --strategy my.py:Mine:alpha=.1",
    )


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
    """Name and where its workers run: the first line of each engine's docstring."""
    from manyhands.engines import CATALOGUE

    table = _table("engine", "runs workers")
    for name in CATALOGUE:
        table.add_row(name, (inspect.getdoc(spec.find(name, CATALOGUE, "engine")) or "").partition("\n")[0])
    _print(table, "auto, the default, is torchrun under torchrun, and local anywhere else.")


def options_text(maker: type[Any]) -> str:
    """`period=8 (int | end)`, one option a line."""
    hints = spec.options_of(maker)
    return (
        "\n".join(f"{f.name}={_default(f)} ({spec.type_text(hints[f.name])})" for f in fields(maker) if f.init) or "–"
    )


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
