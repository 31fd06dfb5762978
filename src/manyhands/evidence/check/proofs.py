"""The proofs: the same steps with one worker and with N, in float64 where that can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from manyhands.data.batch import first_rows
from manyhands.errors import ManyhandsError, WorkerFailed
from manyhands.evidence.check import sizes, source_locations
from manyhands.evidence.check.batches import Subject
from manyhands.evidence.check.copies import users_code
from manyhands.evidence.check.examining import Suspect, suspect
from manyhands.evidence.check.findings import BREAKS, NOTE, EqualityProof, Finding
from manyhands.evidence.check.reading import read
from manyhands.evidence.check.recording import Trace
from manyhands.evidence.check.trial_config import WORKERS, TrialConfig, arranged
from manyhands.evidence.check.trials import Bench, as_alone, between

LIMIT = 1e-10
"""In float64; in another dtype it is the square root of its rounding."""
MEMORY_BYTES = 1 << 30
"""For the vectors of all steps: large models are proved over fewer."""


@dataclass
class Proving:
    """Runs the proofs of a task, and keeps what came of them."""

    bench: Bench
    say: Callable[[str], None]
    settings: list[TrialConfig] = field(default_factory=list)
    """Of each proof."""
    proofs: list[EqualityProof] = field(default_factory=list)
    traces: list[list[Trace]] = field(default_factory=list)
    """Of each proof: of one worker, then of each of N; these are missing where they failed."""
    findings: list[Finding] = field(default_factory=list)
    suspects: list[Suspect] = field(default_factory=list)
    failure: Finding | None = None
    """What to say of workers that failed, if nothing explains it."""
    double: bool = True
    dtype: str = "float64"
    limit: float = LIMIT

    def run(self, steps: int) -> None:
        """Both proofs. Raises what one worker alone raises."""
        own = self.bench.copies.fresh()
        with users_code("opening the data or building the model"):
            even = self._affordable(replace(sizes.even(own, self.bench.workers, steps), count=True))
        self.say(f"{even.steps} steps with one worker, in float64")
        solo, even = self._first(even)
        if (step := _not_finite(solo)) is not None:
            self.findings.append(self._ends_there(step))
        self._prove(even, solo)
        uneven = sizes.uneven(own, self.bench.workers, even, lambda: self._stands_one_row(even))
        if uneven is not None:
            self._prove_uneven(uneven)

    @property
    def failed(self) -> tuple[TrialConfig, EqualityProof] | None:
        """The first proof that does not hold."""
        pairs = zip(self.settings, self.proofs, strict=True)
        return next((pair for pair in pairs if not pair[1].largest <= self.limit), None)

    def _affordable(self, setting: TrialConfig) -> TrialConfig:
        """Over as many steps as memory allows: two vectors a step of one worker alone and of the first of N, one of each other."""
        model = Subject(self.bench.copies.fresh(), setting.double).model
        numbers = sum(p.numel() for p in model.parameters() if p.requires_grad)
        most = max(1, MEMORY_BYTES // max(1, 8 * numbers * (self.bench.workers + 3)))
        if most >= setting.steps:
            return setting
        text = (
            f"The model has {numbers:,} parameters: the proof takes {most} of {setting.steps} steps, whose vectors fit "
            f"{MEMORY_BYTES >> 20} MB."
        )
        self.findings.append(Finding(kind="fewer-steps", severity=NOTE, text=text))
        return replace(setting, steps=most)

    def _first(self, setting: TrialConfig) -> tuple[Trace, TrialConfig]:
        """One worker in float64, else in the model's own dtype."""
        try:
            return self.bench.alone(setting), setting
        except WorkerFailed as error:
            setting = replace(setting, double=False)
            solo = self.bench.alone(setting)
            self._fall_back(solo.dtype, error)
            return solo, setting

    def _fall_back(self, dtype: str, error: WorkerFailed) -> None:
        self.double, self.dtype = False, dtype
        self.limit = float(torch.finfo(getattr(torch, dtype)).eps ** 0.5)
        self.findings.append(
            Finding(
                kind="no-float64",
                severity=NOTE,
                text=f"In float64 the task fails: {_first_line(error)}. So the proof is in {dtype}, with the limit "
                f"{self.limit:.1g} in place of {LIMIT:.1g}: differences below it cannot be told from rounding.",
                places=source_locations.as_tuple(source_locations.of_error(error)),
            )
        )

    def _ends_there(self, step: int) -> Finding:
        return Finding(
            kind="not-finite",
            severity=BREAKS,
            text=f"With one worker alone the loss or its gradient is not finite in step {step}: training ends there. "
            'Lower the rate, look at the rows of this step, or leave such steps out (nonfinite="skip").',
            places=source_locations.as_tuple(source_locations.of_function(self.bench.copies.fresh().loss)),
            numbers={"step": step},
        )

    def _prove(self, setting: TrialConfig, solo: Trace) -> None:
        """The same with N workers."""
        rows = max(solo.rows)
        self.say(f"{setting.steps} steps with {self.bench.workers} workers, {rows} rows each")
        ranks: Sequence[Trace] = ()
        failure = ""
        try:
            ranks = self.bench.for_real(as_alone(setting, solo))
        except ManyhandsError as error:
            failure, self.failure = _first_line(error), _failed(error)
        self.settings.append(setting)
        self.traces.append([solo, *ranks])
        self.proofs.append(
            EqualityProof(
                engine=self.bench.engine.name,
                batch_size=rows,
                last_rows=None if setting.rows is None else min(solo.rows),
                steps=between(solo, ranks) if ranks else (),
                failure=failure,
            )
        )
        if ranks and not self.suspects and solo.rates != ranks[0].rates:
            self.suspects.append(self._other_rates(solo, ranks[0]))

    def _prove_uneven(self, setting: TrialConfig) -> None:
        """Where one worker alone stands such batches."""
        try:
            solo = self.bench.alone(setting)
        except WorkerFailed as error:
            self.findings.append(
                Finding(
                    kind="uneven-not-tried",
                    severity=NOTE,
                    text=f"With {setting.batch_size} rows a step one worker alone fails ({_first_line(error)}), so "
                    "slices of unequal size were not tried. Workers get such slices where a batch does not divide, "
                    "as at the end of an epoch.",
                    places=source_locations.as_tuple(source_locations.of_error(error)),
                )
            )
            return
        self._prove(setting, solo)

    def _other_rates(self, solo: Trace, first: Trace) -> Suspect:
        """The optimizer is another one where there are several workers."""
        pairs = [
            (step, name, own[name], other.get(name))
            for step, groups in enumerate(zip(solo.rates, first.rates, strict=False), start=1)
            for own, other in zip(*groups, strict=False)
            for name in own
        ]
        step, name, alone, among = next(pair for pair in pairs if pair[2] != pair[3])
        task = self.bench.copies.fresh()
        made = task.optimizer if step == 1 or task.schedule is None else task.schedule
        text = (
            f"In step {step} the optimizer's {name} is {_text(alone)} on one worker and {_text(among)} on "
            f"{self.bench.workers}: optimizer or schedule ask how many workers there are. The batch size is global, "
            "and allreduce averages, so the rate that is right for one worker is right for N. A larger batch may "
            "want another rate; give both to the task."
        )
        return suspect(
            WORKERS, WORKERS, text, [source_locations.of_function(made)], step=step, name=name, alone=alone, among=among
        )

    def _stands_one_row(self, setting: TrialConfig) -> bool:
        """Whether the loss of a single row is a finite number."""
        batch = read(arranged(self.bench.copies.fresh(), setting), 1)[0].batch
        try:
            found = Subject(self.bench.copies.fresh(), self.double).measure(first_rows(batch, 1))
        except Exception:  # noqa: BLE001 - that is the question, whatever the user's code raises
            return False
        return found.loss == found.loss and bool(found.gradient.isfinite().all())


def _not_finite(trace: Trace) -> int | None:
    """The first step, from 1, whose loss or gradient is not finite."""
    sums = [loss + float(gradient.sum()) for loss, gradient in zip(trace.losses, trace.gradients, strict=True)]
    return next((step for step, total in enumerate(sums, start=1) if not abs(total) < float("inf")), None)


def _failed(error: ManyhandsError) -> Finding:
    place = source_locations.of_error(error) or source_locations.in_text(str(error))
    return Finding(
        kind="fails-on-workers",
        severity=BREAKS,
        text=f"One worker alone trains, and N workers fail: {_first_line(error)}. A worker gets a slice of each "
        "batch, sometimes a single row, in a process of its own.",
        places=source_locations.as_tuple(place),
    )


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0].rstrip(".")


def _text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
