"""RingGroup in real processes: the conformance suite, traffic to the byte, and every way to lose a peer."""

import programs
import pytest
import torch
from harness import on_ring, values
from meshes import mesh, ring
from programs import conformance

from manyhands.comm.reducing import naive_mean
from manyhands.comm.ring.algorithms import DIRECT_BYTES, SWAP_BYTES
from manyhands.errors import PeerLost
from manyhands.testing.group_suite import GROUP_SUITE, expect_same_everywhere, vector, vectors


def test_conformance_of_one():
    group = ring(mesh(1), 0)
    conformance(group)
    group.close()


@pytest.mark.parametrize(
    "size", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.nightly)]
)
def test_conformance(size):
    assert values(on_ring(size, conformance, timeout_s=30)) == [len(GROUP_SUITE)] * size


# -- by the byte, and large --------------------------------------------------------------------------------------------


def _traffic(group):
    """What count a million of sums, a gather so large that it goes round the ring, and a small mean."""
    n = DIRECT_BYTES // 4 + 7
    group.all_reduce_(torch.ones(1_000_000))
    rows = group.all_gather(torch.arange(n) + 1000.0 * group.rank)
    assert all(torch.equal(rows[rank], torch.arange(n) + 1000.0 * rank) for rank in range(group.size))
    group.mean_(torch.ones(7), 2.0, 5)
    counts = group.ledger.as_dict()
    return counts["all_reduce_"], counts["all_gather"], counts["mean_"]["bytes"]


def test_traffic():
    """CASE 8: of a million on four, each sends 6,000,000 bytes in 6 messages; weights and bits are in headers."""
    sums, gathers, means = zip(*values(on_ring(4, _traffic)), strict=True)
    assert sums == ({"bytes": 6_000_000, "messages": 6},) * 4
    assert gathers == ({"bytes": 3 * (DIRECT_BYTES + 28), "messages": 3},) * 4
    assert sum(means) == 2 * 3 * 7 * 4


LARGE = (SWAP_BYTES + DIRECT_BYTES) // 4 + 4321  # float32: on the ring, cut unevenly


def _large(group):
    for dtype, weights in (
        (torch.float32, [1.0 + rank for rank in range(group.size)]),
        (torch.float32, [float(rank % 2) for rank in range(group.size)]),
        (torch.bfloat16, [float((rank + 1) % 2) for rank in range(group.size)]),
    ):
        mine = vector(group.rank, LARGE, dtype)
        if not weights[group.rank]:
            mine.fill_(torch.nan)
        total = group.mean_(mine, weights[group.rank], 1 << group.rank)
        wanted = naive_mean([v.double() for v in vectors(group, LARGE, dtype)], weights).to(dtype)
        assert (total.weight, total.bits) == (sum(weights), (1 << group.size) - 1)
        torch.testing.assert_close(mine, wanted)
        expect_same_everywhere(group, mine, f"mean of {dtype}")
    before = mine.fill_(group.rank).clone()
    assert group.mean_(mine, 0.0).weight == 0
    assert torch.equal(mine, before)
    group.broadcast_(mine, group.size - 1)
    assert bool((mine == group.size - 1).all())
    return True


def _abandons(group):
    """For a reason of its own, which reaches the peers."""
    if group.rank == 0:
        group.abandon(PeerLost(7, "host-7", "mean_", 3, 1.0))
        return 7, "host-7"
    with pytest.raises(PeerLost, match="worker 0 noticed") as caught:
        group.barrier()
    return caught.value.rank, caught.value.host


def test_of_two():
    work = {"large": _large, "overlapping": programs.overlapping(3_000_000), "waits": programs.waits(1)}
    found = on_ring(2, work, timeout_s=30)
    assert values(found["large"]) == [True] * 2
    assert values(found["overlapping"]) == [(True, 2.0, 0.5)] * 2
    early, late = values(found["waits"])
    assert early > max(late, 0.1)


def test_of_three():
    found = on_ring(3, programs.OF_THREE | {"abandons": _abandons}, timeout_s=10)
    programs.expect_three(found)
    assert values(found["abandons"]) == [(7, "host-7")] * 3
    assert "expected send of 5 float32" in values(found["sent"])[0]


@pytest.mark.slow
def test_large_tensors_of_three():
    assert values(on_ring(3, _large, timeout_s=30)) == [True] * 3


# -- lost peers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "elements"), [(4, 1000), (3, 2_000_000)])
def test_a_killed_peer_is_named_at_once(size, elements):
    programs.expect_killed(on_ring(size, programs.killed(1, elements), timeout_s=30), 1)


def test_a_silent_peer_is_lost_after_the_deadline():
    with programs.silent() as program:
        first, _, third = values(on_ring(3, program, timeout_s=1.0))
    for error in (first, third):
        assert error.rank == 1
        assert "no progress for 1 s" in error.why
