"""What a check found: plain data."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from manyhands import events

FORMAT = 1
BREAKS, NOTE = "breaks equality", "note"


@dataclass(frozen=True)
class SourceLocation:
    """A line of the user's."""

    file: str
    line: int
    name: str = ""
    """What is there, where it has a name: `encoder.norm1`."""

    def __str__(self) -> str:
        at = f"{_shown(self.file)}:{self.line}"
        return f"{at} ({self.name})" if self.name else at


def _shown(file: str) -> str:
    """From the working directory, where it is below it."""
    relative = os.path.relpath(file) if Path(file).is_absolute() else file
    return file if relative.startswith("..") else relative


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that keeps N workers from equalling one, or that is worth knowing."""

    kind: str
    """A stable name: batch-norm, dropout, summed-loss, … (docs/check.md lists them)."""
    severity: str
    """`breaks equality` or `note`."""
    text: str
    """What was seen, with its number; what it means; what to do."""
    places: tuple[SourceLocation, ...] = ()
    """Where it lies, the most telling first; none where that is not known."""
    alone: float | None = None
    """The relative difference that it makes by itself, with everything else taken away that breaks equality too (docs/check.md has the
    exceptions)."""
    share: float | None = None
    """`alone` over the sum of what all causes make alone: the shares of those that could be judged add up to 1."""
    unjudged: str = ""
    """Why it has no share; "" where it has one, and of a note."""
    numbers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def breaks(self) -> bool:
        return self.severity == BREAKS

    @property
    def where(self) -> str:
        """`net.py:14`, or "" """
        return f"{_shown(self.places[0].file)}:{self.places[0].line}" if self.places else ""


@dataclass(frozen=True, kw_only=True)
class Step:
    """How far N workers are from one after one step; relative."""

    step: int
    """From 1."""
    rows: int
    """Of the global batch."""
    loss: float
    gradient: float
    """Of the mean gradient, before clipping: the largest difference in a parameter's over its largest number."""
    parameters: float
    """Of all workers, after the step: the largest difference over the largest number of all."""
    worst: str = ""
    """The parameter that is farthest off; "" where none is."""

    @property
    def largest(self) -> float:
        return max(self.loss, self.gradient, self.parameters)


@dataclass(frozen=True, kw_only=True)
class EqualityProof:
    """The same steps alone and on N workers."""

    engine: str
    """Where the workers ran: local (processes), sim (in this one)."""
    batch_size: int
    last_rows: int | None
    """Of the epoch's last batch, where the epoch was cut short to have an uneven one; None: it was not."""
    steps: tuple[Step, ...]
    failure: str = ""
    """Why the workers did not come to their end, where one worker alone does."""

    @property
    def largest(self) -> float:
        """Of all steps; infinite where the workers failed."""
        return float("inf") if self.failure else max((step.largest for step in self.steps), default=0.0)

    def largest_up_to(self, step: int) -> float:
        """Of the steps up to this one."""
        return float("inf") if self.failure else max((one.largest for one in self.steps[:step]), default=0.0)

    def first_beyond(self, limit: float) -> Step | None:
        """The first step that differs by more."""
        return next((step for step in self.steps if not step.largest <= limit), None)


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What `check()` found."""

    task: str
    workers: int
    findings: tuple[Finding, ...]
    """Those that break equality first, the one that explains most of the difference before the others."""
    proofs: tuple[EqualityProof, ...]
    """None where the task cannot be sent to workers or trained at all."""
    held: tuple[str, ...]
    """What else was looked at and is as it should be, a few words each."""
    unjudged: tuple[str, ...] = ()
    """Questions that could not be answered, and why."""
    dtype: str
    """In which the proof ran: float64, or the model's own."""
    limit: float
    """Relative differences up to it are the rounding of sums."""
    seconds: float
    """That it took."""

    @property
    def passed(self) -> bool:
        """N workers equal one, and nothing was found that breaks it; notes alone pass."""
        return bool(self.proofs) and not any(finding.breaks for finding in self.findings)

    @property
    def largest(self) -> float:
        """The largest relative difference that was measured."""
        return max((proof.largest for proof in self.proofs), default=0.0)

    def text(self) -> str:
        """A block of plain text."""
        from manyhands.evidence.check.report import text

        return text(self)

    def to_json(self) -> str:
        """One line; NaN and infinities as docs/events.md says."""
        return events.to_json({"format": FORMAT, "passed": self.passed, **asdict(self)})
