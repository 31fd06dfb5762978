"""How stale updates were, and how much staleness the learning rate can bear. Pure mathematics.

With a fixed delay of τ versions, gradient descent on a curvature λ converges iff rate·λ < 2·sin(π / (2(2τ + 1))). The
rate is known; the largest curvature that training meets is estimated here from a worker's own gradients.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyhands.server.base import ServerSpec
from manyhands.server.rules import make_rule

Histogram = Mapping[int, int]  # versions -> pushes

WINDOW, WINDOWS = 16, 2  # ticks of a window, and how many of the newest count
DENSE, EVERY = 64, 256  # measured are the first so many ticks, then the first windows of every so many
SURE = 3.0  # standard errors
STALENESS_COUNTS_FROM = 20  # pushes


def limit(staleness: int) -> float:
    """The limit of rate times curvature at which a quadratic converges with a fixed delay: 2, 1, .618, .445, …"""
    return 2 * math.sin(math.pi / (2 * (2 * staleness + 1)))


def max_stable_staleness(gain: float) -> int:
    """The largest staleness that is stable at `gain`, rate times largest curvature; -1 where none is."""
    if gain >= limit(0):
        return -1
    staleness = 0
    while limit(staleness + 1) > gain and staleness < 1_000_000:
        staleness += 1
    return staleness


def quantile(histogram: Histogram, q: float) -> int:
    """The smallest staleness that at least a share `q` of the pushes does not exceed; 0 of none."""
    wanted, seen = q * sum(histogram.values()), 0
    for versions in sorted(histogram):
        seen += histogram[versions]
        if seen >= wanted:
            return versions
    return 0


def _dot(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a, b))


class Curvature:
    """Estimates rate times largest curvature from successive gradients of one worker; call it around each step.

    For a direction v, curvature is how the gradient along v changes with the position along v: the slope of a straight
    line through the pairs (x·v, g·v) of a window of ticks, x the parameters where the gradient g was taken. Where g is
    noisy the slope stays right, because x was there before the noise; it has a standard error. A drift of both over
    the window is taken off. From window to window v turns into the direction in which gradients scatter most (power
    iteration, Oja, 1982): on a quadratic near its limit of stability that is the steepest, and so it is, nearly, in a
    network, whose gradients scatter where the loss is steep. The estimate is biased
    low, except that short windows see spurious curvature in pure noise, about a fifth of the limit. The rate is
    measured likewise, as the slope of steps over gradients along v: for plain SGD it is the learning rate; with
    momentum or Adam it is how much a gradient moves the parameters at once.

    While it measures, a tick costs about five passes over the parameters: the first 64 ticks, then 32 of 256. Else a
    call costs well under a microsecond. Memory: three vectors [D'].
    """

    def __init__(self, dot: Callable[[Any, Any], float] = _dot) -> None:
        """dot: of two vectors, which are tensors, or have `*`, `add_` and a dot product as tensors do."""
        self._dot = dot
        self._fits: deque[_Fit] = deque(maxlen=WINDOWS)
        self._points: list[
            tuple[float, float, float]
        ] = []  # of the window under way: along v, position, gradient, step / rate
        self._tick = 0
        self._v: Any = None  # the direction
        self._scatter: Any = None
        self._sum: Any = None
        self._along = (0.0, 0.0)  # x·v and g·v of the tick under way
        self._rate = 0.0

    def before(self, parameters: Any, gradients: Any) -> None:
        """These gradients [D'] were taken at these parameters [D'], and no step made yet."""
        if not self._measures():
            return
        if self._v is None and not self._turn(gradients):
            return
        self._along = self._dot(parameters, self._v), self._dot(gradients, self._v)
        self._scatter.add_(gradients, alpha=self._along[1])
        self._sum.add_(gradients)

    def after(self, parameters: Any, rate: float = 1.0, applied: bool = True) -> bool:
        """The step was made, at this rate, or nothing was (`applied`). Whether the estimate is a new one now."""
        measured = self._measures() and self._v is not None
        self._tick, self._rate = self._tick + 1, rate
        if not measured or not applied or rate <= 0:
            return False
        (x, g), moved = self._along, self._dot(parameters, self._v)
        self._points.append((x, g, (moved - x) / rate))
        return len(self._points) == WINDOW and self._end()

    def estimate(self) -> float | None:
        """Rate times curvature, at the newest rate; 0 where it is negative, None before there are enough windows."""
        found = self._found()
        return None if found is None else max(0.0, found[0]) * self._rate

    def lower_bound(self) -> float | None:
        """What the estimate is at least, three standard errors below it."""
        found = self._found()
        return None if found is None else max(0.0, found[0] - SURE * found[1]) * self._rate

    # -- a window ----------------------------------------------------------------------------------------------------

    def _measures(self) -> bool:
        return self._tick < DENSE or self._tick % EVERY < WINDOWS * WINDOW

    def _turn(self, direction: Any) -> bool:
        """Look along this direction from now on; False where it is none."""
        square = self._dot(direction, direction)
        if not 0 < square < math.inf:
            return False
        self._v = direction * (1 / math.sqrt(square))
        self._scatter, self._sum = self._v * 0.0, self._v * 0.0
        return True

    def _end(self) -> bool:
        fit = _Fit.of(self._points)
        if fit is not None:
            self._fits.append(fit)
        mean = sum(g for _, g, _ in self._points) / WINDOW
        self._scatter.add_(self._sum, alpha=-mean)
        if not self._turn(self._scatter):
            self._v = None  # gradients that are all the same, or not finite: begin with the next
        self._points = []
        return fit is not None

    def _found(self) -> tuple[float, float] | None:
        """Step over rate, times curvature, and its standard error."""
        if len(self._fits) < WINDOWS:
            return None
        xx, xg, gg, ug = (sum(column) for column in zip(*map(astuple, self._fits), strict=True))
        unexplained = max(0.0, gg - xg * xg / xx)
        error = math.sqrt(unexplained / (len(self._fits) * (WINDOW - 2) - 1) / xx)
        response = max(0.0, -ug / gg)
        return response * xg / xx, response * error


@dataclass(frozen=True, slots=True)
class _Fit:
    """Sums of products over a window: positions x, gradients g, steps u along one direction, centred, detrended."""

    xx: float
    xg: float
    gg: float
    ug: float

    @classmethod
    def of(cls, points: list[tuple[float, float, float]]) -> _Fit | None:
        """None where nothing moved, or something is not finite."""
        whole = np.asarray(points, dtype=np.float64)  # [WINDOW, 3]
        if not np.isfinite(whole).all():
            return None
        x, g, u = (whole - _LINE @ (_LINE.T @ whole)).T
        fit = cls(float(x @ x), float(x @ g), float(g @ g), float(u @ g))
        least = 1e-24 * np.square(whole).sum(0)  # below it is rounding
        return fit if fit.xx > least[0] and fit.gg > least[1] else None


_LINE = np.linalg.qr(np.stack([np.ones(WINDOW), np.arange(WINDOW)], axis=1))[
    0
]  # [WINDOW, 2] what a mean and a drift span


class StalenessMonitor:
    """One worker's eye on whether the rate can bear its updates' staleness; says so once."""

    def __init__(
        self,
        *,
        rank: int,
        workers: int,
        share: float = 1.0,
        fades: bool = False,
        dot: Callable[[Any, Any], float] = _dot,
    ) -> None:
        """share: how far a push moves the center along a worker's step. fades: the server divides by staleness + 1.
        dot: see `Curvature`."""
        self.curvature = Curvature(dot)
        self.staleness: Counter[int] = Counter()
        self._rank, self._workers, self._share, self._fades = rank, workers, share, fades
        self._steps = self._pushes = 0
        self._rate = 0.0
        self._new = self._warned = False
        self._news: dict[str, float] = {}

    def before(self, parameters: Any, gradients: Any) -> None:
        """See `Curvature.before`."""
        self.curvature.before(parameters, gradients)

    def after(self, parameters: Any, rate: float, applied: bool = True) -> None:
        """See `Curvature.after`."""
        self._new = self.curvature.after(parameters, rate, applied) or self._new
        self._steps += applied
        self._rate = rate

    def record(self, drained: Mapping[str, Any]) -> str:
        """Record what `Server.drain_journal` returned; the warning where one is due, else "" """
        self.staleness.update(drained.get("staleness", ()))
        self._pushes += len(drained.get("pushes", ()))
        lower_bound, gain = self.curvature.lower_bound(), self.curvature.estimate()
        if not self._new or self.staleness.total() < STALENESS_COUNTS_FROM or lower_bound is None or gain is None:
            return ""
        stale = quantile(self.staleness, 0.9)
        self._new, self._news = False, {"gain": float(f"{self._of_push(gain, stale):.4g}")}
        if self._warned or not stale or self._of_push(lower_bound, stale) <= limit(stale):
            return ""
        self._warned = True
        return self._warning(gain, stale)

    def news(self) -> dict[str, float]:
        """{"gain": rate times largest curvature of a push} if `record` found a new one since the last call."""
        news, self._news = self._news, {}
        return news

    def _of_push(self, gain: float, stale: int) -> float:
        """Rate times curvature of a push: a window of steps contracts by (1 - gain)^steps; the center by `share` of it."""
        way = 1 - (1 - gain) ** self._window() if gain < 2 else gain  # from 2 on the worker diverges by itself
        return self._weight(stale) * way

    def _weight(self, stale: int) -> float:
        return 1 / (stale + 1) if self._fades else self._share

    def _window(self) -> float:
        return max(1, round(self._steps / self._pushes)) if self._pushes else 1

    def _warning(self, gain: float, stale: int) -> str:
        of_push = self._of_push(gain, stale)
        return (
            f"the training may diverge: 9 of 10 pushes of worker {self._rank} are up to {stale} "
            f"version{'' if stale == 1 else 's'} late, and then rate x curvature must stay below {limit(stale):.3g}; "
            f"it is {of_push:.3g}. {self._remedy(gain, stale)}"
        )

    def _remedy(self, gain: float, stale: int) -> str:
        ways = [
            f"lower the rate from {self._rate:.3g} to {self._rate * min(1.0, self._most(stale) / gain):.2g} or less"
        ]
        most = max_stable_staleness(self._of_push(gain, stale)) + 1  # workers in turn see a staleness of workers - 1
        if 1 <= most < self._workers:
            ways.append(f"use at most {most} worker{'' if most == 1 else 's'}")
        if most >= 1:
            ways.append("set bound=0 (no staleness)")
        if not self._fades:
            ways.append("use strategy dynsgd, which weighs late updates less")
        return f"{', or '.join(ways)}.".replace("lower", "Lower", 1)

    def _most(self, stale: int) -> float:
        """The gain of a step at which a push is at the limit."""
        of_way = limit(stale) / self._weight(stale)
        if self._window() == 1:
            return of_way
        return 1 - (1 - of_way) ** (1 / self._window()) if of_way < 1 else 1.0


def watch(
    spec: ServerSpec, rate_factor: float, rank: int, workers: int, dot: Callable[[Any, Any], float] = _dot
) -> StalenessMonitor | None:
    """The monitor of a worker; None where the limit does not apply to the rule, or nothing can be stale.

    rate_factor: the strategy's, how far one global batch moves the center in steps of the rate. dot: see `Curvature`.
    """
    rule = make_rule(spec)
    if not rule.adds_steps or not rule.policy(workers, spec.bound).stale or workers == 1:
        return None
    return StalenessMonitor(
        rank=rank, workers=workers, share=rate_factor / workers, fades=rule.divides_by_staleness, dot=dot
    )
