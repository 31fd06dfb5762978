"""A comparison as text: two tables, the verdict and advice for a terminal; a compact table for a pull request. Pure."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from manyhands import units
from manyhands.errors import is_whole
from manyhands.evidence.compare.comparison import Comparison, Variant
from manyhands.evidence.compare.report import machine, notes
from manyhands.evidence.compare.table import COST, NOTHING, TableCell, TableColumn, columns
from manyhands.evidence.text_table import text_table

WIDTH, NARROWEST = 120, 80
SIGNS = {"": "", "better": " +", "worse": " -", "same": " =", "unclear": " ~"}
MARKDOWN_SIGNS = {"": "", "better": " ▲", "worse": " ▼", "same": " =", "unclear": ""}
LEGEND = "+ better, - worse than {base}; = the same within the margin; ~ no difference seen"
_GAP = 2
_SPECIAL = re.compile(r"([\\`*_\[\]|~$])")  # of GitHub's Markdown inside a line; what would be HTML is escaped apart


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
        *([f"Optimum: {comparison.optimum}."] if comparison.optimum else []),
        comparison.verdict,
        *(f"Advice: {one.text}" for one in comparison.advice[:1]),
    ]
    return "\n".join(line for part in parts for line in _wrapped(part, width))


def _headline(comparison: Comparison, repeats: str) -> str:
    machine = comparison.machine
    cores = machine.get("cores")
    cores = units.count(cores, "core") if is_whole(cores) else "? cores"
    place = f"engine {machine.get('engine', 'local')}, {machine.get('device', 'cpu')}, {cores}"
    simulated = "; all seconds are virtual" if comparison.simulated else ""
    ended = "" if comparison.complete else ", interrupted"
    return (
        f"{comparison.task}: {units.count(len(comparison.variants), 'variant')}, {repeats}{ended} in "
        f"{units.duration(comparison.seconds)} ({place}{simulated})"
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


# -- for pull requests: the verdict, a compact table, one line of advice, the machine, the command --------------------


def markdown(comparison: Comparison) -> str:
    """GitHub's Markdown, without a newline at the end; what users and tasks named is escaped."""
    parts = [
        f"### {plain(comparison.task)}: strategies compared",
        f"**{plain(comparison.verdict or 'No verdict: too little was measured.')}**",
        *[f"> {plain(note)}" for note in notes(comparison)],
        _table(comparison),
        _legend(comparison),
        *[f"**Advice:** {plain(finding.text)}" for finding in comparison.advice[:1]],
        *_machine(comparison),
    ]
    return "\n\n".join(part for part in parts if part)


def plain(text: str) -> str:
    """Any text as one line of Markdown that reads the same: no tag, no emphasis, no link, no mention of a user."""
    line = " ".join(text.split())
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(r"\\\1", line).replace("@", "@\u200b").replace("://", ":\u200b//")


def code(text: str, in_table: bool = False) -> str:
    """Any text as one span of code; in a table a bar would end the cell, and has its escape there."""
    line = " ".join(text.split())
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    padded = f" {line} " if line.startswith("`") or line.endswith("`") else line
    return f"{fence}{padded.replace('|', chr(92) + '|') if in_table else padded}{fence}"


def _table(comparison: Comparison) -> str:
    found = [column for column in columns(comparison) if column.markdown]
    rows = [
        ["variant", *(plain(column.markdown) for column in found)],
        ["---", *["--:"] * len(found)],
        *(_row(comparison, variant, found) for variant in comparison.variants),
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _row(comparison: Comparison, variant: Variant, found: Sequence[TableColumn]) -> list[str]:
    name = code(variant.name, in_table=True)
    if not comparison.of(variant.name):
        lines = comparison.failure(variant.name).strip().splitlines() or ["no result"]
        return [name, f"failed: {plain(lines[0])}", *[""] * (len(found) - 1)]
    cells = [column.cell(variant) for column in found]
    return [name, *(plain(cell.text) + MARKDOWN_SIGNS[cell.mark] for cell in cells)]


def _legend(comparison: Comparison) -> str:
    """What the signs of the table mean, where it has any."""
    marks = {one.outcome for found in comparison.differences.values() for one in found}
    if not marks:
        return ""
    against = f"against {code(comparison.reference)}: ▲ better, ▼ worse, = the same within the margin, no sign: no difference seen"
    return f"Means of {units.count(comparison.repeats, 'repeat')}, of times and rates geometric; {against}."


def _machine(comparison: Comparison) -> list[str]:
    rows = [(name, value) for name, value in machine(comparison) if name != "host"]
    command = [code(value) for name, value in rows if name == "command"]
    rest = ", ".join(f"{plain(name)} {plain(value)}" for name, value in rows if name != "command")
    return [*([f"Machine: {rest}."] if rest else []), *command]
