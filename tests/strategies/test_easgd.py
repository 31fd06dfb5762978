"""EASGD on mathematics that a hand can check."""

from __future__ import annotations

import pytest
from by_hand import Hand, hands, quadratic, slope
from torch import Tensor

SHIFTS = (-1.0, 0.0, 4.0)
SYNCHRONOUS = ("easgd:period=1,alpha=.2,bound=0", "easgd:period=1,alpha=.2,via=group")


def run(ticks: int):
    def program(hand: Hand) -> tuple[float, float]:
        for _ in range(ticks):
            hand.tick()
        hand.worker.group.barrier()
        hand.finish()
        return float(hand.x), float(hand.center)

    return program


@pytest.mark.parametrize("spec", SYNCHRONOUS)
def test_it_rests_where_the_closed_form_says(spec: str) -> None:
    """CASE 6, over a server in step and over the group."""
    ends = hands(spec, [quadratic([2.0], [b]) for b in SHIFTS], run(600))
    for (x, center), offset in zip(ends, (-1.0, -0.5, 1.5), strict=True):
        assert center == pytest.approx(1.0, abs=1e-12)
        assert x - center == pytest.approx(offset, abs=1e-12)


def test_both_ways_follow_the_papers_formulas_step_by_step() -> None:
    """x_i ← x_i - ηg(x_i) - α(x_i - c); c ← c + Σ α(x_i - c), all of the old values (CASE 11)."""

    def program(hand: Hand) -> list[tuple[float, float]]:
        path = []
        for _ in range(5):
            hand.tick()
            path.append((float(hand.x), float(hand.center)))
        return path

    paths = [hands(spec, [quadratic([2.0], [b]) for b in SHIFTS], program, start=[1.0]) for spec in SYNCHRONOUS]
    xs, c = [1.0] * 3, 1.0
    for tick in range(5):
        force = [0.2 * (x - c) for x in xs]
        xs = [x - 0.1 * 2 * (x - b) - f for x, b, f in zip(xs, SHIFTS, force, strict=True)]
        c += sum(force)
        for path in paths:
            for rank in range(3):
                assert path[rank][tick] == pytest.approx((xs[rank], c), abs=1e-14)


@pytest.mark.parametrize("where", ["bound=none", "bound=0", "via=group"])
def test_it_exchanges_at_steps_0_tau_and_2_tau(where: str) -> None:
    """Algorithm 1 by hand, τ=4, α=.3, 12 steps: (x - 5)² / 2 from 2. One step earlier, the center would be 2.9184."""

    def program(hand: Hand) -> list[tuple[float, float]]:
        path = []
        for _ in range(12):
            hand.tick()
            path.append((float(hand.x), float(hand.center)))
        hand.finish()
        return [*path, (float(hand.x), float(hand.center))]

    (path,) = hands(f"easgd:period=4,alpha=.3,{where}", [quadratic([1.0], [5.0])], program, start=[2.0])
    x = center = 2.0
    for step in range(12):
        force = 0.3 * (x - center) if step % 4 == 0 else 0.0
        x, center = x - 0.1 * (x - 5) - force, center + force
        assert path[step] == pytest.approx((x, center), abs=1e-14)
    assert path[-1] == path[-2]
    assert path[-1][1] == pytest.approx(2.6615, abs=5e-5)


def test_alone_at_its_own_pace_a_window_cut_short_is_closed_without_a_gradient() -> None:
    """A constant gradient of -1, η=.1, α=.5, period 3: at step 3 x is .3, so both move by .15; steps count from the end."""

    def program(hand: Hand) -> list[tuple[float, float]]:
        path = []
        for ticks in (4, 4):
            for _ in range(ticks):
                hand.tick()
                path.append((float(hand.x), float(hand.center)))
            for _ in range(2):
                hand.finish()
                path.append((float(hand.x), float(hand.center)))
                hand.worker.server.activate()
        return path

    expected = [(0.1, 0), (0.2, 0), (0.3, 0), (0.25, 0.15), (0.2, 0.2), (0.2, 0.2)]
    expected += [(0.3, 0.2), (0.4, 0.2), (0.5, 0.2), (0.45, 0.35), (0.4, 0.4), (0.4, 0.4)]
    for got, wanted in zip(hands("easgd:period=3,alpha=.5", [slope(-1.0)], program)[0], expected, strict=True):
        assert got == pytest.approx(wanted, abs=1e-15)


@pytest.mark.parametrize("spec", SYNCHRONOUS)
def test_a_worker_without_rows_takes_no_part(spec: str) -> None:
    """CASE 27: it does not draw the center to where it stands, and a round of nobody moves nothing."""

    def program(hand: Hand) -> tuple[Tensor, Tensor]:
        for _ in range(3):
            hand.tick(None)
        for _ in range(3):
            hand.tick(None if hand.worker.rank else hand.replica.parameters.parts[0][:1].detach())
        return float(hand.x), float(hand.center)

    alone = hands(spec, [slope(-1.0)], program)
    beside = hands(spec, [slope(-1.0)] * 2, program)
    assert beside[0] == alone[0]
    assert beside[1] == (0.0, alone[0][1])
