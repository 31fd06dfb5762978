"""The group of one worker passes the conformance suite of groups."""

import pytest
import torch

from manyhands.comm.group import MeanResult
from manyhands.comm.solo import SoloGroup
from manyhands.testing.group_suite import GROUP_SUITE


@pytest.mark.parametrize("check", GROUP_SUITE.values(), ids=GROUP_SUITE.keys())
def test_conformance(check):
    check(SoloGroup())


def test_total_weight_zero_is_legal():
    tensor = torch.tensor([float("nan"), 1.0])
    assert SoloGroup().mean_(tensor, 0.0, 3) == MeanResult(0.0, 3)
    assert tensor[0].isnan()
    assert tensor[1] == 1


def test_its_shared_memory_is_its_own():
    tensor = torch.zeros(3)
    assert SoloGroup().share(tensor, 0) is tensor
