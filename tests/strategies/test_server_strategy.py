"""What the strategies with a server share, apart from what each one's own test shows."""

from __future__ import annotations

import pytest
import torch
from by_hand import Hand, hands, slope

from manyhands.errors import BadInput, Unsupported
from manyhands.replica.flat_vector import FlatVector
from manyhands.strategies import server_strategy
from manyhands.strategies.agn import AGN
from manyhands.strategies.base import Leasing
from manyhands.strategies.window import Window
from manyhands.worker import Worker


def test_without_a_server_it_is_refused() -> None:
    with pytest.raises(Unsupported, match="needs a parameter server, and this worker has none"):
        Hand(AGN(), Worker(), slope(1.0), [0.0], 0.1)


def test_the_center_comes_in_a_vector_of_its_own() -> None:
    """Keeping it, or writing to it, changes nothing."""

    def program(hand: Hand) -> tuple[bool, bool]:
        first = hand.strategy.consensus(hand.replica, hand.worker, hand.state)
        second = hand.strategy.consensus(hand.replica, hand.worker, hand.state)
        one, other, own = (vector.parts[0].data_ptr() for vector in (first, second, hand.replica.parameters))
        return one != other, one != own

    assert hands("agn", [slope(1.0)] * 2, program) == [(True, True)] * 2


def test_a_window_of_another_number_of_workers_begins_anew() -> None:
    windows = [Window(start=FlatVector([torch.zeros(1)]), ticks=3, steps=2, fresh=True) for _ in range(2)]
    merged = windows[0].merge(windows, 2, 3)
    assert (merged.ticks, merged.steps, merged.fresh) == (0, 0, False)
    assert windows[0].merge(windows, 1, 2) is windows[1]


def test_pace() -> None:
    assert server_strategy.leasing_of(0, 0) is None
    assert server_strategy.leasing_of(None, 3) == server_strategy.leasing_of(2, 3) == Leasing(rank0_warmup_ticks=3)
    server_strategy.check_pace("x", None, 3)
    for bound in (True, 1.0, -1):
        with pytest.raises(BadInput, match="strategy x: bound must be a whole number of 0 or more, or none"):
            server_strategy.check_pace("x", bound, 0)  # type: ignore[arg-type]
