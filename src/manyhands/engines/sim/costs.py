"""What a collective costs on a network, by its algorithm. How each travels: collectives.py and built_collectives.py.

auto          as manyhands' own groups travel: shared memory on one host; sockets where each worker has a host (two
              workers swap, small tensors go directly, large ones round a ring); else the hierarchy of both
hierarchical  the same
ring          a ring of all workers, whatever the number of bytes
tree          binomial trees of all workers
cheapest      for each call the quickest one of ring, tree and hierarchical
"""

from __future__ import annotations

from manyhands.engines.sim.built_collectives import HierarchicalCost, SharedMemoryCost, SocketsCost
from manyhands.engines.sim.collectives import Algorithm, Cost, RingCost, TreeCost
from manyhands.engines.sim.network import Collective, NetworkState

__all__ = ["Cost", "Costs"]

_KEPT = 64  # costs remembered: a run has few lengths, but for codecs that choose them anew each time


class Costs:
    """Of the collectives of workers 0 … size - 1, by the network's `collective`. Pure, and remembers what it computed.

    Costs are of a network that carries nothing else at the same time: collectives do not wait for messages to a
    server, nor those for collectives. One worker costs nothing.
    """

    def __init__(self, wires: NetworkState, size: int) -> None:
        self.size = size
        self._algorithms = _algorithms(wires, size, wires.network.collective) if size > 1 else []
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


def _algorithms(wires: NetworkState, size: int, collective: Collective) -> list[Algorithm]:
    """Of which each call takes the cheapest."""
    ranks = range(size)
    match collective:
        case "ring":
            return [RingCost(wires, ranks)]
        case "tree":
            return [TreeCost(wires, ranks)]
        case "cheapest":
            return [_own(wires, size), RingCost(wires, ranks), TreeCost(wires, ranks)]
        case "auto" | "hierarchical":
            return [_own(wires, size)]


def _own(wires: NetworkState, size: int) -> Algorithm:
    """As this project's own groups."""
    hosts, ranks = wires.host_of(size - 1) + 1, range(size)
    if hosts == 1:
        return SharedMemoryCost(wires, ranks)
    return SocketsCost(wires, ranks) if hosts == size else HierarchicalCost(wires, ranks)
