"""Tools of the server checks: the clients of a fresh server, calls from threads, and comparisons."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from manyhands.server.base import Server, ServerSpec
from manyhands.testing.group_suite import CheckFailed, expect

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
"""Every rule that changes the center, with options."""

ADD = ServerSpec(rule="add")


@contextmanager
def training(
    open_servers: OpenServers, spec: ServerSpec, workers: int, shards: int = 1, center: Tensor | None = None
) -> Iterator[list[Server]]:
    """A server with a first center (default: zeros [D]) and all workers active."""
    with open_servers(spec, workers, shards) as servers:
        servers[0].initialize(torch.zeros(D, dtype=torch.float64) if center is None else center)
        for server in servers:
            server.activate()
        yield servers


def run_clients(servers: Sequence[Server], program: Callable[[int, Server], T]) -> list[T]:
    """Run the program for each worker in its own thread. Returns their results in rank order."""
    with ThreadPoolExecutor(len(servers)) as pool:
        futures = [pool.submit(program, rank, server) for rank, server in enumerate(servers)]
        return [future.result(DEADLINE_S) for future in futures]


@contextmanager
def started(action: Callable[[], T]) -> Iterator[Future[T]]:
    """Run the action in a thread; wait for it on exit."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(action)


def expect_waits(future: Future[Any], what: str) -> None:
    """Expect that the call has not returned yet."""
    try:
        future.result(MOMENT_S)
    except TimeoutError:
        return
    raise CheckFailed(f"{what}: expected to wait, but it returned")


def pulled(server: Server, like: Tensor | None = None) -> Tensor:
    """The result of a pull."""
    into = torch.full((D,), math.nan, dtype=torch.float64) if like is None else torch.full_like(like, math.nan)
    server.pull(into)
    return into


def center_of(server: Server, n: int = D) -> Tensor:
    """The center, [n]."""
    into = torch.full((n,), math.nan, dtype=torch.float64)
    server.center(into)
    return into


def expect_equal(got: Tensor, wanted: Tensor, what: str) -> None:
    """Expect the same bits."""
    expect(torch.equal(got, wanted), f"{what}: got {got.tolist()}, expected {wanted.tolist()}")


def expect_near(got: Tensor, wanted: Tensor, limit: float, what: str) -> None:
    """Expect a largest difference of at most `limit`."""
    error = float((got - wanted).abs().max())
    expect(error <= limit, f"{what}: off by {error} where {limit} is allowed")
