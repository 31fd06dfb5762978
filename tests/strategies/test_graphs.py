"""The graphs of gossip as matrices, and the order of their messages."""

import itertools

import pytest
import torch
from by_hand import matrix

from manyhands.strategies.graphs import Turn, edges, round_of

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17)
GRAPHS = ("ring", "exponential", "random")
ROUNDS = 20


@pytest.mark.parametrize("graph", GRAPHS)
def test_doubly_stochastic_and_connected(graph: str) -> None:
    """CASES 14, 15: rows and columns sum to 1, nothing is negative, and in time everybody hears of everybody.

    One way, which is what push-sum needs, columns do: nothing is lost on the way. On `random` rows do not then, which
    is what its mass is for.
    """
    for size, one_way in itertools.product(SIZES, (False, True)):
        ones = torch.ones(size, dtype=torch.float64)
        unequal, together = False, torch.eye(size, dtype=torch.float64)
        for number in range(ROUNDS):
            w = matrix(graph, size, number, one_way=one_way)
            assert (w >= 0).all(), (size, one_way, number)
            assert (w.diagonal() > 0).all(), (size, one_way, number)
            assert torch.allclose(w.sum(0), ones, atol=1e-15), (size, one_way, number)
            assert one_way or torch.allclose(w.sum(1), ones, atol=1e-15), (size, number)
            assert not one_way or (w.diagonal() == (0.5 if size > 1 else 1.0)).all(), (size, number)
            unequal = unequal or bool((w.sum(1) - 1).abs().max() > 0.1)
            together = w @ together
        assert (together > 0).all(), (size, one_way)
        assert unequal is (one_way and graph == "random" and size > 2), (size, one_way)


def test_random_pairs_leave_out_one_at_most_and_are_drawn_of_the_seed_and_the_round() -> None:
    for size, number in itertools.product(SIZES[1:], range(ROUNDS)):
        pairs = [(a, b) for a, b, _ in edges("random", size, number) if a < b]
        assert len({rank for pair in pairs for rank in pair}) == 2 * len(pairs) == size - size % 2, (size, number)
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


@pytest.mark.parametrize("graph", GRAPHS)
def test_nobody_waits_in_a_circle(graph: str) -> None:
    """Each message waits until both its ranks are at it, as if no group could hold anything: round after round all go through."""
    for size, one_way, number in itertools.product(SIZES, (False, True), range(9)):
        left = [one_at_a_time(rank, turns) for rank, turns in enumerate(round_of(graph, size, number, one_way=one_way))]
        done = []
        while any(left):
            ready = [side[0] for rank, side in enumerate(left) if side and side[0][0] == rank]
            ready = [edge for edge in ready if left[edge[1]] and left[edge[1]][0] == edge]
            assert ready, f"{size} workers, one_way={one_way}, round {number}: all wait: {left}"
            for edge in ready:
                assert left[edge[0]].pop(0) == left[edge[1]].pop(0)
            done += ready
        assert sorted(done) == sorted(edges(graph, size, number, one_way=one_way))


def test_what_goes_both_ways_goes_at_once() -> None:
    """Where each sends as many as it receives, a turn has one of each: one turn for one peer, two for two neighbours."""
    ways = (("exponential", False, 1), ("random", False, 1), ("ring", True, 1), ("ring", False, 2))
    for size, (graph, one_way, turns), number in itertools.product(SIZES, ways, range(5)):
        for mine in round_of(graph, size, number, one_way=one_way):
            assert len(mine) == min(turns, size - 1) or (graph == "random" and not mine), (size, graph, number)
            assert all(turn.target is not None and turn.source is not None for turn in mine), (size, graph, number)
