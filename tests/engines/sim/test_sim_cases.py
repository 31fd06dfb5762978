"""Closed forms of the field, produced by the strategies' own code on simulated workers."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.strategies import strategy_of
from plain import task


def train(strategy: str, workers: int, spec: str = "", **fields: Any) -> mh.Run:
    return mh.train(strategy=strategy, engine=f"sim:{spec}", workers=workers, threads_per_worker=1, **fields)


class Point(nn.Module):
    """One number x of float64, at first 1."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.ones(1, dtype=torch.float64))


def half_square(model: nn.Module, batch: Any) -> Tensor:
    return (model.x * model.x).sum() / 2


def point(rows: int, batch_size: int, rate: float = 0.1, **fields: Any) -> dict[str, Any]:
    """Of a task whose gradients are x."""
    common = {"model": Point, "loss": half_square, "train_data": (torch.zeros(rows, 1),), "batch_size": batch_size}
    return {**common, "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=rate), **fields}


def visited(delay: int, step: float, turns: int) -> tuple[list[float], dict[int, int]]:
    """x of f = x²/2 at each gradient, and the staleness, of delay + 1 equal workers under downpour that compute a second each,
    and begin a part of a second apart: so each pushes, and pulls at once, in turn."""
    workers, xs = delay + 1, []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        xs.append(float(model.x.detach()))
        return half_square(model, batch)

    apart = ",".join(f"pause={rank}@step:0+{rank / workers}" for rank in range(1, workers))
    data = point(turns, workers, step, loss=loss)
    return xs, train("downpour", workers, f"compute='row=0,step=1',faults='{apart}'", **data).staleness


def _norm(xs: list[float]) -> float:
    return math.sqrt(sum(x * x for x in xs))


@pytest.mark.parametrize("delay", [0, 4])
def test_the_limit_of_a_fixed_delay(delay: int) -> None:
    """CASE 10: 1 % below 2·sin(π/(2(2τ+1))) each |x| is smaller than a hundred turns before, 1 % above it is larger.

    By how much is the largest root of z^(τ+1) = z^τ - ηλ.
    """
    limit, turns = 2 * math.sin(math.pi / (2 * (2 * delay + 1))), 200 // (delay + 1) * (delay + 1)
    for factor in (0.99, 1.01):
        xs, staleness = visited(delay, factor * limit, turns)
        assert staleness[delay] >= turns - delay - 1
        growth = _norm(xs[-50:]) / _norm(xs[-150:-100])
        companion = torch.diag(torch.ones(delay), -1)
        companion[0, 0] += 1
        companion[0, delay] -= factor * limit
        expected = torch.linalg.eigvals(companion.double()).abs().max().item() ** 100
        assert (growth < 1) == (factor < 1)
        assert growth == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("strategy", ["downpour", "gossip:graph=pairs", "quorum:backups=1", "hogwild"])
def test_the_same_seed_is_the_same_run_and_another_is_another(strategy: str) -> None:
    """With jitter, and with messages that are lost, doubled, late and in another order."""
    lan = "network='latency=1ms,bandwidth=1e8',compute='row=1e-3,jitter=lognormal:0.5'"
    if strategy == "hogwild":  # on one host
        lan = "network='workers_per_host=3',compute='jitter=exponential'"
    elif strategy_of(strategy).server() is not None:
        lan += ",faults='drop=0.1,duplicate=0.1,delay=0.1:0.01,reorder=0.1,retry=0.05'"
    first, again, other = (train(strategy, 3, f"{lan},seed={seed}", task=task(epochs=1)) for seed in (1, 1, 2))
    assert torch.equal(first.parameters, again.parameters)
    assert (first.seconds, first.history, first.staleness) == (again.seconds, again.history, again.staleness)
    assert not torch.equal(first.parameters, other.parameters)
