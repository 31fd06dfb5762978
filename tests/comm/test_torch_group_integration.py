"""TorchGroup over gloo in real processes: the conformance suite, and lost peers."""

import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import on_gloo, values
from programs import LAST_STEP, conformance, killed, silent

from manyhands.comm.torch_group import TorchGroup
from manyhands.errors import ManyhandsError
from manyhands.testing.group_suite import GROUP_SUITE
from refusals import refused


def _wrong(group):
    """Other errors of torch are left as they are; a closed group says so."""
    refused("[Ii]nvalid|must|[Ee]xpected", dist.all_gather, [torch.zeros(1)], torch.zeros(2), kind=RuntimeError)
    with pytest.raises(RuntimeError, match="boom"), group.watching("mean_"):
        raise RuntimeError("boom")
    group.barrier()
    group.close()
    refused("closed", group.barrier, kind=ManyhandsError)
    return True


@pytest.mark.parametrize(
    "size", [1, pytest.param(2, marks=pytest.mark.nightly), pytest.param(3, marks=pytest.mark.slow)]
)
def test_conformance(size, tmp_path):
    found = on_gloo(size, {"conformance": conformance, "wrong": _wrong}, tmp_path)
    assert values(found["conformance"]) == [len(GROUP_SUITE)] * size
    assert values(found["wrong"]) == [True] * size


def _threads():
    return any("gloo" in path.read_text() for path in Path("/proc/self/task").glob("*/comm"))


def _closed(group):
    group.barrier()
    before = _threads()
    group.close()
    dist.destroy_process_group(dist.group.WORLD)
    after = _threads()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for the harness to destroy
    return before, after


def test_a_closed_group_keeps_no_thread_of_a_destroyed_process_group(tmp_path):
    assert values(on_gloo(2, _closed, tmp_path)) == [(True, False)] * 2


def test_a_killed_peer_is_lost(tmp_path):
    first, second = on_gloo(2, killed(1), tmp_path)
    assert second.status == signal.SIGKILL
    assert first.value.rank == 1
    assert first.value.step in (LAST_STEP - 1, LAST_STEP)


def test_a_silent_peer_is_lost_after_the_deadline(tmp_path):
    with silent() as program:
        first, _ = on_gloo(2, program, tmp_path, timeout_s=1.0)
    assert first.value.rank == 1
    assert first.value.seconds > 0.9


def test_without_torch_distributed_it_is_bad_input():
    refused("init_process_group", TorchGroup)
