"""Replicas of several stages with a server, in processes: they train as replicas of one worker."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from stage_models import ROWS, classified, numbers, task
from stage_runs import WITHIN, alone, expect_alike, train, trained
from torch import nn

import manyhands as mh
from manyhands.checkpoint import checkpoints
from manyhands.engines.sim.timeline import Timeline
from manyhands.errors import Unsupported
from manyhands.events import Event
from manyhands.evidence.replay.replay import _run
from manyhands.evidence.replay.server import ReplayJournal, Stores
from manyhands.recording import event_log
from manyhands.server.shard_ranges import make_stores
from manyhands.training.plan import WorkerPlan

slow = pytest.mark.slow
PLAN = "stages=2"


def slow_but(first: str, others: list[str]) -> list[Any]:
    return [first, *(pytest.param(one, marks=slow) for one in others)]


def steps_of(directory: Path) -> list[Event]:
    """The `step` and `closing` events of a run."""
    return [event for event, _ in event_log.steps_that_count(event_log.files_in(directory))]


IN_STEP = ["easgd:period=2,bound=0", "downpour:bound=0,rule=sgd,outer_rate=0.7"]


@pytest.mark.parametrize("strategy", slow_but("diloco:via=server,bound=0,period=4", IN_STEP))
def test_in_step_at_a_server_stages_train_as_replicas_do(strategy: str) -> None:
    run = trained("mlp", 4, PLAN, strategy, "local")
    expect_alike(run, trained("mlp", 2, None, strategy, "local"))
    assert run.rows["workers"][1::2] == [0, 0]


AT_THEIR_OWN_PACE = ["agn", "distance", "downpour:push_every=2,pull_every=3,overlap=true"]


@slow
@pytest.mark.parametrize("strategy", [*AT_THEIR_OWN_PACE, "gossip:graph=pairs"])
def test_one_replica_of_two_stages_is_one_worker(strategy: str) -> None:
    expect_alike(trained("mlp", 2, PLAN, strategy, "local"), alone("mlp", strategy=strategy))


# -- several replicas at their own pace: what happened, happens again on whole replicas ------------------------------------


def halves() -> nn.Module:
    """Two layers of equally many numbers: a stage is one half of the whole model's vector."""
    return nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Tanh(), nn.Linear(16, 16)))


HALVES = task(halves, classified, numbers(ROWS, (16,)), numbers(20, (16,), seed=1))


def as_whole_replicas(steps: list[Event]) -> Iterator[Event]:
    """The journal of two workers whose server has two shards, of one of two replicas with two stages."""
    for replica in range(2):
        first, second = ([event for event in steps if event.rank == 2 * replica + stage] for stage in range(2))
        assert [event.values.get("lease") for event in first] == [event.values.get("lease") for event in second]
        for one, other in zip(first, second, strict=True):
            values = dict(one.values)
            for name in ("pulls", "pushes"):
                pairs = zip(values.get(name, []), other.values.get(name, []), strict=True)
                values[name] = [[*a, *b] for a, b in pairs]
            yield replace(one, rank=replica, values=values)


@pytest.mark.parametrize("strategy", slow_but("dynsgd:window=2", ["downpour:bound=1,overlap=true"]))
def test_at_their_own_pace_stages_are_shards_of_a_server_of_whole_replicas(strategy: str, tmp_path: Path) -> None:
    """The run's journal, read as that of two workers and a server of two shards, gives its result."""
    run = mh.train(
        HALVES,
        workers=4,
        engine="local",
        strategy=strategy,
        model_parallel="stages=2,cut=[1]",
        run_dir=tmp_path,
        threads_per_worker=1,
    )
    assert [one["parameters"] for one in run.info["stages"]] == [272, 272]
    rule = mh.strategies.strategy_of(strategy)
    journal = ReplayJournal(2, as_whole_replicas(steps_of(tmp_path)))
    stores = Stores(rule.server(), make_stores(rule.server(), 2, 2), journal, Timeline(), ordered=True)
    plan = WorkerPlan(task=HALVES.with_fields(micro_batch_size=10), strategy=rule)
    parameters = _run(plan, stores, 2, 1, None).states[0][0]
    for name, value in run.model.state_dict().items():
        torch.testing.assert_close(parameters[name], value, rtol=0, atol=WITHIN)
    with pytest.raises(Unsupported, match="stages"):
        mh.replay(tmp_path, task=HALVES)


@slow
@pytest.mark.parametrize(
    "strategy", ["downpour:bound=1,warmup=3", pytest.param("agn:window=2", marks=pytest.mark.nightly)]
)
def test_a_replica_leases_as_one_and_each_push_is_one_version(strategy: str, tmp_path: Path) -> None:
    """The journal of each stage is that of a server of its own; copies of a tied parameter stay equal."""
    run = train("gpt", 4, PLAN, strategy, "local", servers=2, run_dir=tmp_path)
    steps = steps_of(tmp_path)
    for stage in range(2):
        own = [event for event in steps if event.rank is not None and event.rank % 2 == stage]
        leased = Counter((e.values["epoch"], *e.values["lease"][:2]) for e in own if e.type == "step")
        assert leased == Counter((epoch, index, part) for epoch in range(2) for index in range(3) for part in range(2))
        for shard in range(2):
            versions = sorted(push[shard] for event in own for push in event.values.get("pushes", []))
            assert versions == list(range(1, len(versions) + 1))
            assert versions
    assert run.rows["total"] == 2 * ROWS == sum(run.rows["workers"][::2])
    assert sorted(row["tick"] for row in run.history) == list(range(6))
    saved = checkpoints.newest(tmp_path / "checkpoints", pytest.fail)
    assert saved is not None
    for replica in range(2):
        copies = [saved.tensors(2 * replica + stage)["parameters/tokens.weight"] for stage in range(2)]
        assert torch.equal(*copies)


@slow
@pytest.mark.parametrize(
    ("name", "before", "after"), [("mlp", (4, PLAN), (6, "stages=3")), ("gpt", (2, None), (4, PLAN))]
)
def test_what_a_server_holds_goes_on_under_any_plan(
    name: str, before: tuple[int, str | None], after: tuple[int, str | None], tmp_path: Path
) -> None:
    """Its momentum, too."""
    strategy, given = "diloco:via=server,bound=0,period=2", {"schedule": None, "run_dir": tmp_path}
    train(name, *before, strategy, "local", max_steps=3, **given)  # an epoch, at whose end no round is open
    run = train(name, *after, strategy, "local", resume=True, **given)
    expect_alike(run, trained(name, 2, None, strategy, "local", schedule=None))
