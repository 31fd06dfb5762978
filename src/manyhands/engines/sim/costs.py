"""What a collective costs on a network, by its algorithm.

Rings and trees are in collectives.py; this project's own groups are here, with bytes as their ledgers count them.

auto          as manyhands' own groups travel: shared memory on one host; sockets where each worker has a host (two
              workers swap, small tensors go directly, large ones round a ring); else the hierarchy of both
hierarchical  the same
ring          a ring of all workers, whatever the number of bytes
tree          binomial trees of all workers
cheapest      for each call the quickest one of ring, tree and hierarchical
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from typing_extensions import override

from manyhands.comm.ring.algorithms import DIRECT_BYTES, SWAP_BYTES
from manyhands.engines.sim.collectives import Algorithm, Cost, RingCost, TreeCost
from manyhands.engines.sim.network import Collective, NetworkState

_KEPT = 64  # costs remembered: a run has few lengths, but for codecs that choose them anew each time
_ALIGNED = 64  # elements: as shared memory cuts slices


class Costs:
    """Of the collectives of some workers, by the network's `collective`. Pure, and remembers what it computed.

    Costs are of a network that carries nothing else at the same time: collectives do not wait for messages to a
    server, nor those for collectives. One worker costs nothing.
    """

    def __init__(self, wires: NetworkState, size: int, nodes: Sequence[int] | None = None) -> None:
        """nodes: of the network, in the order of the ranks; None: 0 … size - 1."""
        self.size = size
        nodes = range(size) if nodes is None else nodes
        self._algorithms = _algorithms(wires, nodes, wires.network.collective) if size > 1 else []
        self._nothing = [0] * size
        self._known: dict[tuple[str | int, ...], Cost] = {}

    def mean(self, elements: int, item: int) -> Cost:
        """All-reduce of [elements] numbers of `item` bytes; 2 bytes are taken for bfloat16 or float16."""
        return self._cost("mean", elements, item)

    def all_gather(self, elements: int, item: int) -> Cost:
        """[elements] from every rank to every rank."""
        return self._cost("all_gather", elements, item)

    def reduce_scatter(self, elements: int, item: int) -> Cost:
        """[elements] of each rank added up, a slice to each."""
        return self._cost("reduce_scatter", elements, item)

    def broadcast(self, elements: int, item: int, source: int) -> Cost:
        """[elements] from rank `source` to all others."""
        return self._cost("broadcast", elements, item, source)

    def barrier(self) -> Cost:
        """Nothing but latency."""
        return self._control(0)

    def json(self, lengths: list[int]) -> Cost:
        """All-gather of values of so many bytes each. As in the groups' ledgers, they are no payload."""
        return self._control(sum(lengths))

    def _control(self, nbytes: int) -> Cost:
        seconds = min((algorithm.control(nbytes) for algorithm in self._algorithms), default=0.0)
        return Cost(seconds, self._nothing, self._nothing)

    def _cost(self, name: str, *arguments: int) -> Cost:
        if not self._algorithms:
            return Cost(0.0, self._nothing, self._nothing)
        key: tuple[str | int, ...] = (name, *arguments)
        found = self._known.get(key)
        if found is None:
            if len(self._known) == _KEPT:
                self._known.clear()
            costs = [getattr(algorithm, name)(*arguments) for algorithm in self._algorithms]
            found = self._known[key] = min(costs, key=lambda cost: cost.seconds)
        return found


def _algorithms(wires: NetworkState, ranks: Sequence[int], collective: Collective) -> list[Algorithm]:
    """Of which each call takes the cheapest."""
    match collective:
        case "ring":
            return [RingCost(wires, ranks)]
        case "tree":
            return [TreeCost(wires, ranks)]
        case "cheapest":
            return [_own(wires, ranks), RingCost(wires, ranks), TreeCost(wires, ranks)]
        case "auto" | "hierarchical":
            return [_own(wires, ranks)]


def _own(wires: NetworkState, ranks: Sequence[int]) -> Algorithm:
    """As this project's own groups."""
    hosts = len({wires.host_of(rank) for rank in ranks})
    if hosts == 1:
        return SharedMemoryCost(wires, ranks)
    return SocketsCost(wires, ranks) if hosts == len(ranks) else HierarchicalCost(wires, ranks)


# -- as this project's own groups do it --------------------------------------------------------------------------------


class SocketsCost(RingCost):
    """As `RingGroup` does it: all are linked with all, small tensors travel directly, large ones round the ring."""

    @override
    def mean(self, elements: int, item: int) -> Cost:
        """Two ranks swap up to 4 MiB; up to 1 MiB, and 16-bit numbers, go to the owner of each piece and back."""
        nbytes = elements * item
        if self.size == 2 and 0 < nbytes <= SWAP_BYTES:
            return self.alike(self.everybody.seconds(nbytes), nbytes, 1)
        if not elements or (nbytes > DIRECT_BYTES and (item != 2 or self.size == 2)):
            return super().mean(elements, item)
        pieces = self.pieces(elements)
        sent = [(elements + (self.size - 2) * piece) * item for piece in pieces]
        return Cost(2 * self.everybody.seconds(max(pieces) * item), sent, [2] * self.size)

    @override
    def all_gather(self, elements: int, item: int) -> Cost:
        """Round the ring above 1 MiB, as it does between two ranks at once."""
        nbytes = elements * item
        if nbytes > DIRECT_BYTES and self.size > 2:
            return super().all_gather(elements, item)
        return self.alike(self.everybody.seconds(nbytes), (self.size - 1) * nbytes, 1)

    @override
    def reduce_scatter(self, elements: int, item: int) -> Cost:
        pieces = self.pieces(elements)
        sent = [(elements - piece) * item for piece in pieces]
        return Cost(self.everybody.seconds(max(pieces) * item), sent, [1] * self.size)

    @override
    def broadcast(self, elements: int, item: int, source: int) -> Cost:
        """Directly to all up to 1 MiB."""
        nbytes = elements * item
        if nbytes > DIRECT_BYTES:
            return super().broadcast(elements, item, source)
        seconds = self.step([(source, rank, nbytes) for rank in range(self.size) if rank != source])
        return self.from_one(seconds, source, nbytes)


class SharedMemoryCost(Algorithm):
    """As `SharedMemoryGroup` does it: all arrive, each rank moves its part in memory that all map, all are done."""

    @override
    def mean(self, elements: int, item: int) -> Cost:
        """Each rank reads its slice from all others, and writes the result into all of them."""
        if not elements:
            return self.nothing()
        length = -(-elements // (self.size * _ALIGNED)) * _ALIGNED
        ends = [min(elements, rank * length) for rank in range(self.size + 1)]
        slices = [stop - start for start, stop in pairwise(ends)]
        moved = [2 * (self.size - 1) * count * item for count in slices]
        return Cost(self._moving(max(moved)), moved, [2] * self.size)

    @override
    def all_gather(self, elements: int, item: int) -> Cost:
        read = (self.size - 1) * elements * item
        return self.alike(self._moving(read), read, 1)

    @override
    def reduce_scatter(self, elements: int, item: int) -> Cost:
        read = [(self.size - 1) * piece * item for piece in self.pieces(elements)]
        return Cost(self._moving(max(read)), read, [1] * self.size)

    @override
    def broadcast(self, elements: int, item: int, source: int) -> Cost:
        """All read at the same time; it counts where it comes from."""
        return self.from_one(self._moving(elements * item), source, elements * item)

    @override
    def control(self, nbytes: float) -> float:
        """All read what all have written."""
        network = self.wires.network
        return network.local_latency + 8 * nbytes / network.local_bandwidth

    def spread(self, elements: int, item: int) -> float:
        """Seconds of a mean in which one rank alone has weight: each reads its slice and writes it to all others."""
        return self._moving(elements * item)

    def _moving(self, nbytes: int) -> float:
        network = self.wires.network
        return 2 * network.local_latency + 8 * nbytes / network.local_bandwidth


class HierarchicalCost(Algorithm):
    """As `HierarchicalGroup` does it: in shared memory on each host, and between the hosts' first ranks, by sockets."""

    def __init__(self, wires: NetworkState, ranks: Sequence[int]) -> None:
        super().__init__(wires, ranks)
        members: dict[int, list[int]] = {}
        for position, host in enumerate(self.places):
            members.setdefault(host, []).append(position)
        self._members = list(members.values())
        self._local = [
            SharedMemoryCost(wires, [ranks[p] for p in host]) if len(host) > 1 else None for host in self._members
        ]
        self._across = SocketsCost(wires, [ranks[host[0]] for host in self._members])

    @override
    def mean(self, elements: int, item: int) -> Cost:
        """A mean on each host, one between hosts, and the result spread on each host."""
        across = self._across.mean(elements, item)
        up = max((local.mean(elements, item).seconds for local in self._local if local), default=0.0)
        down = max((local.spread(elements, item) for local in self._local if local), default=0.0)
        return self._up_and_down(up + across.seconds + down, across, elements * item)

    @override
    def all_gather(self, elements: int, item: int) -> Cost:
        """On each host, then host by host to the others, which spread it."""
        nbytes = elements * item
        rounds = [
            self._across.broadcast(len(host) * elements, item, number) for number, host in enumerate(self._members)
        ]
        here = [
            local.all_gather(elements, item).seconds
            + local.broadcast((self.size - local.size) * elements, item, 0).seconds
            for local in self._local
            if local
        ]
        seconds = sum(round.seconds for round in rounds) + max(here, default=0.0)
        sent, messages = [0] * self.size, [0] * self.size
        for number, host in enumerate(self._members):
            for position in host:
                leads = position == host[0]
                others = self.size - len(host) if leads else 0
                sent[position] = (len(host) - 1) * (nbytes + others * nbytes)
                messages[position] = int(sent[position] > 0)
            sent[host[0]] += sum(round.bytes[number] for round in rounds)
            messages[host[0]] += sum(round.messages[number] for round in rounds)
        return Cost(seconds, sent, messages)

    @override
    def reduce_scatter(self, elements: int, item: int) -> Cost:
        """The whole sum."""
        return self.mean(elements, item)

    @override
    def broadcast(self, elements: int, item: int, source: int) -> Cost:
        """On the source's host, between the hosts, on the others."""
        there = next(number for number, host in enumerate(self._members) if source in host)
        across, nbytes = self._across.broadcast(elements, item, there), elements * item
        moved = [local.broadcast(elements, item, 0).seconds if local else 0.0 for local in self._local]
        elsewhere = max((seconds for number, seconds in enumerate(moved) if number != there), default=0.0)
        sent, messages = [0] * self.size, [0] * self.size
        for number, host in enumerate(self._members):
            first = source if number == there else host[0]
            sent[host[0]], messages[host[0]] = across.bytes[number], across.messages[number]
            sent[first] += (len(host) - 1) * nbytes
            messages[first] += int(len(host) > 1 and nbytes > 0)
        return Cost(moved[there] + across.seconds + elsewhere, sent, messages)

    @override
    def control(self, nbytes: float) -> float:
        """On each host, between the first ranks, and to all."""
        here = [
            local.control(nbytes * local.size / self.size) + local.control(nbytes) for local in self._local if local
        ]
        return max(here, default=0.0) + self._across.control(nbytes)

    def _up_and_down(self, seconds: float, across: Cost, nbytes: int) -> Cost:
        sent, messages = [nbytes] * self.size, [int(nbytes > 0)] * self.size
        for number, host in enumerate(self._members):
            sent[host[0]] = (len(host) - 1) * nbytes + across.bytes[number]
            messages[host[0]] = int(len(host) > 1 and nbytes > 0) + across.messages[number]
        return Cost(seconds, sent, messages)
