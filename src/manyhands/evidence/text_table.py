"""A table as plain text, for terminals and logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO

from rich.console import Console
from rich.table import Table


def text_table(columns: Mapping[str, Sequence[str]], width: int) -> str:
    """columns: {title, of one line or more: cells}.

    The first column stands at the left, folded where there is no room for it; the others at the right, never folded.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for i, title in enumerate(columns):
        table.add_column(title, justify="right" if i else "left", no_wrap=bool(i), overflow="fold")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    console = Console(file=StringIO(), width=width, color_system=None, highlight=False, markup=False)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n"))
