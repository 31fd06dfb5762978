"""Sums and weighted means of pieces, against the naive ones."""

import pytest
import torch

from manyhands.comm.reducing import naive_mean, reduce_everywhere, shares_of, sum_of


def _pieces(size, n=1000, dtype=torch.float64):
    return [
        torch.randn(n, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)
        for rank in range(size)
    ]


def test_naive_mean_by_hand():
    mean = naive_mean([torch.tensor([1.0, 2.0]), torch.tensor([5.0, 10.0])], [3.0, 1.0])
    assert mean.tolist() == [2.0, 4.0]


@pytest.mark.parametrize("weights", [[1.0, 1.0], [3.0, 1.0, 2.5], [0.0, 2.0, 1.0], [1.0, 0.0, 0.0, 4.0]])
def test_all_pieces_become_the_weighted_mean(weights):
    pieces = _pieces(len(weights))
    wanted = naive_mean([piece.clone() for piece in pieces], weights)
    reduce_everywhere(pieces, shares_of(weights, sum(weights)))
    for piece in pieces:
        assert torch.equal(piece, pieces[0])
    assert (pieces[0] - wanted).abs().max() < 1e-12


def test_a_rank_of_weight_zero_does_not_count_even_with_nan():
    pieces = [torch.full((5,), float("nan")), torch.arange(5.0)]
    reduce_everywhere(pieces, shares_of([0.0, 2.0], 2.0))
    assert [piece.tolist() for piece in pieces] == [[0, 1, 2, 3, 4]] * 2


def test_16_bit_numbers_are_added_in_float32():
    """256 + 1 is 256 in bfloat16: a thousand ones after it would get lost one by one."""
    pieces = [torch.tensor([256.0]).bfloat16()] + [torch.tensor([1.0]).bfloat16() for _ in range(64)]
    assert sum_of(pieces).item() == 320
    reduce_everywhere(pieces, None)
    assert {piece.item() for piece in pieces} == {320}


def test_sum_of_leaves_the_pieces_alone():
    pieces = [torch.tensor([1, 2]), torch.tensor([10, 20])]
    assert sum_of(pieces).tolist() == [11, 22]
    assert pieces[0].tolist() == [1, 2]
