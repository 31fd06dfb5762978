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
from slow_cases import slow_after


def task(**fields: Any) -> mh.Task:
    return plain.task(**{"train_data": plain.rows(130), "optimizer": plain.OPTIMIZERS["adamw"], "epochs": 2, **fields})


def train(given: mh.Task, local: Local, strategy: str, workers: int = 3, **options: Any) -> mh.Run:
    return mh.train(given, engine=local, strategy=strategy, workers=workers, threads_per_worker=1, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", slow_after(1, ["gossip", "gossip:graph=random,weights=push-sum,period=2", "gossip:graph=pairs,bound=0"])
)
def test_in_step_it_is_the_same_bits_twice(strategy: str, local: Local) -> None:
    """Semantic 7"""
    runs = [train(task(), local, strategy) for _ in range(2)]
    assert torch.equal(runs[0].parameters, runs[1].parameters)
    assert runs[0].rows["total"] == 260


@pytest.mark.parametrize("strategy", ["gossip", "gossip:graph=random,weights=push-sum", "gossip:graph=pairs"])
def test_one_worker_is_a_plain_loop(strategy: str, local: Local) -> None:
    """CASE 1"""
    runs = [train(task(), local, name, workers=1) for name in (strategy, "solo")]
    assert torch.equal(runs[0].parameters, runs[1].parameters)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        "gossip:period=3",
        pytest.param("gossip:graph=random,weights=push-sum", marks=pytest.mark.slow),
        pytest.param("gossip:graph=pairs,bound=0,period=3", marks=pytest.mark.slow),
    ],
)
def test_interrupted_and_resumed_is_uninterrupted(strategy: str, local: Local, tmp_path: Path) -> None:
    """CASE 19: windows, masses, rounds and the server's vectors included."""
    folder, given = tmp_path / "run", {"train_data": plain.rows(12 * 60)}
    whole = train(task(**given), local, strategy)
    with pytest.raises(Preempted):
        train(task(**given, loss=Preempting(1, 70)), local, strategy, run_dir=folder)
    assert torch.equal(train(task(**given), local, strategy, run_dir=folder, resume=True).parameters, whole.parameters)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["gossip:graph=random,weights=push-sum", "gossip:graph=pairs"])
@pytest.mark.parametrize(
    "workers", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_it_goes_on_with_another_number_of_workers(strategy: str, workers: int, local: Local, tmp_path: Path) -> None:
    folder, given = tmp_path / "run", {"train_data": plain.rows(12 * 60)}
    with pytest.raises(Preempted):
        train(task(**given, loss=Preempting(1, 20)), local, strategy, run_dir=folder)
    run = train(task(**given), local, strategy, workers, run_dir=folder, resume=True)
    assert run.rows["total"] == 2 * 12 * 60
    assert run.parameters.isfinite().all()


@pytest.mark.parametrize(("graph", "turns"), [("exponential", 1), ("random", 1), ("ring", 2)])
def test_a_round_sends_and_receives_at_once(graph: str, turns: int) -> None:
    """On a slow simulated network each step takes the time of one way of the vector, or of two on a ring, and not of both ways."""
    bandwidth, bits = 1e6, 8 * 8 * padded()
    seconds = [
        mh.train(
            task(train_data=plain.rows(8 * steps), batch_size=8, epochs=1),
            strategy=f"gossip:graph={graph}",
            engine=f"sim:network='bandwidth={bandwidth},latency=0'",
            workers=4,
        ).seconds
        for steps in (12, 24)
    ]
    assert seconds[1] - seconds[0] == pytest.approx(12 * turns * bits / bandwidth, rel=0.05)  # and control words


def padded() -> int:
    """Numbers in a replica's flat vector."""
    return Replica.of(plain.mlp(), plain.OPTIMIZERS["sgd"], group=SoloGroup()).layout.padded
