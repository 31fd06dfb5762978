"""Hogwild: one piece of memory, on threads; between processes see tests/comm."""

import pytest
from by_hand import Hand, hands, quadratic, scripted, slope

from manyhands.comm.group import Group
from manyhands.comm.threads import Meeting, ThreadGroup
from manyhands.errors import Unsupported
from manyhands.strategies.hogwild import Hogwild
from manyhands.worker import Worker


def test_all_workers_step_on_the_same_memory_from_rank_0s_parameters() -> None:
    """CASE 25; and N workers move it N times as far. Two that take the gradient at 1 both step, where the other has moved."""
    ends = hands("hogwild", [slope(1.0)] * 3, scripted([0, 0, 1, 1, 2, 2] * 2, 2), start=[1.0])
    assert ends == pytest.approx([1 - 0.1 * 6] * 3)
    ends = hands("hogwild", [quadratic([1.0])] * 2, scripted([0, 1, 0, 1], 1), start=[1.0])
    assert ends == pytest.approx([0.8] * 2)


def test_optimizers_memory_and_the_consensus() -> None:
    """Each worker's optimizer is its own; the parameters that a check looks for are the shared ones; the consensus is a copy."""

    def program(hand: Hand) -> tuple[int, int, bool]:
        hand.replica.check()
        copy = hand.strategy.consensus(hand.replica, hand.worker, hand.state)
        hand.worker.group.barrier()
        hand.tick()
        return hand.replica.parameters.parts[0].data_ptr(), id(hand.replica.optimizer), bool(copy.joined().any())

    (first, one, moved), (second, other, too) = hands("hogwild", [slope(1.0)] * 2, program)
    assert first == second
    assert one != other
    assert not moved
    assert not too


def test_a_group_without_common_memory_refuses() -> None:
    class Apart(ThreadGroup):
        share = Group.share

    worker = Worker(group=Apart(Meeting(1), 0))
    with pytest.raises(Unsupported, match="no memory in common: run them on one machine"):
        Hand(Hogwild(), worker, slope(1.0), [0.0], 0.1)
