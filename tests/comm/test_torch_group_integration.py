"""TorchGroup over gloo in real processes: the conformance suite, and lost peers."""

import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import on_gloo, values
from programs import LAST_STEP, conformance, killed, silent

from manyhands.comm.torch_group import TorchGroup
from manyhands.errors import BadInput, ManyhandsError
from manyhands.testing.group_suite import GROUP_SUITE


def _conformance(group):
    taken = conformance(group)
    group.close()
    with pytest.raises(ManyhandsError, match="closed"):
        group.barrier()
    return taken


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_conformance(size, tmp_path):
    assert values(on_gloo(size, _conformance, tmp_path)) == [len(GROUP_SUITE)] * size


def _threads():
    return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]


def _closed(group):
    group.barrier()
    before = _threads()
    group.close()
    dist.destroy_process_group(dist.group.WORLD)
    after = _threads()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for the harness to destroy
    return [any("gloo" in name for name in names) for names in (before, after)]


def test_a_closed_group_keeps_no_thread_of_a_destroyed_process_group(tmp_path):
    assert values(on_gloo(2, _closed, tmp_path)) == [[True, False]] * 2


def test_a_killed_peer_is_lost(tmp_path):
    first, second = on_gloo(2, killed(1), tmp_path)
    assert second.status == signal.SIGKILL
    error, _ = first.value
    assert error.rank == 1
    assert error.step in (LAST_STEP - 1, LAST_STEP)


def test_a_silent_peer_is_lost_after_the_deadline(tmp_path):
    first, _ = on_gloo(2, silent(1.5), tmp_path, timeout_s=0.5)
    error, seconds = first.value
    assert error.rank == 1
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
