"""The conformance suite of groups fails groups that break a promise: with one worker, by their own results."""

import pytest
import torch

from manyhands.comm.group import Done, MeanResult
from manyhands.comm.solo import SoloGroup
from manyhands.testing.group_suite import GROUP_SUITE, CheckFailed


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


@pytest.mark.parametrize(
    ("group", "check"),
    [
        (_Scales, "total_zero"),
        (_Scales, "one_rank_multiplies_nothing"),
        (_ForgetsBits, "bits"),
        (_Aliases, "gather"),
        (_LeavesRubbish, "allocate"),
        (_Lenient, "refusals"),
    ],
)
def test_a_broken_group_fails(group, check):
    with pytest.raises(CheckFailed):
        GROUP_SUITE[check](group())
