import math

import pytest

from manyhands.engines.sim.network import ALL, PRESETS, NetworkState, SimLink, SimNetworkSpec
from manyhands.errors import BadInput, UnknownName
from refusals import all_refused

EVERYTHING = (
    "latency=1e-4,bandwidth=1Gbit,duplex=shared,workers_per_host=4,servers=own,local_latency=2us,local_bandwidth=8e10,"
    "host3=latency:1e-3/bandwidth:1e8,shard0=bandwidth:10Gbit/s/latency:5us,link0-3=latency:0.1/bandwidth:1Mbit,"
    "link2-shard0=latency:1s,collective=ring"
)


def wires(text: str, workers: int = 4, shards: int = 0) -> NetworkState:
    return NetworkState(SimNetworkSpec.parse(text), workers, shards)


# -- how it is written ---------------------------------------------------------------------------------------------------


def test_what_is_read() -> None:
    parse = SimNetworkSpec.parse
    assert parse(EVERYTHING) == SimNetworkSpec(
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
    for text in ("", "free", *PRESETS, EVERYTHING, "workers_per_host=all", "wan,servers=spread,host0=latency:1"):
        assert parse(str(parse(text))) == parse(text), text
        assert hash(parse(str(parse(text)))) == hash(parse(text)), text
    assert parse("") == parse("free") == SimNetworkSpec()
    assert str(SimNetworkSpec()) == "free"
    lan = parse("lan,duplex=shared")
    assert (lan.latency, lan.bandwidth, lan.duplex) == (1e-4, 1e9, "shared")
    assert parse("workers-per-host=2,lan").workers_per_host == 2
    assert parse("link3-0=latency:1,linkhost4-host2=latency:2").links.keys() == {(0, 3), (2, 4)}


def test_text_changes_only_what_it_names() -> None:
    before = SimNetworkSpec.parse("lan,workers_per_host=4,host3=bandwidth:1e8,link0-3=latency:1")
    after = before.with_text("latency=1s,host3=latency:2s,link0-3=bandwidth:5,host1=latency:0")
    assert (after.latency, after.bandwidth, after.workers_per_host) == (1.0, 1e9, 4)
    assert after.hosts == {3: SimLink(latency=2.0, bandwidth=1e8), 1: SimLink(latency=0.0)}
    assert after.links == {(0, 3): SimLink(latency=1.0, bandwidth=5.0)}
    assert before.hosts == {3: SimLink(bandwidth=1e8)}


REFUSED = {
    "latncy=1": "no option 'latncy'.*did you mean 'latency'.*host3=",
    "ethernet": "presets are free, lan, datacenter, wan",
    "latency=fast": "latency must be a time",
    "bandwidth=100MB": "bandwidth must be a number of bit/s.*8Mbit",
    "collective=star": "collective must be one of auto, cheapest, ring, tree, hierarchical",
    "workers_per_host=0": "workers_per_host must be a whole number of at least 1, or all",
    "host3=1Gbit": "host3 must be .*got '1Gbit'.*write host3=",
    "link0-0=latency:1": "link0-0 names the same host twice: .* local_latency",
}
NO_SENSE = ({"latency": -1.0}, {"latency": math.inf}, {"bandwidth": 0.0}, {"bandwidth": math.nan}, {"duplex": "half"},
            {"links": {(1, 0): SimLink()}})  # fmt: skip


def test_what_is_refused() -> None:
    all_refused(SimNetworkSpec.parse, REFUSED.items())
    with pytest.raises(UnknownName):
        SimNetworkSpec.parse("speed=1")
    for options in NO_SENSE:
        with pytest.raises(BadInput, match="network: "):
            SimNetworkSpec(**options)  # type: ignore[arg-type]
    for text, name in (("host4=latency:1", "host4"), ("link0-9=latency:1", "host9"), ("shard2=latency:1", "shard2")):
        with pytest.raises(BadInput, match=f"{name} does not exist here.*host0 to host3 and shard0 to shard1"):
            wires(text, shards=2)


def test_who_is_where() -> None:
    """Blocks of workers; shards on hosts of their own, or spread over the workers'."""
    net = wires("workers_per_host=4", workers=10, shards=2)
    assert [net.host_of(node) for node in (0, 3, 4, 7, 8, 9, -1, -2)] == [0, 0, 1, 1, 2, 2, -1, -2]
    assert net.hosts == 3
    net = wires("workers_per_host=4,servers=spread", workers=8, shards=3)
    assert [net.host_of(-1 - shard) for shard in range(3)] == [0, 1, 0]
    net = NetworkState(SimNetworkSpec(workers_per_host=ALL), 1000, 0)
    assert (net.hosts, net.host_of(999)) == (1, 0)


# -- when messages arrive ------------------------------------------------------------------------------------------------

HOST_1 = "latency=1,bandwidth=1000,host1=bandwidth:100/latency:3,host2=bandwidth:50"
LINK_0_1 = "bandwidth=1000,host1=latency:3,link0-1=latency:0.5/bandwidth:10"
LOCAL = "latency=9,bandwidth=1,workers_per_host=2,local_latency=0.1,local_bandwidth=1000"
SECOND = "bandwidth=1000"  # bit/s: 125 bytes take a second
# the network, shards, messages (from, to, bytes, when they are sent), when they arrive
ARRIVALS: list[tuple[str, int, list[tuple[int, int, int, float]], list[float]]] = [
    ("latency=0.5ms,bandwidth=1Gbit", 0, [(0, 1, 1_000_000, 2.0)], [2.0085]),  # 8 million bit take 8 ms
    ("", 0, [(0, 1, 10**9, 2.0)], [2.0]),
    ("latency=1ms,bandwidth=1", 0, [(0, 1, 0, 0.0)], [0.001]),
    # within a host 800 bit at 1000 bit/s; the card is not used, and nothing queues
    (LOCAL, 0, [(0, 1, 100, 0.0), (0, 1, 100, 0.0), (0, 2, 0, 0.0)], [0.9, 0.9, 9.0]),
    # the slower card and the slower latency
    (HOST_1, 0, [(0, 1, 100, 0.0)], [8 + 3]),
    (HOST_1, 0, [(1, 2, 100, 0.0)], [16 + 3]),
    # a link of its own goes before the hosts; one that is faster than the cards is as fast as they are
    (LINK_0_1, 0, [(0, 1, 10, 0.0), (1, 2, 0, 10.0)], [8.5, 13.0]),
    ("bandwidth=10,link0-1=bandwidth:1e9", 0, [(0, 1, 10, 0.0)], [8.0]),
    # an incast queues at the server's card; two shards halve the queue; a card ten times as fast takes ten times as many
    *((f"latency=0.25,{SECOND},duplex={duplex}", 1, [(rank, -1, 125, 0.0) for rank in range(4)], [1.25, 2.25, 3.25, 4.25])
      for duplex in ("full", "shared")),
    (SECOND, 2, [(0, -1, 125, 0.0), (1, -1, 125, 0.0), (0, -2, 125, 0.0), (1, -2, 125, 0.0)], [1, 2, 2, 3]),
    (f"{SECOND},shard0=bandwidth:10000", 1, [(rank, -1, 125, 0.0) for rank in range(4)], [1.0, 1.1, 1.2, 1.3]),
    # both directions at once only with full duplex
    (f"{SECOND},duplex=full", 1, [(0, -1, 125, 0.0), (-1, 0, 125, 0.0)], [1, 1]),
    (f"{SECOND},duplex=shared", 1, [(0, -1, 125, 0.0), (-1, 0, 125, 0.0)], [1, 2]),
    # workers of one host share its card: another shard, the same card; another host, the same shard
    (f"{SECOND},workers_per_host=2", 2, [(0, -1, 125, 0.0), (1, -2, 125, 0.0), (2, -1, 125, 0.0), (3, -2, 125, 0.0)],
     [1, 2, 2, 3]),
    (f"latency=5,{SECOND}", 1, [(0, -1, 125, 0.0), (0, -1, 125, 0.5), (0, -1, 125, 10.0)], [6, 7, 16]),  # it runs empty
    # a slow link has its own queue, each direction one, and holds up no other
    (f"{SECOND},link0-1=bandwidth:10", 0, [(0, 1, 125, 0.0), (0, 1, 125, 0.0), (0, 2, 125, 0.0), (1, 0, 125, 0.0)],
     [100, 200, 3, 100]),
]  # fmt: skip


def test_when_messages_arrive() -> None:
    for text, shards, messages, wanted in ARRIVALS:
        net = wires(text, shards=shards)
        assert [net.send(*message) for message in messages] == pytest.approx(wanted), (text, messages)
    assert wires(HOST_1).way(0, 2).latency == 1.0
