"""adasum_ beside its closed form, between threads."""

import pytest
import torch

from manyhands.comm.adasum import adasum_
from manyhands.testing.threads import together

N, PARTS = 37, [(0, 5), (8, 9), (9, 30), (31, 31), (32, 37)]


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_each_part_is_the_closed_form_with_the_same_bits_everywhere(size, dtype):
    vectors = [vector(rank, dtype=dtype) for rank in range(size)]
    got = [one for one, _ in adaptive_sums(vectors, PARTS)]
    wanted = torch.stack(vectors).double().sum(0)
    for start, stop in PARTS:
        wanted[start:stop] = closed_form([one[start:stop] for one in vectors])
    assert (got[0] - wanted).abs().max() < (1e-12 if dtype is torch.float64 else 1e-5)
    for one in got:
        assert torch.equal(one, got[0])


@pytest.mark.parametrize("size", [2, 4, 8])
def test_orthogonal_vectors_add_up_and_parallel_ones_are_averaged(size):
    axes = torch.diag(torch.arange(1.0, 9.0, dtype=torch.float64))
    assert torch.equal(adaptive_sums(list(axes[:size]), [(0, 8)])[0][0], axes[:size].sum(0))
    same = adaptive_sums([vector(0, 8)] * size, [(0, 8)])[0][0]
    assert (same - vector(0, 8)).abs().max() < 1e-14


def test_a_rank_with_nothing_leaves_the_others_sum():
    vectors = [vector(0), torch.zeros(N, dtype=torch.float64), vector(2), torch.zeros(N, dtype=torch.float64)]
    got = adaptive_sums(vectors, [(0, N)])[3][0]
    assert (got - closed_form([vectors[0], vectors[2]])).abs().max() < 1e-12


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_rank_sends_less_than_two_vectors(size):
    """2n (1 - 1/size) numbers, and three products a part: one exchange at the first level, two at the second, …"""
    n, levels = 64, size.bit_length() - 1
    products = 3 * len(PARTS) * levels * (levels + 1) // 2
    for _, sent in adaptive_sums([vector(rank, n) for rank in range(size)], PARTS):
        assert sent == 2 * n * (size - 1) // size + products
