"""Simulated workers at their own pace are lost, as real ones are in test_faults_leases_integration.py: each row is at the server
once. The model has one number for each row, see numbered_rows.py."""

from __future__ import annotations

from typing import Any

import numbered_rows
import pytest
import torch

import manyhands as mh
from manyhands.server.client import ShardLost

BATCH, TICKS, EPOCHS = 6, 8, 2
ROWS = BATCH * TICKS
COUNTED = ("downpour", "downpour:push_every=3,pull_every=3", "downpour:bound=1", "downpour:bound=1,warmup=9")


def train(faults: str, strategy: str, workers: int = 3, **options: Any) -> mh.Run:
    given = {
        "compute": "step=100ms,jitter=exponential",
        "network": "latency=20ms",
        "survive": "max_losses=any",
    } | options
    engine = f"sim:compute='{given.pop('compute')}',network='{given.pop('network')}',faults='{faults},notice=50ms'"
    task = numbered_rows.task(ROWS, BATCH, epochs=EPOCHS)
    return mh.train(task, engine=engine, workers=workers, strategy=strategy, **given)


def check_counts(run: mh.Run, *of_epochs: tuple[int, ...]) -> None:
    """of_epochs: how many parts each epoch's global batches had, as it may be."""
    moved = run.model.of.detach()
    assert torch.allclose(moved, moved[0].expand(ROWS), rtol=0, atol=1e-9), moved
    wanted = [sum(parts) / BATCH for parts in of_epochs or [(3, 3), (3, 2), (3, 1), (2, 2), (2, 3)]]
    assert min(abs(float(moved[0]) - one) for one in wanted) < 1e-9
    assert (run.rows["total"], run.rows["unused"]) == (EPOCHS * ROWS, 0)
    assert sorted((row["tick"], row["rows"]) for row in run.history) == [
        (tick, BATCH) for tick in range(EPOCHS * TICKS)
    ]


@pytest.mark.parametrize("strategy", COUNTED)
@pytest.mark.parametrize(
    "faults",
    [
        "kill=1@step:3",
        "kill=0@step:2:exchange",
        "kill=2@step:0",
        "kill=0@step:4,kill=1@step:5",
        "kill=1@0.43s,kill=2@0.61s,back=0.2",
        "leave=1@step:4",
        "restart=0@step:2+0.4",
    ],
)
def test_each_row_is_at_the_server_once(strategy: str, faults: str) -> None:
    run = train(faults, strategy)
    planned = [one for one in faults.split(",") if not one.startswith("back")]
    assert sum(run.info["faults"].values()) == len(planned)
    assert len(run.losses) == sum("leave" not in one for one in planned)
    check_counts(run)


@pytest.mark.parametrize("strategy", COUNTED)
def test_workers_and_primaries_are_lost_in_one_run(strategy: str) -> None:
    faults = "kill=shard0@0.3s,kill=1@step:3,kill=shard0@0.9s,kill=0@0.95s"
    run = train(faults, strategy, survive="max_losses=any,copies=2")
    assert run.info["faults"] == dict.fromkeys(faults.split(","), 1)
    check_counts(run)


def test_with_two_shards_what_only_one_has_is_counted_and_not_repeated() -> None:
    """Killed as its push is on the way to both: one has it, the other one's copy is lost."""
    run = train("kill=1@0.35s", "downpour", servers=2)
    assert run.rows["total"] == EPOCHS * ROWS


def test_a_lost_shard_ends_the_run() -> None:
    with pytest.raises(ShardLost, match="server shard 0"):
        train("kill=shard0@0.4s", "downpour")


@pytest.mark.parametrize("strategy", ["easgd:period=2", "dynsgd", "diloco:period=3,via=server"])
def test_every_strategy_at_its_own_pace_goes_on(strategy: str) -> None:
    run = train("kill=1@step:4", strategy)
    assert run.rows["total"] == EPOCHS * ROWS
    assert run.model.of.detach().min() > 0


def test_the_same_seed_gives_the_same_bits() -> None:
    one, other = (train("kill=1@step:3,kill=2@0.6s", "dynsgd") for _ in range(2))
    assert torch.equal(one.parameters, other.parameters)
    assert (one.losses, one.seconds) == (other.losses, other.seconds)
