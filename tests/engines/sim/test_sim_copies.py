"""Simulated server shards with copies: a lost primary or backup changes nothing, by the same views and log as real ones."""

from __future__ import annotations

from typing import Any

import numbered_rows
import pytest
import torch

import manyhands as mh
from manyhands.server.client import ShardLost

BATCH, TICKS, EPOCHS = 6, 8, 2
ROWS = BATCH * TICKS


class Changes(mh.Callback):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def on_notice(self, event: mh.Event) -> None:
        if event.type == "change":
            self.messages.append(event.values["message"])


def train(faults: str, strategy: str, latency: str = "20ms", **options: Any) -> mh.Run:
    planned = f"notice=50ms,{faults}".removesuffix(",")
    engine = f"sim:compute='step=100ms,jitter=exponential',network=latency={latency},faults='{planned}'"
    task = numbered_rows.task(ROWS, BATCH, epochs=EPOCHS)
    given: dict[str, Any] = {"workers": 3, "survive": "copies=2"} | options
    return mh.train(task, engine=engine, strategy=strategy, **given)


KILLS = [
    "kill=shard0@0s",
    "kill=shard0@0.51s",
    "kill=backup0@0.51s",
    "kill=shard0@0.2s,kill=shard0@0.9s,kill=backup0@1.6s",
]


@pytest.mark.parametrize("strategy", ["downpour:bound=0", "quorum", "downpour:bound=0,rule=adam"])
def test_in_step_the_result_is_that_of_a_run_without_faults(strategy: str) -> None:
    wanted = train("", strategy)
    for faults in KILLS:
        run = train(faults, strategy)
        assert run.info["faults"] == dict.fromkeys(faults.split(","), 1)
        assert torch.equal(run.parameters, wanted.parameters), faults
        assert run.rows["total"] == EPOCHS * ROWS
    assert torch.equal(wanted.parameters, train("", strategy, survive=None).parameters)


@pytest.mark.parametrize("strategy", ["downpour", "downpour:push_every=3,pull_every=3", "downpour:bound=1"])
@pytest.mark.parametrize("faults", KILLS)
def test_at_their_own_pace_every_row_counts_once(strategy: str, faults: str) -> None:
    run = train(faults, strategy)
    moved = run.model.of.detach()
    assert torch.allclose(moved, torch.full((ROWS,), EPOCHS * 3 / BATCH, dtype=torch.float64), rtol=0, atol=1e-9), moved
    assert run.losses == []


def test_one_copy_is_named_and_then_two_again() -> None:
    seen = Changes()
    train("kill=shard0@0.5s", "downpour:bound=0", callbacks=[seen])
    first, second = seen.messages
    assert "server shard 0 has one copy" in first
    assert second == "server shard 0 has 2 copies again"


def test_a_copy_has_its_price() -> None:
    """What a call gave waits until the backup has it: two ways more."""
    without, with_two = (train("", "downpour:bound=0", survive=survive).seconds for survive in (None, "copies=2"))
    assert with_two > without + 2 * 0.02 * EPOCHS * TICKS


def test_both_copies_lost_end_the_run() -> None:
    with pytest.raises(ShardLost, match=r"server shard 0 has no copy left.*--resume"):
        train("kill=shard0@0.5s,kill=backup0@0.5s", "downpour:bound=0")


def test_several_shards() -> None:
    wanted = train("", "downpour:bound=0", servers=2)
    run = train("kill=shard1@0.5s,kill=backup0@0.6s", "downpour:bound=0", servers=2)
    assert sum(run.info["faults"].values()) == 2
    assert torch.equal(run.parameters, wanted.parameters)
