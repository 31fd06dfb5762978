"""Copies of a simulated server's shards are lost, by the same views and log as real ones: the bits are those of a run without faults.

The model has one number for each row, see numbered_rows.py. All places of a lost worker at a server are struck by
test_faults_simulated.py; more schedules, with copies, are searched through by test_training_chaos.py.
"""

from typing import Any

import numbered_rows
import pytest
import torch
from sim_world import Changes

import manyhands as mh
from manyhands.server.replication.log import Copy, OutOfOrder
from manyhands.server.replication.views import ShardView

BATCH, TICKS, EPOCHS = 6, 8, 2
ROWS = BATCH * TICKS
KILLS = (
    "kill=shard0@0s",
    "kill=shard0@0.51s",
    "kill=backup0@0.51s",
    "kill=shard0@0.2s,kill=shard0@0.9s,kill=backup0@1.6s",
)


def train(faults: str, strategy: str, survive: str | None = "copies=2", **options: Any) -> mh.Run:
    planned = f"notice=50ms,{faults}".removesuffix(",")
    engine = f"sim:compute='step=100ms,jitter=exponential',network=latency=20ms,faults='{planned}'"
    task = options.pop("task", None) or numbered_rows.task(ROWS, BATCH, epochs=EPOCHS)
    return mh.train(task, engine=engine, strategy=strategy, workers=3, survive=survive, **options)


@pytest.mark.parametrize(
    ("strategy", "kills"),
    [("downpour:bound=0", KILLS), ("quorum", KILLS[3:]), ("downpour:bound=0,rule=adam", KILLS[3:])],
)
def test_with_copies_in_step_the_result_is_that_of_a_run_without_faults(strategy: str, kills: tuple[str, ...]) -> None:
    wanted = train("", strategy)
    for faults in kills:
        seen = Changes()
        run = train(faults, strategy, callbacks=[seen])
        assert run.info["faults"] == dict.fromkeys(faults.split(","), 1)  # each happens once
        assert torch.equal(run.parameters, wanted.parameters), faults
        assert (run.rows["total"], run.losses) == (EPOCHS * ROWS, [])
        if faults != KILLS[0]:  # before anybody is let in it is only started again
            assert "server shard 0 has one copy" in seen.changes[0][1]
            assert seen.changes[-1][1] == "server shard 0 has 2 copies again"


@pytest.mark.parametrize(
    ("strategy", "slices"),
    [
        ("downpour:bound=0,push_every=3,pull_every=3", (4, 6, 12)),
        ("quorum", (12, 8, 6, 4)),
        ("downpour:push_every=3,pull_every=3", (4,)),
    ],
)
def test_workers_and_both_copies_are_lost_in_one_run_and_each_row_counts_once(
    strategy: str, slices: tuple[int, ...]
) -> None:
    """In step, and at their own pace. One more worker leaves."""
    faults = "kill=shard0@0s,kill=1@step:3,kill=backup0@0.8s,kill=shard0@1.4s,kill=0@1.5s,leave=2@step:10"
    task = numbered_rows.task(13 * 12, 12, epochs=1, order=lambda epoch: range(13 * 12))
    run = train(f"{faults},back=0.2", strategy, "max_losses=3,copies=2", task=task)
    assert run.info["faults"] == dict.fromkeys(faults.split(","), 1)
    assert len(run.losses) == 2
    numbered_rows.trained_once(run, 12, slices)


def test_a_copy_has_its_price_and_each_shard_its_own_copies() -> None:
    """What a call gave waits until the backup has it, which takes two ways more."""
    alone = train("", "downpour:bound=0", None)
    run = train("kill=shard1@0.5s,kill=backup0@0.6s", "downpour:bound=0", servers=2)
    assert sum(run.info["faults"].values()) == 2
    assert torch.equal(run.parameters, alone.parameters)
    assert run.seconds > alone.seconds + 2 * 0.02 * EPOCHS * TICKS


def test_what_only_one_of_two_shards_has_of_a_lost_workers_push_is_counted_and_not_repeated() -> None:
    run = train("kill=1@0.35s,kill=2@0.6s", "dynsgd", "max_losses=any", servers=2)
    assert (run.rows["total"], len(run.losses)) == (EPOCHS * ROWS, 2)


def test_an_entry_of_the_log_after_a_gap_is_out_of_order() -> None:
    backup = Copy(-2, alone=False)
    backup.take_view(ShardView(number=0, primary=-1, backup=-2, link=0))
    backup.receive(0, 1)
    for index in (1, 3):
        with pytest.raises(OutOfOrder, match="expected 2"):
            backup.receive(0, index)
