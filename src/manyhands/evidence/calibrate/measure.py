"""The times of groups, server and leases on this machine: programs on real workers, and the simulator's constants."""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from manyhands import rng
from manyhands.comm.group import Group
from manyhands.comm.ring.group import RingGroup
from manyhands.comm.ring.links import connect_all
from manyhands.data.leases import Segment
from manyhands.engines.driver.run_monitor import USER
from manyhands.engines.sim.collectives import Cost
from manyhands.engines.sim.costs import Costs
from manyhands.engines.sim.network import ALL, NetworkState, SimNetworkSpec
from manyhands.errors import BadInput
from manyhands.evidence.calibrate.fit import Terms, two_terms
from manyhands.evidence.calibrate.observe import RunSetup
from manyhands.replica.layout import Layout, layouts_of
from manyhands.server.base import ServerSpec
from manyhands.task import Task
from manyhands.training.plan import build_model
from manyhands.transport.credentials import Credentials
from manyhands.transport.listener import Listener
from manyhands.worker import Worker

SIZES = tuple(4 << 10 + 3 * i for i in range(9))  # bytes of means: 4 KB, 32 KB, … up to the model's
LEAST_LARGEST = 2 << 20  # the largest mean has at least so many bytes: smaller ones do not show the bandwidth
_REPEATS = 24
_WARM = 4
_TIMEOUT_S = 60.0

Sizes = tuple[int, torch.dtype]  # elements of the model's flat vector [D'], and their type
Stamps = list[tuple[float, float]]  # (start, end) of a rank's call, of each repeat
Stamped = tuple[str, int, int, Stamps]  # (name, elements, item, stamps) of one call


@dataclass(frozen=True)
class TimedCollective:
    """A collective, and its time from the last rank's start until all ranks had the result."""

    name: str  # mean | all_gather | barrier
    elements: int
    item: int  # bytes of an element
    seconds: float

    def cost(self, costs: Costs) -> Cost:
        """In the simulator."""
        if self.name == "barrier":
            return costs.barrier()
        collective = costs.mean if self.name == "mean" else costs.all_gather
        return collective(self.elements, self.item)


@dataclass(frozen=True)
class ServerTimes:
    """The seconds of the parameter server's calls, for one worker at a time."""

    elements: int
    item: int
    request: float  # a round trip without a vector
    pull: float
    push: float
    lease: float

    @property
    def bytes(self) -> int:
        """Of the pulled vector, and of the pushed one."""
        return self.elements * self.item


# -- groups ------------------------------------------------------------------------------------------------------------


def time_groups(setup: RunSetup, task: Task) -> tuple[list[TimedCollective], list[TimedCollective]]:
    """(collectives in shared memory, collectives over sockets) of the same workers.

    Sockets are TCP over loopback, as between workers on different hosts; with TLS if `cryptography` is installed.
    """
    try:
        proof: dict[str, Any] = {"credentials": Credentials.create(), "token": None}
    except BadInput:  # without the package
        proof = {"credentials": None, "token": secrets.token_bytes(32)}
    memory, sockets = zip(*setup.engine.launch(partial(_time_both, task, proof), setup.launch()), strict=True)
    return timed_collectives(memory), timed_collectives(sockets)


def fit_group(calls: Sequence[TimedCollective], workers: int, own: int, *, one_host: bool) -> Terms:
    """Fit (latency in seconds, seconds a bit), with which the simulator's times are those measured.

    own: the model's elements. A mean of this length has as much weight as all other calls together.
    """
    if one_host:  # a network with a latency of 1 s and infinite bandwidth, and one without latency and 1 s a bit
        latency = SimNetworkSpec(workers_per_host=ALL, local_latency=1.0)
        bits = SimNetworkSpec(workers_per_host=ALL, local_bandwidth=1.0)
    else:
        latency, bits = SimNetworkSpec(latency=1.0), SimNetworkSpec(bandwidth=1.0)
    units = [Costs(NetworkState(network, workers, 0), workers) for network in (latency, bits)]
    xs = [(call.cost(units[0]).seconds, call.cost(units[1]).seconds) for call in calls]
    weights = [float(len(calls)) if (call.name, call.elements) == ("mean", own) else 1.0 for call in calls]
    return two_terms(xs, [call.seconds for call in calls], weights)


def bandwidth_of(terms: Terms) -> float:
    """bit/s"""
    return 1 / terms.second if terms.second else float("inf")


def timed_collectives(ranks: Sequence[Sequence[Stamped]]) -> list[TimedCollective]:
    """Combine all ranks' stamps: the median over repeats."""
    calls = []
    for same in zip(*ranks, strict=True):
        name, elements, item, _ = same[0]
        repeats = zip(*(stamps for *_, stamps in same), strict=True)
        seconds = [max(end for _, end in one) - max(start for start, _ in one) for one in repeats]
        calls.append(TimedCollective(name, elements, item, max(statistics.median(seconds[_WARM:]), 1e-9)))
    return calls


def _time_both(task: Task, proof: dict[str, Any], worker: Worker) -> tuple[list[Stamped], list[Stamped]]:
    """Runs on every worker: times the calls of both groups. proof: credentials or a token, by which sockets connect."""
    worker.driver.progress(USER, 0)
    elements, dtype = vector_of(task)
    with closing(Listener(**proof, timeout_s=_TIMEOUT_S)) as listener:
        addresses = [(host, port) for host, port in worker.group.all_gather_json(list(listener.address))]
        channels = connect_all(worker.rank, listener, addresses, **proof, timeout_s=_TIMEOUT_S)
        worker.group.barrier()
    with closing(RingGroup(worker.rank, worker.size, channels, timeout_s=_TIMEOUT_S)) as ring:
        return _measured(worker.group, elements, dtype), _measured(ring, elements, dtype)


def vector_of(task: Task) -> Sizes:
    """Length and type of the model's flat vector [D']."""
    with rng.kept():
        layout = Layout.joined(layouts_of(build_model(task)))
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
    """Elements of the means to measure, ascending: the model's own, smaller ones, and larger ones for a small model."""
    most = max(elements * item, LEAST_LARGEST)
    return sorted({elements, *(size // item for size in SIZES if size <= most)})


def _stamps(group: Group, prepare: Callable[[], Any], operation: Callable[[], Any]) -> Stamps:
    """Collective. `prepare` writes the tensor, as a backward pass does."""
    stamps = []
    for _ in range(_REPEATS + _WARM):
        prepare()
        group.barrier()
        start = time.perf_counter()
        operation()
        stamps.append((start, time.perf_counter()))
    return stamps


# -- server ------------------------------------------------------------------------------------------------------------


def time_server(setup: RunSetup, task: Task) -> ServerTimes:
    """Median times of one shard that holds the whole vector, as engine `local` starts it, called by worker 0 alone."""
    first, *_ = setup.engine.launch(partial(_time_requests, task), setup.launch(server=ServerSpec(rule="add")))
    assert first is not None
    return first


def _time_requests(task: Task, worker: Worker) -> ServerTimes | None:
    worker.driver.progress(USER, 0)
    server = worker.server
    assert server is not None
    elements, dtype = vector_of(task)
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
        segment = Segment(epoch=0, first=0, until=_REPEATS, parts=worker.size, size=worker.size)
        leases = [_seconds(lambda: worker.lease(segment)) for _ in range(_REPEATS)]
        answer = ServerTimes(
            elements,
            dtype.itemsize,
            request=statistics.median(requests[_WARM:]),
            pull=statistics.median(pulls),
            push=statistics.median(pushes),
            lease=statistics.median(leases[_WARM:]),
        )
    worker.group.barrier()
    return answer


def _seconds(operation: Callable[[], Any]) -> float:
    start = time.perf_counter()
    operation()
    return time.perf_counter() - start
