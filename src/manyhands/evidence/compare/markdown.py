"""A comparison for a pull request: the verdict, a compact table, one line of advice, the machine, the command."""

from __future__ import annotations

import re
from collections.abc import Sequence

from manyhands import units
from manyhands.evidence.compare.comparison import Comparison, Variant
from manyhands.evidence.compare.report import machine, notes
from manyhands.evidence.compare.table import TableColumn, columns

SIGNS = {"": "", "better": " ▲", "worse": " ▼", "same": " =", "unclear": ""}
_SPECIAL = re.compile(r"([\\`*_\[\]|~$])")  # of GitHub's Markdown inside a line; what would be HTML is escaped apart


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
    return [name, *(plain(cell.text) + SIGNS[cell.mark] for cell in cells)]


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
