"""What a check found, as the command prints it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from manyhands.evidence.check.findings import Checked, EqualityProof, Finding
from manyhands.units import count

WIDTH = 110


def text(checked: Checked) -> str:
    """A block of plain text: the verdict, the steps, the findings, what else held, and pass or not in the last line."""
    breaks = [finding for finding in checked.findings if finding.breaks]
    notes = [finding for finding in checked.findings if not finding.breaks]
    parts = [_verdict(checked), *(_proof(proof, checked.limit) for proof in checked.proofs)]
    parts += [_finding(i, finding) for i, finding in enumerate(breaks, start=1)]
    parts += [_finding(0, finding) for finding in notes]
    if checked.held:
        parts.append("\n".join(["Also looked at, and as it should be:", *_listed(checked.held)]))
    if checked.unjudged:
        parts.append("\n".join(["Could not be judged:", *_listed(checked.unjudged)]))
    parts.append(_last(checked, len(breaks), len(notes)))
    return "\n\n".join(parts)


def _listed(lines: Sequence[str]) -> list[str]:
    wrapped = (textwrap.wrap(line, WIDTH, initial_indent="  - ", subsequent_indent="    ") for line in lines)
    return [line for lines in wrapped for line in lines]


def _verdict(checked: Checked) -> str:
    who = f"{checked.task}: {checked.workers} workers of allreduce"
    if not checked.proofs:
        return f"{who} could not be tried."
    limit = f"limit {checked.limit:.1g}, {checked.dtype}"
    if any(proof.failure for proof in checked.proofs):
        return f"{who} fail where one worker does not."
    if checked.largest <= checked.limit:
        return f"{who} equal one worker, step by step: they differ by {checked.largest:.1e} at most ({limit})."
    if checked.passed:
        return f"{who} equal one worker up to rounding, of which the task makes {checked.largest:.1e} ({limit})."
    return f"{who} do not equal one worker: they differ by {checked.largest:.1e} ({limit})."


def _proof(proof: EqualityProof, limit: float) -> str:
    cut = f", {proof.last_rows} in the epoch's last" if proof.last_rows is not None else ""
    where = "worker processes" if proof.engine == "local" else "simulated workers"
    lines = [f"{proof.batch_size} rows a step{cut}; {where}:"]
    if proof.failure:
        return "\n".join([*lines, *textwrap.wrap(proof.failure, WIDTH, initial_indent="  ", subsequent_indent="  ")])
    lines.append("  step  rows     loss  mean gradient  parameters")
    for step in proof.steps:
        worst = f"  {step.worst}" if not step.largest <= limit else ""
        lines.append(
            f"  {step.step:>4}  {step.rows:>4}  {_number(step.loss)}        {_number(step.gradient)}     {_number(step.parameters)}{worst}"
        )
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:7.0e}" if value else "      0"


def _finding(number: int, finding: Finding) -> str:
    head = f"{number}. {finding.kind}" if number else f"Note: {finding.kind}"
    if finding.share is not None and finding.alone is not None and finding.breaks:
        head += f" ({_share(finding.share)} of the difference; alone it makes {finding.alone:.1e})"
    elif finding.unjudged:
        head += f" (its share could not be judged: {finding.unjudged})"
    lines = [*textwrap.wrap(head, WIDTH, subsequent_indent="   "), *(f"   {place}" for place in finding.places)]
    return "\n".join([*lines, *textwrap.wrap(finding.text, WIDTH, initial_indent="   ", subsequent_indent="   ")])


def _share(share: float) -> str:
    return "all" if share > 0.995 else f"{share:.0%}" if share >= 0.01 else "under 1%" if share else "none"


def _last(checked: Checked, breaks: int, notes: int) -> str:
    tail = f"{count(notes, 'note')}, {checked.seconds:.0f} s" if notes else f"{checked.seconds:.0f} s"
    if checked.passed:
        return f"PASS ({tail})"
    return f"FAIL: {count(breaks, 'finding')} ({tail}); docs/check.md says what each means"
