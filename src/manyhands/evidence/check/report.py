"""What a check found, as data and as the text that the command prints."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from manyhands import events
from manyhands.engines import capabilities_of
from manyhands.evidence.check.source_locations import SourceLocation
from manyhands.units import count

FORMAT = 1
BREAKS, NOTE = "breaks equality", "note"
WIDTH = 110  # of the lines of text


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that keeps N workers from equalling one, or that is worth knowing."""

    kind: str
    """A stable name: batch-norm, dropout, summed-loss, … (docs/check.md lists them)."""
    severity: str
    """`breaks equality` or `note`."""
    text: str
    """What was found, with its number; what it means; what to do."""
    places: tuple[SourceLocation, ...] = ()
    """Where it is, the most likely line first; empty if unknown."""
    alone: float | None = None
    """The relative difference that it makes with all other causes removed (docs/check.md has the exceptions)."""
    share: float | None = None
    """`alone` over the sum of `alone` of all causes, so that shares add up to 1."""
    unjudged: str = ""
    """Why it has no share; "" if it has one, and for a note."""
    numbers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def breaks(self) -> bool:
        return self.severity == BREAKS

    @property
    def where(self) -> str:
        """`net.py:14`, or "" """
        return self.places[0].where if self.places else ""


def finding(kind: str, severity: str, text: str, *where: SourceLocation | None, **numbers: Any) -> Finding:
    """A finding; places that are None, or named before, are left out."""
    places = tuple(dict.fromkeys(place for place in where if place is not None))
    return Finding(kind=kind, severity=severity, text=text, places=places, numbers=numbers)


@dataclass(frozen=True)
class Suspect:
    """A possible finding, and what removes its cause in a trial."""

    finding: Finding
    remedy: str = ""  # one of `copies.REMEDIES`; "" if no trial can remove the cause

    @property
    def kind(self) -> str:
        return self.finding.kind


@dataclass
class Results:
    """What one part of a check has found so far."""

    findings: list[Finding] = field(default_factory=list)
    suspects: list[Suspect] = field(default_factory=list)  # possible causes of a difference, which trials test
    held: list[str] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)  # questions without an answer, and why

    def breaks(self, kind: str, text: str, *where: SourceLocation | None, **numbers: Any) -> None:
        self.findings.append(finding(kind, BREAKS, text, *where, **numbers))

    def note(self, kind: str, text: str, *where: SourceLocation | None, **numbers: Any) -> None:
        self.findings.append(finding(kind, NOTE, text, *where, **numbers))

    def suspect(self, kind: str, remedy: str, text: str, *where: SourceLocation | None, **numbers: Any) -> None:
        self.suspects.append(Suspect(finding(kind, BREAKS, text, *where, **numbers), remedy))

    def extend(self, other: Results) -> None:
        self.findings += other.findings
        self.suspects += other.suspects
        self.held += other.held
        self.unjudged += other.unjudged


@dataclass(frozen=True, kw_only=True)
class Step:
    """The relative differences between N workers and one after a step."""

    step: int
    """From 1."""
    rows: int
    """Of the global batch."""
    loss: float
    gradient: float
    """Of the mean gradient before clipping: the largest difference of a parameter over its largest number."""
    parameters: float
    """Of all workers, after the step: the largest difference over the largest number of all parameters."""
    worst: str = ""
    """The parameter with the largest difference; "" if there is none."""

    @property
    def largest(self) -> float:
        return max(self.loss, self.gradient, self.parameters)


@dataclass(frozen=True, kw_only=True)
class EqualityProof:
    """The same steps on one worker and on N."""

    engine: str
    """Of the N workers: local (processes), or sim (in this process)."""
    batch_size: int
    last_rows: int | None
    """Rows of the epoch's last batch, if the epoch was shortened to have an uneven one; else None."""
    steps: tuple[Step, ...]
    failure: str = ""
    """Why N workers failed, if one worker alone does not."""

    @property
    def largest(self) -> float:
        """The largest difference in all steps; infinite if the workers failed."""
        return self.largest_up_to(len(self.steps))

    def largest_up_to(self, step: int) -> float:
        """The largest difference in the steps up to this one."""
        return float("inf") if self.failure else max((one.largest for one in self.steps[:step]), default=0.0)


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What `check()` found."""

    task: str
    workers: int
    findings: tuple[Finding, ...]
    """Those that break equality first, the largest share first."""
    proofs: tuple[EqualityProof, ...]
    """Empty if the task can be neither sent to workers nor copied."""
    held: tuple[str, ...]
    """What else was checked and is as it should be, a few words each."""
    unjudged: tuple[str, ...] = ()
    """Questions without an answer, and why."""
    dtype: str
    """Of the proofs: float64, or the model's own."""
    limit: float
    """Relative differences up to this are rounding."""
    seconds: float
    """The time that the check took."""

    @property
    def passed(self) -> bool:
        """Whether N workers equal one, and no finding breaks equality. Notes pass."""
        return bool(self.proofs) and not any(finding.breaks for finding in self.findings)

    @property
    def largest(self) -> float:
        """The largest relative difference of all proofs."""
        return max((proof.largest for proof in self.proofs), default=0.0)

    def text(self) -> str:
        """The verdict, the steps, the findings, what else held, and PASS or FAIL in the last line."""
        breaks = [finding for finding in self.findings if finding.breaks]
        notes = [finding for finding in self.findings if not finding.breaks]
        parts = [_verdict(self), *(_proof(proof, self.limit) for proof in self.proofs)]
        parts += [_finding(i, finding) for i, finding in enumerate(breaks, start=1)]
        parts += [_finding(0, finding) for finding in notes]
        if self.held:
            parts.append("\n".join(["Also checked, and as it should be:", *_listed(self.held)]))
        if self.unjudged:
            parts.append("\n".join(["Could not be judged:", *_listed(self.unjudged)]))
        tail = f"{count(len(notes), 'note')}, {self.seconds:.0f} s" if notes else f"{self.seconds:.0f} s"
        failed = f"FAIL: {count(len(breaks), 'finding')} ({tail}); docs/check.md says what each means"
        parts.append(f"PASS ({tail})" if self.passed else failed)
        return "\n\n".join(parts)

    def to_json(self) -> str:
        """One line; NaN and infinities as docs/events.md says."""
        return events.to_json({"format": FORMAT, "passed": self.passed, **asdict(self)})


def _listed(lines: Sequence[str]) -> list[str]:
    wrapped = (textwrap.wrap(line, WIDTH, initial_indent="  - ", subsequent_indent="    ") for line in lines)
    return [line for lines in wrapped for line in lines]


def _verdict(checked: Checked) -> str:
    subject = f"{checked.task}: {checked.workers} workers of allreduce"
    if not checked.proofs:
        return f"{subject} could not be tried."
    limit = f"limit {checked.limit:.1g}, {checked.dtype}"
    if any(proof.failure for proof in checked.proofs):
        return f"{subject} fail where one worker does not."
    if checked.largest <= checked.limit:
        return f"{subject} equal one worker, step by step: they differ by {checked.largest:.1e} at most ({limit})."
    if checked.passed:
        return f"{subject} equal one worker up to rounding, of which the task makes {checked.largest:.1e} ({limit})."
    return f"{subject} do not equal one worker: they differ by {checked.largest:.1e} ({limit})."


def _proof(proof: EqualityProof, limit: float) -> str:
    cut = f", {proof.last_rows} in the epoch's last" if proof.last_rows is not None else ""
    where = "simulated workers" if capabilities_of(proof.engine).simulated else "worker processes"
    lines = [f"{proof.batch_size} rows a step{cut}; {where}:"]
    if proof.failure:
        return "\n".join([*lines, *textwrap.wrap(proof.failure, WIDTH, initial_indent="  ", subsequent_indent="  ")])
    lines.append("  step  rows     loss  mean gradient  parameters")
    for step in proof.steps:
        worst = f"  {step.worst}" if not step.largest <= limit else ""
        loss, gradient, parameters = (
            f"{value:7.0e}" if value else "      0" for value in (step.loss, step.gradient, step.parameters)
        )
        lines.append(f"  {step.step:>4}  {step.rows:>4}  {loss}        {gradient}     {parameters}{worst}")
    return "\n".join(lines)


def _finding(number: int, finding: Finding) -> str:
    """number: from 1; 0: a note."""
    head = f"{number}. {finding.kind}" if number else f"Note: {finding.kind}"
    if finding.share is not None and finding.alone is not None and finding.breaks:
        share = finding.share
        part = "all" if share > 0.995 else f"{share:.0%}" if share >= 0.01 else "under 1%" if share else "none"
        head += f" ({part} of the difference; alone it makes {finding.alone:.1e})"
    elif finding.unjudged:
        head += f" (its share could not be judged: {finding.unjudged})"
    lines = [*textwrap.wrap(head, WIDTH, subsequent_indent="   "), *(f"   {place}" for place in finding.places)]
    return "\n".join([*lines, *textwrap.wrap(finding.text, WIDTH, initial_indent="   ", subsequent_indent="   ")])
