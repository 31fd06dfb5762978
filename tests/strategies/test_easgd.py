"""EASGD on mathematics that a hand can check."""

from __future__ import annotations

import pytest
from by_hand import ROW, Hand, close, hands, path_of, quadratic, slope

SHIFTS = (-1.0, 0.0, 4.0)
LOSSES = [quadratic([2.0], [b]) for b in SHIFTS]
SYNCHRONOUS = ("easgd:period=1,alpha=.2,bound=0", "easgd:period=1,alpha=.2,via=group")


@pytest.mark.parametrize("spec", SYNCHRONOUS)
def test_it_rests_where_the_closed_form_says(spec: str) -> None:
    """CASE 6, over a server in step and over the group."""
    for path, offset in zip(hands(spec, LOSSES, path_of(200, ends=1)), (-1.0, -0.5, 1.5), strict=True):
        assert close(path[-1], (1.0 + offset, 1.0), 1e-12)


def test_both_ways_follow_the_papers_formulas_step_by_step() -> None:
    """x_i ← x_i - ηg(x_i) - α(x_i - c); c ← c + Σ α(x_i - c), all of the old values (CASE 11)."""
    paths = [hands(spec, LOSSES, path_of(5), start=[1.0]) for spec in SYNCHRONOUS]
    xs, c = [1.0] * 3, 1.0
    for tick in range(5):
        force = [0.2 * (x - c) for x in xs]
        xs = [x - 0.1 * 2 * (x - b) - f for x, b, f in zip(xs, SHIFTS, force, strict=True)]
        c += sum(force)
        for path in paths:
            assert close([of_rank[tick] for of_rank in path], [(x, c) for x in xs])


@pytest.mark.parametrize("where", ["bound=none", "bound=0", "via=group"])
def test_it_exchanges_at_steps_0_tau_and_2_tau(where: str) -> None:
    """Algorithm 1 by hand, τ=4, α=.3, 12 steps: (x - 5)² / 2 from 2. One step earlier, the center would be 2.9184."""
    spec = f"easgd:period=4,alpha=.3,{where}"
    (path,) = hands(spec, [quadratic([1.0], [5.0])], path_of(12, ends=1), start=[2.0])
    x = center = 2.0
    for step in range(12):
        force = 0.3 * (x - center) if step % 4 == 0 else 0.0
        x, center = x - 0.1 * (x - 5) - force, center + force
        assert close(path[step], (x, center))
    assert path[-1] == path[-2]
    assert path[-1][1] == pytest.approx(2.6615, abs=5e-5)


def test_alone_at_its_own_pace_a_window_cut_short_is_closed_without_a_gradient() -> None:
    """A constant gradient of -1, η=.1, α=.5, period 3: at step 3 x is .3, so both move by .15; steps count from the end."""

    def program(hand: Hand) -> list[tuple[float, float]]:
        path = []
        for _ in range(2):
            path += path_of(4)(hand)
            for _ in range(2):
                path += path_of(0, ends=1)(hand)
                hand.worker.server.activate()
        return path

    expected = [(0.1, 0), (0.2, 0), (0.3, 0), (0.25, 0.15), (0.2, 0.2), (0.2, 0.2)]
    expected += [(0.3, 0.2), (0.4, 0.2), (0.5, 0.2), (0.45, 0.35), (0.4, 0.4), (0.4, 0.4)]
    assert close(hands("easgd:period=3,alpha=.5", [slope(-1.0)], program)[0], expected)


@pytest.mark.parametrize("spec", SYNCHRONOUS)
def test_a_worker_without_rows_takes_no_part(spec: str) -> None:
    """CASE 27: it does not draw the center to where it stands, and a round of nobody moves nothing."""

    def program(hand: Hand) -> tuple[float, float]:
        for number in range(6):
            hand.tick(None if hand.worker.rank or number < 3 else ROW)
        return float(hand.x), float(hand.center)

    (alone,) = hands(spec, [slope(-1.0)], program)
    assert hands(spec, [slope(-1.0)] * 2, program) == [alone, (0.0, alone[1])]
