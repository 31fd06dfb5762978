"""What groups, server and leases take on this machine: small programs on real workers, and the simulator's constants for them."""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from manyhands import rng
from manyhands.comm.group import Group
from manyhands.comm.ring.group import RingGroup
from manyhands.comm.ring.links import connect_all
from manyhands.data.leases import Segment
from manyhands.engines.driver.run_monitor import USER
from manyhands.engines.sim.costs import Cost, Costs
from manyhands.engines.sim.network import ALL, NetworkState, SimNetworkSpec
from manyhands.errors import BadInput
from manyhands.evidence.calibrate.fit import Terms, two_terms
from manyhands.evidence.calibrate.observe import ObservedOn
from manyhands.replica.layout import Layout
from manyhands.server.base import ServerSpec
from manyhands.task import Task
from manyhands.training.plan import build_model
from manyhands.transport.credentials import Credentials
from manyhands.transport.listener import Listener
from manyhands.worker import Worker

SIZES = tuple(4 << 10 + 3 * i for i in range(9))  # bytes of means: 4 KB, 32 KB, … up to the model's
LEAST_LARGEST = 2 << 20  # bytes: what a smaller model's vector takes says nothing of bandwidth
_REPEATS = 24
_WARM = 4
_TIMEOUT_S = 60.0

Sizes = tuple[int, torch.dtype]  # elements of the model's flat vector [D'], and their type
Stamps = list[tuple[float, float]]  # (when a rank came, when it left), of each repeat
Stamped = tuple[str, int, int, Stamps]  # (name, elements, item, stamps) of one call


@dataclass(frozen=True)
class TimedCollective:
    """One collective, and how long it took from the last arrival until all had its result."""

    name: str  # mean | all_gather | barrier
    elements: int
    item: int  # bytes of an element
    seconds: float

    def cost(self, costs: Costs) -> Cost:
        """In the simulator."""
        if self.name == "barrier":
            return costs.barrier()
        return (
            costs.mean(self.elements, self.item) if self.name == "mean" else costs.all_gather(self.elements, self.item)
        )


@dataclass(frozen=True)
class Served:
    """What the parameter server takes for one worker at a time, seconds."""

    elements: int
    item: int
    request: float  # there and back, without a vector
    pull: float
    push: float
    lease: float

    @property
    def bytes(self) -> int:
        """Of the vector that is pulled, and of the one that is pushed."""
        return self.elements * self.item


# -- groups ------------------------------------------------------------------------------------------------------------


def groups(place: ObservedOn, task: Task) -> tuple[list[TimedCollective], list[TimedCollective]]:
    """(of the group in shared memory, of the group over sockets), with the same workers.

    Sockets are TCP over loopback, as if each worker had a host of its own; with TLS where `cryptography` is installed.
    """
    try:
        program = _GroupProgram(task, Credentials.create(), None)
    except BadInput:  # without the package
        program = _GroupProgram(task, None, secrets.token_bytes(32))
    memory, sockets = zip(*place.engine.launch(program, place.launch()), strict=True)
    return together(memory), together(sockets)


def fit_group(calls: Sequence[TimedCollective], workers: int, own: int, *, one_host: bool) -> Terms:
    """(latency in seconds, seconds a bit) with which the simulator takes as long as it took here.

    own: the model's elements; a mean of so many counts as much as all other calls together.
    """
    units = [Costs(NetworkState(network, workers, 0), workers) for network in _units(one_host)]
    xs = [(call.cost(units[0]).seconds, call.cost(units[1]).seconds) for call in calls]
    weights = [float(len(calls)) if (call.name, call.elements) == ("mean", own) else 1.0 for call in calls]
    return two_terms(xs, [call.seconds for call in calls], weights)


def _units(one_host: bool) -> tuple[SimNetworkSpec, SimNetworkSpec]:
    """Networks in which only latency costs, a second each; and only bytes, a second a bit."""
    if one_host:
        return SimNetworkSpec(workers_per_host=ALL, local_latency=1.0), SimNetworkSpec(
            workers_per_host=ALL, local_bandwidth=1.0
        )
    return SimNetworkSpec(latency=1.0), SimNetworkSpec(bandwidth=1.0)


def bandwidth_of(terms: Terms) -> float:
    """bit/s"""
    return 1 / terms.second if terms.second else float("inf")


def together(ranks: Sequence[Sequence[Stamped]]) -> list[TimedCollective]:
    """All ranks' stamps as calls: the median over repeats."""
    calls = []
    for same in zip(*ranks, strict=True):
        name, elements, item, _ = same[0]
        repeats = zip(*(stamps for *_, stamps in same), strict=True)
        seconds = [max(left for _, left in one) - max(came for came, _ in one) for one in repeats]
        calls.append(TimedCollective(name, elements, item, max(statistics.median(seconds[_WARM:]), 1e-9)))
    return calls


@dataclass(frozen=True)
class _GroupProgram:
    """On every worker: the stamps of both groups' calls. One of credentials and token is there."""

    task: Task
    credentials: Credentials | None
    token: bytes | None

    def __call__(self, worker: Worker) -> tuple[list[Stamped], list[Stamped]]:
        worker.driver.progress(USER, 0)
        elements, dtype = vector_of(self.task)
        with closing(self._ring(worker)) as ring:
            return _measured(worker.group, elements, dtype), _measured(ring, elements, dtype)

    def _ring(self, worker: Worker) -> RingGroup:
        proof: dict[str, Any] = {"credentials": self.credentials, "token": self.token}
        with closing(Listener(**proof, timeout_s=_TIMEOUT_S)) as listener:
            addresses = [(host, port) for host, port in worker.group.all_gather_json(list(listener.address))]
            channels = connect_all(worker.rank, listener, addresses, **proof, timeout_s=_TIMEOUT_S)
            worker.group.barrier()
        return RingGroup(worker.rank, worker.size, channels, timeout_s=_TIMEOUT_S)


def vector_of(task: Task) -> Sizes:
    """Length and type of the model's flat vector [D']."""
    with rng.kept():
        layout = Layout(build_model(task))
    return layout.padded, layout.dtype


def _measured(group: Group, elements: int, dtype: torch.dtype) -> list[Stamped]:
    item = dtype.itemsize
    found: list[Stamped] = [("barrier", 0, 0, _stamps(group, lambda: None, group.barrier))]
    for n in sizes_of(elements, item):
        tensor = group.allocate(n, dtype)
        fresh = torch.ones(n, dtype=dtype)
        stamps = _stamps(group, lambda t=tensor, f=fresh: t.copy_(f), lambda t=tensor: group.mean_(t))  # type: ignore[misc]
        found.append(("mean", n, item, stamps))
    small = torch.ones(SIZES[0] // item, dtype=dtype)
    found.append(("all_gather", small.numel(), item, _stamps(group, lambda: None, lambda: group.all_gather(small))))
    return found


def sizes_of(elements: int, item: int) -> list[int]:
    """Elements of the means to measure, ascending: the model's own, smaller ones, and for a small model some larger."""
    most = max(elements * item, LEAST_LARGEST)
    return sorted({elements, *(size // item for size in SIZES if size <= most)})


def _stamps(group: Group, prepare: Callable[[], Any], operation: Callable[[], Any]) -> Stamps:
    """All ranks call it; `prepare` writes the tensor anew, as a backward does."""
    stamps = []
    for _ in range(_REPEATS + _WARM):
        prepare()
        group.barrier()
        came = time.perf_counter()
        operation()
        stamps.append((came, time.perf_counter()))
    return stamps


# -- server ------------------------------------------------------------------------------------------------------------


def served(place: ObservedOn, task: Task) -> Served:
    """Of one shard that holds the whole vector, as engine `local` starts it, asked by worker 0 alone; medians."""
    first, *_ = place.engine.launch(_ServerProgram(task), place.launch(server=ServerSpec(rule="add")))
    assert first is not None
    return first


@dataclass(frozen=True)
class _ServerProgram:
    task: Task

    def __call__(self, worker: Worker) -> Served | None:
        worker.driver.progress(USER, 0)
        server = worker.server
        assert server is not None
        elements, dtype = vector_of(self.task)
        elements = max(elements, LEAST_LARGEST // dtype.itemsize)
        center = torch.zeros(elements, dtype=dtype)
        server.initialize(center)
        answer = None
        if worker.rank == 0:
            requests = [_seconds(server.activate) for _ in range(_REPEATS)]
            pairs = [
                (_seconds(lambda: server.pull(center)), _seconds(lambda: server.push(center))) for _ in range(_REPEATS)
            ]
            server.deactivate()
            pulls, pushes = zip(*pairs[_WARM:], strict=True)
            answer = Served(
                elements,
                dtype.itemsize,
                request=statistics.median(requests[_WARM:]),
                pull=statistics.median(pulls),
                push=statistics.median(pushes),
                lease=self._lease(worker),
            )
        worker.group.barrier()
        return answer

    def _lease(self, worker: Worker) -> float:
        segment = Segment(epoch=0, first=0, until=_REPEATS, parts=worker.size, size=worker.size)
        return statistics.median([_seconds(lambda: worker.driver.lease(segment)) for _ in range(_REPEATS)][_WARM:])


def _seconds(operation: Callable[[], Any]) -> float:
    start = time.perf_counter()
    operation()
    return time.perf_counter() - start
