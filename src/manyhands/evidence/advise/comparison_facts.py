"""The data behind the advice on a comparison, and the comparison's one decision."""

from __future__ import annotations

import math
from dataclasses import dataclass

from manyhands.evidence.advise.exchange_advice import WORTH
from manyhands.evidence.advise.run_facts import RunMeasurements

VARIES = 1.5  # times: a reference whose repeats differ by half hides differences of that size


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """How many times as fast as the reference, and whether that is a difference."""

    middle: float
    low: float
    high: float  # the interval of the middle, 95 %
    outcome: str  # better | worse | same | unclear


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A strategy on so many workers: the means of its repeats."""

    name: str  # as people are shown it: `local-sgd:period=8 on 4`
    measured: RunMeasurements
    """As of one run: strategy, workers, threads, split of time, bytes, period, rate, staleness."""
    speed: Ratio | None
    """Against the reference, by what Compared.speed_of says; None of the reference itself, and where a repeat of one of
    the two did not reach the target."""
    quality: str
    """The final metric against the reference's: better | worse | same | unclear; "" of the reference itself."""
    effective_rate: float  # rate times how far a global batch moves the answer, as the summary has it
    batch_size: int  # global rows of a step
    reached: float | None = None  # share of the repeats in which it reached the target; None where there is none
    target_s: float = math.inf  # seconds until it did
    varies: float = 1.0  # what Compared.speed_of says of its best repeat, over that of its worst

    @property
    def times(self) -> float:
        """As fast as the reference; 0 where that is not known, or the target never reached."""
        if self.speed is None:
            return 0.0 if self.quality else 1.0
        return self.speed.middle if math.isfinite(self.speed.middle) else 0.0

    @property
    def outcome(self) -> str:
        """Of its speed: better | worse | same | unclear."""
        return "unclear" if self.speed is None else self.speed.outcome

    @property
    def threads(self) -> int:
        """Of all workers."""
        return self.measured.workers * self.measured.threads_per_worker


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Whether to distribute; the verdict says it in words."""

    kind: str  # distribute | stay | undecided
    why: str
    """What decided.

    faster: `best` is surely faster than one process, and not worse in the metric (with a target: in time to it).
    reached: `best` reached the target in every repeat, and the reference in none.
    unclear: `best` may be faster by enough to be worth it, and its interval leaves open whether it is.
    repeats: they are too few to separate a difference from chance.
    unreached: the reference did not reach the target in every repeat, so that times to it cannot be compared.
    slower: nothing that is as good was significantly faster; `best` is the nearest.
    worse: all are worse in the metric.
    failed: nothing else is left.
    """
    best: Contestant | None  # the one that this rests on


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What a comparison knows, as far as the rules look at it. Contestants that failed are left out."""

    contestants: tuple[Contestant, ...]
    reference: str  # the name of the one that others are compared with: one process with all threads
    metric: str  # the one that `quality` is about
    speed_of: str = "rows/s"  # what `speed` is about: `rows/s`, or `time to test_accuracy ≥ 0.97`
    enough: bool = True  # whether there are enough repeats to call anything different
    margin: float = 0.05  # a share: ratios of time nearer to 1 are no difference

    @property
    def base(self) -> Contestant:
        """The reference."""
        return next(one for one in self.contestants if one.name == self.reference)

    @property
    def several(self) -> list[Contestant]:
        """Those on several workers, the fastest first."""
        return sorted((one for one in self.contestants if one.measured.workers > 1), key=lambda one: -one.times)

    @property
    def rivals(self) -> list[Contestant]:
        """All but solo, the fastest first."""
        return sorted(
            (one for one in self.contestants if not one.measured.needs.one_worker), key=lambda one: -one.times
        )

    @property
    def fit(self) -> list[Contestant]:
        """The rivals that may be recommended, fastest first: a worse metric rules out, except for time to target."""
        return [one for one in self.rivals if self.to_target or one.quality != "worse"]

    @property
    def best(self) -> Contestant | None:
        """The rival that the decision rests on, else the fastest that may be taken; None where there is none."""
        found = self.decision.best
        return found if found in self.rivals else next(iter(self.fit), None)

    @property
    def decision(self) -> Decision:
        """The one decision of a comparison."""
        if not self.rivals:
            return Decision(kind="stay", why="failed", best=None)
        nearest = next(iter(self.fit), None)
        if not self.enough:
            return Decision(kind="undecided", why="repeats", best=nearest)
        if self.base.reached is not None and self.base.reached < 1:
            always = [one for one in self.contestants if one.reached == 1]
            if self.base.reached or not always:
                return Decision(kind="undecided", why="unreached", best=None)
            first = min(always, key=lambda one: one.target_s)
            return Decision(kind="distribute" if first in self.rivals else "stay", why="reached", best=first)
        if faster := next((one for one in self.fit if one.outcome == "better"), None):
            return Decision(kind="distribute", why="faster", best=faster)
        if unclear := next(filter(self._may_be_worth_it, self.fit), None):
            return Decision(kind="undecided", why="unclear", best=unclear)
        return Decision(kind="stay", why="slower" if nearest else "worse", best=nearest)

    def _may_be_worth_it(self, one: Contestant) -> bool:
        """Where the reference varies by half, the upper end of the interval counts: the middle says little."""
        if one.speed is None or one.outcome != "unclear":
            return False
        seen = one.speed.high if self.base.varies >= VARIES else one.speed.middle
        return seen >= max(WORTH, 1 + self.margin)

    @property
    def to_target(self) -> bool:
        return self.speed_of != "rows/s"
