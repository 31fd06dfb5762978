"""A comparison as text for terminals: what was measured, what it cost, and what follows from it. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from manyhands import units
from manyhands.evidence.compare.comparison import Comparison
from manyhands.evidence.compare.table import COST, NOTHING, TableCell, TableColumn, columns
from manyhands.evidence.text_table import text_table

WIDTH, NARROWEST = 120, 80
SIGNS = {"": "", "better": " +", "worse": " -", "same": " =", "unclear": " ~"}
LEGEND = "+ better, - worse than {base}; = the same within the margin; ~ no difference seen"
_GAP = 2


def text(comparison: Comparison, width: int = WIDTH) -> str:
    """Two tables, the verdict and the first advice, `width` columns at most; columns are dropped, not cut."""
    width = max(NARROWEST, min(width, WIDTH))
    legend = LEGEND.format(base=comparison.reference.replace(", ", " with "))
    repeats = units.count(comparison.repeats, "repeat")
    over = f"mean ± half the range of {repeats}" if comparison.repeats > 1 else repeats
    found = [column for column in columns(comparison) if column.terminal]
    failed = [(variant.name, comparison.failure(variant.name)) for variant in comparison.variants]
    parts = [
        _headline(comparison, repeats),
        "",
        _drawn(comparison, [column for column in found if column.group != COST], width),
        f"  {legend}; {over}",
        "",
        _drawn(comparison, [column for column in found if column.group == COST], width),
        "",
        *(f"{name} failed: {why}" for name, why in failed if why),
        comparison.verdict,
        *(f"Advice: {one.text}" for one in comparison.advice[:1]),
    ]
    return "\n".join(line for part in parts for line in _wrapped(part, width))


def _headline(comparison: Comparison, repeats: str) -> str:
    machine = comparison.machine
    place = (
        f"engine {machine.get('engine', 'local')}, {machine.get('device', 'cpu')}, {machine.get('cores', '?')} cores"
    )
    simulated = "; all seconds are virtual" if comparison.simulated else ""
    ended = "" if comparison.complete else ", interrupted"
    return (
        f"{comparison.task}: {len(comparison.variants)} variants, {repeats}{ended} in {units.duration(comparison.seconds)} "
        f"({place}{simulated})"
    )


def _drawn(comparison: Comparison, found: Sequence[TableColumn], width: int) -> str:
    """A line a variant, with the columns that there is room for.

    The names are folded where even the columns that must stay are too wide.
    """
    names = [one.name if comparison.of(one.name) else f"{one.name} failed" for one in comparison.variants]
    cells = {column: _cells(comparison, column) for column in found}
    widths = {column: max(map(len, [*column.terminal.split("\n"), *cells[column]])) for column in found}
    room = width - max(map(len, names)) - _GAP
    while sum(widths[column] + _GAP for column in cells) > room and any(column.spare for column in cells):
        del cells[max(cells, key=lambda column: column.spare)]
    return text_table({"variant": names} | {column.terminal: cells[column] for column in cells}, width)


def _cells(comparison: Comparison, column: TableColumn) -> list[str]:
    """What a column says of each variant; signs stand below each other."""
    found = [column.cell(variant) for variant in comparison.variants]
    signed = any(cell.mark for cell in found)

    def text(cell: TableCell) -> str:
        if cell.text == NOTHING:
            return ""
        if cell.note:
            return f"{cell.text} ({cell.note})"
        return cell.text + (SIGNS[cell.mark] or "  " if signed else "")

    return list(map(text, found))


def _wrapped(part: str, width: int) -> list[str]:
    """A paragraph in lines; a table's lines stay as they are."""
    lines = part.split("\n")
    if len(lines) > 1 or len(part) <= width:
        return lines
    return textwrap.wrap(part, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
