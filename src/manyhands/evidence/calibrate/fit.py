"""From samples to the constants of the simulator's model: medians, two-term lines, jitter. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

_QUARTILES = 1.349  # of a normal distribution: from the first to the third, in standard deviations
_CLIP = 3.0  # standard deviations; what is further off is the machine's other work


@dataclass(frozen=True)
class Terms:
    """y = first·x₁ + second·x₂, both at least 0, and how far the samples are from it."""

    first: float
    second: float
    residuals: tuple[float, ...]  # of each sample: fitted/measured - 1

    @property
    def worst(self) -> float:
        """The largest residual, without its sign."""
        return max(map(abs, self.residuals), default=0.0)


@dataclass(frozen=True)
class Spread:
    """Of positive samples that lie about a median as a lognormal distribution does, but for outliers."""

    mean: float
    sigma: float  # of the logarithm


@dataclass(frozen=True)
class Computed:
    """What a tick takes: step + row · rows, times a factor of mean 1 whose logarithm has deviation `jitter`."""

    step: float  # seconds
    row: float  # seconds
    jitter: float
    residuals: Mapping[int, float]  # by rows: fitted/measured - 1


def two_terms(xs: Sequence[tuple[float, float]], ys: Sequence[float], weights: Sequence[float] | None = None) -> Terms:
    """The least squares of relative errors Σ w·((a·x₁ + b·x₂)/y - 1)², with a and b at least 0.

    ys: above 0. weights: 1 each without. Where only one of the terms can be told from the samples, the other is 0.
    """
    rows = [(x1 / y, x2 / y, w) for (x1, x2), y, w in zip(xs, ys, weights or [1.0] * len(ys), strict=True)]
    s11, s12, s22 = (sum(w * p * q for p, q, w in _products(rows, i)) for i in range(3))
    s1, s2 = (sum(w * row[i] for *row, w in rows) for i in range(2))
    determinant = s11 * s22 - s12 * s12
    candidates = [(s1 / s11 if s11 else 0.0, 0.0), (0.0, s2 / s22 if s22 else 0.0)]
    if determinant > 1e-12 * s11 * s22:
        both = (s1 * s22 - s2 * s12) / determinant, (s2 * s11 - s1 * s12) / determinant
        if min(both) >= 0:
            candidates = [both]
    a, b = min(candidates, key=lambda ab: sum(w * (ab[0] * p + ab[1] * q - 1) ** 2 for p, q, w in rows))
    return Terms(a, b, tuple(a * p + b * q - 1 for p, q, _ in rows))


def _products(rows: Sequence[tuple[float, float, float]], which: int) -> list[tuple[float, float, float]]:
    i, j = ((0, 0), (0, 1), (1, 1))[which]
    return [(row[i], row[j], row[2]) for row in rows]


def spread(samples: Sequence[float]) -> Spread:
    """Mean and jitter, robust: samples further off than _CLIP deviations count as if they were so far off.

    The deviation by which they are clipped is that of the quartiles. Samples must be positive.
    """
    logs = [math.log(sample) for sample in samples]
    middle = statistics.median(logs)
    if len(logs) < 4:
        return Spread(math.exp(middle), 0.0)
    low, _, high = statistics.quantiles(logs, n=4)
    reach = _CLIP * (high - low) / _QUARTILES
    clipped = [min(max(value, middle - reach), middle + reach) for value in logs]
    return Spread(statistics.fmean(map(math.exp, clipped)), statistics.pstdev(clipped))


def computed(samples: Mapping[int, Sequence[Sequence[float]]], rows: int) -> Computed:
    """From seconds of ticks: {rows of a tick: [one run's seconds, …]}; `rows` is the number that matters most.

    Of each number of rows the quickest run counts: a machine's other work only ever slows a run down. Jitter is the
    spread inside a run. Raises ValueError without samples.
    """
    spreads = {n: min(map(spread, runs), key=lambda one: one.mean) for n, runs in samples.items() if runs}
    if not spreads:
        raise ValueError("no samples")
    sizes = sorted(spreads)
    weights = [float(len(sizes)) if n == rows else 1.0 for n in sizes]
    terms = two_terms([(1.0, float(n)) for n in sizes], [spreads[n].mean for n in sizes], weights)
    nearest = min(sizes, key=lambda n: abs(n - rows))
    return Computed(
        step=terms.first,
        row=terms.second,
        jitter=spreads[nearest].sigma,
        residuals=dict(zip(sizes, terms.residuals, strict=True)),
    )


def step_seconds(ends: Sequence[float], every: int) -> list[float]:
    """Seconds a step, of blocks of `every` steps. ends: when each step ended, ascending; a rest of less than a block is left out."""
    marks = ends[::every]
    return [(later - earlier) / every for earlier, later in pairwise(marks)]
