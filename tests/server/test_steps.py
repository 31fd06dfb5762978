"""The steps of a quorum, without a store."""

import torch

from manyhands.server.rules.base import Push
from manyhands.server.steps import Decided, Steps


def push(worker, weight=1.0):
    return Push(worker, torch.zeros(1), weight)


def test_a_step_is_complete_with_enough_weight_or_with_everybody():
    steps = Steps(3)
    assert not steps.is_complete(2, 0, [0, 1, 2])
    steps.join(push(0))
    assert not steps.is_complete(2, 0, [0, 1, 2])
    assert steps.is_complete(1, 0, [0, 1, 2])
    steps.join(push(1, 0.0))
    assert not steps.is_complete(2, 0, [0, 1, 2])
    assert steps.is_complete(2, 0, [0, 1])
    assert steps.is_complete(2, 0, []), "all who pushed have left"
    assert not Steps(3).is_complete(0, 0, [0]), "a step that nobody came to"


def test_who_missed_a_step_gets_its_answer_once():
    steps = Steps(2)
    steps.join(push(0))
    decided = Decided(1, None, 0.0, 0)
    assert [p.worker for p in steps.decide(0, decided)] == [0]
    assert steps.missed(0) is None
    assert steps.missed(1) is decided
    assert steps.missed(1) is None
    steps.forget([0, 1])
    steps.at[1] = 0
    assert steps.missed(1) is None, "an answer that all have had is not kept"
