"""What the rules about a comparison look at: plain data, made of a Comparison by whoever advises."""

from __future__ import annotations

import math
from dataclasses import dataclass

from manyhands.advise.measured import Measured


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """How many times as fast as the reference, and whether that is a difference."""

    middle: float
    low: float
    high: float
    """The interval of the middle, 95 %."""
    said: str
    """better | worse | same | unclear"""


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A strategy on so many workers: the middle of its repeats."""

    name: str
    """As people are shown it: `local-sgd:period=8 on 4`."""
    measured: Measured
    """As of one run: strategy, workers, threads, split of time, bytes, period, rate, staleness."""
    speed: Ratio | None
    """Against the reference, by what Compared.speed_of says; None of the reference itself, and where it never reached the target."""
    quality: str
    """The final metric against the reference's: better | worse | same | unclear; "" of the reference itself."""
    effective_rate: float
    """Rate times how far a global batch moves the answer, as the summary has it."""
    batch_size: int
    """Global rows of a step."""
    reached: bool | None = None
    """Whether it reached the target in every repeat; None where there is none."""

    @property
    def times(self) -> float:
        """As fast as the reference; 0 where that is not known, or the target never reached."""
        if self.speed is None:
            return 0.0 if self.quality else 1.0
        return self.speed.middle if math.isfinite(self.speed.middle) else 0.0

    @property
    def said(self) -> str:
        """Of its speed: better | worse | same | unclear."""
        return "unclear" if self.speed is None else self.speed.said

    @property
    def threads(self) -> int:
        """Of all workers."""
        return self.measured.workers * self.measured.threads_per_worker


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What a comparison knows, as far as the rules look at it. Contestants that failed are left out."""

    contestants: tuple[Contestant, ...]
    reference: str
    """The name of the one that others are compared with: one process with all threads."""
    metric: str
    """The one that `quality` is about."""
    speed_of: str = "rows/s"
    """What `speed` is about: `rows/s`, or `time to test_accuracy ≥ 0.97`."""

    @property
    def base(self) -> Contestant:
        """The reference."""
        return next(one for one in self.contestants if one.name == self.reference)

    @property
    def several(self) -> list[Contestant]:
        """Those on several workers, the fastest first."""
        return sorted((one for one in self.contestants if one.measured.workers > 1), key=lambda one: -one.times)

    @property
    def best(self) -> Contestant | None:
        """On several workers: the fastest that is surely faster than one process, else the fastest; None where there is none.

        Where the time to a target is compared, that is all; else a worse metric rules out.
        """
        fit = [one for one in self.several if self.to_target or one.quality != "worse"]
        return next((one for one in fit if one.said == "better"), next(iter(fit), None))

    @property
    def to_target(self) -> bool:
        return self.speed_of != "rows/s"
