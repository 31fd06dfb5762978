"""Distance on mathematics that a hand can check."""

from __future__ import annotations

import pytest
import torch
from by_hand import F64, hands, scripted

from manyhands.errors import BadInput
from manyhands.strategies.distance import Distance

FIRST = [
    lambda model, batch: 3 * model.w[0],
    lambda model, batch: model.w.sum(),
]  # worker 0 moves the first weight only


def test_weights_that_others_have_moved_count_less() -> None:
    """Both pull 0; worker 0 moves the first weight by -.3; worker 1's -.1 there is divided by 1 + .09/.03 = 4, elsewhere by 1."""
    ends = hands("distance:window=1,rate=.03", FIRST, scripted([0, 1, 0, 1], 1), start=[0.0, 0.0])
    assert (ends[0] - torch.tensor([-0.3 - 0.1 / 4, -0.1], dtype=F64)).abs().max() < 1e-15


def test_the_own_pushes_are_distance_too_unless_it_pulls() -> None:
    """A worker that pulls before each window finds the center where it left it: nothing is damped, alone."""
    ends = hands("distance:window=1,rate=1e-6", FIRST[:1], scripted([0] * 6, 3), start=[0.0, 0.0])
    assert (ends[0] - torch.tensor([-0.9, 0.0], dtype=F64)).abs().max() < 1e-15


def test_a_window_enters_divided_by_its_steps() -> None:
    """The thesis combines it with accumulated gradient normalisation; the short last window too."""
    ends = hands("distance:window=2", FIRST[:1], scripted([0] * 6, 3), start=[0.0, 0.0])
    assert (ends[0] - torch.tensor([-0.6, 0.0], dtype=F64)).abs().max() < 1e-15


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_rate_that_cannot_be_is_refused(rate: float) -> None:
    with pytest.raises(BadInput, match="rate must be a number above 0"):
        Distance(rate=rate)
