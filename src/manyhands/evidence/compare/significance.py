"""When two variants count as different: repeats in pairs, two intervals of their mean, and a margin. Pure.

Sources: An Introduction to the Bootstrap, Bradley Efron and Robert J. Tibshirani, 1993 (chapter 13: percentile
    intervals);
What Teachers Should Know About the Bootstrap, Tim C. Hesterberg, The American Statistician 69 (4), 2015 (percentile
intervals of small samples are too narrow, by about sqrt((n - 1) / n) and a normal quantile where Student's belongs,
which is why Student's interval is asked, too).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev

import numpy as np
from numpy.typing import NDArray

from manyhands.evidence.compare.comparison import Difference

CONFIDENCE = 0.95
LEAST_PAIRS = 3  # with fewer nothing is called different
RESAMPLES, EXACT = 10_000, 6  # of up to so many pairs all resamples are taken, n to the power of n
SEED = 20150101
HIGHER = {"rows_per_s": True, "seconds": False, "target_seconds": False}  # the ratios; all else is a metric
Numbers = Sequence[float | None]
Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Mean:
    """Of some repeats, and the least and the most of them."""

    middle: float
    low: float
    high: float
    missing: int = 0  # repeats without a value, or with one that is not finite; they are not in the others


def mean(values: Iterable[float | None], geometric: bool = False) -> Mean | None:
    """None where no value is finite. What is compared as ratios has the geometric mean: the ratio of two such means is
    the mean of the ratios, so that a table's numbers are those that its ratios are made of. Everything else has the
    arithmetic one.
    """
    given = list(values)
    finite = [value for value in given if value is not None and math.isfinite(value)]
    if not finite:
        return None
    low, high = min(finite), max(finite)
    middle = fmean(finite)
    if geometric:
        middle = math.exp(fmean(map(math.log, finite))) if low > 0 else 0.0
    return Mean(middle=min(max(middle, low), high), low=low, high=high, missing=len(given) - len(finite))


def difference(own: Numbers, reference: Numbers, *, of: str, margin: float, higher: bool) -> Difference:
    """How `own` differs from `reference`, where the i-th numbers of both are of the same repeat.

    of: rows_per_s, seconds or target_seconds are compared as ratios (the mean is geometric, `margin` a share, and 5 %
        more counts like 5 % less); anything else as differences, with `margin` in its own unit.
    higher: whether more is better.

    1. Of each pair, d = log(own / reference), or own - reference.
    2. B is the 95 % percentile bootstrap interval of the mean of d: resampled pairs, all n^n of up to 6, else 10,000.
    3. T is Student's 95 % interval of the mean of d, of n - 1 degrees of freedom.
    4. The interval is the wider of B and T on either side.
    5. Better or worse: it lies beyond the margin on that side, and there are at least 3 pairs.
    6. Same: it lies inside the margin, and there are at least 3 pairs.
    7. Unclear, no difference seen: anything else.

    target_seconds may be None, where the target was not reached: then nothing is better, and worse is who reached it in
    no repeat where the reference did in all; the middle is of the pairs where both reached it (infinite where it is
    worse, NaN where there are none).
    """
    if len(own) != len(reference):
        raise ValueError(f"{of}: {len(own)} repeats of one and {len(reference)} of the other")
    pairs = [(a, b) for a, b in zip(own, reference, strict=True) if a is not None and b is not None]
    missing = len(own) - len(pairs)
    if missing and not any(a is not None for a in own) and all(b is not None for b in reference):
        outcome = "worse" if len(own) >= LEAST_PAIRS else "unclear"
        return Difference(of=of, middle=math.inf, low=math.inf, high=math.inf, margin=margin, outcome=outcome)
    ratio = of in HIGHER
    if not pairs or not all(math.isfinite(value) and (value > 0 or not ratio) for pair in pairs for value in pair):
        return Difference(of=of, middle=math.nan, low=math.nan, high=math.nan, margin=margin, outcome="unclear")
    found = [math.log(a / b) if ratio else a - b for a, b in pairs]
    reach = math.log1p(margin) if ratio else margin
    outcome = "unclear" if missing else judged(found, reach, higher)
    numbers = (fmean(found), *interval(found))
    middle, low, high = (math.exp(number) for number in numbers) if ratio else numbers
    return Difference(of=of, middle=middle, low=low, high=high, margin=margin, outcome=outcome)


def judged(differences: Sequence[float], margin: float, higher: bool) -> str:
    """better | worse | same | unclear, by the rule of `difference`."""
    low, high = interval(differences)
    if len(differences) < LEAST_PAIRS:
        return "unclear"
    if low > margin or high < -margin:
        return "better" if (low > margin) == higher else "worse"
    return "same" if -margin <= low and high <= margin else "unclear"


def interval(differences: Sequence[float]) -> Interval:
    """Of the mean of n ≥ 1 numbers: the wider of the bootstrap's and Student's on either side."""
    (low, high), (least, most) = bootstrap(differences), student(differences)
    return min(low, least), max(high, most)


def bootstrap(differences: Sequence[float]) -> Interval:
    """The percentile interval of the mean of n ≥ 1 numbers."""
    values, n = np.asarray(differences, dtype=np.float64), len(differences)
    drawn = _all_resamples(n) if n <= EXACT else np.random.default_rng(SEED).integers(0, n, (RESAMPLES, n))
    means = values[drawn].mean(1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1 - tail], method="inverted_cdf")
    return float(low), float(high)


@cache
def _all_resamples(n: int) -> NDArray[np.int64]:
    return np.array(list(itertools.product(range(n), repeat=n)), dtype=np.int64)  # [n^n, n]


def student(differences: Sequence[float]) -> Interval:
    """Student's interval of the mean; without bounds for a single number."""
    n = len(differences)
    if n < 2:
        return -math.inf, math.inf
    middle, error = fmean(differences), stdev(differences) / math.sqrt(n)
    reach = t_quantile(n - 1) * error
    return middle - reach, middle + reach


@cache
def t_quantile(freedom: int) -> float:
    """The t that |Student's t| of so many degrees of freedom exceeds with probability 5 %: 12.706, 4.303, 3.182, …"""
    low, high = 0.0, 1000.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_within(middle, freedom) < CONFIDENCE else (low, middle)
    return (low + high) / 2


def t_within(t: float, freedom: int) -> float:
    """P(|Student's t| ≤ t), t ≥ 0: Abramowitz, Stegun, Handbook of Mathematical Functions, 1964, 26.7.3-4."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term = math.sin(angle) * (math.cos(angle) if odd else 1.0)
    total = 0.0
    for k in range(odd + 1, freedom, 2):
        total += term
        term *= math.cos(angle) ** 2 * k / (k + 1)
    return 2 / math.pi * (angle + total) if odd else total
