"""The simulator, in which the stand-in's messages cost what the real ones would.

A message of n bytes takes α + n·β. So a vector k times as short takes as long where its bytes are counted k times; the
latency α, queues, and the way an algorithm takes by its length are then those of the real one.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from typing_extensions import override

from manyhands.comm.ledger import Ledger
from manyhands.engines.base import MOST_SECONDS, LaunchSpec, Observer
from manyhands.engines.sim.compute import Compute
from manyhands.engines.sim.costs import Cost, Costs
from manyhands.engines.sim.driver_client import backward_in_turn
from manyhands.engines.sim.engine import Sim, Simulation
from manyhands.engines.sim.group import SimRendezvous
from manyhands.engines.sim.network import NetworkState, SimNetworkSpec
from manyhands.evidence.estimate.lengths import Lengths, Piece
from manyhands.training.plan import WorkerPlan
from manyhands.training.worker import make_loop
from manyhands.worker import Worker

PATIENCE_S = float(MOST_SECONDS)
"""Virtual seconds: nobody is late here, however slow the network."""
_COLLECTIVES = ("mean_", "all_reduce_", "all_gather", "reduce_scatter", "broadcast_", "share")


def simulate(
    plan: WorkerPlan,
    workers: int,
    servers: int,
    network: SimNetworkSpec,
    compute: Compute,
    lengths: Lengths,
    observer: Observer,
) -> None:
    """Train the plan's stand-in on so many workers; its `step` events have the real one's virtual time and bytes.

    Until the observer stops it, or the plan's steps are over. Raises what `Sim.launch` does.
    """
    engine = Sim(network=network, compute=lengths.compute(compute))
    launch = LaunchSpec(
        workers=workers,
        server=plan.strategy.server(),
        servers=servers,
        timeout_s=PATIENCE_S,
        device="cpu",
        observer=observer,
        rejoins=False,
    )
    engine.check(launch)

    def program(worker: Worker) -> None:
        worker.group.ledger = ScaledLedger(lengths)
        if worker.server is not None:
            worker.server.ledger = ScaledLedger(lengths)
        make_loop(plan.copy_for_thread(), worker).run()

    with _quiet(), backward_in_turn():
        ScaledSimulation(engine, launch, lengths).run(program)


@contextmanager
def _quiet() -> Iterator[None]:
    """One thread, for vectors of few numbers; and no search for circles meanwhile, of which hundreds of workers make it a slow one."""
    threads, collects = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(1)
    gc.disable()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if collects:
            gc.enable()
        gc.collect()  # replicas are in circles, and would stay beside those of the next run


class ScaledSimulation(Simulation):
    """One launch."""

    def __init__(self, engine: Sim, plan: LaunchSpec, lengths: Lengths) -> None:
        super().__init__(engine, plan)
        workers = plan.workers
        self.wires = ScaledWires(self.wires.network, workers, plan.shards, lengths)
        costs = ScaledCosts(self.wires, workers, lengths)
        self.meeting = SimRendezvous(self.timeline, costs, self.wires, workers, plan.timeout_s)
        self.servers = self._servers()


class ScaledCosts(Costs):
    """Of the collectives that the stand-in's stand for."""

    def __init__(self, wires: NetworkState, size: int, lengths: Lengths) -> None:
        super().__init__(wires, size)
        self._lengths = lengths

    @override
    def mean(self, elements: int, item: int) -> Cost:
        return _one_after_the_other([self._piece(piece) for piece in self._lengths.mean(elements, item)])

    @override
    def all_gather(self, elements: int, item: int) -> Cost:
        return super().all_gather(self._lengths.gathered(elements, item), item)

    @override
    def reduce_scatter(self, elements: int, item: int) -> Cost:
        return super().reduce_scatter(self._lengths.real(elements), item)

    @override
    def broadcast(self, elements: int, item: int, source: int) -> Cost:
        return super().broadcast(self._lengths.real(elements), item, source)

    def _piece(self, piece: Piece) -> Cost:
        match piece.name:
            case "words":
                return self.json([piece.elements])
            case "all_gather":
                return super().all_gather(piece.elements, piece.item)
            case "mean":
                return super().mean(piece.elements, piece.item) if piece.elements else self.barrier()


def _one_after_the_other(costs: list[Cost]) -> Cost:
    if len(costs) == 1:
        return costs[0]
    return Cost(
        sum(cost.seconds for cost in costs),
        [sum(each) for each in zip(*(cost.bytes for cost in costs), strict=True)],
        [sum(each) for each in zip(*(cost.messages for cost in costs), strict=True)],
    )


class ScaledWires(NetworkState):
    """Messages occupy cards and links for as long as those that they stand for."""

    def __init__(self, network: SimNetworkSpec, workers: int, shards: int, lengths: Lengths) -> None:
        super().__init__(network, workers, shards)
        self._lengths = lengths

    @override
    def send(self, source: int, target: int, bytes: int, at: float) -> float:
        return super().send(source, target, self._lengths.message(source, target, bytes), at)


class ScaledLedger(Ledger):
    """Counts what messages stand for; the costs of collectives say so by themselves."""

    def __init__(self, lengths: Lengths) -> None:
        super().__init__()
        self._lengths = lengths

    @override
    def add(self, operation: str, bytes: int, messages: int = 1) -> None:
        super().add(
            operation, bytes if operation in _COLLECTIVES else self._lengths.counted(operation, bytes), messages
        )
