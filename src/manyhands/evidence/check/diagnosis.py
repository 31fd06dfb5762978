"""From suspects to findings: what remains when all are taken away, and what each makes when it alone is left."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import nn

from manyhands.errors import ManyhandsError
from manyhands.evidence.check.examining import Suspect, suspect
from manyhands.evidence.check.findings import BREAKS, NOTE, Finding, Step
from manyhands.evidence.check.interventions import BATCH_NORM, RANDOMNESS, words
from manyhands.evidence.check.rows import Data
from manyhands.evidence.check.trial_config import BUFFERS, DATA, FUNCTIONS, REBUILT, SLICES, WORKERS, TrialConfig
from manyhands.evidence.check.trials import Bench, between

GENERIC = (*sorted(FUNCTIONS), BUFFERS, WORKERS, DATA)
"""What is tried where nothing that was suspected explains the difference."""
NUDGE = 1e-14
"""A share of a gradient, as rounding has it."""
PROVEN_ELSEWHERE = words(
    "rows-not-once in-place-change not-rebuilt foreign-parameters summed-loss wrong-weight coupled-rows"
)
"""What breaks equality also where a few steps do not show it: in later epochs, on other slices, without rows."""
STAYING = frozenset([RANDOMNESS, "hidden-state", "nondeterministic-operator"])
"""What remains of these cannot be told from other causes."""
_BEHIND = "Not all of it could be taken away for a trial, so other causes may hide behind it."
_BLIND = 100
"""Differences that rounding makes, times so much, may be rounding."""

_TEXTS = {
    WORKERS: "Once every worker is told that it is alone, and gets the rates that one worker has, they are equal: "
    "something asks which worker this is, or how many there are. Where was not seen.",
    DATA: "Once batches are read once and cut, N workers equal one: what a worker reads is not cut from what one reads.",
}
_FOUND = "Found by trying: without it the difference vanishes. Where it lies was not seen."


@dataclass
class Ablation:
    """Trials of the failing setting, in simulated workers, without this or that."""

    bench: Bench
    setting: TrialConfig
    data: Data
    model: nn.Module
    limit: float
    _made: dict[frozenset[str], tuple[Step, ...] | None] = field(default_factory=dict)

    def difference(self, without: frozenset[str]) -> float:
        """The largest one without these; infinite where workers fail and one alone does not."""
        steps = self.steps(without)
        return float("inf") if steps is None else max((step.largest for step in steps), default=0.0)

    def steps(self, without: frozenset[str]) -> tuple[Step, ...] | None:
        """None where somebody failed."""
        if without not in self._made:
            self._made[without] = self._try(self._setting(without))
        return self._made[without]

    def by_rounding(self, without: frozenset[str]) -> float:
        """How far one worker alone goes astray where its gradients are off by rounding."""
        setting = self._setting(without)
        nudged = self.bench.alone(replace(setting, nudge=NUDGE))
        steps = between(self.bench.alone(setting), [nudged])
        return max((step.largest for step in steps), default=0.0)

    def _try(self, setting: TrialConfig) -> tuple[Step, ...] | None:
        try:
            return self.bench.difference(setting)
        except ManyhandsError:  # what the user's code raises among them
            return None

    def _setting(self, without: frozenset[str]) -> TrialConfig:
        batches = self.data.batches(self.setting.steps) if DATA in without else ()
        return replace(self.setting, without=without, batches=batches, model=self.model if REBUILT in without else None)


@dataclass
class Judgement:
    """What explains a measured difference."""

    ablation: Ablation
    suspects: list[Suspect]
    measured: float
    """The difference of the proof that failed."""
    failure: Finding | None = None
    """Where workers failed: what to say if nothing explains it."""
    findings: list[Finding] = field(default_factory=list)

    def run(self) -> list[Finding]:
        """Findings, those that explain most before the others; at least one. The shares of those that have one add up to 1."""
        limit = self.ablation.limit
        if self.ablation.difference(frozenset()) <= limit:
            kept = [one.finding for one in self.suspects if one.kind in PROVEN_ELSEWHERE | {"data-order"}]
            return kept or [self.failure or _only_there(self.measured)]
        everything = frozenset(one.remedy for one in self.suspects if one.remedy)
        if self.ablation.difference(everything) > limit:
            everything = self._extended(everything)
        rest = self.ablation.difference(everything)
        self._weigh(everything, rest if rest > limit else 0.0)
        if rest > limit and not self._rest_is_theirs(rest):
            self.findings.append(self._rest(everything, rest))
        if not self.findings:
            self.findings.append(self._rest(everything, self.measured))
        return sorted(_with_shares(self.findings), key=lambda finding: -(finding.alone or 0.0))

    def _rest_is_theirs(self, rest: float) -> bool:
        """Whether something stays that no trial can take away: then what is left is what it makes, or what it hides."""
        stays = [one for one in self.findings if one.kind in STAYING]
        for i, one in enumerate(stays):
            kept = replace(
                one, severity=BREAKS, text=f"{one.text} {_BEHIND}", unjudged=f"it cannot be told from {stays[0].kind}"
            )
            if not i:
                kept = replace(kept, alone=(one.alone or 0.0) + rest, unjudged="")
            self.findings[self.findings.index(one)] = kept
        return bool(stays)

    def _extended(self, everything: frozenset[str]) -> frozenset[str]:
        """With whatever else helps, found by trying."""
        all_of_it = everything | set(GENERIC)
        if self.ablation.difference(all_of_it) > self.ablation.limit:
            return everything
        for remedy in GENERIC:
            if remedy not in everything and self.ablation.difference(all_of_it - {remedy}) > self.ablation.limit:
                self.suspects.append(self._by_trying(remedy))
        return frozenset(one.remedy for one in self.suspects if one.remedy)

    def _by_trying(self, remedy: str) -> Suspect:
        kind = "data-order" if remedy == DATA else remedy
        return suspect(kind, remedy, _TEXTS.get(remedy, _FOUND), [])

    def _weigh(self, everything: frozenset[str], rest: float) -> None:
        """Each suspect with all others taken away, beyond the rest that stays when all are."""
        limit = self.ablation.limit
        for one in self.suspects:
            if not one.remedy:
                why = "no trial can take it away" + ("" if rest else ", and without the others nothing is left")
                self.findings.append(replace(one.finding, unjudged=why))
                continue
            below, why = rest, "what no trial can take away hides it"
            others = everything - {one.remedy}
            if one.kind == BATCH_NORM and SLICES in others:  # whose statistics are then those of slices, alone too
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

    def _rest(self, everything: frozenset[str], rest: float) -> Finding:
        """What is left when all is taken away."""
        steps = self.ablation.steps(everything)
        if steps is None and self.failure is not None:
            return self.failure
        first = next((one for one in steps or () if not one.largest <= self.ablation.limit), None)
        if first is not None and steps is not None and steps[0].gradient <= self.ablation.limit:
            noise = self.ablation.by_rounding(everything)
            if noise * _BLIND >= rest:
                return _rounding(noise, rest)
        at = "" if first is None else f" first after step {first.step}, in {first.worst or 'the loss'};"
        taken = f" with {', '.join(sorted(everything))} taken away" if everything else ""
        return Finding(
            kind="unexplained",
            severity=BREAKS,
            text=f"N workers differ from one by {rest:.1e}{taken},{at} and nothing that was tried explains it. Either "
            "the task does something that this check does not know, or manyhands itself is wrong: please report it "
            "with the task, this text and the versions.",
            alone=rest,
            numbers={"without": sorted(everything)}
            | ({} if first is None else {"step": first.step, "parameter": first.worst}),
        )


def _with_shares(findings: list[Finding]) -> list[Finding]:
    """Of what all make alone, summed up; infinite ones share all of it."""
    made = [one.alone if one.breaks else None for one in findings]
    whole = sum(one for one in made if one)
    if whole == float("inf"):
        made = [None if one is None else float(one == whole) for one in made]
        whole = sum(one for one in made if one)
    return [
        one if alone is None or not whole else replace(one, share=alone / whole)
        for one, alone in zip(findings, made, strict=True)
    ]


def _only_there(measured: float) -> Finding:
    return Finding(
        kind="unexplained",
        severity=BREAKS,
        text=f"Workers in processes of their own differ from one by {measured:.1e}, and simulated ones in this "
        "process do not: the task depends on its process (environment variables, the process id, files, a module's "
        "globals), or manyhands' own exchange is wrong: please report it then.",
        alone=measured,
        share=1.0,
    )


def _rounding(noise: float, rest: float) -> Finding:
    return Finding(
        kind="magnified-rounding",
        severity=NOTE,
        text=f"Gradients are equal up to rounding, and later steps differ by {rest:.1e}. One worker alone goes astray "
        f"by {noise:.1e} where its gradients are off by {NUDGE:g}: model or optimizer magnify rounding (a sign, a "
        "division by what is nearly zero). No order of sums is the right one, so N workers are as right as one.",
        alone=rest,
        numbers={"nudge": NUDGE, "noise": noise},
    )
