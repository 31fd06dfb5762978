"""Threads of which one runs at a time."""

from __future__ import annotations

import threading

import pytest
import torch

from manyhands.evidence.replay.turns import InTurns, ReplayDeadlock, ThreadTurns


def test_one_runs_at_a_time_and_the_lowest_that_can_goes_on() -> None:
    turns, order, inside = ThreadTurns(), [], []
    lock = threading.Lock()

    def program(rank: int) -> int:
        for turn in range(3):
            assert lock.acquire(blocking=False), "two run at once"
            order.append((rank, turn))
            lock.release()
            inside.append(rank)
            turns.wait_for(lambda turn=turn: len(inside) >= 3 * (turn + 1))
        return rank

    assert turns.run([lambda rank=rank: program(rank) for rank in range(3)]) == [0, 1, 2]
    assert order[:4] == [(0, 0), (1, 0), (2, 0), (2, 1)]  # the last to come need not wait


def test_each_has_a_random_state_of_its_own() -> None:
    def drawn(workers: int) -> list[list[float]]:
        turns = ThreadTurns()
        meet = InTurns(workers, turns).swap

        def program(rank: int) -> list[float]:
            torch.manual_seed(rank)
            numbers = []
            for _ in range(4):
                numbers.append(float(torch.rand(())))
                meet(rank, None)
            return numbers

        return turns.run([lambda rank=rank: program(rank) for rank in range(workers)])

    state = torch.get_rng_state()
    together = drawn(3)
    assert torch.equal(torch.get_rng_state(), state)
    generator = torch.Generator().manual_seed(2)
    assert together[2] == [float(torch.rand((), generator=generator)) for _ in range(4)]
    assert together[0] == drawn(1)[0]


def test_a_meeting_gives_everybodys_values_in_rank_order() -> None:
    turns = ThreadTurns()
    meet = InTurns(3, turns).swap

    def program(rank: int) -> list[list[int]]:
        return [meet(rank, 10 * turn + rank) for turn in range(3)]

    ends = turns.run([lambda rank=rank: program(rank) for rank in range(3)])
    assert ends == [[[0, 1, 2], [10, 11, 12], [20, 21, 22]]] * 3


def test_waiting_for_what_never_happens_is_an_error() -> None:
    turns = ThreadTurns()
    with pytest.raises(ReplayDeadlock, match="wait for each other"):
        turns.run([lambda: turns.wait_for(lambda: False), lambda: turns.wait_for(lambda: False)])


def test_an_error_ends_all_and_is_the_one_raised() -> None:
    turns = ThreadTurns()

    def fails() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        turns.run([lambda: turns.wait_for(lambda: False), fails])
