"""From samples to the constants of the simulator's model: medians, two-term lines, jitter. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

_QUARTILES = 1.349  # the interquartile range of a normal distribution, in standard deviations
_CLIP = 3.0  # standard deviations; samples beyond it are due to the machine's other work


@dataclass(frozen=True)
class Terms:
    """The fit y = first·x₁ + second·x₂, both at least 0, and its residuals."""

    first: float
    second: float
    residuals: tuple[float, ...]  # fitted/measured - 1 of each sample

    @property
    def worst(self) -> float:
        """The largest absolute residual."""
        return max(map(abs, self.residuals), default=0.0)


@dataclass(frozen=True)
class LogNormal:
    """A lognormal distribution."""

    mean: float
    sigma: float  # of the logarithm


@dataclass(frozen=True)
class ComputeFit:
    """The seconds of a tick: step + row · rows, times a factor of mean 1 whose logarithm has deviation `jitter`."""

    step: float
    row: float
    jitter: float
    residuals: Mapping[int, float]  # {rows: fitted/measured - 1}


def two_terms(xs: Sequence[tuple[float, float]], ys: Sequence[float], weights: Sequence[float] | None = None) -> Terms:
    """Least squares of relative errors Σ w·((a·x₁ + b·x₂)/y - 1)², with a and b at least 0.

    ys: above 0. weights: default to 1. If the samples determine only one of the terms, the other is 0.
    """
    rows = [(x1 / y, x2 / y, w) for (x1, x2), y, w in zip(xs, ys, weights or [1.0] * len(ys), strict=True)]
    s11, s12, s22 = (sum(row[2] * row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    s1, s2 = (sum(row[2] * row[i] for row in rows) for i in range(2))
    determinant = s11 * s22 - s12 * s12
    candidates = [(s1 / s11 if s11 else 0.0, 0.0), (0.0, s2 / s22 if s22 else 0.0)]
    if determinant > 1e-12 * s11 * s22:
        both = (s1 * s22 - s2 * s12) / determinant, (s2 * s11 - s1 * s12) / determinant
        if min(both) >= 0:
            candidates = [both]
    a, b = min(candidates, key=lambda ab: sum(w * (ab[0] * p + ab[1] * q - 1) ** 2 for p, q, w in rows))
    return Terms(a, b, tuple(a * p + b * q - 1 for p, q, _ in rows))


def lognormal(samples: Sequence[float]) -> LogNormal:
    """A robust fit to positive samples: logarithms beyond _CLIP deviations, as the quartiles give them, are clipped."""
    logs = [math.log(sample) for sample in samples]
    middle = statistics.median(logs)
    if len(logs) < 4:
        return LogNormal(math.exp(middle), 0.0)
    low, _, high = statistics.quantiles(logs, n=4)
    reach = _CLIP * (high - low) / _QUARTILES
    clipped = [min(max(value, middle - reach), middle + reach) for value in logs]
    return LogNormal(statistics.fmean(map(math.exp, clipped)), statistics.pstdev(clipped))


def fit_compute(samples: Mapping[int, Sequence[Sequence[float]]], rows: int) -> ComputeFit:
    """Fit seconds of ticks: {rows of a tick: [one run's seconds, …]}. `rows` has the largest weight.

    For each number of rows the quickest run counts: other work on the machine only slows runs down. Jitter is the
    spread within a run. Raises ValueError without samples.
    """
    fits = {n: min(map(lognormal, runs), key=lambda one: one.mean) for n, runs in samples.items() if runs}
    if not fits:
        raise ValueError("no samples")
    sizes = sorted(fits)
    weights = [float(len(sizes)) if n == rows else 1.0 for n in sizes]
    terms = two_terms([(1.0, float(n)) for n in sizes], [fits[n].mean for n in sizes], weights)
    nearest = min(sizes, key=lambda n: abs(n - rows))
    return ComputeFit(
        step=terms.first,
        row=terms.second,
        jitter=fits[nearest].sigma,
        residuals=dict(zip(sizes, terms.residuals, strict=True)),
    )


def step_seconds(ends: Sequence[float], every: int) -> list[float]:
    """Seconds a step in each whole block of `every` steps. ends: the end times of steps, ascending."""
    marks = ends[::every]
    return [(later - earlier) / every for earlier, later in pairwise(marks)]
