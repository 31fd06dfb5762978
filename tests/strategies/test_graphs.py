"""The graphs of gossip as matrices, and the order of their messages."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from manyhands.strategies.graphs import Turn, edges, round_of

SIZES = range(1, 18)
GRAPHS = ("ring", "exponential", "random")
ROUNDS = 40


def matrix(graph: str, size: int, number: int = 0, **options: object) -> Tensor:
    """[size, size] what rank i has after round `number`, as a mean of what all had before."""
    w = torch.eye(size, dtype=torch.float64)
    for source, target, share in edges(graph, size, number, **options):
        w[target, source] += share
        w[source, source] -= share
    return w


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("graph", GRAPHS)
def test_doubly_stochastic_and_connected(graph: str, size: int) -> None:
    """CASES 14, 15: rows and columns sum to 1, nothing is negative, and in time everybody hears of everybody."""
    together = torch.eye(size, dtype=torch.float64)
    for number in range(ROUNDS):
        w = matrix(graph, size, number)
        assert (w >= 0).all()
        assert (w.diagonal() > 0).all()
        assert torch.allclose(w.sum(0), torch.ones(size, dtype=torch.float64), atol=1e-15)
        assert torch.allclose(w.sum(1), torch.ones(size, dtype=torch.float64), atol=1e-15)
        together = w @ together
    assert (together > 0).all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("graph", GRAPHS)
def test_one_way_columns_sum_to_one(graph: str, size: int) -> None:
    """What push-sum needs: nothing is lost on the way. On `random` rows do not sum to 1, which is what its mass is for."""
    unequal, together = False, torch.eye(size, dtype=torch.float64)
    for number in range(ROUNDS):
        p = matrix(graph, size, number, one_way=True)
        assert torch.allclose(p.sum(0), torch.ones(size, dtype=torch.float64), atol=1e-15)
        assert (p.diagonal() == (0.5 if size > 1 else 1.0)).all()
        unequal = unequal or bool((p.sum(1) - 1).abs().max() > 0.1)
        together = p @ together
    assert (together > 0).all()
    assert unequal is (graph == "random" and size > 2)


@pytest.mark.parametrize("size", range(3, 18))
def test_a_ring_shrinks_what_is_apart_by_its_second_eigenvalue(size: int) -> None:
    """CASE 14: 1/3 + 2/3·cos(2π/n)"""
    eigenvalues = torch.linalg.eigvalsh(matrix("ring", size)).abs().sort().values
    slowest = abs(1 / 3 + 2 / 3 * math.cos(2 * math.pi / size))
    assert float(eigenvalues[-1]) == pytest.approx(1, abs=1e-14)
    assert float(eigenvalues[-2]) == pytest.approx(slowest, abs=1e-14)
    if size == 8:
        assert slowest == pytest.approx(0.804738, abs=5e-7)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_an_exponential_graph_is_the_exact_mean_after_log2_rounds(size: int) -> None:
    """CASE 15, from whatever round on."""
    rounds = size.bit_length() - 1
    for first in range(rounds + 1):
        product = torch.eye(size, dtype=torch.float64)
        for number in range(first, first + rounds):
            assert not torch.equal(product, torch.full_like(product, 1 / size))
            product = matrix("exponential", size, number) @ product
        assert torch.equal(product, torch.full_like(product, 1 / size))


def test_two_on_a_ring_are_one_pair() -> None:
    assert matrix("ring", 2).tolist() == [[0.5, 0.5], [0.5, 0.5]]


@pytest.mark.parametrize("size", range(2, 18))
def test_random_pairs_leave_out_one_at_most(size: int) -> None:
    for number in range(ROUNDS):
        pairs = [(a, b) for a, b, _ in edges("random", size, number) if a < b]
        assert len({rank for pair in pairs for rank in pair}) == 2 * len(pairs) == size - size % 2


def test_draws_are_of_the_seed_and_the_round() -> None:
    for one_way in (False, True):
        first, again, other, later = (
            [edges("random", 12, start + number, one_way=one_way, seed=seed) for number in range(8)]
            for start, seed in ((0, 0), (0, 0), (0, 1), (8, 0))
        )
        assert first == again
        assert other != first != later


def one_at_a_time(rank: int, turns: tuple[Turn, ...]) -> list[tuple[int, int, float]]:
    """A rank's messages where each waits for its other side, as the plainest `Group.swap` has them."""
    order = []
    for turn in turns:
        out = [] if turn.target is None else [(rank, turn.target, turn.given)]
        back = [] if turn.source is None else [(turn.source, rank, turn.gotten)]
        order += out + back if turn.target is None or rank < turn.target else back + out
    return order


@pytest.mark.parametrize("one_way", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("graph", GRAPHS)
def test_nobody_waits_in_a_circle(graph: str, size: int, one_way: bool) -> None:
    """Each message waits until both its ranks are at it, as if no group could hold anything: round after round all go through."""
    for number in range(9):
        made = round_of(graph, size, number, one_way=one_way)
        left = [one_at_a_time(rank, turns) for rank, turns in enumerate(made)]
        done = []
        while any(left):
            ready = [side[0] for rank, side in enumerate(left) if side and side[0][0] == rank]
            ready = [edge for edge in ready if left[edge[1]] and left[edge[1]][0] == edge]
            assert ready, f"all wait: {left}"
            for edge in ready:
                assert left[edge[0]].pop(0) == left[edge[1]].pop(0)
            done += ready
        assert sorted(done) == sorted(edges(graph, size, number, one_way=one_way))


@pytest.mark.parametrize("size", SIZES)
def test_what_goes_both_ways_goes_at_once(size: int) -> None:
    """Where each sends as many as it receives, a turn has one of each: one turn for one peer, two for two neighbours."""
    for graph, one_way, turns in (
        ("exponential", False, 1),
        ("random", False, 1),
        ("ring", True, 1),
        ("ring", False, 2),
    ):
        turns = min(turns, size - 1)
        for number in range(5):
            for mine in round_of(graph, size, number, one_way=one_way):
                sits_out = graph == "random" and not mine
                assert len(mine) == turns or sits_out
                assert all(turn.target is not None and turn.source is not None for turn in mine)
