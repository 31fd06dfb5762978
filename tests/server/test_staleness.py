"""Staleness: what a quadratic can bear, what a worker's steps say of it, and a warning that does not cry wolf."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from manyhands.server.base import ServerSpec
from manyhands.server.staleness import Curvature, StalenessMonitor, limit, max_stable_staleness, quantile, watch
from manyhands.units import count

F64 = torch.float64


def test_the_limits_of_case_10() -> None:
    """CASE 10: in closed form, and by iterating 1 % below and above."""
    for staleness, expected in enumerate([2, 1, 0.618034, 0.445042, 0.347296]):
        assert limit(staleness) == pytest.approx(expected, abs=5e-7), staleness
        assert _delayed(0.99 * limit(staleness), staleness) < 1e-3, staleness
        assert _delayed(1.01 * limit(staleness), staleness) > 1e3, staleness


def _delayed(gain: float, staleness: int) -> float:
    """The largest of the last |x| after 6,000 steps of x_{t+1} = x_t - gain·x_{t-staleness} from 1."""
    past = [1.0] * (staleness + 1)
    for _ in range(6000):
        past = [*past[1:], past[-1] - gain * past[0]]
    return max(map(abs, past))


def test_what_a_gain_can_bear() -> None:
    assert [max_stable_staleness(gain) for gain in (2.0, 1.99, 1.0, 0.99, 0.5, 0.4)] == [-1, 0, 0, 1, 2, 3]
    for staleness in range(50):
        assert max_stable_staleness(limit(staleness) * 0.999) == staleness


def test_quantiles() -> None:
    assert [quantile({0: 5, 3: 4, 9: 1}, q) for q in (0.5, 0.51, 0.9, 0.91)] == [0, 3, 3, 9]
    assert quantile({}, 0.5) == 0


def train(
    look: Callable[[Tensor, Tensor, Tensor], None],
    curvatures: Tensor,
    gain: float,
    *,
    workers: int = 1,
    noise: float | Tensor = 0.0,
    steps: int = 320,
    seed: int = 0,
) -> None:
    """Workers in turn (staleness: workers - 1) on x'diag(curvatures)x/2, with rate x largest curvature = gain.

    look(before, gradient, after): worker 0's step.
    """
    random = torch.Generator().manual_seed(seed)
    center = torch.randn(curvatures.shape, generator=random, dtype=F64)
    pulled, rate = [center.clone() for _ in range(workers)], gain / float(curvatures.max())
    for _ in range(steps):
        for worker in range(workers):
            x = pulled[worker]
            gradient = curvatures * x + noise * torch.randn(x.shape, generator=random, dtype=F64)
            if worker == 0:
                look(x, gradient, x - rate * gradient)
            center = pulled[worker] = center - rate * gradient
        if float(center.abs().max()) > 1e12:
            return
    assert center.isfinite().all()


def estimate(curvatures: Tensor, gain: float, found: list[float] | None = None, **options: float | Tensor) -> Curvature:
    """`found` gets all estimates."""
    curvature, rate = Curvature(), gain / float(curvatures.max())

    def look(before: Tensor, gradient: Tensor, after: Tensor) -> None:
        curvature.before(before, gradient)
        if curvature.after(after, rate) and found is not None:
            found.append(curvature.estimate() or 0.0)

    train(look, curvatures, gain, **options)  # type: ignore[arg-type]
    return curvature


SPREAD = torch.logspace(-3, 0, 100, dtype=F64)
ALIKE = torch.full((20,), 3.0, dtype=F64)
CASE_7 = torch.tensor([1.0, 2.0, 5.0], dtype=F64)


def test_the_estimate_is_exact_where_all_directions_are_alike_and_at_the_limit_it_is_the_largest_curvature() -> None:
    """CASE 10: the steepest direction prevails, with and without noise, and the estimate is within 10 %."""
    for workers, share in product((1, 2, 4), (0.1, 0.4, 0.9)):
        gain = share * limit(workers - 1)
        found = estimate(ALIKE, gain, workers=workers, steps=90).estimate()
        assert found == pytest.approx(gain, rel=1e-6), (workers, share)
    for workers, curvatures, noise in product((1, 4), (CASE_7, SPREAD), (0.0, 0.1)):
        gain = 1.05 * limit(workers - 1)
        found = estimate(curvatures, gain, workers=workers, noise=noise).estimate()
        assert found == pytest.approx(gain, rel=0.1), (workers, len(curvatures), noise)


def test_it_is_surely_never_more_than_the_largest_but_for_a_little_in_pure_noise() -> None:
    for workers, noise, curvatures in product((1, 4), (0.0, 0.1, 10.0), (CASE_7, SPREAD, ALIKE)):
        for share, seed in ((0.05, 0), (0.9, 2)):
            gain = share * limit(workers - 1)
            lower_bound = estimate(curvatures, gain, workers=workers, noise=noise, seed=seed).lower_bound()
            most = max(1.001 * gain, 0.4 * limit(workers - 1))
            case = (workers, noise, len(curvatures), share)
            assert lower_bound is None or lower_bound <= most, case  # None: it stands


def test_with_noise_it_is_the_steepest_direction_though_steps_go_anywhere() -> None:
    """Gradients scatter as curvature does, as in a network: within 30 % at half the limit, where nothing grows."""
    for workers in (1, 4):
        gain, found = 0.5 * limit(workers - 1), list[float]()
        estimate(SPREAD, gain, found, workers=workers, noise=SPREAD.sqrt(), steps=1200)
        assert torch.tensor(found).median() == pytest.approx(gain, rel=0.3), workers


def test_the_estimate_follows_the_rate_and_a_step_that_was_not_made_is_no_point_of_the_line() -> None:
    """Also within a window: what a schedule changes is no curvature."""
    for scheduled in (True, False):
        curvature, x = Curvature(), torch.ones(8, dtype=F64)
        for tick in range(300):
            rate = 0.02 / (1 + 0.1 * tick) if scheduled else 0.05
            applied = scheduled or tick % 5 != 2
            curvature.before(x, 3.0 * x)
            x = x - rate * 3.0 * x if applied else x
            curvature.after(x, rate, applied)
        assert curvature.estimate() == pytest.approx(rate * 3, rel=1e-6), scheduled


def test_with_momentum_a_step_counts_for_what_its_gradient_moves_at_once() -> None:
    curvature, random = Curvature(), torch.Generator().manual_seed(0)
    x, velocity = torch.ones(20, dtype=F64), torch.zeros(20, dtype=F64)
    for _ in range(300):
        g = 3.0 * x + torch.randn(20, generator=random, dtype=F64)
        curvature.before(x, g)
        velocity = 0.5 * velocity + g
        x = x - 0.1 * velocity
        curvature.after(x, 0.1)
    assert 0.2 < (curvature.estimate() or 0) < 0.45  # 0.3, give or take the noise


def test_nothing_is_said_before_there_are_windows_nor_of_gradients_that_tell_nothing() -> None:
    for gradient in (torch.zeros(3), torch.ones(3), torch.full((3,), float("nan"))):
        curvature, x = Curvature(), torch.ones(3)
        assert curvature.estimate() is None
        for _ in range(200):
            curvature.before(x, gradient)
            curvature.after(x)
        assert curvature.estimate() is None
        assert curvature.lower_bound() is None


def warnings_of(
    eye: StalenessMonitor, curvatures: Tensor, gain: float, workers: int, window: int = 1, **options: float
) -> list[str]:
    """What `eye` says of worker 0, whose every push is workers - 1 versions late."""
    output, ticks = [], 0

    def look(before: Tensor, gradient: Tensor, after: Tensor) -> None:
        nonlocal ticks
        ticks += 1
        eye.before(before, gradient)
        eye.after(after, rate=gain / float(curvatures.max()))
        pushed = ticks % window == 0
        message = eye.record({"pushes": [[ticks]], "staleness": [workers - 1]} if pushed else {"pulls": [[ticks]]})
        if message:
            output.append(message)

    train(look, curvatures, gain, workers=workers, **options)  # type: ignore[arg-type]
    return output


def test_case_10_is_told_5_percent_above_the_limit_and_not_5_percent_below() -> None:
    """CASE 10: once, with the numbers; on a quadratic where the steepest direction is one of a hundred."""
    for workers, noise in ((2, 0.1), (3, 0.0), (5, 0.1)):
        most = limit(workers - 1)
        above, below = (
            warnings_of(
                StalenessMonitor(rank=0, workers=workers), SPREAD, share * most, workers, noise=noise, steps=600
            )
            for share in (1.05, 0.95)
        )
        assert (len(above), below) == (1, []), (workers, noise)
        assert f"up to {count(workers - 1, 'version')} late" in above[0]
        assert f"must stay below {most:.3g}; it is" in above[0]


def test_it_does_not_cry_wolf() -> None:
    for noise, curvatures in product((0.0, 0.1, 10.0), (CASE_7, SPREAD, ALIKE)):
        eye = StalenessMonitor(rank=0, workers=4)
        found = warnings_of(eye, curvatures, 0.5 * limit(3), 4, noise=noise)
        assert found == [], (noise, len(curvatures))


def test_the_warning_says_what_to_do() -> None:
    (output,) = warnings_of(StalenessMonitor(rank=2, workers=4), ALIKE, 0.8, 4)
    for words in (
        "9 of 10 pushes of worker 2 are up to 3 versions late",
        "must stay below 0.445; it is 0.8",
        "from 0.267 to 0.15 or less",
        "at most 2 workers",
        "bound=0",
        "dynsgd",
    ):
        assert words in output


def test_a_push_of_a_window_moves_the_center_further_and_a_share_of_it_less() -> None:
    """Window of 5 steps of gain .1: 1 - .9^5 = .41 of the way in a push; agn's share of it, a fifth: .082."""

    def said(**options: float) -> list[str]:
        return warnings_of(StalenessMonitor(rank=0, workers=6, **options), ALIKE, 0.1, 6, window=5, steps=400)

    (output,) = said()
    assert "stay below 0.285; it is 0.41" in output
    assert "from 0.0333 to 0.022 or less" in output  # 1 - (1 - .285)^(1/5) = .065 of .1
    assert said(share=1 / 5) == said(fades=True) == []


def test_updates_that_are_never_late_are_none_of_its_business_and_what_it_found_is_news_once() -> None:
    eye = StalenessMonitor(rank=0, workers=2)
    for tick in range(200):
        x = torch.ones(3, dtype=F64) * (-2.0) ** tick
        eye.before(x, 3.0 * x)
        eye.after(-2.0 * x, rate=1.0)
        assert eye.record({"pushes": [[tick]], "staleness": [0]}) == ""
    eye = StalenessMonitor(rank=0, workers=3)
    assert warnings_of(eye, ALIKE, 0.1, 3, steps=60) == []
    assert [eye.news(), eye.news()] == [{"gain": 0.1}, {}]


def test_who_is_watched() -> None:
    for rule, bound, share, workers, watched in [
        ("add", None, 4.0, 4, True),
        ("staleness", 2, 1.0, 4, True),
        ("add", 0, 4.0, 4, False),
        ("elastic", None, 1.0, 4, False),
        ("add", None, 1.0, 1, False),
    ]:
        eye = watch(ServerSpec(rule=rule, bound=bound), share, rank=0, workers=workers)
        assert (eye is not None) is watched, (rule, bound, workers)
