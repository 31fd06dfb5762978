"""What the checks of servers are written with: the clients of a fresh server, and calls in a scripted order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from manyhands.server.base import Server, ServerSpec
from manyhands.testing.group_suite import ConformanceFailed, expect

OpenServers = Callable[[ServerSpec, int, int], AbstractContextManager[list[Server]]]
T = TypeVar("T")
D = 7
MOMENT_S = 0.05
DEADLINE_S = 30.0

MOMENTUM = {"optimizer": "SGD", "rate": 0.7, "momentum": 0.9, "nesterov": True}
RULES: dict[str, dict[str, Any]] = {
    "add": {},
    "staleness": {},
    "distance": {"rate": 0.1},
    "elastic": {"alpha": 0.3},
    "adagrad": {"rate": 0.1},
    "outer": MOMENTUM,
}
"""Every rule that moves the center, with options."""

ADD = ServerSpec(rule="add")


@contextmanager
def training(
    open_servers: OpenServers, spec: ServerSpec, workers: int, shards: int = 1, center: Tensor | None = None
) -> Iterator[list[Server]]:
    """A server with a first center (zeros [D]), all of whose workers take part."""
    with open_servers(spec, workers, shards) as servers:
        servers[0].initialize(torch.zeros(D, dtype=torch.float64) if center is None else center)
        for server in servers:
            server.activate()
        yield servers


def together(servers: Sequence[Server], program: Callable[[int, Server], T]) -> list[T]:
    """Run the program for each worker in a thread of its own; the values in rank order."""
    with ThreadPoolExecutor(len(servers)) as pool:
        futures = [pool.submit(program, rank, server) for rank, server in enumerate(servers)]
        return [future.result(DEADLINE_S) for future in futures]


@contextmanager
def started(action: Callable[[], T]) -> Iterator[Future[T]]:
    """The action runs in a thread; leaving waits for it."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(action)


def expect_waits(future: Future[Any], what: str) -> None:
    """The call has not returned: it must not before something else happens."""
    try:
        future.result(MOMENT_S)
    except TimeoutError:
        return
    raise ConformanceFailed(f"{what}: expected to wait, but it returned")


def pulled(server: Server, like: Tensor | None = None) -> Tensor:
    """What a pull gives."""
    into = torch.full((D,), math.nan, dtype=torch.float64) if like is None else torch.full_like(like, math.nan)
    server.pull(into)
    return into


def center_of(server: Server, n: int = D) -> Tensor:
    """The center, [n]."""
    into = torch.full((n,), math.nan, dtype=torch.float64)
    server.center(into)
    return into


def expect_equal(got: Tensor, wanted: Tensor, what: str) -> None:
    """Bit for bit the same."""
    expect(torch.equal(got, wanted), f"{what}: got {got.tolist()}, expected {wanted.tolist()}")


def expect_near(got: Tensor, wanted: Tensor, limit: float, what: str) -> None:
    """Not further apart than `limit`."""
    error = float((got - wanted).abs().max())
    expect(error <= limit, f"{what}: off by {error} where {limit} is allowed")
