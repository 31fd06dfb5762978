"""Error bars of a prediction, from the errors of calibration's own predictions.

For each strategy that calibration tried on W workers, a profile has e = predicted / measured step - 1 of the run with
the largest error. The prediction was off by the factor q = max(1 + e, 1 / (1 + e)). The rule:

1. A strategy that was tried has its own q, any other the largest q of all. q is at least 1 + FLOOR: it is one sample,
   and two calibrations of the same idle machine differ by nearly as much.
2. A prediction for N workers with r rows a tick each is log2(N / W) doublings of workers away from the measurement, and
   as many doublings of rows as r lies outside the measured batch sizes. Halvings count as well.
3. Each doubling may be as wrong again as the measurement, in the same direction. So with n doublings the true time is
   assumed to lie between t / f and t · f, f = q^(1 + n).
4. Of a strategy that was not tried, only computing was measured. The rest of a step (exchange, leases, waiting), a
   share s of it by the prediction, may take half as long or twice: f is multiplied by 1 + s. In a short step s is
   large.

Errors of independent doublings would partly cancel, and the exponent would grow with the root of n. They are not
assumed to be independent: what a model leaves out, it leaves out every time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from manyhands.engines.sim.profile import Profile
from manyhands.errors import BadInput

FLOOR = 0.05


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Of one prediction: the true time is assumed to lie between time / factor and time · factor."""

    factor: float
    error: float
    """q - 1."""
    tried: bool
    """Whether q is this strategy's own."""
    besides: float
    """The share of a step that is not computing, if the strategy was not tried; else 0."""
    doublings: float
    """Of workers and of rows, away from the measurement."""


def bars_of(profile: Profile, strategy: str, workers: int, rows: float, besides: float) -> Bars | None:
    """None if calibration tried no strategy.

    strategy: its spec. rows: of a worker's tick. besides: share of a step that is not computing. Raises BadInput for a
    profile with an error of -1 or below, which no prediction can have.
    """
    if not profile.errors:
        return None
    off = {name: _factor(name, error) for name, error in profile.errors.items()}
    tried = strategy in off
    factor = max(1 + FLOOR, off[strategy] if tried else max(off.values()))
    doublings = abs(math.log2(workers / profile.workers)) + _outside(profile, rows)
    unknown = 0.0 if tried else besides
    return Bars(
        factor=factor ** (1 + doublings) * (1 + unknown),
        error=factor - 1,
        tried=tried,
        besides=unknown,
        doublings=doublings,
    )


def _factor(strategy: str, error: float) -> float:
    if error <= -1:
        raise BadInput(
            f"the profile's prediction error of {strategy} is {error:g}, and it must be above -1: calibrate again"
        )
    return max(1 + error, 1 / (1 + error))


def _outside(profile: Profile, rows: float) -> float:
    """Doublings from the nearest measured batch size; 0 between two of them."""
    if not profile.batch_sizes:
        return 0.0
    low, high = min(profile.batch_sizes), max(profile.batch_sizes)
    return max(0.0, math.log2(low / rows), math.log2(rows / high))
