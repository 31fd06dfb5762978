"""DeviceGroup in real processes: gloo on the CPU stands in for nccl; nccl itself where there are GPUs."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import on_shared_memory, values
from programs import DIFFERENT, conformance, different, expect_killed, expect_told, killed

import manyhands as mh
import plain
from manyhands.comm.device_group import DeviceGroup, has_own_gpu, nccl_group, store_of
from manyhands.testing.group_suite import GROUP_SUITE

GPUS = torch.cuda.device_count()


def on_device(program):
    """`program(group)` on a process whose device is the CPU, and whose backend gloo."""

    def run(host):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        backend = dist.ProcessGroupGloo(store_of(host), host.rank, host.size, timedelta(seconds=20))
        group = DeviceGroup(host, backend, torch.device("cpu"), timeout_s=20)
        try:
            return program(group)
        finally:
            group.close()

    return run


@pytest.mark.slow
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_conformance(size):
    assert values(on_shared_memory(size, on_device(conformance), timeout_s=30)) == [len(GROUP_SUITE)] * size


def test_a_killed_peer_is_named_before_the_devices_wait():
    expect_killed(on_shared_memory(2, on_device(killed(1)), timeout_s=30), 1)


def test_different_calls_are_told_to_all_with_both_sides():
    found = on_shared_memory(3, {what: on_device(different(what)) for what in DIFFERENT}, timeout_s=10)
    for what in DIFFERENT:
        expect_told(found[what], what)


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has nccl")
def test_without_nccl_tensors_go_through_the_host():
    assert values(on_shared_memory(2, lambda host: nccl_group(host, torch.device("cuda:0"), 10) is host)) == [True] * 2


def test_each_has_a_gpu_of_its_own_where_there_are_enough_and_one_device_for_all_is_nobodys_own():
    cases = {(2, 2): True, (2, 8): True, (3, 2): False, (1, 1): True, (2, 0): False}
    for wanted in ("auto", "cuda"):
        assert {case: has_own_gpu(wanted, *case) for case in cases} == cases, wanted
    named = {("cuda:0", 2): False, ("cuda:0", 1): True, ("cpu", 2): False, ("cpu", 1): False}
    assert {case: has_own_gpu(*case, 8) for case in named} == named


# -- on GPUs ---------------------------------------------------------------------------------------------------------


def trained(device):
    run = mh.train(plain.task(), strategy="allreduce", workers=2, device=device)
    return plain.flat(run.model.cpu())


@pytest.mark.nightly
@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_two_gpus_are_one_process_through_nccl(local):
    """Within the rounding of another order of sums."""
    assert (trained("cuda") - trained("cpu")).abs().max() < 1e-10
    names = mh.launch(lambda: type(mh.worker().group).__name__, workers=2, engine=local)
    assert names == ["DeviceGroup"] * 2


@pytest.mark.nightly
@pytest.mark.skipif(not GPUS, reason="needs a GPU")
def test_more_workers_than_gpus_meet_through_the_host(local):
    names = mh.launch(lambda: type(mh.worker().group).__name__, workers=GPUS + 1, engine=local)
    assert names == ["SharedMemoryGroup"] * (GPUS + 1)
