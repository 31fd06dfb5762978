"""This project's own groups: their costs by hand, and their ledgers to the byte, against the real ones in threads."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

import pytest
import torch

from manyhands.comm.hierarchical import HierarchicalGroup
from manyhands.comm.ring.algorithms import DIRECT_BYTES, SWAP_BYTES
from manyhands.comm.ring.group import RingGroup
from manyhands.comm.shared_memory.group import SharedMemory as Memory
from manyhands.comm.shared_memory.group import SharedMemoryGroup
from manyhands.engines.sim.costs import HierarchicalCost, SharedMemoryCost, SocketsCost
from manyhands.engines.sim.network import NetworkState, SimNetworkSpec
from manyhands.transport.channel import Channel


def of(family, size, text="lan"):
    return family(NetworkState(SimNetworkSpec.parse(text), size, 0), range(size))


# -- sockets -----------------------------------------------------------------------------------------------------------------


def test_two_workers_swap():
    """1 MB each way at once: 8 ms and 0.1 ms; with a shared card 16 ms."""
    cost = of(SocketsCost, 2).mean(250_000, 4)
    assert (cost.seconds, cost.bytes, cost.messages) == (pytest.approx(8.1e-3), [1_000_000] * 2, [1] * 2)
    assert of(SocketsCost, 2, "lan,duplex=shared").mean(250_000, 4).seconds == pytest.approx(16.1e-3)


def test_small_tensors_go_directly():
    """400,000 bytes on four: a card carries 3 pieces of 100,000 bytes, 2.4 ms, there and back, with 0.1 ms each."""
    cost = of(SocketsCost, 4).mean(100_000, 4)
    assert (cost.seconds, cost.bytes, cost.messages) == (pytest.approx(5e-3), [600_000] * 4, [2] * 4)


def test_seven_on_five():
    """CASE 8: 224 bytes over all ranks."""
    assert sum(of(SocketsCost, 5).mean(7, 4).bytes) == 224


def test_a_million_on_four():
    """CASE 8: 6,000,000 bytes in 6 messages each."""
    cost = of(SocketsCost, 4).mean(1_000_000, 4)
    assert (cost.bytes, cost.messages) == ([6_000_000] * 4, [6] * 4)


@pytest.mark.parametrize(
    ("size", "nbytes", "item", "messages"),
    [
        (2, SWAP_BYTES, 4, 1),
        (2, SWAP_BYTES + 4, 4, 2),  # a ring of two
        (4, DIRECT_BYTES, 4, 2),
        (4, DIRECT_BYTES + 4, 4, 6),
        (4, DIRECT_BYTES + 4, 2, 2),  # 16-bit numbers, whatever their number
        (2, SWAP_BYTES + 4, 2, 2),
    ],
)
def test_which_way(size, nbytes, item, messages):
    assert of(SocketsCost, size).mean(nbytes // item, item).messages == [messages] * size


def test_broadcast_is_direct_up_to_a_mebibyte():
    """1000 bytes to three others leave one card: 24 us and 0.1 ms."""
    cost = of(SocketsCost, 4).broadcast(250, 4, 2)
    assert (cost.seconds, cost.bytes, cost.messages) == (pytest.approx(124e-6), [0, 0, 3000, 0], [0, 0, 1, 0])
    assert of(SocketsCost, 4).broadcast(DIRECT_BYTES, 4, 2).messages == [1, 0, 1, 1]


# -- shared memory -------------------------------------------------------------------------------------------------------------


def test_shared_memory_is_latency_and_bytes():
    """2560 float32 on four: a slice of 640 is read from 3 and written to 3, 15,360 bytes, 1.536 us at 80 Gbit/s; and twice 2 us."""
    cost = of(SharedMemoryCost, 4, "lan,workers_per_host=all").mean(2560, 4)
    assert (cost.seconds, cost.bytes, cost.messages) == (pytest.approx(5.536e-6), [15_360] * 4, [2] * 4)


def test_other_operations_in_shared_memory():
    """1000 bytes from each of three others, 0.3 us; a third of 999 elements from two others; 1000 bytes read by all at once."""
    four, three = (of(SharedMemoryCost, size, "lan,workers_per_host=all") for size in (4, 3))
    assert four.all_gather(250, 4).seconds == pytest.approx(4.3e-6)
    assert three.reduce_scatter(999, 4).seconds == pytest.approx(4e-6 + 8 * 2 * 333 * 4 / 8e10)
    assert four.broadcast(250, 4, 1).seconds == pytest.approx(4.1e-6)
    assert four.control(0) == 2e-6
    assert four.mean(0, 4).seconds == 2e-6


# -- both ------------------------------------------------------------------------------------------------------------------------


def test_a_hierarchy_is_the_sum_of_its_phases():
    """1000 float32 on two hosts of two. A mean on each host: slices of 512, 4096 bytes moved, 4 us + 0.4096 us. Between the
    first ranks 4000 bytes are swapped: 132 us. The result spreads: 4000 bytes, 4 us + 0.4 us.
    """
    cost = of(HierarchicalCost, 4, "lan,workers_per_host=2").mean(1000, 4)
    assert cost.seconds == pytest.approx(4.4096e-6 + 132e-6 + 4.4e-6)
    assert cost.bytes == [8000, 4000, 8000, 4000]
    assert cost.messages == [2, 1, 2, 1]


def test_between_hosts_a_hierarchy_sends_what_a_ring_of_hosts_sends():
    """2,000,000 float32 on 2 hosts of 4, 8 MB: the ring of two sends 8 MB from each first rank, which also sends 3 · 8 MB on its host."""
    assert of(HierarchicalCost, 8, "lan,workers_per_host=4").mean(2_000_000, 4).bytes[::4] == [32_000_000] * 2


def test_workers_of_one_host_share_its_card_where_they_do_not_go_by_hosts():
    """Direct on two hosts of two, 1000 elements: each of two workers sends 250 elements to each of two others, 4000 bytes a card."""
    assert of(SocketsCost, 4, "lan,workers_per_host=2").mean(1000, 4).seconds == pytest.approx(2 * (32e-6 + 100e-6))


def test_operations_of_a_hierarchy_take_their_phases():
    """Two hosts of two, 1000 bytes each, local phases of 4 us and bytes.

    Gather: 1000 bytes on the host, 0.1 us; two broadcasts of 2000 bytes, 16 us + 100 us; 2000 bytes to the host's other, 0.2 us.
    Broadcast: 1000 bytes on the host, between, on the other host.
    Control: 2 us + 50 % of 1000 bytes; 8 us / 2 + 100 us between; 2 us + 0.1 us.
    """
    group = of(HierarchicalCost, 4, "lan,workers_per_host=2")
    assert group.all_gather(250, 4).seconds == pytest.approx(4.1e-6 + 2 * 116e-6 + 4.2e-6)
    assert group.broadcast(250, 4, 1).seconds == pytest.approx(4.1e-6 + 108e-6 + 4.1e-6)
    assert group.control(1000) == pytest.approx(2.05e-6 + 104e-6 + 2.1e-6)
    assert group.reduce_scatter(1000, 4) == group.mean(1000, 4)


# -- ledgers -----------------------------------------------------------------------------------------------------------------------

LENGTHS = (7, 1000, 300_000, 1_100_000)  # float32: 28 bytes to 4.4 MB, either side of each limit


def in_threads(size, program):
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(program, range(size)))


def mesh(size):
    sockets = [{} for _ in range(size)]
    for low, high in combinations(range(size), 2):
        sockets[low][high], sockets[high][low] = socket.socketpair()
    return sockets


def ring_group(sockets, rank, **options):
    channels = {peer: Channel(sock, peer=f"worker {peer}", timeout_s=10.0) for peer, sock in sockets[rank].items()}
    return RingGroup(rank, len(sockets), channels, timeout_s=30, **options)


def counted(group):
    """By operation and length: what one rank's ledger says."""
    seen = {}
    try:
        for n in LENGTHS:
            tensor = group.allocate(n, torch.float32)
            for name, operation in {
                "mean": lambda t: group.mean_(t),
                "all_gather": lambda t: group.all_gather(t),
                "reduce_scatter": lambda t: group.reduce_scatter(t),
                "broadcast": lambda t: group.broadcast_(t, group.size - 1),
            }.items():
                before = totals(group)
                operation(tensor)
                seen[name, n] = tuple(now - then for now, then in zip(totals(group), before, strict=True))
            group.barrier()
    finally:
        group.close()
    return seen


def totals(group):
    counts = group.ledger.as_dict().values()
    return sum(count["bytes"] for count in counts), sum(count["messages"] for count in counts)


def predicted(algorithm):
    """The same, by rank, as the model has it."""
    costs = {}
    for n in LENGTHS:
        costs["mean", n] = algorithm.mean(n, 4)
        costs["all_gather", n] = algorithm.all_gather(n, 4)
        costs["reduce_scatter", n] = algorithm.reduce_scatter(n, 4)
        costs["broadcast", n] = algorithm.broadcast(n, 4, algorithm.size - 1)
    return [
        {key: (cost.bytes[rank], cost.messages[rank]) for key, cost in costs.items()} for rank in range(algorithm.size)
    ]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_ledger_of_sockets(size):
    sockets = mesh(size)
    assert in_threads(size, lambda rank: counted(ring_group(sockets, rank))) == predicted(of(SocketsCost, size))


@pytest.mark.parametrize("size", [2, 3])
def test_the_ledger_of_shared_memory(size):
    memory = Memory.create(size)
    try:
        seen = in_threads(
            size, lambda rank: counted(SharedMemoryGroup(rank, size, [os.dup(fd) for fd in memory], timeout_s=30))
        )
    finally:
        for fd in memory:
            os.close(fd)
    assert seen == predicted(of(SharedMemoryCost, size, "workers_per_host=all"))


def test_the_ledger_of_hosts_of_two_and_one():
    layout, sockets = ((0, 1), (2,)), mesh(2)
    memories = [Memory.create(2), Memory.create(1)]

    def program(rank):
        host, place = divmod(rank, 2)
        memory = [os.dup(fd) for fd in memories[host]]
        local = SharedMemoryGroup(place, len(layout[host]), memory, timeout_s=30)
        across = ring_group(sockets, host) if place == 0 else None
        return counted(HierarchicalGroup(rank, layout, local, across))

    try:
        seen = in_threads(3, program)
    finally:
        for fd in (fd for memory in memories for fd in memory):
            os.close(fd)
    assert seen == predicted(of(HierarchicalCost, 3, "workers_per_host=2"))
