"""What collectives cost in virtual time, by hand; and the ledgers of this project's own groups, to the byte, against real ones.

`lan` is 1 Gbit/s and 0.1 ms between hosts: a megabyte takes 8 ms and 0.1 ms; on a host 80 Gbit/s and 2 us.
"""

import os
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from meshes import mesh, ring
from threads import in_threads

from manyhands.comm.hierarchical import HierarchicalGroup
from manyhands.comm.ring.algorithms import DIRECT_BYTES, SWAP_BYTES
from manyhands.comm.shared_memory.group import SharedMemory as Memory
from manyhands.comm.shared_memory.group import SharedMemoryGroup
from manyhands.engines.sim.collectives import RingCost, TreeCost
from manyhands.engines.sim.costs import Cost, Costs, HierarchicalCost, SharedMemoryCost, SocketsCost
from manyhands.engines.sim.network import NetworkState, SimNetworkSpec

MILLION, MS, US = 1_000_000, 1e-3, 1e-6
ONE_HOST, HOSTS_OF_2 = "lan,workers_per_host=all", "lan,workers_per_host=2"
COLLECTIVES = ("auto", "cheapest", "ring", "tree", "hierarchical")


def of(family: Any, size: int, text: str = "lan") -> Any:
    return family(NetworkState(SimNetworkSpec.parse(text), size, 0), range(size))


def costs(text: str, size: int) -> Costs:
    return Costs(NetworkState(SimNetworkSpec.parse(text), size, 0), size)


# family, workers, network, operation, its arguments, seconds, bytes, messages (... is not looked at)
BY_HAND: list[tuple[Any, int, str, str, tuple[int, ...], Any, Any, Any]] = [
    # CASE 8: 6,000,000 bytes in 6 messages each; six steps of a quarter, which is 1 MB
    (RingCost, 4, "lan", "mean", (MILLION, 4), 6 * 8.1 * MS, [6_000_000] * 4, [6] * 4),
    # CASE 8: 224 bytes over all; pieces are 1, 1, 2, 1, 2 elements; rank r sends all twice, but pieces r+1 and r+2 once
    (RingCost, 5, "lan", "mean", (7, 4), 8 * 100.064 * US, [44, 44, 44, 44, 48], [8] * 5),
    (RingCost, 5, "lan", "reduce_scatter", (7, 4), 4 * 100.064 * US, ..., ...),
    # each card sends 1 MB and receives 1 MB in each step
    (RingCost, 4, "lan,duplex=shared", "mean", (MILLION, 4), 6 * 16.1 * MS, ..., ...),
    # the slowest edge: host 2's card; the way from 3 to 0; 0 to 2 is not on the ring
    (RingCost, 4, "lan,host2=bandwidth:1e8", "mean", (MILLION, 4), 6 * 80.1 * MS, ..., ...),
    (RingCost, 4, "lan,link0-3=latency:1", "mean", (MILLION, 4), 6 * 1.008, ..., ...),
    (RingCost, 4, "lan,link0-2=latency:1", "mean", (MILLION, 4), 6 * 8.1 * MS, ..., ...),
    # a host's card carries one message each way, whatever its workers do within
    (RingCost, 4, HOSTS_OF_2, "mean", (MILLION, 4), 6 * 8.1 * MS, ..., ...),
    (RingCost, 4, ONE_HOST, "mean", (MILLION, 4), 6 * 102 * US, ..., ...),
    (RingCost, 4, "lan", "all_gather", (MILLION // 4, 4), 3 * 8.1 * MS, [3_000_000] * 4, [3] * 4),
    (RingCost, 4, "lan", "reduce_scatter", (MILLION // 4, 4), 3 * 2.1 * MS, [750_000] * 4, [3] * 4),
    # 4 MiB in chunks of 1 MiB, over three hops: 6 chunk times and three latencies; the last one sends nothing
    (RingCost, 4, "lan", "broadcast", (1 << 20, 4, 1), 6 * 8.388608 * MS + 0.3 * MS, [0, *[4 << 20] * 3], [0, 1, 1, 1]),
    # two levels up and two down of 4 MB; rank 0 sends two down; 2 sends one up, one down; 1 and 3 one up
    (TreeCost, 4, "lan", "mean", (MILLION, 4), 4 * 32.1 * MS, [8_000_000, 4_000_000] * 2, [2, 1, 2, 1]),
    (TreeCost, 5, "lan", "mean", (MILLION, 4), 6 * 32.1 * MS, ..., ...),
    # two hosts of two: one level between them, one of 0.4 ms + 2 us within, up and down
    (TreeCost, 4, HOSTS_OF_2, "mean", (MILLION, 4), 2 * 32.1 * MS + 2 * 402 * US, ..., ...),
    # from 3 to 1, then 3 to 0 and 1 to 2
    (TreeCost, 4, "lan", "broadcast", (MILLION, 4, 3), 2 * 32.1 * MS, ..., [0, 1, 0, 2]),
    # one megabyte in the first step, two in the second, and of five workers one more in the third; scattering is the reverse
    (TreeCost, 4, "lan", "all_gather", (MILLION // 4, 4), 24.2 * MS, [3_000_000] * 4, [2] * 4),
    (TreeCost, 5, "lan", "all_gather", (MILLION // 4, 4), 32.3 * MS, [4_000_000] * 5, ...),
    (TreeCost, 4, "lan", "reduce_scatter", (MILLION, 4), 24.2 * MS, [3_000_000] * 4, ...),
    # without elements the one latency of control words
    *((family, 4, "lan", "mean", (0, 4), 0.1 * MS, [0] * 4, [0] * 4) for family in (RingCost, TreeCost)),
    # 1 MB each way at once; with a shared card after each other
    (SocketsCost, 2, "lan", "mean", (250_000, 4), 8.1 * MS, [MILLION] * 2, [1] * 2),
    (SocketsCost, 2, "lan,duplex=shared", "mean", (250_000, 4), 16.1 * MS, ..., ...),
    # small ones go directly: a card carries 3 pieces of 100,000 bytes, there and back
    (SocketsCost, 4, "lan", "mean", (100_000, 4), 5 * MS, [600_000] * 4, [2] * 4),
    (SocketsCost, 4, "lan", "mean", (MILLION, 4), ..., [6_000_000] * 4, [6] * 4),
    # direct on two hosts of two: each of two workers sends 250 elements to each of two others, 4000 bytes a card
    (SocketsCost, 4, HOSTS_OF_2, "mean", (1000, 4), 2 * 132 * US, ..., ...),
    # a broadcast is direct up to a mebibyte: 1000 bytes to three others leave one card
    (SocketsCost, 4, "lan", "broadcast", (250, 4, 2), 124 * US, [0, 0, 3000, 0], [0, 0, 1, 0]),
    (SocketsCost, 4, "lan", "broadcast", (DIRECT_BYTES, 4, 2), ..., ..., [1, 0, 1, 1]),
    # 16-bit numbers go the same ways, whatever their number
    (SocketsCost, 4, "lan", "mean", (DIRECT_BYTES // 2 + 2, 2), ..., ..., [2] * 4),
    (SocketsCost, 2, "lan", "mean", (SWAP_BYTES // 2 + 2, 2), ..., ..., [2] * 2),
    # in shared memory a slice of 640 is read from 3 and written to 3, and twice 2 us
    (SharedMemoryCost, 4, ONE_HOST, "mean", (2560, 4), 5.536 * US, [15_360] * 4, [2] * 4),
    (SharedMemoryCost, 4, ONE_HOST, "mean", (0, 4), 2 * US, ..., ...),
    # 1000 bytes from each of three others; a third of 999 elements from two others; 1000 bytes read by all at once
    (SharedMemoryCost, 4, ONE_HOST, "all_gather", (250, 4), 4.3 * US, ..., ...),
    (SharedMemoryCost, 3, ONE_HOST, "reduce_scatter", (999, 4), 4 * US + 8 * 2 * 333 * 4 / 8e10, ..., ...),
    (SharedMemoryCost, 4, ONE_HOST, "broadcast", (250, 4, 1), 4.1 * US, ..., ...),
    # a mean on each host: slices of 512, 4096 bytes moved; between the first ranks 4000 bytes are swapped; the result spreads
    (HierarchicalCost, 4, HOSTS_OF_2, "mean", (1000, 4), (4.4096 + 132 + 4.4) * US, [8000, 4000] * 2, [2, 1] * 2),
    # 8 MB on 2 hosts of 4: the ring of two sends 8 MB from each first rank, which also sends 3 * 8 MB on its host
    (
        HierarchicalCost,
        8,
        "lan,workers_per_host=4",
        "mean",
        (2 * MILLION, 4),
        ...,
        [32_000_000, ..., ..., ...] * 2,
        ...,
    ),
    # gather: 1000 bytes on the host; two broadcasts of 2000 bytes; 2000 bytes to the host's other
    (HierarchicalCost, 4, HOSTS_OF_2, "all_gather", (250, 4), (4.1 + 2 * 116 + 4.2) * US, ..., ...),
    (HierarchicalCost, 4, HOSTS_OF_2, "broadcast", (250, 4, 1), (4.1 + 108 + 4.1) * US, ..., ...),
]
# control words go from each to each: 1000 bytes over all of 4, a card sends three times 250 bytes; the slowest latency counts
CONTROL = [
    (RingCost, 4, "lan", 1000, 106 * US),
    (RingCost, 4, "lan,duplex=shared", 1000, 112 * US),
    (RingCost, 4, "lan,host3=latency:1", 0, 1.0),
    (RingCost, 4, "lan,link1-2=latency:2", 0, 2.0),
    (RingCost, 2, "lan,link0-1=latency:0", 0, 0.0),  # the only way has its own
    (RingCost, 4, "lan,link1-2=bandwidth:1000", 1000, 2.0001),  # 250 bytes at 1000 bit/s
    (SharedMemoryCost, 4, ONE_HOST, 0, 2 * US),
    (HierarchicalCost, 4, HOSTS_OF_2, 1000, (2.05 + 104 + 2.1) * US),
]


def test_costs_by_hand() -> None:
    for case in BY_HAND:
        family, size, text, operation, arguments, *wanted = case
        cost = getattr(of(family, size, text), operation)(*arguments)
        assert wanted[0] is ... or cost.seconds == pytest.approx(wanted[0]), case
        for found, expected in ((cost.bytes, wanted[1]), (cost.messages, wanted[2])):
            pairs = [] if expected is ... else zip(found, expected, strict=True)
            assert all(one == other for one, other in pairs if other is not ...), (case, found)
    for family, size, text, nbytes, seconds in CONTROL:
        assert of(family, size, text).control(nbytes) == pytest.approx(seconds), (family, text, nbytes)
    hierarchy = of(HierarchicalCost, 4, HOSTS_OF_2)
    assert hierarchy.reduce_scatter(1000, 4) == hierarchy.mean(1000, 4)


def test_over_all_ranks_each_moves_what_every_group_moves() -> None:
    """And nobody passes on what it does not have yet."""
    for family, size in product((RingCost, TreeCost), (2, 3, 4, 5, 8, 13)):
        algorithm, n = of(family, size, "lan,workers_per_host=3"), 1003
        sums = [sum(getattr(algorithm, name)(n, 4).bytes) for name in ("mean", "all_gather", "reduce_scatter")]
        assert sums == [times * (size - 1) * n * 4 for times in (2, size, 1)], (family, size)
        for source in (0, size - 1):
            cost = algorithm.broadcast(n, 4, source)
            assert (sum(cost.bytes), sum(cost.messages)) == ((size - 1) * n * 4, size - 1), (family, size, source)
        have = {1}
        for edges in of(TreeCost, size)._tree(100, source=1):
            assert {sender for sender, _, _ in edges} <= have, size
            have |= {receiver for _, receiver, _ in edges}
        assert have == set(range(size))


# -- which algorithm a group takes -------------------------------------------------------------------------------------


def every(group: Costs, n: int = 1000) -> list[Cost]:
    """Every operation on [n] float32."""
    mean, gather, scatter = (getattr(group, name)(n, 4) for name in ("mean", "all_gather", "reduce_scatter"))
    return [mean, gather, scatter, group.broadcast(n, 4, 0), group.barrier(), group.json([n] * group.size)]


def test_latency_and_bytes_are_all_that_takes_time() -> None:
    """What 1000 and 100,000 elements take is the same where bandwidth is infinite; and half the bandwidth takes twice as long."""

    def seconds(text: str, n: int = 1000, size: int = 5) -> Any:
        return pytest.approx([cost.seconds for cost in every(costs(text, size), n)])

    for collective, per_host in product(COLLECTIVES, ("1", "2", "all")):
        assert every(costs(f"lan,collective={collective}", 1)) == [Cost(0.0, [0], [0])] * 6
        place = f"workers_per_host={per_host},collective={collective}"
        assert seconds(place).expected == [0.0] * 6, place
        once = seconds(f"latency=1ms,local_latency=1us,{place}")
        assert min(once.expected) > 0, place
        assert once.expected == seconds(f"latency=1ms,local_latency=1us,{place}", 100_000), place
        assert [2 * one for one in once.expected] == seconds(f"latency=2ms,local_latency=2us,{place}"), place
        full, half = (seconds(f"bandwidth={n}e6,local_bandwidth={n}e9,{place}", size=6) for n in (2, 1))
        assert [2 * one for one in full.expected] == half, place
    for collective, name in product(("ring", "tree", "cheapest"), ("mean", "all_gather", "reduce_scatter")):
        group = costs(f"lan,workers_per_host=3,collective={collective}", 7)
        times = [getattr(group, name)(n, 4).seconds for n in (1, 10, 100, 10_000, 262_144, 10**6, 10**7)]
        assert times == sorted(times), (collective, name)


def test_auto_goes_as_the_groups_go() -> None:
    """Shared memory on one host, sockets between hosts, a hierarchy over hosts of several."""
    for collective in COLLECTIVES:
        assert sum(costs(f"lan,collective={collective}", 5).mean(7, 4).bytes) == 224
    assert costs("lan,workers_per_host=4", 4).mean(2560, 4).seconds == pytest.approx(5.536 * US)
    assert costs("lan,workers_per_host=1", 4).mean(1000, 4).seconds == pytest.approx(2 * 124 * US)
    hierarchy = costs(f"{HOSTS_OF_2},collective=hierarchical", 4).mean(1000, 4)
    assert costs(HOSTS_OF_2, 4).mean(1000, 4) == hierarchy
    assert hierarchy.messages == [2, 1, 2, 1]
    assert costs("lan", 4).json([100, 200, 300, 400]) == Cost(pytest.approx(106 * US), [0] * 4, [0] * 4)
    assert costs("lan", 4).barrier() == Cost(1e-4, [0] * 4, [0] * 4)


def test_the_cheapest_is_the_least_of_the_three() -> None:
    """Broadcast of 1 kB to 63 others at 1 Mbit/s: one after the other from one card 0.504 s, six levels of a tree 0.048 s.

    Of 100 MB: six times 800 s in a tree, 800 s and 62 more chunks of 8.39 s along a ring.
    """
    named = [costs(f"bandwidth=1e6,collective={name}", 64) for name in ("hierarchical", "ring", "tree")]
    for n, winner in ((250, 2), (25_000_000, 1)):
        times = [group.broadcast(n, 4, 0).seconds for group in named]
        assert min(times) == times[winner]
        assert costs("bandwidth=1e6,collective=cheapest", 64).broadcast(n, 4, 0) == named[winner].broadcast(n, 4, 0)


def test_the_same_call_is_computed_once_and_lengths_that_always_differ_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = costs("lan", 1000)
    computed, (algorithm,) = [], group._algorithms
    for name in ("mean", "broadcast"):
        plain = getattr(algorithm, name)
        monkeypatch.setattr(algorithm, name, lambda *call, plain=plain: computed.append(call) or plain(*call))
    for _ in range(5):
        group.mean(10_000, 4)
        group.broadcast(10, 4, 3)
    assert computed == [(10_000, 4), (10, 4, 3)]
    group = costs("lan", 2)
    assert max(len(group._known) for n in range(1, 500) if group.mean(n, 4)) <= 64


# -- ledgers of real groups ----------------------------------------------------------------------------------------------

LENGTHS = (7, 1000, 300_000, 1_100_000)  # float32: 28 bytes to 4.4 MB, either side of each limit
OPERATIONS = ("mean", "all_gather", "reduce_scatter", "broadcast")


def counted(group: Any) -> dict[tuple[str, int], tuple[int, int]]:
    """By operation and length: what one rank's ledger says."""

    def totals() -> tuple[int, int]:
        counts = group.ledger.as_dict().values()
        return sum(count["bytes"] for count in counts), sum(count["messages"] for count in counts)

    seen = {}
    try:
        for n in LENGTHS:
            tensor = group.allocate(n, torch.float32)
            calls = (group.mean_, group.all_gather, group.reduce_scatter, lambda t: group.broadcast_(t, group.size - 1))
            for name, call in zip(OPERATIONS, calls, strict=True):
                before = totals()
                call(tensor)
                seen[name, n] = tuple(now - then for now, then in zip(totals(), before, strict=True))
            group.barrier()
    finally:
        group.close()
    return seen  # type: ignore[return-value]


def check_ledgers(algorithm: Any, group_of: Callable[[int], Any]) -> None:
    """What each rank counts is what the model has."""
    size = algorithm.size
    seen = in_threads(size, lambda rank: counted(group_of(rank)))
    for name, n in product(OPERATIONS, LENGTHS):
        cost = getattr(algorithm, name)(n, 4, *([size - 1] if name == "broadcast" else []))
        assert [one[name, n] for one in seen] == list(zip(cost.bytes, cost.messages, strict=True)), (name, n)


def test_the_ledger_of_sockets() -> None:
    for size in (2, 3, 5):
        sockets = mesh(size)
        check_ledgers(of(SocketsCost, size), partial(ring, sockets, timeout_s=30))


def test_the_ledger_of_shared_memory_and_of_hosts_of_two_and_one() -> None:
    layout, sockets = ((0, 1), (2,)), mesh(2)
    memories = [Memory.create(size) for size in (3, 2, 1)]

    def local(memory: int, rank: int, size: int) -> SharedMemoryGroup:
        return SharedMemoryGroup(rank, size, [os.dup(fd) for fd in memories[memory]], timeout_s=30)

    def hierarchical(rank: int) -> HierarchicalGroup:
        host, place = divmod(rank, 2)
        across = ring(sockets, host, timeout_s=30) if place == 0 else None
        return HierarchicalGroup(rank, layout, local(1 + host, place, len(layout[host])), across)

    try:
        check_ledgers(of(SharedMemoryCost, 3, "workers_per_host=all"), lambda rank: local(0, rank, 3))
        check_ledgers(of(HierarchicalCost, 3, "workers_per_host=2"), hierarchical)
    finally:
        for fd in (fd for memory in memories for fd in memory):
            os.close(fd)
