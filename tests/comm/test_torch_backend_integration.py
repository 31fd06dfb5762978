"""TorchGroup over gloo in real processes: the exam, and lost peers."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from harness import on_gloo, values

from manyhands.comm.torch_backend import TorchGroup
from manyhands.errors import BadInput, ManyhandsError, PeerLost
from manyhands.testing.group_exam import GROUP_EXAM


def _exam(group):
    for check in GROUP_EXAM.values():
        check(group)
    group.close()
    with pytest.raises(ManyhandsError, match="closed"):
        group.barrier()
    return len(GROUP_EXAM)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_exam(size, tmp_path):
    assert values(on_gloo(size, _exam, tmp_path)) == [len(GROUP_EXAM)] * size


def _killed(group):
    for step in range(100):
        group.step = step
        if (group.rank, step) == (1, 5):
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            group.mean_(torch.ones(1000))
        except PeerLost as error:
            with pytest.raises(PeerLost):
                group.barrier()
            return error.rank, error.step
    return None


def test_a_killed_peer_is_lost(tmp_path):
    first, second = on_gloo(2, _killed, tmp_path)
    assert second.status == signal.SIGKILL
    assert first.value[0] == 1
    assert first.value[1] in (4, 5)


def _silent(group):
    group.barrier()
    if group.rank == 1:
        time.sleep(1.5)
        return None
    start = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        group.mean_(torch.ones(10))
    return caught.value.rank, time.monotonic() - start


def test_a_silent_peer_is_lost_after_the_deadline(tmp_path):
    first, _ = on_gloo(2, _silent, tmp_path, timeout_s=0.5)
    rank, seconds = first.value
    assert rank == 1
    assert 0.4 < seconds < 1.4


def _wrong(group):
    with pytest.raises(RuntimeError, match="[Ii]nvalid|must|[Ee]xpected"):
        dist.all_gather([torch.zeros(1)], torch.zeros(2))
    with pytest.raises(RuntimeError, match="boom"), group.watching("mean_"):
        raise RuntimeError("boom")
    group.barrier()
    return True


def test_other_errors_of_torch_are_left_as_they_are(tmp_path):
    assert values(on_gloo(2, _wrong, tmp_path)) == [True, True]


def test_without_torch_distributed_it_is_bad_input():
    with pytest.raises(BadInput, match="init_process_group"):
        TorchGroup()
