"""How collectives travel, and how long that takes: the alpha-beta model.

A message of n bytes takes alpha + n·beta: a latency, and a time for each byte (The Communication Challenge for MPP:
Intel Paragon and Meiko CS-2, Hockney, 1994). An algorithm is a sequence of steps; a step lasts as long as its slowest
message, and all of a host's messages share its card. Adding up, and what a message costs a processor, is left out.

As in the groups' ledgers, bytes are payload, and control words (barriers, JSON, weights) do not count.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from typing_extensions import override

from manyhands.comm.checks import slice_of
from manyhands.comm.ring.algorithms import CHUNK_BYTES
from manyhands.engines.sim.network import NetworkState

Edge = tuple[int, int, int]
"""(source, target, bytes): positions in an algorithm's list of ranks."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one collective. It is remembered: do not change it."""

    seconds: float  # from the last arrival until all have the result
    bytes: list[int]  # what each rank sends, payload
    messages: list[int]  # a message is one step of the algorithm


class Algorithm(ABC):
    """The collectives of some ranks by one family of algorithms. Costs are in the order of `ranks`, at least two.

    elements: of each rank's tensor, of `item` bytes each; source: a position in `ranks`.
    """

    def __init__(self, wires: NetworkState, ranks: Sequence[int]) -> None:
        self.wires, self.ranks, self.size = wires, list(ranks), len(ranks)
        self.places = [wires.host_of(rank) for rank in ranks]
        self.everybody = _Everybody(wires, self.places)

    @abstractmethod
    def mean(self, elements: int, item: int) -> Cost:
        """All-reduce: over all ranks it moves 2·(size - 1)·elements."""

    @abstractmethod
    def all_gather(self, elements: int, item: int) -> Cost:
        """Over all ranks size·(size - 1)·elements."""

    @abstractmethod
    def reduce_scatter(self, elements: int, item: int) -> Cost:
        """Over all ranks (size - 1)·elements, unless the whole sum is made on the way."""

    @abstractmethod
    def broadcast(self, elements: int, item: int, source: int) -> Cost:
        """Over all ranks (size - 1)·elements."""

    def control(self, nbytes: float) -> float:
        """Seconds until everybody has everybody's control words: `nbytes` over all ranks, from each to each at once."""
        return self.everybody.seconds(nbytes / self.size)

    # -- for algorithms ----------------------------------------------------------------------------------------------

    def pieces(self, elements: int) -> list[int]:
        bounds = [slice_of(position, self.size, elements) for position in range(self.size)]
        return [stop - start for start, stop in bounds]

    def step(self, edges: Sequence[Edge]) -> float:
        """Seconds of messages that all begin at the same time."""
        return max((latency + transmission for latency, transmission in self.times(edges)), default=0.0)

    def times(self, edges: Sequence[Edge]) -> list[tuple[float, float]]:
        """(latency, seconds of the bytes) of each of the messages under way at the same time."""
        sent: Counter[int] = Counter()  # by host
        received = sent if self.wires.network.duplex == "shared" else Counter()
        along: Counter[tuple[int, int]] = Counter()
        for source, target, nbytes in edges:
            here, there = self.places[source], self.places[target]
            if here != there:
                sent[here] += nbytes
                received[there] += nbytes
                along[here, there] += nbytes
        times = []
        for source, target, nbytes in edges:
            here, there = self.places[source], self.places[target]
            way = self.wires.way(here, there)
            bits = 8 * nbytes / way.slowest
            if here != there:
                busiest = (sent[here], way.sender), (along[here, there], way.link), (received[there], way.receiver)
                bits = max(8 * load / bandwidth for load, bandwidth in busiest)
            times.append((way.latency, bits))
        return times

    def nothing(self) -> Cost:
        """Of a tensor without elements: all arrive."""
        return Cost(self.control(0), [0] * self.size, [0] * self.size)

    def from_one(self, seconds: float, source: int, nbytes: int) -> Cost:
        sends = [int(rank == source) for rank in range(self.size)]
        return Cost(seconds, [count * (self.size - 1) * nbytes for count in sends], sends)

    def alike(self, seconds: float, nbytes: int, messages: int) -> Cost:
        return Cost(seconds, [nbytes] * self.size, [messages] * self.size)


class _Everybody:
    """Everyone sends the same to everyone, at once: at most `seconds`, since it takes the worst of each."""

    def __init__(self, wires: NetworkState, places: Sequence[int]) -> None:
        crowd, size = Counter(places), len(places)
        network = wires.network
        crowded = max(crowd.values()) - 1
        self._here = (network.local_latency, 8 * crowded / network.local_bandwidth) if crowded else (0.0, 0.0)
        self._between = (0.0, 0.0)
        if len(crowd) > 1:
            both = 2 if network.duplex == "shared" else 1
            cards = [8 * both * count * (size - count) / wires.card_of(host) for host, count in crowd.items()]
            own = [
                (link.latency, 8 * crowd[one] * crowd[other] / (link.bandwidth or float("inf")))
                for (one, other), link in network.links.items()
                if one in crowd and other in crowd
            ]
            latencies = [latency for latency, _ in own if latency is not None]
            self._between = (
                max([*latencies, _usual_latency(wires, crowd)]),
                max([*cards, *(byte for _, byte in own)]),
            )

    def seconds(self, nbytes: float) -> float:
        """`nbytes` from each to each."""
        return max(latency + nbytes * byte for latency, byte in (self._here, self._between))


def _usual_latency(wires: NetworkState, hosts: Counter[int]) -> float:
    """The greatest between two hosts whose way has none of its own."""
    overridden = Counter(
        host
        for way, link in wires.network.links.items()
        if link.latency is not None and set(way) <= hosts.keys()
        for host in way
    )
    usual = [wires.latency_of(host) for host in hosts if overridden[host] < len(hosts) - 1]
    return max(usual, default=0.0)


class RingCost(Algorithm):
    """Everything goes round a ring of ranks. Bandwidth optimal: Patarasuk and Yuan, Bandwidth Optimal All-reduce
    Algorithms for Clusters of Workstations (2009).
    """

    @override
    def mean(self, elements: int, item: int) -> Cost:
        """A piece goes round and is added to, then the sum goes round: 2·(N - 1) steps of a piece."""
        if not elements:
            return self.nothing()
        pieces, steps = self.pieces(elements), 2 * (self.size - 1)
        sent = [
            (2 * elements - pieces[(r + 1) % self.size] - pieces[(r + 2) % self.size]) * item for r in range(self.size)
        ]
        return Cost(steps * self._round(max(pieces) * item), sent, [steps] * self.size)

    @override
    def all_gather(self, elements: int, item: int) -> Cost:
        steps, nbytes = self.size - 1, elements * item
        return self.alike(steps * self._round(nbytes), steps * nbytes, steps)

    @override
    def reduce_scatter(self, elements: int, item: int) -> Cost:
        pieces, steps = self.pieces(elements), self.size - 1
        sent = [(elements - piece) * item for piece in pieces]
        return Cost(steps * self._round(max(pieces) * item), sent, [steps] * self.size)

    @override
    def broadcast(self, elements: int, item: int, source: int) -> Cost:
        """Chunk by chunk from one to the next."""
        ranks = [(source + distance) % self.size for distance in range(self.size)]
        nbytes = elements * item
        times = self.times([(one, other, nbytes) for one, other in pairwise(ranks)])
        chunk = min(1.0, CHUNK_BYTES / nbytes) if nbytes else 1.0
        seconds = sum(latency + chunk * bits for latency, bits in times) + (1 - chunk) * max(bits for _, bits in times)
        last = ranks[-1]
        sends = [int(rank != last) for rank in range(self.size)]
        return Cost(seconds, [nbytes * count for count in sends], sends)

    def _round(self, nbytes: int) -> float:
        """Everyone sends so much to the next."""
        return self.step([(rank, (rank + 1) % self.size, nbytes) for rank in range(self.size)])


class TreeCost(Algorithm):
    """In ceil(log2 N) steps: binomial trees, and Bruck's all-gather. Thakur, Rabenseifner, Gropp, Optimization of
    Collective Communication Operations in MPICH (2005).
    """

    def __init__(self, wires: NetworkState, ranks: Sequence[int]) -> None:
        super().__init__(wires, ranks)
        self.depth = (self.size - 1).bit_length()

    @override
    def mean(self, elements: int, item: int) -> Cost:
        """To rank 0 along a binomial tree, and back."""
        if not elements:
            return self.nothing()
        down = self.broadcast(elements, item, 0)
        up = [
            [(target, source, nbytes) for source, target, nbytes in edges] for edges in self._tree(elements * item, 0)
        ]
        seconds = down.seconds + sum(map(self.step, up))
        ups = [int(rank != 0) for rank in range(self.size)]
        sent = [nbytes + elements * item * count for nbytes, count in zip(down.bytes, ups, strict=True)]
        return Cost(seconds, sent, [a + b for a, b in zip(down.messages, ups, strict=True)])

    @override
    def all_gather(self, elements: int, item: int) -> Cost:
        """At step k a rank passes its 2^k tensors to the rank 2^k before it; at the last step, what is missing."""
        nbytes = elements * item
        return self.alike(self._doubling(nbytes), (self.size - 1) * nbytes, self.depth)

    @override
    def reduce_scatter(self, elements: int, item: int) -> Cost:
        """The all-gather backwards."""
        pieces = self.pieces(elements)
        seconds = self._doubling(max(pieces) * item)
        return Cost(seconds, [(elements - piece) * item for piece in pieces], [self.depth] * self.size)

    @override
    def broadcast(self, elements: int, item: int, source: int) -> Cost:
        seconds, messages = 0.0, [0] * self.size
        for edges in self._tree(elements * item, source):
            seconds += self.step(edges)
            for sender, _, _ in edges:
                messages[sender] += 1
        return Cost(seconds, [count * elements * item for count in messages], messages)

    def _tree(self, nbytes: int, source: int) -> list[list[Edge]]:
        """By step, the farthest first, so that hosts are left early and only once."""
        steps = []
        for distance in (1 << level for level in reversed(range(self.depth))):
            pairs = [(at, at + distance) for at in range(0, self.size - distance, 2 * distance)]
            steps.append([((a + source) % self.size, (b + source) % self.size, nbytes) for a, b in pairs])
        return steps

    def _doubling(self, nbytes: int) -> float:
        seconds = 0.0
        for distance in (1 << level for level in range(self.depth)):
            load = min(distance, self.size - distance) * nbytes
            seconds += self.step([(rank, (rank - distance) % self.size, load) for rank in range(self.size)])
        return seconds
