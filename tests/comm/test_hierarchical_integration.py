"""HierarchicalGroup in real processes on several "hosts": the conformance suite, and lost peers."""

import pytest
import torch
from harness import on_hosts, values
from programs import conformance, different, expect_killed, expect_told, killed, overlapping, waits

from manyhands.comm.hierarchical import HierarchicalGroup
from manyhands.comm.reducing import naive_mean
from manyhands.comm.shared_memory.group import SharedMemory, SharedMemoryGroup
from manyhands.errors import Unsupported
from manyhands.testing.group_suite import GROUP_SUITE, expect_same_everywhere, vector, vectors
from refusals import refused

TWO_BY_TWO = ((0, 1), (2, 3))
UNEVEN = ((0,), (1, 2), (3,))


@pytest.mark.parametrize(
    "layout",
    [
        ((0,),),
        pytest.param(((0,), (1, 2)), marks=pytest.mark.slow),
        *(pytest.param(layout, marks=pytest.mark.nightly) for layout in (TWO_BY_TWO, UNEVEN)),
    ],
    ids=str,
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


def _between_hosts(group):
    """Travels what a ring of hosts sends."""
    group.all_reduce_(torch.ones(1_000_000))
    return None if group.across is None else group.across.ledger.total_bytes


def test_two_by_two():
    """Shares are of all ranks, also when a host has none; waiting is counted where one waits."""
    programs = {
        "exact": _exact,
        "bytes": _between_hosts,
        "overlapping": overlapping(300_000),
        "waits": waits(3),
        "different": different("n", odd=(2, 3)),
    }
    found = on_hosts(TWO_BY_TWO, programs, timeout_s=30)
    assert values(found["exact"]) == [True] * 4
    assert values(found["bytes"]) == [4_000_000, None, 4_000_000, None]
    assert values(found["overlapping"]) == [(True, 4.0, 1.5)] * 4
    leader, other, slow_ones_leader, slow = values(found["waits"])
    assert min(leader, slow_ones_leader) > max(other, slow, 0.1)
    expect_told(found["different"], "n", odd=(2, 3))


def test_shares_are_of_all_ranks_with_uneven_hosts():
    assert values(on_hosts(UNEVEN, _exact, timeout_s=30)) == [True] * 4


@pytest.mark.parametrize("victim", [2, 3])
def test_a_killed_peer_is_named_on_all_hosts(victim):
    expect_killed(on_hosts(TWO_BY_TWO, killed(victim), timeout_s=30), victim)


def _without_a_way(group):
    if group.rank in (0, 1):
        tensor = torch.full((3,), float(group.rank))
        (group.send if group.rank else group.receive_)(tensor, 1 - group.rank)
        assert tensor[0] == 1
        refused("different hosts", group.send, tensor, 3, kind=Unsupported)
    group.barrier()
    return True


def test_without_direct_only_hosts_send_inside():
    assert values(on_hosts(TWO_BY_TWO, _without_a_way, with_direct=False)) == [True] * 4


def test_a_layout_out_of_order_is_refused():
    local = SharedMemoryGroup(0, 1, SharedMemory.create(1))
    for layout in (((0, 2), (1,)), ((0,), ()), ((1, 0),)):
        refused("each rank once, in order", HierarchicalGroup, 0, layout, local, None)
    local.close()
