"""HierarchicalGroup in real processes: shared memory on each "host", socket pairs between them; the conformance suite, and lost peers."""

import os

import pytest
import torch
from harness import forked, values
from meshes import close, mesh, ring
from programs import conformance, different, expect_killed, expect_told, killed, overlapping, waits

from manyhands.comm.hierarchical import HierarchicalGroup
from manyhands.comm.reducing import naive_mean
from manyhands.comm.shared_memory.group import SharedMemory, SharedMemoryGroup
from manyhands.errors import BadInput, Unsupported
from manyhands.testing.group_suite import GROUP_SUITE, expect_same_everywhere, vector, vectors

TWO_BY_TWO = ((0, 1), (2, 3))
UNEVEN = ((0,), (1, 2), (3,))


def on_hosts(layout, program, *, deadline_s=60, with_direct=True, **options):
    """Run `program(group)` on a process for every rank of the layout."""
    size = sum(map(len, layout))
    hosts = [f"host-{number}" for number in range(len(layout))]
    memory = [SharedMemory.create(len(ranks)) for ranks in layout]
    pipes = [[os.pipe2(os.O_CLOEXEC) for _ in ranks] for ranks in layout]
    leaders, everybody = mesh(len(layout)), mesh(size)

    def let_go(host=-1, local_rank=-1, rank=-1):
        close(leaders, but=host if local_rank == 0 else -1)
        close(everybody, but=rank)
        for number in range(len(layout)):
            for fd in [*memory[number], *(end for pipe in pipes[number] for end in pipe)] if number != host else []:
                os.close(fd)

    def run(rank):
        host = next(number for number, ranks in enumerate(layout) if rank in ranks)
        local_rank = layout[host].index(rank)
        let_go(host, local_rank, rank)
        local = SharedMemoryGroup(local_rank, len(layout[host]), memory[host], lifelines=pipes[host], **options)
        names = [ranks[0] for ranks in layout]
        across = ring(leaders, host, hosts=hosts, names=names, **options) if local_rank == 0 else None
        where = [hosts[number] for number, ranks in enumerate(layout) for _ in ranks]
        direct = ring(everybody, rank, hosts=where, **options) if with_direct else None
        if not with_direct:
            close([everybody[rank]])
        group = HierarchicalGroup(rank, layout, local, across, direct=direct, hosts=hosts)
        try:
            return program(group)
        finally:
            group.close()

    return forked(size, run, deadline_s, then=let_go)


@pytest.mark.parametrize(
    "layout", [((0,),), ((0, 1),), TWO_BY_TWO, pytest.param(UNEVEN, marks=pytest.mark.slow)], ids=str
)
def test_conformance(layout):
    assert values(on_hosts(layout, conformance, timeout_s=30)) == [len(GROUP_SUITE)] * sum(map(len, layout))


def _exact(group):
    for i, weights in enumerate(([1.0, 2.0, 0.0, 3.5], [0.0, 0.0, 1.0, 2.0], [0.0, 1e-3, 0.0, 0.0])):
        mine, wanted = vector(group.rank, 5001, seed=i), naive_mean(vectors(group, 5001, seed=i), weights)
        if not weights[group.rank]:
            mine.fill_(torch.nan)
        group.mean_(mine, weights[group.rank])
        assert float((mine - wanted).abs().max()) < 1e-12
        expect_same_everywhere(group, mine, f"mean with weights {weights}")
    return True


@pytest.mark.parametrize("layout", [TWO_BY_TWO, UNEVEN], ids=str)
def test_shares_are_of_all_ranks_also_when_a_host_has_none(layout):
    assert values(on_hosts(layout, _exact, timeout_s=30)) == [True] * 4


def _between_hosts(group):
    group.all_reduce_(torch.ones(1_000_000))
    return None if group.across is None else group.across.ledger.total_bytes


def test_between_hosts_travels_what_a_ring_of_hosts_sends():
    assert values(on_hosts(TWO_BY_TWO, _between_hosts)) == [4_000_000, None, 4_000_000, None]


def test_a_started_mean_completes_while_the_caller_computes():
    assert values(on_hosts(TWO_BY_TWO, overlapping(300_000), timeout_s=30)) == [(True, 4.0, 1.5)] * 4


@pytest.mark.parametrize("victim", [2, 3])
def test_a_killed_peer_is_named_on_all_hosts(victim):
    expect_killed(on_hosts(TWO_BY_TWO, killed(victim), timeout_s=30), victim)


def test_hosts_that_disagree_are_told():
    expect_told(on_hosts(TWO_BY_TWO, different("n", odd=(2, 3)), timeout_s=10), "n", odd=(2, 3))


def _without_a_way(group):
    if group.rank in (0, 1):
        tensor = torch.full((3,), float(group.rank))
        (group.send if group.rank else group.receive_)(tensor, 1 - group.rank)
        assert tensor[0] == 1
        with pytest.raises(Unsupported, match="different hosts"):
            group.send(tensor, 3)
    group.barrier()
    return True


def test_without_direct_only_hosts_send_inside():
    assert values(on_hosts(TWO_BY_TWO, _without_a_way, with_direct=False)) == [True] * 4


def test_waiting_is_counted_where_one_waits():
    leader, other, slow_ones_leader, slow = values(on_hosts(TWO_BY_TWO, waits(3, 1.5)))
    assert min(leader, slow_ones_leader) > 1.0
    assert max(other, slow) < 0.7


@pytest.mark.parametrize("layout", [((0, 2), (1,)), ((0,), ()), ((1, 0),)], ids=str)
def test_a_layout_out_of_order_is_refused(layout):
    local = SharedMemoryGroup(0, 1, SharedMemory.create(1))
    with pytest.raises(BadInput, match="each rank once, in order"):
        HierarchicalGroup(0, layout, local, None)
    local.close()
