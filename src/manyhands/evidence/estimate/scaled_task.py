"""A task of few numbers that stands in for a real one, simulated so that its messages cost what the real ones would.

A message of n bytes takes α + n·β. A vector k times as short takes the same time if its bytes are counted k times. The
latency α, queues, and the algorithm that a length selects are then those of the real task.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from manyhands.comm.group import Ledger
from manyhands.engines.base import MOST_SECONDS, LaunchSpec, Observer
from manyhands.engines.sim.collectives import Cost
from manyhands.engines.sim.compute import Compute
from manyhands.engines.sim.costs import Costs
from manyhands.engines.sim.driver_client import backward_in_turn
from manyhands.engines.sim.engine import Sim
from manyhands.engines.sim.network import NetworkState, SimNetworkSpec
from manyhands.engines.sim.rendezvous import SimRendezvous
from manyhands.engines.sim.simulation import Simulation
from manyhands.engines.single_process import running_threads
from manyhands.evidence.estimate.message_lengths import CODEC, Lengths, Piece, codec_named
from manyhands.evidence.estimate.model_sizes import ReadingPlan, Shape
from manyhands.strategies.base import Strategy
from manyhands.task import Task
from manyhands.training.joining import join
from manyhands.training.plan import WorkerPlan
from manyhands.training.worker_main import make_loop
from manyhands.worker import Worker

NEVER = 1 << 40
_MOVE = 1e-3


class Vector(nn.Module):
    """One parameter [n]."""

    def __init__(self, n: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(n, dtype=dtype))


class Keeper(torch.optim.Optimizer):
    """Keeps the state of another optimizer, and changes parameters a little: some servers detect a new center by them."""

    def __init__(self, parameters: Any, state: Mapping[str, Any], largest: torch.Size) -> None:
        super().__init__(parameters, {"lr": 0.0})
        self._kept, self._largest = state, largest

    @override
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data += _MOVE
                if self._kept and not self.state[parameter]:
                    self.state[parameter] = {name: self._own(value, parameter) for name, value in self._kept.items()}

    def _own(self, value: Any, parameter: Tensor) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.shape == self._largest:
            return torch.zeros_like(parameter, dtype=value.dtype)
        return torch.zeros(value.shape, dtype=value.dtype)


def stand_in(task: Task, shape: Shape, reading: ReadingPlan, length: int) -> Task:
    """The task with a model of `length` numbers, whose gradient costs nothing. Its rows are not read and take no memory."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        vector: Tensor = model.vector  # type: ignore[assignment]
        return (vector * 0).sum()

    return Task(
        name=task.name,
        model=lambda: Vector(length, shape.dtype),
        loss=loss,
        optimizer=lambda model: Keeper(model.parameters(), shape.state, shape.largest),
        train_data=torch.zeros(1, 1).expand(NEVER if reading.rows is None else reading.rows, 1),
        batch_size=reading.batch_size,
        epochs=NEVER,
        shuffle=False,
        seed=task.seed,
    )


def steady_state(strategy: Strategy) -> Strategy:
    """The strategy without its warm-up, and with the stand-in's codec instead of its own."""
    options = {field.name for field in fields(strategy)}  # type: ignore[arg-type]
    changes: dict[str, Any] = {}
    if "warmup" in options:
        changes["warmup"] = 0
    if codec_named(strategy) != "none":
        changes |= {"compress": CODEC, "feedback": None}
    return replace(strategy, **changes) if changes else strategy  # type: ignore[type-var]


PATIENCE_S = float(MOST_SECONDS)  # virtual seconds: no worker times out, however slow the network
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
    """Train the stand-in of `plan`. Its `step` events have the virtual time and the bytes of the real task.

    Ends when the observer stops it or the plan's steps are done. Raises what `Sim.launch` does.
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
        loop = make_loop(plan.copy_for_thread(), worker)
        join(loop)
        loop.run()

    with running_threads(1), _without_gc(), backward_in_turn():
        ScaledSimulation(engine, launch, lengths).run(program)


@contextmanager
def _without_gc() -> Iterator[None]:
    """Without garbage collection, which is slow with hundreds of workers in one process."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        gc.collect()  # replicas are in reference cycles, and would stay in memory during the next run


class ScaledSimulation(Simulation):
    """One launch, with the costs of the real task."""

    def __init__(self, engine: Sim, plan: LaunchSpec, lengths: Lengths) -> None:
        super().__init__(engine.parts, engine.seed, plan)
        workers = plan.workers
        self.wires = ScaledWires(self.wires.network, workers, plan.shards, lengths)
        costs = ScaledCosts(self.wires, workers, lengths)
        self.meeting = SimRendezvous(self.timeline, costs, self.wires, workers, plan.timeout_s)
        self.servers = self._servers()


class ScaledCosts(Costs):
    """Of the real task's collectives, given the stand-in's."""

    def __init__(self, wires: NetworkState, size: int, lengths: Lengths) -> None:
        super().__init__(wires, size)
        self._lengths = lengths

    @override
    def mean(self, elements: int, item: int) -> Cost:
        return _total([self._piece(piece) for piece in self._lengths.mean(elements, item)])

    @override
    def all_gather(self, elements: int, item: int) -> Cost:
        return super().all_gather(self._lengths.all_gathered(elements, item), item)

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


def _total(costs: list[Cost]) -> Cost:
    return Cost(
        sum(cost.seconds for cost in costs),
        [sum(each) for each in zip(*(cost.bytes for cost in costs), strict=True)],
        [sum(each) for each in zip(*(cost.messages for cost in costs), strict=True)],
    )


class ScaledWires(NetworkState):
    """Messages occupy network cards and links for as long as the real task's."""

    def __init__(self, network: SimNetworkSpec, workers: int, shards: int, lengths: Lengths) -> None:
        super().__init__(network, workers, shards)
        self._lengths = lengths

    @override
    def send(self, source: int, target: int, bytes: int, at: float) -> float:
        return super().send(source, target, self._lengths.message(source, target, bytes), at)


class ScaledLedger(Ledger):
    """Counts the bytes of the real task's messages. The costs of collectives have them already."""

    def __init__(self, lengths: Lengths) -> None:
        super().__init__()
        self._lengths = lengths

    @override
    def add(self, operation: str, bytes: int, messages: int = 1) -> None:
        super().add(
            operation, bytes if operation in _COLLECTIVES else self._lengths.counted_bytes(operation, bytes), messages
        )
