import math

import pytest
import torch

from manyhands.comm.codecs.threshold import Threshold
from manyhands.errors import BadInput


def payload_of(*entries):
    return torch.tensor([e - (1 << 32) if e >= 1 << 31 else e for e in entries], dtype=torch.int32).view(torch.uint8)


def test_plus_or_minus_tau():
    values = torch.tensor([0.4, -5.0, 0.5, 3.0, -0.5, -0.1])
    payload = Threshold(0.5).encode(values)
    assert torch.equal(payload, payload_of(2 * 1 + 1, 2 * 2, 2 * 3, 2 * 4 + 1))
    assert Threshold(0.5).decode(payload, 6, torch.float32).tolist() == [0.0, -0.5, 0.5, 0.5, -0.5, 0.0]
    assert len(Threshold(9).encode(values)) == 0


def test_what_is_not_finite_says_where():
    payload = Threshold(0.5).encode(torch.tensor([1.0, math.nan, 2.0, -math.inf]))
    assert torch.equal(payload, payload_of(0xFFFFFFFF, 2, 6))
    assert Threshold(0.5).decode(payload, 4, torch.float32).isnan().tolist() == [False, True, False, True]


def test_a_sum_that_overflows_is_finite_all_the_same():
    values = torch.full((4,), 3e38)
    assert Threshold(0.5).decode(Threshold(0.5).encode(values), 4, torch.float32).tolist() == [0.5] * 4


def test_residuals_are_clipped_to_a_multiple_of_tau():
    """Deeplearning4j's ResidualClippingPostProcessor: [-clip·tau, clip·tau]."""
    residual = torch.tensor([1.0, -9.0, 2.6, 0.0])
    Threshold(0.5).clip_(residual)
    assert residual.tolist() == [1.0, -2.5, 2.5, 0.0]
    Threshold(0.5, None).clip_(residual := torch.tensor([9.0]))
    assert residual.tolist() == [9.0]


@pytest.mark.parametrize(
    "entries", [(12,), (4, 2), (4, 4), (5, 4), (0xFFFFFFFE,), (0xFFFFFFFF,), (0xFFFFFFFF, 3), (2, 0xFFFFFFFF)]
)
def test_entries_that_cannot_be_are_refused(entries):
    """Out of range, out of order, twice, twice with both signs, not finite nowhere, negative and not finite."""
    with pytest.raises(BadInput, match="threshold"):
        Threshold(0.5).decode(payload_of(*entries), 6, torch.float32)
