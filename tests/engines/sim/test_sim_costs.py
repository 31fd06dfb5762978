import pytest

from manyhands.engines.sim.costs import Cost, Costs
from manyhands.engines.sim.network import NetworkState, SimNetworkSpec


def costs(text, size):
    return Costs(NetworkState(SimNetworkSpec.parse(text), size, 0), size)


def every(costs, n=1000):
    """Every operation on [n] float32."""
    return [
        costs.mean(n, 4),
        costs.all_gather(n, 4),
        costs.reduce_scatter(n, 4),
        costs.broadcast(n, 4, 0),
        costs.barrier(),
        costs.json([n] * costs.size),
    ]


@pytest.mark.parametrize("collective", ["auto", "cheapest", "ring", "tree", "hierarchical"])
def test_one_worker_costs_nothing(collective):
    assert every(costs(f"lan,collective={collective}", 1)) == [Cost(0.0, [0], [0])] * 6


@pytest.mark.parametrize("collective", ["auto", "cheapest", "ring", "tree", "hierarchical"])
@pytest.mark.parametrize("per_host", ["1", "2", "all"])
def test_a_free_network_takes_no_time(collective, per_host):
    assert [cost.seconds for cost in every(costs(f"workers_per_host={per_host},collective={collective}", 5))] == [
        0.0
    ] * 6


@pytest.mark.parametrize("collective", ["auto", "cheapest", "ring", "tree", "hierarchical"])
@pytest.mark.parametrize("per_host", ["1", "2", "all"])
def test_infinite_bandwidth_leaves_latency(collective, per_host):
    """What 1000 and 100,000 elements take is the same, and twice that with twice the latency."""
    text = f"latency={{}}ms,local_latency={{}}us,workers_per_host={per_host},collective={collective}"
    once, twice = (costs(text.format(n, n), 5) for n in (1, 2))
    assert [cost.seconds for cost in every(once)] == pytest.approx([cost.seconds for cost in every(once, 100_000)])
    assert [cost.seconds for cost in every(twice)] == pytest.approx([2 * cost.seconds for cost in every(once)])
    assert all(cost.seconds > 0 for cost in every(once))


@pytest.mark.parametrize("collective", ["auto", "cheapest", "ring", "tree", "hierarchical"])
def test_no_latency_leaves_bytes(collective):
    """With half the bandwidth all takes twice as long."""
    full, half = (
        every(costs(f"bandwidth={n}e6,local_bandwidth={n}e9,workers_per_host=2,collective={collective}", 6))
        for n in (2, 1)
    )
    wanted = [2 * cost.seconds for cost in full]
    assert [cost.seconds for cost in half] == pytest.approx(wanted)


@pytest.mark.parametrize("collective", ["ring", "tree", "cheapest"])
@pytest.mark.parametrize("name", ["mean", "all_gather", "reduce_scatter"])
def test_more_elements_never_take_less(collective, name):
    group = costs(f"lan,workers_per_host=3,collective={collective}", 7)
    times = [getattr(group, name)(n, 4).seconds for n in (1, 10, 100, 10_000, 262_144, 10**6, 10**7)]
    assert times == sorted(times)


def test_the_ring_of_a_million_on_four():
    """CASE 8: 6,000,000 bytes in 6 messages each."""
    for text in ("lan", "lan,collective=ring"):
        cost = costs(text, 4).mean(1_000_000, 4)
        assert (cost.bytes, cost.messages) == ([6_000_000] * 4, [6] * 4)


def test_seven_on_five():
    """CASE 8: 224 bytes over all ranks, by every algorithm of workers that have a host each."""
    for collective in ("auto", "cheapest", "ring", "tree", "hierarchical"):
        assert sum(costs(f"lan,collective={collective}", 5).mean(7, 4).bytes) == 224


def test_auto_goes_as_the_groups_go():
    """Shared memory on one host reads and writes (2 messages), sockets go directly (2), a hierarchy sends from its first ranks."""
    assert costs("lan,workers_per_host=4", 4).mean(2560, 4).seconds == pytest.approx(5.536e-6)
    assert costs("lan,workers_per_host=1", 4).mean(1000, 4).seconds == pytest.approx(2 * (24e-6 + 100e-6))
    assert costs("lan,workers_per_host=2", 4).mean(1000, 4).messages == [2, 1, 2, 1]
    assert costs("lan,workers_per_host=2", 4).mean(1000, 4) == costs(
        "lan,workers_per_host=2,collective=hierarchical", 4
    ).mean(1000, 4)


def test_the_cheapest_is_the_least_of_the_three():
    """Broadcast of 1 kB to 63 others at 1 Mbit/s: one after the other from one card 0.504 s, six levels of a tree 0.048 s.

    Of 100 MB: six times 800 s in a tree, 800 s and 62 more chunks of 8.39 s along a ring.
    """
    named = [costs(f"bandwidth=1e6,collective={name}", 64) for name in ("hierarchical", "ring", "tree")]
    for n, winner in ((250, 2), (25_000_000, 1)):
        times = [group.broadcast(n, 4, 0).seconds for group in named]
        assert min(times) == times[winner]
        assert costs("bandwidth=1e6,collective=cheapest", 64).broadcast(n, 4, 0) == named[winner].broadcast(n, 4, 0)


def test_json_and_barriers_are_no_payload():
    """1000 bytes over all of 4, 250 to each of three: 6 us and 0.1 ms."""
    group = costs("lan", 4)
    assert group.json([100, 200, 300, 400]) == Cost(pytest.approx(106e-6), [0] * 4, [0] * 4)
    assert group.barrier() == Cost(1e-4, [0] * 4, [0] * 4)


def test_the_same_call_is_computed_once(monkeypatch):
    group = costs("lan", 1000)
    computed, (algorithm,) = [], group._algorithms
    mean, broadcast = algorithm.mean, algorithm.broadcast
    monkeypatch.setattr(algorithm, "mean", lambda *call: computed.append(call) or mean(*call))
    monkeypatch.setattr(algorithm, "broadcast", lambda *call: computed.append(call) or broadcast(*call))
    for _ in range(50):
        group.mean(10_000, 4)
        group.broadcast(10, 4, 3)
    assert computed == [(10_000, 4), (10, 4, 3)]


def test_lengths_that_always_differ_are_forgotten():
    group = costs("lan", 2)
    sizes = {len(group._known) for n in range(1, 500) if group.mean(n, 4)}
    assert max(sizes) <= 64


def test_many_workers_on_many_hosts():
    """1000 workers in 250 hosts: a ring's 1998 steps of 40 bytes between hosts: 1998 · (0.1 ms + 0.32 us)."""
    cost = costs("lan,workers_per_host=4,collective=ring", 1000).mean(10_000, 4)
    assert cost.seconds == pytest.approx(1998 * (1e-4 + 0.32e-6))
    assert sum(cost.bytes) == 2 * 999 * 40_000
