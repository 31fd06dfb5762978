"""DynSGD on mathematics that a hand can check."""

from __future__ import annotations

import pytest
from by_hand import hands, scripted, slope

from manyhands.strategies import strategy_of


def test_an_update_of_staleness_3_enters_with_weight_a_quarter() -> None:
    """CASE 12: worker 0 pulls, worker 1 makes three versions, worker 0 pushes: -.1·(1 + 1 + 1 + 1/4).

    Then worker 0 makes two more, whose staleness is 0: its own pushes do not count.
    """
    order = [0, *[1, 1] * 3, 0, *[0, 0] * 2]
    ends = hands("dynsgd", [slope(1.0)] * 2, scripted(order, 3))
    assert ends == pytest.approx([-0.1 * 5.25] * 2)


def test_two_who_pull_at_once_and_windows() -> None:
    """The first enters whole, the second by half. A window of two steps enters as it is where nothing is stale."""
    assert hands("dynsgd:window=1", [slope(1.0)] * 2, scripted([0, 1, 0, 1], 1)) == pytest.approx([-0.15] * 2)
    assert hands("dynsgd:window=2", [slope(1.0)], scripted([0] * 6, 3)) == pytest.approx([-0.3])


def test_rate_factor() -> None:
    """At one speed N workers' updates enter with 1/N each; at bound 0 nothing is stale."""
    assert [strategy_of(spec).rate_factor(4) for spec in ("dynsgd", "dynsgd:bound=0")] == [1, 4]
