"""The result of a comparison as plain data, stored in report.json; report, table and verdict are made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from manyhands import events
from manyhands.errors import BadInput
from manyhands.evidence.advise import Advice
from manyhands.strategies import kind_of

FORMAT = 1
NUMBERS = "report.json"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One of the things compared: a strategy on so many workers with so many threads each."""

    strategy: str
    """Its spec."""
    workers: int
    threads: int
    """Of each worker."""
    name: str
    """Unique among the variants: `solo, 2 threads`, `local-sgd:period=8 on 4`, `downpour on 4, fixed partition`; a repeated
    spec ends in `(2)`."""
    partition: str = "none"
    """How rows are dealt, as `train` takes it."""

    @property
    def solo(self) -> bool:
        kind = kind_of(self.strategy)
        return kind is not None and kind.needs.one_worker


@dataclass(frozen=True, kw_only=True)
class Point:
    """A validation during a trial."""

    rows: int
    """Consumed by all workers until then."""
    seconds: float
    """Of training until then: the loop's own time, without validations and start-up."""
    metrics: Mapping[str, float]
    distance: float | None = None
    """Of the parameters from solo's at the same rows and of the same repeat, |p - s| / |s|; an estimate (see probe.py).
    None where solo has no point at these rows."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of one variant. Seconds are means over workers, as in `Run.timing`, without validations."""

    variant: str
    """Its name."""
    repeat: int
    """From 0. All trials of a repeat have the same seed."""
    seed: int
    failure: str = ""
    """Why there is no result; all that follows is then empty."""
    rows: int = 0
    """Consumed by all workers, and, of those, without effect: dropped or skipped."""
    unused: int = 0
    steps: int = 0
    """Optimizer steps and exchanges of a worker; at the workers' own pace those of worker 0."""
    rounds: int = 0
    ticks: int = 0
    """Global batches."""
    seconds: float = 0.0
    """Of the loop."""
    launch_seconds: float = 0.0
    """From the call to the result, start-up and validations included."""
    rows_per_s: float = 0.0
    """Without the first ticks."""
    curve: tuple[Point, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    """At the end: train_*, validation_*, test_*."""
    target_seconds: float | None = None
    """Seconds of the loop until the target, interpolated between validations; None where it was not reached."""
    target_rows: float | None = None
    distance: float | None = None
    """Of the final parameters from solo's of the same repeat, |p - s| / |s|, exact; 0 is bit-equal."""
    cosine: float | None = None
    """Of the angle between what this run and what solo moved from the common start."""
    agreement: float | None = None
    """Share of rows that it and solo predict alike (classes); else 1 - |o - s| / |s| of the outputs, at least 0."""
    agreement_of: str = ""
    """classes | outputs"""
    optimum_distance: float | None = None
    """Of the final parameters from the task's optimum, |p - x| / |x|; |p| where x is 0."""
    excess_loss: float | None = None
    """Their loss over all training rows, less the optimum's."""
    timing: tuple[Mapping[str, float], ...] = ()
    """By worker: {input, compute, exchange, wait}, seconds."""
    bytes: int = 0
    """Sent by all workers."""
    messages: int = 0
    input: Mapping[str, float] = field(default_factory=dict)
    """As `Run.input`: what reading files cost all workers; empty: rows lay in memory, or were not counted."""
    staleness: Mapping[int, int] = field(default_factory=dict)
    """{versions: pushes}"""
    gain: float | None = None
    """Rate times largest curvature of a push (docs/events.md); None: not known."""
    memory: tuple[int, ...] = ()
    """By worker: the most resident bytes of its process (on a GPU: allocated there); empty: not known."""
    effective_rate: float = 0.0
    rate: float = 0.0
    batch_size: int = 0

    @property
    def worker_seconds(self) -> float:
        """What it costs: seconds of the loop times workers."""
        return self.seconds * max(1, len(self.timing))

    @property
    def bytes_read(self) -> float | None:
        """From the files or their store, by all workers; None: not counted."""
        return self.input.get("bytes")

    @property
    def most_memory(self) -> int | None:
        """Bytes of the worker that held most."""
        return max(self.memory, default=None)


@dataclass(frozen=True, kw_only=True)
class Target:
    """A metric's value to be reached."""

    metric: str
    value: float
    higher: bool
    """Whether more is better."""

    def __str__(self) -> str:
        return f"{self.metric} {'≥' if self.higher else '≤'} {self.value:g}"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How a variant's numbers differ from the reference's, repeat by repeat.

    Of seconds and rates: the ratio variant / reference. Of metrics: variant - reference.
    """

    of: str
    """What was compared: rows_per_s, seconds, target_seconds, or a metric's name."""
    middle: float
    low: float
    high: float
    """The interval of the middle, 95 %."""
    margin: float
    """What counts as a difference: of ratios a share, of metrics in its own unit."""
    outcome: str
    """better | worse | same (inside the margin) | unclear (no difference seen)"""

    @property
    def different(self) -> bool:
        return self.outcome in ("better", "worse")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of `compare()`."""

    task: str
    parameters: int
    """Trainable numbers of the model."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Of its trainable tensors."""
    ticks_per_epoch: int | None = None
    """Global batches of one worker's epoch; None: a stream."""
    variants: tuple[Variant, ...]
    """Solo with one thread first, then solo with all threads where there are more."""
    trials: tuple[Trial, ...]
    """In the order in which they ran."""
    repeats: int
    metric: str
    """The one to judge by."""
    higher: bool
    """Whether more of it is better."""
    target: Target | None
    reference: str
    """The variant that others are compared with: solo with all threads."""
    time_margin: float
    """A share: ratios of time nearer to 1 are no difference."""
    metric_margin: float
    """A share of the reference's value of the metric."""
    differences: Mapping[str, tuple[Difference, ...]] = field(default_factory=dict)
    """By variant, against the reference; none of the reference itself and of variants that failed."""
    decision: str = ""
    """distribute | stay | undecided"""
    best: str | None = None
    """The variant that the decision rests on."""
    verdict: str = ""
    """The decision in a sentence or two."""
    advice: tuple[Advice, ...] = ()
    """The most important first."""
    optimum: str = ""
    """How the task's optimum is known, and its loss; "" where it is not."""
    simulated: Mapping[str, str] = field(default_factory=dict)
    """The cluster's options where seconds are virtual; empty: they are real."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Of the task, from the warm-up run: how many processes load its rows, and whether gradients are clipped."""
    machine: Mapping[str, Any] = field(default_factory=dict)
    """As `manyhands.recording.run.environment()` has it, with processor, engine, device and when."""
    seconds: float = 0.0
    """That it took."""
    complete: bool = True
    """False where it was interrupted: trials of whole repeats only."""

    @property
    def solos(self) -> list[Variant]:
        """The one with one thread, then that with all where there is another."""
        return [variant for variant in self.variants if variant.solo]

    @property
    def speed_of(self) -> str:
        """What decides who is faster: the time to the target, else rows a second."""
        return "rows_per_s" if self.target is None else "target_seconds"

    def variant(self, name: str) -> Variant:
        return next(variant for variant in self.variants if variant.name == name)

    def of(self, name: str) -> list[Trial]:
        """The trials of a variant that came to their end, by repeat."""
        found = [trial for trial in self.trials if trial.variant == name and not trial.failure]
        return sorted(found, key=lambda trial: trial.repeat)

    def failure(self, name: str) -> str:
        """Why a variant has no result, or ""."""
        return next((trial.failure for trial in self.trials if trial.variant == name and trial.failure), "")

    def difference(self, name: str, of: str) -> Difference | None:
        """How a variant differs from the reference in one thing; None where that was not compared."""
        return next((one for one in self.differences.get(name, ()) if one.of == of), None)

    # -- on disk -----------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """One line; NaN and infinities as docs/events.md says."""
        return events.to_json({"format": FORMAT, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises BadInput for what no `to_json` of this version wrote."""
        unknown = (
            f"this is not the {NUMBERS} of a comparison, or another version of manyhands wrote it: run manyhands "
            "compare again"
        )
        try:
            values = events.from_json(text)
        except ValueError:
            raise BadInput(unknown) from None
        if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
            raise BadInput(unknown)
        try:
            return cls(**{**values, **_parts(values)})
        except (KeyError, TypeError) as missing:
            raise BadInput(f"{unknown} ({missing})") from None


def _parts(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a Comparison that JSON does not hold as they are."""
    return {
        "shapes": tuple(tuple(one) for one in values["shapes"]),
        "variants": tuple(Variant(**one) for one in values["variants"]),
        "trials": tuple(_trial(one) for one in values["trials"]),
        "target": None if values["target"] is None else Target(**values["target"]),
        "differences": {
            name: tuple(Difference(**one) for one in found) for name, found in values["differences"].items()
        },
        "advice": tuple(Advice(**one) for one in values["advice"]),
    }


def _trial(values: dict[str, Any]) -> Trial:
    known = {one.name for one in fields(Trial)}
    curve = tuple(Point(**point) for point in values["curve"])
    staleness = {int(versions): pushes for versions, pushes in values["staleness"].items()}
    more = {
        "curve": curve,
        "staleness": staleness,
        "timing": tuple(values["timing"]),
        "memory": tuple(values["memory"]),
    }
    return Trial(**{name: value for name, value in values.items() if name in known} | more)
