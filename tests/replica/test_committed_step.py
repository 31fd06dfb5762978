"""A step that workers of a replica make together or not at all: `Replica.join` with `commits`."""

import pytest
import torch
from torch import nn

from manyhands.comm.lost import LostGroup
from manyhands.comm.solo import SoloGroup
from manyhands.errors import PeerLost
from manyhands.replica.replica import Replica


@pytest.fixture
def replica():
    """Its gradient is 1 for each of two weights, and its rate 0.5."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    made = Replica.of(
        model,
        lambda m: torch.optim.SGD(m.parameters(), lr=0.5),
        group=SoloGroup(),
        loss=lambda m, rows: m(rows).sum(),
        elastic=True,
    )
    made.join(SoloGroup(), commits=LostGroup(0, 2))
    made.begin_tick()
    made.backward(torch.ones(1, 2))
    return made


def test_a_step_that_not_all_commit_is_not_made_and_with_all_there_it_is(replica):
    with pytest.raises(PeerLost):
        replica.apply()
    replica.catch_up(0)
    assert (replica.step, replica.stepped, replica.completed) == (0, False, 0)
    assert replica.model.weight.eq(0).all()
    replica.join(SoloGroup(), commits=SoloGroup())
    assert replica.apply()
    assert (replica.step, replica.completed) == (1, 1)
    assert replica.model.weight.eq(-0.5).all()


def test_a_step_that_another_has_made_is_made_of_what_was_computed(replica):
    with pytest.raises(PeerLost):
        replica.apply()
    replica.catch_up(1)
    assert (replica.step, replica.stepped, replica.completed) == (1, True, 1)
    assert replica.model.weight.eq(-0.5).all()
