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
    """A worker that pulls before each window finds the center where it left it: nothing is damped, alone.

    A window enters divided by its steps, the short last one too: the thesis combines it with AGN.
    """
    for window, moved in ((1, -0.9), (2, -0.6)):
        ends = hands(f"distance:window={window},rate=1e-6", FIRST[:1], scripted([0] * 6, 3), start=[0.0, 0.0])
        assert (ends[0] - torch.tensor([moved, 0.0], dtype=F64)).abs().max() < 1e-15, window


def test_a_rate_that_cannot_be_is_refused() -> None:
    for rate in (0.0, -1.0, float("nan")):
        with pytest.raises(BadInput, match="rate must be a number above 0"):
            Distance(rate=rate)
