"""The group of one worker passes the conformance suite of groups, which fails groups that break a promise."""

import torch

from manyhands.comm.group import Done, MeanResult
from manyhands.comm.solo import SoloGroup
from manyhands.testing.group_suite import GROUP_SUITE, CheckFailed
from refusals import refused


def test_solo():
    for check in GROUP_SUITE.values():
        check(SoloGroup())
    tensor = torch.tensor([float("nan"), 1.0])
    assert SoloGroup().mean_(tensor, 0.0, 3) == MeanResult(0.0, 3), "total weight 0 is legal"
    assert tensor[0].isnan()
    assert tensor[1] == 1
    assert SoloGroup().share(tensor, 0) is tensor


class _Scales(SoloGroup):
    def start_mean_(self, tensor, weight=1.0, bits=0, lost=None):
        tensor.mul_(weight)
        return super().start_mean_(tensor, weight, bits, lost)


class _ForgetsBits(SoloGroup):
    def start_mean_(self, tensor, weight=1.0, bits=0, lost=None):
        super().start_mean_(tensor, weight, bits, lost)
        return Done(MeanResult(weight, bits & (1 << 64) - 1))


class _Aliases(SoloGroup):
    def all_gather(self, tensor):
        return tensor.unsqueeze(0)


class _LeavesRubbish(SoloGroup):
    def allocate(self, n, dtype):
        return torch.ones(n, dtype=dtype)


class _Lenient(SoloGroup):
    def broadcast_(self, tensor, source):
        pass


def test_a_broken_group_fails():
    for group, check in (
        (_Scales, "total_zero"),
        (_Scales, "one_rank_multiplies_nothing"),
        (_ForgetsBits, "bits"),
        (_Aliases, "gather"),
        (_LeavesRubbish, "allocate"),
        (_Lenient, "refusals"),
    ):
        refused("", GROUP_SUITE[check], group(), kind=CheckFailed, case=(group, check))
