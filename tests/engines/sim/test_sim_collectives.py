"""Rings and trees, by hand. `lan` is 1 Gbit/s and 0.1 ms: a megabyte takes 8 ms and 0.1 ms."""

import pytest

from manyhands.engines.sim.collectives import RingCost, TreeCost
from manyhands.engines.sim.network import NetworkState, SimNetworkSpec

MILLION = 1_000_000


def of(family, size, text="lan"):
    return family(NetworkState(SimNetworkSpec.parse(text), size, 0), range(size))


# -- rings -----------------------------------------------------------------------------------------------------------------


def test_a_ring_of_a_million_on_four():
    """CASE 8: 6,000,000 bytes in 6 messages each. Six steps of a quarter, which is 1 MB: 6 · 8.1 ms."""
    cost = of(RingCost, 4).mean(MILLION, 4)
    assert cost.bytes == [6_000_000] * 4
    assert cost.messages == [6] * 4
    assert cost.seconds == pytest.approx(6 * 8.1e-3)


def test_a_ring_of_seven_on_five():
    """CASE 8: 224 bytes over all ranks. Pieces are 1, 1, 2, 1, 2 elements; rank r sends all twice, but pieces r+1 and r+2 once."""
    cost = of(RingCost, 5).mean(7, 4)
    assert cost.bytes == [4 * (14 - 3), 4 * (14 - 3), 4 * (14 - 3), 4 * (14 - 3), 4 * (14 - 2)]
    assert sum(cost.bytes) == 224
    assert cost.messages == [8] * 5


def test_a_step_lasts_as_long_as_its_largest_piece():
    """Of 7 elements on five, two: 8 bytes, 64 ns and 0.1 ms, in each of 8 steps, and of the 4 of a reduce-scatter."""
    assert of(RingCost, 5).mean(7, 4).seconds == pytest.approx(8 * 100.064e-6)
    assert of(RingCost, 5).reduce_scatter(7, 4).seconds == pytest.approx(4 * 100.064e-6)


def test_a_card_that_shares_its_bandwidth_halves_a_ring():
    """Each card sends 1 MB and receives 1 MB in each step: 16 ms."""
    assert of(RingCost, 4, "lan,duplex=shared").mean(MILLION, 4).seconds == pytest.approx(6 * 16.1e-3)


def test_a_step_lasts_as_long_as_its_slowest_edge():
    """Host 2's card does 100 Mbit/s: 80 ms. Or the way from 3 to 0 has 1 s of latency: 8 ms + 1 s, in each of 6 steps."""
    assert of(RingCost, 4, "lan,host2=bandwidth:1e8").mean(MILLION, 4).seconds == pytest.approx(6 * 80.1e-3)
    assert of(RingCost, 4, "lan,link0-3=latency:1").mean(MILLION, 4).seconds == pytest.approx(6 * 1.008)
    assert of(RingCost, 4, "lan,link0-2=latency:1").mean(MILLION, 4).seconds == pytest.approx(
        6 * 8.1e-3
    )  # not on the ring


def test_a_ring_over_hosts_of_two_leaves_each_host_once():
    """A host's card carries one message each way, whatever its workers do within: 8.1 ms a step."""
    assert of(RingCost, 4, "lan,workers_per_host=2").mean(MILLION, 4).seconds == pytest.approx(6 * 8.1e-3)


def test_a_ring_within_a_host():
    """1 MB at 80 Gbit/s is 0.1 ms, and 2 us: 6 steps."""
    assert of(RingCost, 4, "lan,workers_per_host=all").mean(MILLION, 4).seconds == pytest.approx(6 * 102e-6)


def test_gather_and_scatter_on_a_ring():
    """Three steps: of the whole 1 MB each, or of a quarter."""
    gather, scatter = of(RingCost, 4).all_gather(MILLION // 4, 4), of(RingCost, 4).reduce_scatter(MILLION // 4, 4)
    assert (gather.seconds, gather.bytes, gather.messages) == (pytest.approx(3 * 8.1e-3), [3_000_000] * 4, [3] * 4)
    assert (scatter.seconds, scatter.bytes, scatter.messages) == (pytest.approx(3 * 2.1e-3), [750_000] * 4, [3] * 4)


def test_broadcast_along_a_ring_is_a_pipeline():
    """4 MiB in chunks of 1 MiB, 8.388608 ms each, over three hops: 6 chunk times and three latencies; the last one sends nothing."""
    cost = of(RingCost, 4).broadcast(1 << 20, 4, 1)
    assert cost.seconds == pytest.approx(6 * 8.388608e-3 + 3e-4)
    assert cost.bytes == [0 if rank == 0 else 4 << 20 for rank in range(4)]
    assert cost.messages == [0, 1, 1, 1]


# -- trees -----------------------------------------------------------------------------------------------------------------


def test_a_tree_of_four_goes_two_levels_up_and_two_down():
    """4 MB take 32 ms: 4 · 32.1 ms. Rank 0 sends two down; 2 sends one up, one down; 1 and 3 one up."""
    cost = of(TreeCost, 4).mean(MILLION, 4)
    assert cost.seconds == pytest.approx(4 * 32.1e-3)
    assert cost.messages == [2, 1, 2, 1]
    assert cost.bytes == [4_000_000 * messages for messages in cost.messages]


def test_a_tree_of_five_has_three_levels():
    cost = of(TreeCost, 5).mean(MILLION, 4)
    assert cost.seconds == pytest.approx(6 * 32.1e-3)
    assert sum(cost.bytes) == 2 * 4 * 4_000_000


def test_a_tree_crosses_between_hosts_once():
    """Two hosts of two: one level of 32.1 ms between them, one of 0.4 ms + 2 us within, up and down."""
    assert of(TreeCost, 4, "lan,workers_per_host=2").mean(MILLION, 4).seconds == pytest.approx(2 * 32.1e-3 + 2 * 402e-6)


def test_broadcast_from_another_rank_turns_the_tree():
    """As 0 sends to 2, then 0 to 1 and 2 to 3: 3 to 1, then 3 to 0 and 1 to 2."""
    cost = of(TreeCost, 4).broadcast(MILLION, 4, 3)
    assert cost.messages == [0, 1, 0, 2]
    assert cost.seconds == pytest.approx(2 * 32.1e-3)


@pytest.mark.parametrize("size", [2, 3, 5, 8, 13])
def test_nobody_passes_on_what_it_does_not_have_yet(size):
    have = {1}
    for edges in of(TreeCost, size)._tree(100, source=1):
        assert {sender for sender, _, _ in edges} <= have
        have |= {receiver for _, receiver, _ in edges}
    assert have == set(range(size))


def test_gathering_doubles():
    """Of 1 MB each: one in the first step, two in the second, and of five workers one more in the third."""
    four, five = of(TreeCost, 4).all_gather(MILLION // 4, 4), of(TreeCost, 5).all_gather(MILLION // 4, 4)
    assert (four.seconds, four.bytes, four.messages) == (pytest.approx(8.1e-3 + 16.1e-3), [3_000_000] * 4, [2] * 4)
    assert (five.seconds, five.bytes) == (pytest.approx(8.1e-3 + 16.1e-3 + 8.1e-3), [4_000_000] * 5)


def test_scattering_is_gathering_backwards():
    """Pieces of 1 MB: two, then one."""
    cost = of(TreeCost, 4).reduce_scatter(MILLION, 4)
    assert (cost.seconds, cost.bytes) == (pytest.approx(8.1e-3 + 16.1e-3), [3_000_000] * 4)


# -- both ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 13])
@pytest.mark.parametrize("family", [RingCost, TreeCost])
def test_over_all_ranks_moves_what_every_group_moves(family, size):
    algorithm, n = of(family, size, "lan,workers_per_host=3"), 1003
    assert sum(algorithm.mean(n, 4).bytes) == 2 * (size - 1) * n * 4
    assert sum(algorithm.all_gather(n, 4).bytes) == size * (size - 1) * n * 4
    assert sum(algorithm.reduce_scatter(n, 4).bytes) == (size - 1) * n * 4
    for source in (0, size - 1):
        cost = algorithm.broadcast(n, 4, source)
        assert sum(cost.bytes) == (size - 1) * n * 4
        assert sum(cost.messages) == size - 1


@pytest.mark.parametrize("family", [RingCost, TreeCost])
def test_without_elements_all_arrive(family):
    """The one latency of control words, and nothing in the ledger."""
    cost = of(family, 4).mean(0, 4)
    assert (cost.seconds, cost.bytes, cost.messages) == (1e-4, [0] * 4, [0] * 4)


def test_control_words_go_from_each_to_each():
    """1000 bytes over all of 4: a card sends three times 250 bytes, 6 us, and 0.1 ms of latency; the slowest latency counts."""
    assert of(RingCost, 4).control(1000) == pytest.approx(106e-6)
    assert of(RingCost, 4, "lan,duplex=shared").control(1000) == pytest.approx(112e-6)
    assert of(RingCost, 4, "lan,host3=latency:1").control(0) == 1.0
    assert of(RingCost, 4, "lan,link1-2=latency:2").control(0) == 2.0
    assert of(RingCost, 2, "lan,link0-1=latency:0").control(0) == 0.0  # the only way has its own
    assert of(RingCost, 4, "lan,link1-2=bandwidth:1000").control(1000) == pytest.approx(
        2.0001
    )  # 250 bytes at 1000 bit/s
