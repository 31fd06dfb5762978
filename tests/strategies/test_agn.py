"""AGN on mathematics that a hand can check."""

from __future__ import annotations

import pytest
from by_hand import ROW, Hand, close, hands, path_of, quadratic, slope

from manyhands.errors import BadInput
from manyhands.strategies import strategy_of
from manyhands.strategies.agn import AGN


def end_of(hand: Hand) -> float:
    """The center after four ticks and the end, all in step."""
    return path_of(4, ends=1)(hand)[-1][1]


def test_a_window_enters_divided_by_its_steps_and_so_does_the_short_last_one() -> None:
    """CASE 12: windows of 4, 4 and 2 steps of -.1 each enter as -.1 each."""
    (path,) = hands("agn:window=4", [slope(1.0)], path_of(10, ends=1))
    assert close([center for _, center in path], [0, 0, 0, -0.1, -0.1, -0.1, -0.1, -0.2, -0.2, -0.2, -0.3])


def test_the_local_steps_go_on_from_each_other() -> None:
    """On w²/2 with rate .5 from 1: steps to .5 and .25, their mean -.375, so that the next window begins at .625."""
    (path,) = hands("agn:window=2", [quadratic([1.0])], path_of(4, ends=1), start=[1.0], rate=0.5)
    assert close([center for _, center in path], [1.0, 0.625, 0.625, 0.625 - 0.375 * 0.625, 0.625 - 0.375 * 0.625])


def test_workers_add_and_window_1_is_downpour() -> None:
    both = [hands(spec, [slope(1.0)] * 3, end_of) for spec in ("agn:window=1,bound=0", "downpour:bound=0")]
    assert both[0] == both[1]
    assert both[0][0] == pytest.approx(-0.1 * 4 * 3)


def test_a_worker_without_rows_enters_nothing() -> None:
    """CASE 27: the other's window is not divided by two workers, nor the ticks without rows counted as steps."""

    def program(hand: Hand) -> float:
        for tick in range(4):
            hand.tick(None if hand.worker.rank or tick == 2 else ROW)
        hand.worker.group.barrier()
        hand.finish()
        return float(hand.center)

    assert hands("agn:window=4,bound=0", [slope(1.0)] * 2, program) == pytest.approx([-0.1] * 2)


def test_options_and_rate_factor() -> None:
    assert strategy_of("agn").rate_factor(4) == 1.0
    assert strategy_of("agn:window=8").rate_factor(4) == 0.5
    with pytest.raises(BadInput, match="window must be a whole number of at least 1"):
        AGN(window=0)
