"""Gossip as whole runs of real processes, and as runs that go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
import plain
from manyhands.comm.solo import SoloGroup
from manyhands.engines.local.engine import Local
from manyhands.errors import Preempted
from manyhands.replica.replica import Replica
from preempting import Preempting


def task(**fields: Any) -> mh.Task:
    return plain.task(**{"train_data": plain.rows(130), "optimizer": plain.OPTIMIZERS["adamw"], "epochs": 2, **fields})


def train(given: mh.Task, local: Local, strategy: str, workers: int = 3, **options: Any) -> mh.Run:
    return mh.train(given, engine=local, strategy=strategy, workers=workers, threads_per_worker=1, **options)


@pytest.mark.slow
def test_in_step_it_is_the_same_bits_twice(local: Local) -> None:
    """Semantic 7"""
    for strategy in ("gossip:graph=random,weights=push-sum,period=2", "gossip:graph=pairs,bound=0"):
        runs = [train(task(), local, strategy) for _ in range(2)]
        assert torch.equal(runs[0].parameters, runs[1].parameters), strategy
        assert runs[0].rows["total"] == 260


@pytest.mark.parametrize("strategy", ["gossip", "gossip:graph=random,weights=push-sum", "gossip:graph=pairs"])
def test_one_worker_is_a_plain_loop(strategy: str, local: Local) -> None:
    """CASE 1"""
    runs = [train(task(), local, name, workers=1) for name in (strategy, "solo")]
    assert torch.equal(runs[0].parameters, runs[1].parameters)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["gossip:graph=random,weights=push-sum", "gossip:graph=pairs,bound=0,period=3"])
def test_interrupted_and_resumed_is_uninterrupted(strategy: str, local: Local, tmp_path: Path) -> None:
    """CASE 19: windows, masses, rounds and the server's vectors included."""
    folder, given = tmp_path / "run", {"train_data": plain.rows(12 * 20)}
    whole = train(task(**given), local, strategy)
    with pytest.raises(Preempted):
        train(task(**given, loss=Preempting(1, 25)), local, strategy, run_dir=folder)
    assert torch.equal(train(task(**given), local, strategy, run_dir=folder, resume=True).parameters, whole.parameters)


def test_a_round_sends_and_receives_at_once() -> None:
    """On a slow simulated network each step takes the time of one way of the vector, or of two on a ring, and not of both ways."""
    replica = Replica.of(plain.mlp(), plain.OPTIMIZERS["sgd"], group=SoloGroup())
    bandwidth, bits = 1e6, 8 * 8 * replica.layout.padded
    for graph, turns in [("exponential", 1), ("random", 1), ("ring", 2)]:
        seconds = [
            mh.train(
                task(train_data=plain.rows(8 * steps), batch_size=8, epochs=1),
                strategy=f"gossip:graph={graph}",
                engine=f"sim:network='bandwidth={bandwidth},latency=0'",
                workers=4,
            ).seconds
            for steps in (6, 12)
        ]
        way = turns * bits / bandwidth
        assert (seconds[1] - seconds[0]) / 6 == pytest.approx(way, rel=0.05), graph  # and control words
