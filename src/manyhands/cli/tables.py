"""The tables that the command prints: strategies, tasks, engines."""

from __future__ import annotations

import inspect
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer

from manyhands import __version__, spec

NamedStrategy = Annotated[str | None, typer.Argument(metavar="[NAME]", help="Explain this one.")]
NamedTask = Annotated[str | None, typer.Argument(metavar="[NAME]", help="Explain this one.")]
NamedEngine = Annotated[str | None, typer.Argument(metavar="[NAME]", help="Explain this one.")]


def version_line() -> str:
    """`manyhands X.Y.Z, Python 3.11.9, torch 2.13.0`; torch is not imported for it."""
    return f"manyhands {__version__}, Python {platform.python_version()}, torch {_version('torch')}"


def strategies(name: NamedStrategy = None) -> None:
    """List the strategies: what they exchange, their options, their papers; or explain one and each of its options.

    [bold]manyhands strategies[/bold]
    [bold]manyhands strategies local-sgd[/bold]
    """
    from manyhands.strategies import CATALOGUE, ELSEWHERE

    makers = {one: spec.find(one, CATALOGUE, "strategy", ELSEWHERE) for one in ([name] if name else CATALOGUE)}
    if name:
        _explain(name, makers[name], "--strategy ")
        return
    rows: dict[str, list[str | list[str]]] = {}
    for one, maker in makers.items():
        consistency = "" if maker.consistency == "-" else f" ({maker.consistency})"
        rows[one] = [f"{maker.summary}{consistency}", options_of(maker), maker.source]
    _print(
        ("strategy", "what replicas exchange; options and their defaults; source"),
        rows,
        "Options go behind the name: --strategy local-sgd:period=16,warmup=100. Your own: --strategy my.py:Mine:alpha=.1\n"
        "What an option means: manyhands strategies NAME",
    )


def tasks(name: NamedTask = None) -> None:
    """List the ready-made tasks; or explain one and its fields.

    [bold]manyhands tasks[/bold]
    [bold]manyhands tasks digits[/bold]
    """
    from manyhands.tasks import CATALOGUE, SUMMARIES

    if name:
        maker = spec.find(name, CATALOGUE, "task")
        _explain(name, maker, "", values=maker())
        return
    _print(
        ("task", "what it is"),
        {one: [summary] for one, summary in SUMMARIES.items()},
        "Fields go behind the name: digits:batch_size=32,epochs=5. Your own: my.py:task, a Task or a function that returns one.\n"
        "What a field means: manyhands tasks NAME",
    )


def engines(name: NamedEngine = None) -> None:
    """List the engines: where workers can run, and their options; or explain one and each of its options.

    [bold]manyhands engines[/bold]
    [bold]manyhands engines hosts[/bold]
    """
    from manyhands.engines import CATALOGUE, HINTS

    makers = {one: spec.find(one, CATALOGUE, "engine", HINTS) for one in ([name] if name else CATALOGUE)}
    if name:
        _explain(name, makers[name], "--engine ")
        return
    _print(
        ("engine", "where workers run; options and their defaults"),
        {one: [(inspect.getdoc(maker) or "").partition("\n")[0], options_of(maker)] for one, maker in makers.items()},
        "Options go behind the name: --engine hosts:listen=10.0.0.1,local_workers=2. What an option means: manyhands engines NAME\n"
        "auto, the default, is torchrun in what torchrun, mpirun or srun started, hosts with --listen, sim with --network, --compute or --faults,\n"
        "and local anywhere else.",
    )


def _explain(name: str, maker: Any, option: str, values: Any = None) -> None:
    """What one entry is, and what each of its options means. values: an object whose fields the options are, where they
    differ from the fields' defaults."""
    from rich.console import Console
    from rich.markup import escape
    from rich.padding import Padding
    from rich.text import Text

    console = Console(highlight=False)
    console.print(f"[bold cyan]{name}[/bold cyan]")
    console.print("\n".join(_paragraphs(inspect.getdoc(maker) or "")), markup=False)
    kind = maker if values is None else type(values)
    docs, hints = spec.field_docs(kind), spec.options_of(kind)
    shown = [f for f in spec.option_fields(kind) if values is None or _in_text(hints[f.name])]
    for field in shown:
        value = _default(field) if values is None else _text_of(getattr(values, field.name))
        console.print(f"\n  [cyan]{field.name}[/cyan]={escape(f'{value} ({spec.type_text(hints[field.name])})')}")
        console.print(Padding(Text(" ".join(docs[field.name].split())), (0, 0, 0, 6)))
    if shown:
        first = shown[0].name
        console.print(
            f"\nOptions go behind the name, with commas between them: {option}{name}:{first}=...", markup=False
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


def width() -> tuple[int, ...]:
    """(columns of the terminal,), or nothing where standard output is none."""
    return (shutil.get_terminal_size().columns,) if sys.stdout.isatty() else ()


def options_of(maker: type[Any]) -> list[str]:
    """[`period=8 (int | end)`, …]"""
    hints = spec.options_of(maker)
    return [f"{f.name}={_default(f)} ({spec.type_text(hints[f.name])})" for f in spec.option_fields(maker)]


def _in_text(hint: Any) -> bool:
    """Whether an option of this type can be given in a spec string."""
    return bool({"int", "float", "str", "bool"} & set(spec.type_text(hint).split(" | ")))


def _paragraphs(docstring: str) -> Iterator[str]:
    """Its paragraphs and numbered lines without the line breaks of the source, which a terminal breaks anew."""
    for i, block in enumerate(docstring.split("\n\n")):
        yield from [""] if i else []
        yield from (" ".join(part.split()) for part in re.split(r"\s(?=\d+\. )", block))


def _default(field: Any) -> str:
    return "..." if field.default is MISSING else _text_of(field.default)


def _text_of(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


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
