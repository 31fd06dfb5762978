"""DeviceGroup in real processes: gloo on the CPU stands in for nccl, so that all but nccl itself is examined; nccl where there are GPUs."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import on_shared_memory, values
from programs import DIFFERENT, conformance, different, expect_killed, expect_told, killed

import manyhands as mh
import plain
from manyhands.comm.device_group import DeviceGroup, nccl_group, store_of
from manyhands.testing.group_suite import GROUP_SUITE
from residuals import check_feedback, feedback

GPUS = torch.cuda.device_count()


def on_device(size, program, **options):
    """Run `program(group)` on processes whose device is the CPU, and whose backend gloo."""

    def run(host):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        backend = dist.ProcessGroupGloo(store_of(host), host.rank, host.size, timedelta(seconds=20))
        group = DeviceGroup(host, backend, torch.device("cpu"), timeout_s=20)
        try:
            return program(group)
        finally:
            group.close()

    return on_shared_memory(size, run, **options)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_conformance(size):
    assert values(on_device(size, conformance, timeout_s=30)) == [len(GROUP_SUITE)] * size


def test_a_killed_peer_is_named_before_the_devices_wait():
    expect_killed(on_device(2, killed(1), timeout_s=30), 1, within_s=1)


@pytest.mark.parametrize("what", DIFFERENT)
def test_different_calls_are_told_to_all_with_both_sides(what):
    expect_told(on_device(3, different(what), timeout_s=10), what)


def test_error_feedback():
    check_feedback(values(on_device(2, feedback("bf16", [3.0, 1.0], 100))), [3.0, 1.0], 100)


def _without_nccl(host):
    return nccl_group(host, torch.device("cuda:0"), 10) is host


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has nccl")
def test_without_nccl_tensors_go_through_the_host():
    assert values(on_shared_memory(2, _without_nccl)) == [True, True]


# -- on GPUs: not run where this was written -------------------------------------------------------------------------


def trained(device):
    run = mh.train(plain.task(), strategy="allreduce", workers=2, device=device)
    return plain.flat(run.model.cpu())


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_two_gpus_are_one_process():
    """Through nccl: within the rounding of another order of sums."""
    assert (trained("cuda") - trained("cpu")).abs().max() < 1e-10


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_workers_with_gpus_of_their_own_meet_through_nccl(local):
    names = mh.launch(lambda: type(mh.worker().group).__name__, workers=2, engine=local)
    assert names == ["DeviceGroup"] * 2


@pytest.mark.skipif(not GPUS, reason="needs a GPU")
def test_more_workers_than_gpus_meet_through_the_host(local):
    names = mh.launch(lambda: type(mh.worker().group).__name__, workers=GPUS + 1, engine=local)
    assert names == ["SharedMemoryGroup"] * (GPUS + 1)
