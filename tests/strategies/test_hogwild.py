"""Hogwild: one piece of memory, on threads; between processes see tests/comm."""

from __future__ import annotations

import pytest
from by_hand import Hand, hands, scripted, slope
from torch import Tensor

from manyhands.comm.group import Group
from manyhands.comm.threads import Meeting, ThreadGroup
from manyhands.errors import BadInput, Unsupported
from manyhands.strategies import strategy_of
from manyhands.strategies.base import Leasing
from manyhands.strategies.hogwild import Hogwild
from manyhands.worker import Worker


def test_all_workers_step_on_the_same_memory_from_rank_0s_parameters() -> None:
    """CASE 25; and N workers move it N times as far."""
    ends = hands("hogwild", [slope(1.0)] * 3, scripted([0, 0, 1, 1, 2, 2] * 2, 2), start=[1.0])
    assert ends == pytest.approx([1 - 0.1 * 6] * 3)


def test_a_gradient_is_applied_where_the_others_have_moved_meanwhile() -> None:
    """Both take the gradient at 1; both steps are there afterwards."""
    losses = [lambda model, batch: (model.w**2).sum() / 2] * 2
    assert hands("hogwild", losses, scripted([0, 1, 0, 1], 1), start=[1.0]) == pytest.approx([0.8] * 2)


def test_optimizer_and_memory() -> None:
    """Each worker's optimizer is its own; the parameters that a check looks for are the shared ones."""

    def program(hand: Hand) -> tuple[int, int]:
        hand.replica.check()
        return hand.replica.parameters.parts[0].data_ptr(), id(hand.replica.optimizer)

    (first, one), (second, other) = hands("hogwild", [slope(1.0)] * 2, program)
    assert first == second
    assert one != other


def test_the_consensus_is_a_copy() -> None:
    def program(hand: Hand) -> Tensor:
        copy = hand.strategy.consensus(hand.replica, hand.worker, hand.state)
        hand.worker.group.barrier()
        hand.tick()
        return copy.joined()

    assert all(not copy.any() for copy in hands("hogwild", [slope(1.0)] * 2, program))


def test_a_group_without_common_memory_refuses() -> None:
    class Apart(ThreadGroup):
        share = Group.share

    worker = Worker(group=Apart(Meeting(1), 0))
    with pytest.raises(Unsupported, match="no memory in common: run them on one machine"):
        Hand(Hogwild(), worker, slope(1.0), [0.0], 0.1)


def test_what_it_wants() -> None:
    assert strategy_of("hogwild:warmup=5").leasing() == Leasing(rank0_warmup_ticks=5)
    assert Hogwild().needs.one_host
    assert (Hogwild().server(), Hogwild().rate_factor(3)) == (None, 3)
    with pytest.raises(BadInput, match="warmup must be a whole number of at least 0"):
        Hogwild(warmup=-1)
