"""What can be seen of a task without training it: its data, what it builds, its loss and metrics on one batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from manyhands.data.batch import first_rows
from manyhands.evidence.check import building, source_locations
from manyhands.evidence.check.copies import Copies, users_code
from manyhands.evidence.check.examining import Examination, Suspect
from manyhands.evidence.check.findings import NOTE, Finding
from manyhands.evidence.check.interventions import RANDOMNESS
from manyhands.evidence.check.losses import examine_loss, examine_metrics
from manyhands.evidence.check.reading import evaluated, read
from manyhands.evidence.check.recording import Trace
from manyhands.evidence.check.rows import Data
from manyhands.evidence.check.trial_config import DATA, FOREIGN, REBUILT

ENOUGH_ROWS = 24
"""Of a batch to look at, where nothing needs to be explained."""

_REMEDIES = {"not-rebuilt": REBUILT, "foreign-parameters": FOREIGN, RANDOMNESS: RANDOMNESS} | dict.fromkeys(
    ("rows-not-once", "data-order", "random-rows", "collate"), DATA
)


@dataclass
class Inspection:
    """Fills `suspects` (what may keep workers apart), `findings` (what stands by itself), `held` and `unjudged`."""

    copies: Copies
    sent: Copies
    """With the functions that give its data, where `copies` have the data."""
    data: Data
    double: bool
    say: Callable[[str], None]
    suspects: list[Suspect] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)

    def run(self, step: int | None, proofs: list[list[Trace]]) -> None:
        """step: from 1, the first that differs; None: all are equal. proofs: of each the traces of one worker, then of each of N."""
        traces = proofs[0]
        self.say("who reads which rows")
        self._take(*self.data.once(proofs))
        if not self.suspects:
            self._take(self.data.made_alike(self.sent), [])
        if not self.suspects:
            self._take(*self.data.same())
        self.findings += self.data.sorted_targets()
        self.say("what model() and optimizer() build")
        self._take(*building.rebuilt(self.copies, traces))
        self._take(*building.optimized(self.copies))
        self._autocast()
        self.findings += [*building.on_device(self.copies), *building.unused(self.copies, traces[0])]
        self.say(f"the loss on the rows of step {step or 1}")
        batch = read(self.data.own(), step or 1)[-1].batch
        self._examine(batch if step is not None else first_rows(batch, ENOUGH_ROWS))
        self._evaluate()

    def _autocast(self) -> None:
        precision = self.copies.fresh().precision
        if precision != "float32":
            text = (
                f"The task trains with precision={precision}; the proof computes without autocast, whose rounding would "
                "hide small differences."
            )
            self.findings.append(Finding(kind="no-autocast", severity=NOTE, text=text))

    def _take(self, found: list[Finding], held: list[str]) -> None:
        """Findings that a trial can try become suspects."""
        self.held += held
        for finding in found:
            if finding.kind in _REMEDIES:
                self.suspects.append(Suspect(finding=finding, remedy=_REMEDIES[finding.kind]))
            else:
                self.findings.append(finding)

    def _examine(self, batch: Any) -> None:
        examination = Examination(self.copies, self.double, batch)
        try:
            examination.run()
            examine_loss(examination)
        except Exception as error:  # noqa: BLE001 - the user's code, run otherwise than in training; it is told
            self.findings.append(_not_examined("The loss", error))
        self.suspects += examination.suspects
        self.findings += examination.notes
        self.held += examination.held
        self.unjudged += examination.unjudged

    def _evaluate(self) -> None:
        with users_code("reading validation data"):
            batch = evaluated(self.copies.fresh(), self.data.setting.batch_size)
        if batch is None:
            return
        self.say("evaluate on a batch")
        try:
            self._take(*examine_metrics(self.copies, self.double, batch))
        except Exception as error:  # noqa: BLE001 - as above
            if self.double:
                self.double = False
                self._evaluate()
                return
            self.findings.append(_not_examined("evaluate", error))


def _not_examined(what: str, error: Exception) -> Finding:
    return Finding(
        kind="not-examined",
        severity=NOTE,
        text=f"{what} could not be looked at by itself, so causes that lie in it may be missed: "
        f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}",
        places=source_locations.as_tuple(source_locations.of_error(error)),
    )
