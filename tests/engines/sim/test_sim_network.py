import math

import pytest

from manyhands.engines.sim.network import ALL, PRESETS, NetworkState, SimLink, SimNetworkSpec
from manyhands.errors import BadInput, UnknownName

EVERYTHING = (
    "latency=1e-4,bandwidth=1Gbit,duplex=shared,workers_per_host=4,servers=own,local_latency=2us,local_bandwidth=8e10,"
    "host3=latency:1e-3/bandwidth:1e8,shard0=bandwidth:10Gbit/s/latency:5us,link0-3=latency:0.1/bandwidth:1Mbit,"
    "link2-shard0=latency:1s,collective=ring"
)


def wires(text, workers=4, shards=0):
    return NetworkState(SimNetworkSpec.parse(text), workers, shards)


# -- how it is written ---------------------------------------------------------------------------------------------------


def test_everything_at_once():
    assert SimNetworkSpec.parse(EVERYTHING) == SimNetworkSpec(
        latency=1e-4,
        bandwidth=1e9,
        duplex="shared",
        workers_per_host=4,
        local_latency=2e-6,
        local_bandwidth=8e10,
        hosts={3: SimLink(latency=1e-3, bandwidth=1e8), -1: SimLink(latency=5e-6, bandwidth=1e10)},
        links={(0, 3): SimLink(latency=0.1, bandwidth=1e6), (-1, 2): SimLink(latency=1.0)},
        collective="ring",
    )


@pytest.mark.parametrize(
    "text", ["", "free", *PRESETS, EVERYTHING, "workers_per_host=all", "wan,servers=spread,host0=latency:1"]
)
def test_str_is_what_parse_reads(text):
    network = SimNetworkSpec.parse(text)
    assert SimNetworkSpec.parse(str(network)) == network
    assert hash(SimNetworkSpec.parse(str(network))) == hash(network)


def test_free_is_the_default():
    assert SimNetworkSpec.parse("") == SimNetworkSpec.parse("free") == SimNetworkSpec()
    assert str(SimNetworkSpec()) == "free"


def test_a_preset_and_what_differs():
    lan = SimNetworkSpec.parse("lan,duplex=shared")
    assert (lan.latency, lan.bandwidth, lan.duplex) == (1e-4, 1e9, "shared")
    assert SimNetworkSpec.parse("workers-per-host=2,lan").workers_per_host == 2


def test_text_changes_only_what_it_names():
    before = SimNetworkSpec.parse("lan,workers_per_host=4,host3=bandwidth:1e8,link0-3=latency:1")
    after = before.with_text("latency=1s,host3=latency:2s,link0-3=bandwidth:5,host1=latency:0")
    assert (after.latency, after.bandwidth, after.workers_per_host) == (1.0, 1e9, 4)
    assert after.hosts == {3: SimLink(latency=2.0, bandwidth=1e8), 1: SimLink(latency=0.0)}
    assert after.links == {(0, 3): SimLink(latency=1.0, bandwidth=5.0)}
    assert before.hosts == {3: SimLink(bandwidth=1e8)}


def test_the_lower_host_comes_first():
    assert SimNetworkSpec.parse("link3-0=latency:1,linkhost4-host2=latency:2").links.keys() == {(0, 3), (2, 4)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("latncy=1", "network has no option 'latncy'.*did you mean 'latency'.*host3="),
        ("hosts=1", "network has no option 'hosts'"),
        ("ethernet", "'ethernet' is neither option=value nor a preset; presets are free, lan, datacenter, wan"),
        ("latency=fast", "network: latency must be a time in seconds"),
        ("bandwidth=100MB", "network: bandwidth must be a number of bit/s.*8Mbit"),
        ("duplex=half", "network: duplex must be one of full, shared, not 'half'"),
        ("collective=star", "network: collective must be one of auto, cheapest, ring, tree, hierarchical, not 'star'"),
        ("servers=all", "network: servers must be one of own, spread"),
        ("workers_per_host=0", "workers_per_host must be a whole number of at least 1, or all; got 0"),
        ("workers_per_host=1.5", "workers_per_host must be a whole number"),
        ("host3=1Gbit", "host3 must be latency:TIME, bandwidth:BITS or both.*got '1Gbit'.*write host3="),
        ("host3=latency:x", "host3: latency must be a time"),
        ("link0-0=latency:1", "link0-0 names the same host twice: .* local_latency"),
    ],
)
def test_what_is_refused(text, message):
    with pytest.raises(BadInput, match=message):
        SimNetworkSpec.parse(text)


def test_an_unknown_option_is_an_unknown_name():
    with pytest.raises(UnknownName):
        SimNetworkSpec.parse("speed=1")


@pytest.mark.parametrize(
    "options",
    [
        {"latency": -1.0},
        {"latency": math.inf},
        {"bandwidth": 0.0},
        {"bandwidth": math.nan},
        {"duplex": "half"},
        {"links": {(1, 0): SimLink()}},
    ],
)
def test_numbers_that_make_no_sense_are_refused_from_python_too(options):
    with pytest.raises(BadInput, match="network: "):
        SimNetworkSpec(**options)


# -- who is where --------------------------------------------------------------------------------------------------------


def test_blocks_of_workers_and_a_host_for_each_shard():
    net = wires("workers_per_host=4", workers=10, shards=2)
    assert [net.host_of(node) for node in (0, 3, 4, 7, 8, 9, -1, -2)] == [0, 0, 1, 1, 2, 2, -1, -2]
    assert net.hosts == 3


def test_shards_spread_over_the_workers_hosts():
    net = wires("workers_per_host=4,servers=spread", workers=8, shards=3)
    assert [net.host_of(-1 - shard) for shard in range(3)] == [0, 1, 0]


def test_all_on_one_host():
    net = NetworkState(SimNetworkSpec(workers_per_host=ALL), 1000, 0)
    assert (net.hosts, net.host_of(999)) == (1, 0)


@pytest.mark.parametrize(
    ("text", "name"), [("host4=latency:1", "host4"), ("link0-9=latency:1", "host9"), ("shard2=latency:1", "shard2")]
)
def test_hosts_that_are_not_there(text, name):
    with pytest.raises(
        BadInput, match=f"{name} does not exist here: the hosts are host0 to host3 and shard0 to shard1 .workers: 4, "
    ):
        wires(text, shards=2)


# -- one message -----------------------------------------------------------------------------------------------------------


def test_latency_and_bandwidth():
    """8 · 1,000,000 bit over 1e9 bit/s: 8 ms, and 0.5 ms of latency."""
    assert wires("latency=0.5ms,bandwidth=1Gbit").send(0, 1, 1_000_000, at=2.0) == pytest.approx(2.0085)


def test_a_free_network_takes_no_time():
    assert wires("").send(0, 1, 10**9, at=2.0) == 2.0


def test_no_bytes_take_latency():
    assert wires("latency=1ms,bandwidth=1").send(0, 1, 0, at=0.0) == 0.001


def test_within_a_host():
    """800 bit at 1000 bit/s: 0.8 s, and 0.1 s of latency; the card is not used, and nothing queues."""
    net = wires("latency=9,bandwidth=1,workers_per_host=2,local_latency=0.1,local_bandwidth=1000")
    assert [net.send(0, 1, 100, at=0.0) for _ in range(2)] == [pytest.approx(0.9)] * 2
    assert net.send(0, 2, 0, at=0.0) == 9.0


def test_the_slower_card_and_the_slower_latency():
    """Host 1's card does 100 bit/s with 3 s of latency, host 2's 50 bit/s with 1 s: 800 bit take 16 s and 3 s."""
    net = wires("latency=1,bandwidth=1000,host1=bandwidth:100/latency:3,host2=bandwidth:50")
    assert net.send(0, 1, 100, at=0.0) == pytest.approx(8 + 3)
    assert (
        wires("latency=1,bandwidth=1000,host1=bandwidth:100/latency:3,host2=bandwidth:50").send(1, 2, 100, 0.0)
        == 16 + 3
    )
    assert net.way(0, 2).latency == 1.0


def test_a_link_of_its_own_goes_before_the_hosts():
    """host1 has 3 s of latency, but its link to host 0 0.5 s and 10 bit/s: 80 bit take 8.5 s."""
    net = wires("bandwidth=1000,host1=latency:3,link0-1=latency:0.5/bandwidth:10")
    assert net.send(0, 1, 10, at=0.0) == 8.5
    assert net.send(1, 2, 0, at=10.0) == 13.0


def test_a_link_faster_than_the_cards_is_as_fast_as_they_are():
    assert wires("bandwidth=10,link0-1=bandwidth:1e9").send(0, 1, 10, at=0.0) == 8.0


# -- queues ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplex", ["full", "shared"])
def test_an_incast_queues_at_the_servers_card(duplex):
    """Four workers push 125 bytes, 1 s each at 1000 bit/s, at once: the server's card takes one after the other."""
    net = wires(f"latency=0.25,bandwidth=1000,duplex={duplex}", workers=4, shards=1)
    assert [net.send(rank, -1, 125, at=0.0) for rank in range(4)] == [1.25, 2.25, 3.25, 4.25]


def test_two_shards_halve_the_queue():
    """Two workers push 1 s to each of two shards: each card is busy for 2 s, staggered by 1 s."""
    net = wires("bandwidth=1000", workers=2, shards=2)
    assert [net.send(rank, shard, 125, at=0.0) for shard in (-1, -2) for rank in (0, 1)] == [1.0, 2.0, 2.0, 3.0]


def test_a_card_ten_times_as_fast_takes_ten_times_as_many():
    """Each message takes a worker's card 1 s, the server's 0.1 s: they start 0.1 s apart."""
    net = wires("bandwidth=1000,shard0=bandwidth:10000", workers=4, shards=1)
    arrivals = [net.send(rank, -1, 125, at=0.0) for rank in range(4)]
    assert arrivals == pytest.approx([1.0, 1.1, 1.2, 1.3])


def test_both_directions_at_once_only_with_full_duplex():
    full, shared = (wires(f"bandwidth=1000,duplex={duplex}", workers=1, shards=1) for duplex in ("full", "shared"))
    assert [full.send(0, -1, 125, 0.0), full.send(-1, 0, 125, 0.0)] == [1.0, 1.0]
    assert [shared.send(0, -1, 125, 0.0), shared.send(-1, 0, 125, 0.0)] == [1.0, 2.0]


def test_workers_of_one_host_share_its_card():
    net = wires("bandwidth=1000,workers_per_host=2", workers=4, shards=2)
    assert net.send(0, -1, 125, 0.0) == 1.0
    assert net.send(1, -2, 125, 0.0) == 2.0  # another shard, the same card
    assert net.send(2, -1, 125, 0.0) == 2.0  # another host, the same shard
    assert net.send(3, -2, 125, 0.0) == 3.0


def test_a_queue_runs_empty():
    net = wires("latency=5,bandwidth=1000", workers=1, shards=1)
    assert [net.send(0, -1, 125, at) for at in (0.0, 0.5, 10.0)] == [6.0, 7.0, 16.0]


def test_a_slow_link_has_its_own_queue_and_holds_up_no_other():
    """From host 0 to host 1 a message takes 100 s on its link and 1 s on the cards: two take 200 s, one to host 2 none of that."""
    net = wires("bandwidth=1000,link0-1=bandwidth:10")
    assert [net.send(0, 1, 125, 0.0) for _ in range(2)] == [100.0, 200.0]
    assert net.send(0, 2, 125, 0.0) == 3.0
    assert net.send(1, 0, 125, 0.0) == 100.0  # each direction has the link to itself


def test_nothing_arrives_sooner_with_more_bytes_or_less_bandwidth():
    times = [
        wires(f"latency=1,bandwidth={bandwidth}").send(0, 1, n, 0.0) for bandwidth in (1e6, 1e5) for n in (0, 10, 1000)
    ]
    assert times[:3] == sorted(times[:3])
    assert all(slow >= fast for fast, slow in zip(times[:3], times[3:], strict=True))
