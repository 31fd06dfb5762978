"""A table as plain text, for terminals and logs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from io import StringIO

from rich.console import Console
from rich.table import Table

_GAP = 2  # between two columns


def text_tables(columns: Mapping[str, Sequence[str]], width: int) -> str:
    """As `text_table`, in as many tables below each other as have room for all columns; each begins with the first."""
    (first, names), *others = columns.items()
    room = width - max(map(len, [*first.split("\n"), *names]), default=0)
    tables: list[dict[str, Sequence[str]]] = [{}]
    left = room
    for title, cells in others:
        needed = _GAP + max(map(len, [*title.split("\n"), *cells]))
        if needed > left and tables[-1]:
            tables.append({})
            left = room
        tables[-1][title] = cells
        left -= needed
    return "\n\n".join(text_table({first: names, **table}, width) for table in tables)


def text_table(columns: Mapping[str, Sequence[str]], width: int, notes: Collection[str] = ()) -> str:
    """columns: {title, of one line or more: cells}.

    The first column and notes stand at the left, folded where there is no room for them; the others at the right, never
    folded.
    """
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="")
    for i, title in enumerate(columns):
        number = i > 0 and title not in notes
        table.add_column(title, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    console = Console(file=StringIO(), width=width, color_system=None, highlight=False, markup=False)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n"))
