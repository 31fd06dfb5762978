"""EAMSGD on mathematics that a hand can check."""

from __future__ import annotations

import pytest
from by_hand import ROW, Hand, close, hands, path_of, quadratic

from manyhands.errors import BadInput
from manyhands.strategies import strategy_of
from manyhands.strategies.eamsgd import EAMSGD

SHIFTS = (-1.0, 0.0, 4.0)
LOSSES = [quadratic([2.0], [b]) for b in SHIFTS]


def test_without_force_it_is_nesterovs_momentum() -> None:
    """v = δv - ηg(x + δv), x = x + v, by hand."""
    (path,) = hands("eamsgd:alpha=1e-300,momentum=.9", LOSSES[1:2], path_of(30), start=[1.0])
    x, v = 1.0, 0.0
    for found, _ in path:
        v = 0.9 * v - 0.1 * 2 * (x + 0.9 * v)
        x += v
        assert found == pytest.approx(x, abs=1e-14)


@pytest.mark.parametrize("via", ["bound=0", "via=group"])
def test_it_follows_the_papers_formulas_step_by_step(via: str) -> None:
    """The force is of x, not of the point looked ahead to.

    CASE 6 with momentum: at rest v is the force α·d, so that d = h / (α(1-δ) + h + hδα)·(b - mean), with h = ηλ.
    """
    paths = hands(f"eamsgd:period=1,alpha=.2,momentum=.5,{via}", LOSSES, path_of(120), start=[1.0])
    xs, vs, c = [1.0] * 3, [0.0] * 3, 1.0
    for tick in range(5):
        force = [0.2 * (x - c) for x in xs]
        vs = [0.5 * v - 0.1 * 2 * (x + 0.5 * v - b) for x, v, b in zip(xs, vs, SHIFTS, strict=True)]
        xs = [x + v - f for x, v, f in zip(xs, vs, force, strict=True)]
        c += sum(force)
        assert close([path[tick] for path in paths], [(x, c) for x in xs])
    away = 0.2 / (0.2 * 0.5 + 0.2 + 0.2 * 0.5 * 0.2)
    assert close([path[-1] for path in paths], [(1.0 + away * (b - 1), 1.0) for b in SHIFTS], 1e-9)


def test_a_tick_without_rows_leaves_parameters_and_momentum() -> None:
    def program(hand: Hand) -> list[float]:
        path = []
        for tick in range(4):
            hand.tick(None if tick == 2 else ROW)
            path.append(float(hand.x))
        return path

    spec = "eamsgd:period=9,momentum=.5,via=group"
    (path,) = hands(spec, LOSSES[1:2], program, start=[1.0])
    (without,) = hands(spec, LOSSES[1:2], path_of(3), start=[1.0])
    assert path == [without[number][0] for number in (0, 1, 1, 2)]


def test_momentum_that_cannot_be_is_refused_and_the_rate_factor_says_what_it_does() -> None:
    assert strategy_of("eamsgd:momentum=.75").rate_factor(4) == 4
    with pytest.raises(BadInput, match="momentum must be 0 or more and below 1"):
        EAMSGD(momentum=1.0)
