"""Simulated workers with a server are lost, and copies of its shards, as real ones are in tests/faults: each row is in once.

The model has one number for each row, see numbered_rows.py. All places of a loss are struck by test_faults_simulated.py.
"""

from __future__ import annotations

from typing import Any

import numbered_rows
import pytest
import torch

import manyhands as mh
from manyhands.server.client import ShardLost

BATCH, TICKS, EPOCHS = 6, 8, 2
ROWS = BATCH * TICKS


def train(faults: str, strategy: str, latency: str = "20ms", **options: Any) -> mh.Run:
    planned = f"notice=50ms,{faults}".removesuffix(",")
    engine = f"sim:compute='step=100ms,jitter=exponential',network=latency={latency},faults='{planned}'"
    task = options.pop("task", None) or numbered_rows.task(ROWS, BATCH, epochs=EPOCHS)
    return mh.train(task, engine=engine, strategy=strategy, **{"workers": 3, "survive": "max_losses=any", **options})


def planned(faults: str) -> dict[str, int]:
    """Each fault happens once."""
    return {fault: 1 for fault in faults.split(",") if not fault.startswith("back")}


SLICES = {  # rows of a slice, or of all slices of a step, with three workers, two and one, and of the lost worker's alone
    "downpour:bound=0": (4, 6, 12),
    "downpour:bound=0,push_every=3,pull_every=3": (4, 6, 12),
    "quorum": (12, 8, 6, 4),
}
OWN_PACE = ("downpour", "downpour:push_every=3,pull_every=3", "downpour:bound=1", "downpour:bound=1,warmup=9")


@pytest.mark.parametrize("strategy", SLICES)
def test_in_step_each_row_is_in_one_step_whatever_workers_and_primaries_are_lost(strategy: str) -> None:
    task = numbered_rows.task(156, 12, epochs=1, order=lambda epoch: range(156))
    faults = "kill=shard0@0.3s,kill=1@step:4,kill=shard0@1.4s,kill=0@1.5s"
    run = train(f"{faults},back=0.2", strategy, task=task, survive="max_losses=3,copies=2")
    assert run.info["faults"] == planned(faults)
    assert len(run.losses) == 2
    numbered_rows.trained_once(run, 12, SLICES[strategy])


@pytest.mark.parametrize(
    ("strategy", "faults"),
    [
        *((strategy, "kill=shard0@0.3s,kill=1@step:3,kill=shard0@0.9s,kill=0@0.95s") for strategy in OWN_PACE),
        ("downpour", "kill=1@0.43s,kill=2@0.61s,back=0.2"),
        ("downpour:bound=1", "restart=0@step:2+0.4"),
        ("downpour:bound=1,warmup=9", "leave=1@step:4"),
    ],
)
def test_at_their_own_pace_each_row_is_at_the_server_once(strategy: str, faults: str) -> None:
    """An epoch's global batches have as many parts as there were workers when it began."""
    run = train(faults, strategy, survive=f"max_losses=any{',copies=2' if 'shard' in faults else ''}")
    assert run.info["faults"] == planned(faults)
    assert len(run.losses) == sum("leave" not in one and "shard" not in one for one in planned(faults))
    moved = run.model.of.detach()
    assert torch.allclose(moved, moved[0].expand(ROWS), rtol=0, atol=1e-9), moved
    wanted = [sum(parts) / BATCH for parts in ((3, 3), (3, 2), (3, 1), (2, 2), (2, 3))]
    assert min(abs(float(moved[0]) - one) for one in wanted) < 1e-9
    assert (run.rows["total"], run.rows["unused"]) == (EPOCHS * ROWS, 0)
    ticks = [(tick, BATCH) for tick in range(EPOCHS * TICKS)]
    assert sorted((row["tick"], row["rows"]) for row in run.history) == ticks


def test_a_lost_shard_ends_the_run() -> None:
    with pytest.raises(ShardLost, match="server shard 0"):
        train("kill=shard0@0.4s", "downpour")
    with pytest.raises(ShardLost, match=r"server shard 0 has no copy left.*--resume"):
        train("kill=shard0@0.5s,kill=backup0@0.5s", "downpour:bound=0", survive="copies=2")


def test_the_same_seed_gives_the_same_bits() -> None:
    """And what only one of two shards has of a lost worker's push is counted, and not repeated."""
    one, other = (train("kill=1@0.35s,kill=2@0.6s", "dynsgd", servers=2) for _ in range(2))
    assert one.rows["total"] == EPOCHS * ROWS
    assert torch.equal(one.parameters, other.parameters)
    assert (one.losses, one.seconds) == (other.losses, other.seconds)


# -- copies of shards: by the same views and log as real ones ------------------------------------------------------------

KILLS = (
    "kill=shard0@0s",
    "kill=shard0@0.51s",
    "kill=backup0@0.51s",
    "kill=shard0@0.2s,kill=shard0@0.9s,kill=backup0@1.6s",
)


class Changes(mh.Callback):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def on_notice(self, event: mh.Event) -> None:
        if event.type == "change":
            self.messages.append(event.values["message"])


@pytest.mark.parametrize(
    ("strategy", "kills"),
    [("downpour:bound=0", KILLS), ("quorum", KILLS[1::2]), ("downpour:bound=0,rule=adam", KILLS[2:])],
)
def test_with_copies_in_step_the_result_is_that_of_a_run_without_faults(strategy: str, kills: tuple[str, ...]) -> None:
    """A copy has its price: what a call gave waits until the backup has it, which takes two ways more."""
    wanted = train("", strategy, survive="copies=2")
    for faults in kills:
        seen = Changes()
        run = train(faults, strategy, survive="copies=2", callbacks=[seen])
        assert run.info["faults"] == planned(faults)
        assert torch.equal(run.parameters, wanted.parameters), faults
        assert run.rows["total"] == EPOCHS * ROWS
        if faults != KILLS[0]:  # before anybody is let in it is only started again
            assert "server shard 0 has one copy" in seen.messages[0]
            assert seen.messages[-1] == "server shard 0 has 2 copies again"
    alone = train("", strategy, survive=None)
    assert torch.equal(wanted.parameters, alone.parameters)
    assert wanted.seconds > alone.seconds + 2 * 0.02 * EPOCHS * TICKS


@pytest.mark.parametrize(("faults", "strategy"), [*zip(KILLS, (*OWN_PACE[:3], OWN_PACE[0]), strict=True)])
def test_with_copies_at_their_own_pace_every_row_counts_once(strategy: str, faults: str) -> None:
    run = train(faults, strategy, survive="copies=2")
    moved = run.model.of.detach()
    assert torch.allclose(moved, torch.full((ROWS,), EPOCHS * 3 / BATCH, dtype=torch.float64), rtol=0, atol=1e-9), moved
    assert run.losses == []


def test_several_shards_with_copies() -> None:
    wanted, run = (
        train(faults, "downpour:bound=0", servers=2, survive="copies=2")
        for faults in ("", "kill=shard1@0.5s,kill=backup0@0.6s")
    )
    assert sum(run.info["faults"].values()) == 2
    assert torch.equal(run.parameters, wanted.parameters)
