"""What a message costs on a network that is described, not there: links, network cards, hosts.

A host has a card, which all its workers share. A message between two hosts occupies the sender's card and the
receiver's, each for as long as the bytes take on that card alone, and waits until both are free, first come first
served. So workers that push to one server at the same time queue at its card. What several messages share fairly in
truth is served one after the other here: the last one arrives at the same time where the cards are alike.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, Self

from manyhands.engines.quantities import expect_number, read_bandwidth, read_items, read_seconds, shown, unknown
from manyhands.errors import BadInput, is_whole
from manyhands.spec import convert

ALL = 1 << 40
"""As `workers_per_host`: all workers are on one host."""

Duplex = Literal["full", "shared"]
Servers = Literal["own", "spread"]
Collective = Literal["auto", "cheapest", "ring", "tree", "hierarchical"]
_CHOICES: dict[str, Any] = {"duplex": Duplex, "servers": Servers, "collective": Collective}
_OVERRIDES = ("host3=latency:1ms/bandwidth:100Mbit", "shard0=…", "link0-3=…", "link0-shard0=…")


@dataclass(frozen=True, kw_only=True)
class SimLink:
    """What differs on the way between two hosts, or at one host's card. None: as in the rest of the network."""

    latency: float | None = None  # seconds
    bandwidth: float | None = None  # bit/s, each way

    def __post_init__(self) -> None:
        if self.latency is not None:
            expect_number(self.latency, "latency (seconds)", least=0)
        if self.bandwidth is not None:
            _expect_bandwidth(self.bandwidth, "bandwidth")

    def __str__(self) -> str:
        options = {"latency": self.latency, "bandwidth": self.bandwidth}
        return "/".join(f"{name}:{shown(value)}" for name, value in options.items() if value is not None)


@dataclass(frozen=True, kw_only=True)
class SimNetworkSpec:
    """A network; frozen, so that it is an engine's option. Its default is free: every message arrives at once.

    Worker rank r is on host r // workers_per_host. Server shard s has a host of its own, whose number is -1 - s, or is
    on one of the workers' hosts. A way's bandwidth is the least of both cards' and its own override's; its latency is
    its own override's, else the greater one of both hosts'. `str()` gives what `parse` reads.

    Raises BadInput where a number makes no sense.
    """

    latency: float = 0.0  # seconds between two hosts
    bandwidth: float = math.inf  # bit/s of a host's card
    duplex: Duplex = "full"  # shared: what a card sends and receives share its bandwidth
    workers_per_host: int = 1
    servers: Servers = "own"  # own: each shard has a host; spread: shard s is on worker host s % hosts
    local_latency: float = 0.0  # seconds between two nodes of one host
    local_bandwidth: float = math.inf  # bit/s of each of them, whatever the others do
    hosts: Mapping[int, SimLink] = field(default_factory=dict, hash=False)  # cards that differ
    links: Mapping[tuple[int, int], SimLink] = field(default_factory=dict, hash=False)
    """Ways between two hosts (lower, higher) that differ: each direction has this bandwidth to itself."""
    collective: Collective = "auto"  # see costs.py

    def __post_init__(self) -> None:
        for name in ("latency", "local_latency"):
            expect_number(getattr(self, name), f"network: {name} (seconds)", least=0)
        for name in ("bandwidth", "local_bandwidth"):
            _expect_bandwidth(getattr(self, name), f"network: {name}")
        for name, choices in _CHOICES.items():
            convert(f"network: {name}", str(getattr(self, name)), choices)
        if not is_whole(self.workers_per_host):
            raise BadInput(
                f"network: workers_per_host must be a whole number of at least 1, or all; got {self.workers_per_host!r}"
            )
        for one, other in self.links:
            if one >= other:
                raise BadInput(
                    f"network: a link must name two different hosts, the lower number first; got {(one, other)}"
                )

    @classmethod
    def parse(cls, text: str) -> Self:
        """`latency=1ms,bandwidth=1Gbit,workers_per_host=4,host3=bandwidth:100Mbit,link0-3=latency:0.1/bandwidth:1e6`

        Times are seconds, or 2s, 10ms, 50us; bandwidths are bit/s, or 100Mbit, 1Gbit, inf. `hostK` is a host's card,
        `shardK` that of a server shard with a host of its own, `linkA-B` a way between two hosts. The first word may be
        a preset (`lan,duplex=shared`): free, lan, datacenter, wan. Raises BadInput, and UnknownName for an option.
        """
        return cls().with_text(text)

    def with_text(self, text: str) -> Self:
        """This network where `text`, written as for `parse`, says nothing else. Raises as `parse` does."""
        changes: dict[str, Any] = {}
        hosts, links = dict(self.hosts), dict(self.links)
        for name, value in read_items(text, "network"):
            if not value and name in PRESETS:
                changes.update(PRESETS[name])
            elif not value:
                raise BadInput(
                    f"network: {name!r} is neither option=value nor a preset; presets are {', '.join(PRESETS)}: "
                    "write lan, or latency=1ms,bandwidth=1Gbit"
                )
            elif found := re.fullmatch(r"(host|shard)(\d+)", name):
                node = _host(name)
                hosts[node] = _read_link(name, value, hosts.get(node))
            elif found := re.fullmatch(r"link((?:host|shard)?\d+)-((?:host|shard)?\d+)", name):
                one, other = sorted((_host(found[1]), _host(found[2])))
                if one == other:
                    raise BadInput(
                        f"network: {name} names the same host twice: for the link inside a host, set local_latency and "
                        "local_bandwidth"
                    )
                links[one, other] = _read_link(name, value, links.get((one, other)))
            else:
                option = name.replace("-", "_")
                changes[option] = _read_option(option, value)
        return replace(self, **changes, hosts=hosts, links=links)

    def __str__(self) -> str:
        parts = []
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name not in ("hosts", "links") and value != entry.default:
                text = "all" if value == ALL else shown(value) if isinstance(value, float) else str(value)
                parts.append(f"{entry.name}={text}")
        parts += [f"{_name(host)}={link}" for host, link in sorted(self.hosts.items()) if str(link)]
        parts += [
            f"link{_name(a).removeprefix('host')}-{_name(b).removeprefix('host')}={link}"
            for (a, b), link in sorted(self.links.items())
            if str(link)
        ]
        return ",".join(parts) or "free"


_MEMORY = {"local_latency": 2e-6, "local_bandwidth": 8e10}

PRESETS: dict[str, dict[str, float]] = {
    "free": {"latency": 0.0, "bandwidth": math.inf, "local_latency": 0.0, "local_bandwidth": math.inf},
    "lan": {"latency": 1e-4, "bandwidth": 1e9, **_MEMORY},
    "datacenter": {"latency": 2e-5, "bandwidth": 2.5e10, **_MEMORY},
    "wan": {"latency": 2.5e-2, "bandwidth": 1e8, **_MEMORY},
}
"""Round numbers to start with: Ethernet in an office, in a machine room, and a line between cities."""


class Way(NamedTuple):
    """From one host to another, without anybody else: bandwidths in bit/s."""

    latency: float  # seconds
    sender: float  # of the card
    link: float  # of the way itself: inf unless it is overridden
    receiver: float  # of the card
    slowest: float


class NetworkState:
    """The network of one simulation, with the cards' queues. Nodes: worker rank r is r, server shard s is -1 - s.

    Raises BadInput for a network with overrides of hosts that this simulation does not have.
    """

    def __init__(self, network: SimNetworkSpec, workers: int, shards: int) -> None:
        self.network, self.workers, self.shards = network, workers, shards
        self.hosts = -(-workers // network.workers_per_host)
        """Of workers: they have the numbers 0 … hosts - 1."""
        shards_apart = shards if network.servers == "own" else 0
        there = set(range(-shards_apart, self.hosts))
        for host in [*network.hosts, *(host for way in network.links for host in way)]:
            if host not in there:
                last = f" and shard0 to shard{shards_apart - 1}" if shards_apart else ""
                raise BadInput(
                    f"network: {_name(host)} does not exist here: the hosts are host0 to host{self.hosts - 1}{last} "
                    f"(workers: {workers}, on each host: {network.workers_per_host}). Name one of those, or leave it "
                    "out"
                )
        self._out: dict[int, float] = {}  # by host: when its card is free
        self._in = self._out if network.duplex == "shared" else {}
        self._link: dict[tuple[int, int], float] = {}  # of those with a bandwidth of their own
        self._ways: dict[tuple[int, int], Way] = {}
        self.cut_until: dict[int, float] = {}
        """By host that was cut off: when messages to and from others pass again."""

    def cut(self, host: int, until: float) -> None:
        """Nothing passes between this host and others before `until`: it arrives later."""
        self.cut_until[host] = max(until, self.cut_until.get(host, 0.0))

    def passes_at(self, hosts: Collection[int]) -> float:
        """When messages pass between all of these hosts, cuts alone considered; 0: always, or there is one host only."""
        return max((self.cut_until.get(host, 0.0) for host in hosts), default=0.0) if len(hosts) > 1 else 0.0

    def host_of(self, node: int) -> int:
        """The number of a node's host; negative for a server shard with a host of its own."""
        if node >= 0:
            return node // self.network.workers_per_host
        return node if self.network.servers == "own" else (-1 - node) % self.hosts

    def latency_of(self, host: int) -> float:
        """Seconds of messages from or to a host, where the way and the other host do not say otherwise."""
        own = self.network.hosts.get(host, SimLink()).latency
        return self.network.latency if own is None else own

    def card_of(self, host: int) -> float:
        """bit/s of a host's card."""
        own = self.network.hosts.get(host, SimLink()).bandwidth
        return self.network.bandwidth if own is None else own

    def way(self, here: int, there: int) -> Way:
        """From host to host; between two nodes of one host where both are the same."""
        if (here, there) not in self._ways:
            self._ways[here, there] = self._way(here, there)
        return self._ways[here, there]

    def send(self, source: int, target: int, bytes: int, at: float) -> float:
        """When a message that is given to the network at `at` has arrived (seconds); it occupies both cards meanwhile.

        Between hosts it starts when both cards are free, and arrives after 8·bytes/bandwidth + latency; each card is
        occupied for 8·bytes/(its own bandwidth). A way with a bandwidth of its own has a queue behind the cards, so
        that one slow way holds up no other. On one host nothing queues. First come is first called.
        """
        here, there = self.host_of(source), self.host_of(target)
        way, bits = self.way(here, there), 8 * bytes
        if here == there:
            return at + bits / way.slowest + way.latency
        start = max(at, self._out.get(here, 0.0), self._in.get(there, 0.0))
        if self.cut_until:
            start = max(start, self.passes_at({here, there}))
        self._out[here] = start + bits / way.sender
        self._in[there] = start + bits / way.receiver
        if way.link < math.inf:
            start = max(start, self._link.get((here, there), 0.0))
            self._link[here, there] = start + bits / way.link
        return start + bits / way.slowest + way.latency

    def _way(self, here: int, there: int) -> Way:
        network = self.network
        if here == there:
            return Way(network.local_latency, math.inf, network.local_bandwidth, math.inf, network.local_bandwidth)
        own = network.links.get((min(here, there), max(here, there)), SimLink())
        latency = max(self.latency_of(here), self.latency_of(there)) if own.latency is None else own.latency
        bandwidths = self.card_of(here), own.bandwidth or math.inf, self.card_of(there)
        return Way(latency, *bandwidths, min(bandwidths))


def _read_option(name: str, text: str) -> Any:
    if name in ("latency", "local_latency"):
        return read_seconds(text, f"network: {name}")
    if name in ("bandwidth", "local_bandwidth"):
        return read_bandwidth(text, f"network: {name}")
    if name == "workers_per_host":
        return ALL if text == "all" else convert(f"network: {name}", text, int)
    if name in _CHOICES:
        return convert(f"network: {name}", text, _CHOICES[name])
    valid = [entry.name for entry in fields(SimNetworkSpec) if entry.name not in ("hosts", "links")]
    raise unknown(name, "network", [*valid, *_OVERRIDES])


def _read_link(name: str, text: str, before: SimLink | None) -> SimLink:
    link = before or SimLink()
    for part in re.split(r"/(?!s\b)", text):
        what, colon, value = part.partition(":")
        if what == "latency" and colon:
            link = replace(link, latency=read_seconds(value, f"network: {name}: latency"))
        elif what == "bandwidth" and colon:
            link = replace(link, bandwidth=read_bandwidth(value, f"network: {name}: bandwidth"))
        else:
            raise BadInput(
                f"network: {name} must be latency:TIME, bandwidth:BITS or both with / between them; got {text!r}: "
                f"write {name}=latency:1ms/bandwidth:100Mbit"
            )
    return link


def _host(name: str) -> int:
    """`3`, `host3` → 3; `shard0` → -1"""
    number = int(re.sub(r"\D", "", name))
    return -1 - number if name.startswith("shard") else number


def _name(host: int) -> str:
    return f"host{host}" if host >= 0 else f"shard{-1 - host}"


def _expect_bandwidth(value: float, what: str) -> None:
    if value != math.inf:
        expect_number(value, f"{what} (bit/s)", above=0)
