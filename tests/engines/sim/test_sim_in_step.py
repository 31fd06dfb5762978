"""Simulated workers in step at a server are lost, as real ones are in test_faults_in_step_integration.py: each row is in one
step. The model has one number for each row, see numbered_rows.py."""

from __future__ import annotations

import numbered_rows
import pytest
import torch

import manyhands as mh

BATCH, TICKS = 12, 13
ROWS = BATCH * TICKS
SLICES = {  # rows of a slice, or of all slices of a step, with three workers, two and one, and of the lost worker's alone
    "downpour:bound=0": (4, 6, 12),
    "downpour:bound=0,push_every=3,pull_every=3": (4, 6, 12),
    "quorum": (12, 8, 6, 4),
}
FAULTS = [
    "kill=1@step:4",
    "kill=0@step:5:exchange",
    "kill=2@step:0",
    "kill=1@step:12",
    "kill=0@step:4,kill=1@step:5",
    "kill=1@0.43s,kill=2@0.61s",
    "leave=1@step:4",
]


def train(faults: str, strategy: str, survive: str) -> mh.Run:
    engine = (
        f"sim:compute='step=100ms,jitter=exponential',network='latency=20ms',faults='{faults},notice=50ms,back=0.2'"
    )
    task = numbered_rows.task(ROWS, BATCH, epochs=1, order=lambda epoch: range(ROWS))
    return mh.train(task, engine=engine, workers=3, strategy=strategy, survive=survive)


@pytest.mark.parametrize("survive", ["max_losses=3", "max_losses=3,replace=false", "max_losses=3,copies=2"])
@pytest.mark.parametrize("faults", FAULTS)
@pytest.mark.parametrize("strategy", SLICES)
def test_each_row_is_in_one_step(strategy: str, faults: str, survive: str) -> None:
    run = train(faults, strategy, survive)
    assert run.info["faults"] == dict.fromkeys(faults.split(","), 1)
    assert len(run.losses) == faults.count("kill")
    numbered_rows.trained_once(run, BATCH, SLICES[strategy])


@pytest.mark.parametrize("strategy", SLICES)
def test_workers_and_primaries_are_lost_in_one_run(strategy: str) -> None:
    faults = "kill=shard0@0.3s,kill=1@step:4,kill=shard0@1.4s,kill=0@1.5s"
    run = train(faults, strategy, "max_losses=3,copies=2")
    assert run.info["faults"] == dict.fromkeys(faults.split(","), 1)
    numbered_rows.trained_once(run, BATCH, SLICES[strategy])


def test_the_same_seed_gives_the_same_bits() -> None:
    one, other = (train("kill=1@step:3,kill=2@0.6s", "downpour:bound=0", "max_losses=3") for _ in range(2))
    assert torch.equal(one.parameters, other.parameters)
    assert (one.losses, one.seconds) == (other.losses, other.seconds)
