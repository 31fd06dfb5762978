"""From suspects to findings: trials remove all causes, then all but one; what remains is what that one makes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import nn

from manyhands.errors import ManyhandsError
from manyhands.evidence.check.copies import BUFFERS, DATA, FUNCTIONS, REBUILT, SLICES, WORKERS, TrialConfig
from manyhands.evidence.check.interventions import BATCH_NORM, RANDOMNESS, name_set
from manyhands.evidence.check.report import BREAKS, NOTE, Finding, Step, Suspect, finding
from manyhands.evidence.check.rows import TrainingData
from manyhands.evidence.check.trials import TrialRunner, step_differences

GENERIC = (*sorted(FUNCTIONS), BUFFERS, WORKERS, DATA)  # remedies to try if the suspects do not explain the difference
NUDGE = 1e-14  # the size of a rounding error, relative to the largest gradient
PROVEN_ELSEWHERE = name_set("rows-not-once in-place-change not-rebuilt summed-loss wrong-weight coupled-rows")
"""Causes that break equality even if a few steps do not show it: in later epochs, on other slices, without rows."""
IRREMOVABLE = frozenset([RANDOMNESS, "hidden-state", "nondeterministic-operator"])
"""Causes that a trial removes only in part, or not at all."""
_ROUNDING_FACTOR = 100  # a difference up to this multiple of the effect of rounding may be rounding

_TEXTS = {
    WORKERS: "If every worker sees a group of one, and gets the rates of one worker, N workers equal one: something asks "
    "for the rank or the number of workers. The line was not found.",
    DATA: "If batches are read once and cut, N workers equal one: what a worker reads is not cut from what one reads.",
}
_FOUND = "Found by trying: without it the difference vanishes. The line was not found."


@dataclass
class Ablation:
    """Runs the failing steps on simulated workers without some of the causes; each combination once."""

    trials: TrialRunner
    config: TrialConfig
    data: TrainingData
    model: nn.Module
    limit: float
    _made: dict[frozenset[str], tuple[Step, ...] | None] = field(default_factory=dict)

    def difference(self, without: frozenset[str]) -> float:
        """The largest difference without these causes; infinite if workers fail and one alone does not."""
        steps = self.steps(without)
        return float("inf") if steps is None else max((step.largest for step in steps), default=0.0)

    def steps(self, without: frozenset[str]) -> tuple[Step, ...] | None:
        """None if a worker failed."""
        if without not in self._made:
            try:
                self._made[without] = self.trials.difference(self._config(without))
            except ManyhandsError:  # also what the user's code raises
                self._made[without] = None
        return self._made[without]

    def by_rounding(self, without: frozenset[str]) -> float:
        """How far one worker moves from itself if its gradients have rounding errors."""
        config = self._config(without)
        nudged = self.trials.run_solo(replace(config, nudge=NUDGE))
        steps = step_differences(self.trials.run_solo(config), [nudged])
        return max((step.largest for step in steps), default=0.0)

    def _config(self, without: frozenset[str]) -> TrialConfig:
        batches = self.data.batches(self.config.steps) if DATA in without else ()
        return replace(self.config, without=without, batches=batches, model=self.model if REBUILT in without else None)


@dataclass
class Attribution:
    """Attributes a measured difference to its causes."""

    ablation: Ablation
    suspects: list[Suspect]
    measured: float  # the difference of the proof that failed
    failure: Finding | None = None  # if workers failed: the finding if nothing explains it
    findings: list[Finding] = field(default_factory=list)

    def run(self) -> list[Finding]:
        """At least one finding, the largest share first. The shares of those that have one add up to 1."""
        limit = self.ablation.limit
        if self.ablation.difference(frozenset()) <= limit:
            known = [one.finding for one in self.suspects if one.kind in PROVEN_ELSEWHERE | {"data-order"}]
            if known:
                return known
            if self.failure is not None:
                return [self.failure]
            text = (
                f"Worker processes differ from one worker by {self.measured:.1e}, and simulated workers in this process do "
                "not: the task depends on its process (environment variables, the process id, files, a module's globals), "
                "or manyhands' own exchange is wrong: please report it then."
            )
            return [replace(finding("unexplained", BREAKS, text), alone=self.measured, share=1.0)]
        everything = frozenset(one.remedy for one in self.suspects if one.remedy)
        if self.ablation.difference(everything) > limit:
            everything = self._extended(everything)
        rest = self.ablation.difference(everything)
        self._attribute(everything, rest if rest > limit else 0.0)
        if rest > limit and not self._attribute_rest(rest):
            self.findings.append(self._unexplained(everything, rest))
        if not self.findings:
            self.findings.append(self._unexplained(everything, self.measured))
        return sorted(_with_shares(self.findings), key=lambda finding: -(finding.alone or 0.0))

    def _extended(self, everything: frozenset[str]) -> frozenset[str]:
        """Add a suspect for each other remedy that the difference depends on."""
        all_remedies = everything | set(GENERIC)
        if self.ablation.difference(all_remedies) > self.ablation.limit:
            return everything
        for remedy in GENERIC:
            if remedy not in everything and self.ablation.difference(all_remedies - {remedy}) > self.ablation.limit:
                kind = "data-order" if remedy == DATA else remedy
                self.suspects.append(Suspect(finding(kind, BREAKS, _TEXTS.get(remedy, _FOUND)), remedy))
        return frozenset(one.remedy for one in self.suspects if one.remedy)

    def _attribute(self, everything: frozenset[str], rest: float) -> None:
        """Measure each suspect with all others removed, beyond the rest that remains without any."""
        limit = self.ablation.limit
        for one in self.suspects:
            if not one.remedy:
                why = "no trial can remove it" + ("" if rest else ", and without the others nothing is left")
                self.findings.append(replace(one.finding, unjudged=why))
                continue
            below, why = rest, "a cause that no trial can remove hides it"
            others = everything - {one.remedy}
            if one.kind == BATCH_NORM and SLICES in others:  # its statistics are those of slices on one worker, too
                others -= {SLICES}
                below = self.ablation.difference(others | {one.remedy})
                hides = next(other.kind for other in self.suspects if other.remedy == SLICES)
                why = f"{hides} hides it"
            found = self.ablation.difference(others)
            alone = found if below == 0.0 or found == float("inf") else found - below
            if alone > limit:
                self.findings.append(replace(one.finding, alone=alone))
            elif below > limit:
                why += f": with it {found:.1e}, without it {below:.1e}"
                self.findings.append(replace(one.finding, unjudged=why))
            elif one.kind in PROVEN_ELSEWHERE:
                self.findings.append(replace(one.finding, unjudged="these steps do not show it by itself"))
            else:
                text = f"{one.finding.text} By itself it makes no difference in these steps."
                self.findings.append(replace(one.finding, severity=NOTE, text=text, alone=0.0, share=0.0))

    def _attribute_rest(self, rest: float) -> bool:
        """Attribute the rest to the causes that no trial can remove. False if there are none."""
        irremovable = [one for one in self.findings if one.kind in IRREMOVABLE]
        for i, one in enumerate(irremovable):
            text = f"{one.text} Trials cannot remove all of it, so it may hide other causes."
            if i:
                changed = replace(one, unjudged=f"it cannot be separated from {irremovable[0].kind}")
            else:
                changed = replace(one, alone=(one.alone or 0.0) + rest, unjudged="")
            self.findings[self.findings.index(one)] = replace(changed, severity=BREAKS, text=text)
        return bool(irremovable)

    def _unexplained(self, everything: frozenset[str], rest: float) -> Finding:
        """The finding for what remains with all causes removed."""
        steps = self.ablation.steps(everything)
        if steps is None and self.failure is not None:
            return self.failure
        first = next((one for one in steps or () if not one.largest <= self.ablation.limit), None)
        if first is not None and steps is not None and steps[0].gradient <= self.ablation.limit:
            noise = self.ablation.by_rounding(everything)
            if noise * _ROUNDING_FACTOR >= rest:
                text = (
                    f"Gradients are equal up to rounding, and later steps differ by {rest:.1e}. One worker alone moves by "
                    f"{noise:.1e} if its gradients are off by {NUDGE:g}: model or optimizer magnify rounding (a sign, a "
                    "division by nearly zero). No order of summation is the right one, so N workers are as right as one."
                )
                return replace(finding("magnified-rounding", NOTE, text, nudge=NUDGE, noise=noise), alone=rest)
        at = "" if first is None else f" first after step {first.step}, in {first.worst or 'the loss'};"
        removed = f" with {', '.join(sorted(everything))} taken away" if everything else ""
        text = (
            f"N workers differ from one by {rest:.1e}{removed},{at} and nothing that was tried explains it. Either the task "
            "does something that this check does not know, or manyhands itself is wrong: please report it with the task, "
            "this text and the versions."
        )
        where = {} if first is None else {"step": first.step, "parameter": first.worst}
        return replace(finding("unexplained", BREAKS, text, without=sorted(everything), **where), alone=rest)


def _with_shares(findings: list[Finding]) -> list[Finding]:
    """Each cause's part of the sum of what all make alone. If some are infinite, they share all of it."""
    made = [one.alone if one.breaks else None for one in findings]
    total = sum(one for one in made if one)
    if total == float("inf"):
        made = [None if one is None else float(one == total) for one in made]
        total = sum(one for one in made if one)
    return [
        one if alone is None or not total else replace(one, share=alone / total)
        for one, alone in zip(findings, made, strict=True)
    ]
