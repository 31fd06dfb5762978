"""Sums and weighted means of pieces against the naive ones, and adasum_ beside its closed form."""

import pytest
import torch

from manyhands.comm.adasum import adasum_
from manyhands.comm.reducing import naive_mean, reduce_everywhere, shares_of, sum_of
from manyhands.testing.threads import together


def test_all_pieces_become_the_weighted_mean():
    assert naive_mean([torch.tensor([1.0, 2.0]), torch.tensor([5.0, 10.0])], [3.0, 1.0]).tolist() == [2.0, 4.0]
    for weights in ([1.0, 1.0], [3.0, 1.0, 2.5], [0.0, 2.0, 1.0], [1.0, 0.0, 0.0, 4.0]):
        draws = [torch.Generator().manual_seed(rank) for rank in range(len(weights))]
        pieces = [torch.randn(1000, generator=draw, dtype=torch.float64) for draw in draws]
        wanted = naive_mean([piece.clone() for piece in pieces], weights)
        reduce_everywhere(pieces, shares_of(weights, sum(weights)))
        assert all(torch.equal(piece, pieces[0]) for piece in pieces), weights
        assert (pieces[0] - wanted).abs().max() < 1e-12, weights


def test_16_bit_numbers_are_added_in_float32():
    """256 + 1 is 256 in bfloat16: a thousand ones after it would get lost one by one."""
    pieces = [torch.tensor([256.0]).bfloat16()] + [torch.tensor([1.0]).bfloat16() for _ in range(64)]
    assert sum_of(pieces).item() == 320
    reduce_everywhere(pieces, None)
    assert {piece.item() for piece in pieces} == {320}


# -- adasum ------------------------------------------------------------------------------------------------------------


N, PARTS = 64, [(0, 5), (8, 9), (9, 30), (31, 31), (32, 64)]


def vector(rank, n=N, dtype=torch.float64):
    return torch.randn(n, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def closed_form(vectors):
    """Of whole vectors, in float64."""
    if len(vectors) == 1:
        return vectors[0].double()
    half = len(vectors) // 2
    a, b = closed_form(vectors[:half]), closed_form(vectors[half:])
    of_a, of_b = (1 - a @ b / (2 * one @ one) if one.any() else 1.0 for one in (a, b))
    return of_a * a + of_b * b


def adaptive_sums(vectors, parts):
    """(the sum, the numbers sent) of each rank."""

    def program(worker):
        mine, sent, swap = vectors[worker.rank].clone(), [], worker.group.swap

        def counted(tensor, *where):
            sent.append(len(tensor))
            swap(tensor, *where)

        worker.group.swap = counted
        adasum_(worker.group, mine, parts)
        return mine, sum(sent)

    return together(len(vectors), program)


@pytest.mark.parametrize(("size", "dtype"), [(1, torch.float64), (2, torch.float32), (8, torch.float64)], ids=str)
def test_each_part_is_the_closed_form_with_the_same_bits_everywhere(size, dtype):
    """A rank sends less than two vectors: 2n (1 - 1/size) numbers, and three products a part: one exchange at the first
    level, two at the second, …"""
    vectors = [vector(rank, dtype=dtype) for rank in range(size)]
    got = adaptive_sums(vectors, PARTS)
    wanted = torch.stack(vectors).double().sum(0)
    for start, stop in PARTS:
        wanted[start:stop] = closed_form([one[start:stop] for one in vectors])
    assert (got[0][0] - wanted).abs().max() < (1e-12 if dtype is torch.float64 else 1e-5)
    levels = size.bit_length() - 1
    products = 3 * len(PARTS) * levels * (levels + 1) // 2
    for one, sent in got:
        assert torch.equal(one, got[0][0])
        assert sent == 2 * N * (size - 1) // size + products


@pytest.mark.parametrize("size", [2, 4])
def test_orthogonal_vectors_add_up_and_parallel_ones_are_averaged(size):
    axes = torch.diag(torch.arange(1.0, 9.0, dtype=torch.float64))
    assert torch.equal(adaptive_sums(list(axes[:size]), [(0, 8)])[0][0], axes[:size].sum(0))
    same = adaptive_sums([vector(0, 8)] * size, [(0, 8)])[0][0]
    assert (same - vector(0, 8)).abs().max() < 1e-14


def test_a_rank_with_nothing_leaves_the_others_sum():
    vectors = [vector(0), torch.zeros(N, dtype=torch.float64), vector(2), torch.zeros(N, dtype=torch.float64)]
    got = adaptive_sums(vectors, [(0, N)])[3][0]
    assert (got - closed_form([vectors[0], vectors[2]])).abs().max() < 1e-12
