"""Replicas of several stages with a server, and ensembles of them, in processes: they train as replicas of one worker."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from stage_models import ROWS, TASKS, classified, numbers, task
from test_stages_integration import WITHIN, expect_alike, trained
from torch import nn

import manyhands as mh
from manyhands.checkpoint import checkpoints
from manyhands.engines.hosts.engine import Hosts
from manyhands.engines.sim.timeline import Timeline
from manyhands.errors import Unsupported
from manyhands.events import Event
from manyhands.evidence.replay.replay import _run
from manyhands.evidence.replay.server import ReplayJournal, Stores
from manyhands.recording import event_log
from manyhands.server.shard_ranges import make_stores
from manyhands.training.plan import WorkerPlan

sys.path.append(str(Path(__file__).resolve().parents[1] / "engines" / "hosts"))
from joined_run import Run, joined_by

SLOW = pytest.mark.slow
PLAN = "stages=2"


def slow_but(first: str, others: list[str]) -> list[Any]:
    return [first, *(pytest.param(one, marks=SLOW) for one in others)]


def steps_of(directory: Path) -> list[Event]:
    """The `step` and `closing` events of a run."""
    return [event for event, _ in event_log.steps_that_count(event_log.files_in(directory))]


IN_STEP = ["downpour:bound=0", "dynsgd:window=2,bound=0", "agn:window=3,bound=0", "easgd:period=2,bound=0"]
IN_STEP += ["eamsgd:period=2,bound=0", "distance:window=2,bound=0", "downpour:bound=0,rule=sgd,outer_rate=0.7"]


@pytest.mark.parametrize("strategy", slow_but("diloco:via=server,bound=0,period=4", IN_STEP))
def test_in_step_at_a_server_stages_train_as_replicas_do(strategy: str, tmp_path: Path) -> None:
    run = trained("gpt", 4, PLAN, strategy)
    expect_alike(run, trained("gpt", 2, None, strategy))
    assert run.rows["workers"][1::2] == [0, 0]


AT_THEIR_OWN_PACE = ["dynsgd:window=2", "agn", "easgd:period=2", "eamsgd:period=2", "distance", "downpour:bound=2"]
AT_THEIR_OWN_PACE += ["downpour:push_every=2,pull_every=3,overlap=true", "gossip:graph=pairs"]


@pytest.mark.parametrize("strategy", slow_but("downpour:push_every=2", AT_THEIR_OWN_PACE))
def test_one_replica_of_two_stages_is_one_worker(strategy: str) -> None:
    expect_alike(trained("gpt", 2, PLAN, strategy), trained("gpt", 1, None, strategy))


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


@pytest.mark.parametrize(
    "strategy",
    slow_but("dynsgd:window=2", ["downpour", "agn", "easgd:period=2", "distance", "downpour:bound=1,overlap=true"]),
)
def test_at_their_own_pace_stages_are_shards_of_a_server_of_whole_replicas(strategy: str, tmp_path: Path) -> None:
    """The run's journal, read as that of two workers and a server of two shards, gives its result."""
    directory = tmp_path / "run"
    run = mh.train(
        HALVES,
        workers=4,
        engine="local",
        strategy=strategy,
        model_parallel="stages=2,cut=[1]",
        run_dir=directory,
        threads_per_worker=1,
    )
    assert [one["parameters"] for one in run.info["stages"]] == [272, 272]
    rule = mh.strategies.strategy_of(strategy)
    journal = ReplayJournal(2, as_whole_replicas(steps_of(directory)))
    stores = Stores(rule.server(), make_stores(rule.server(), 2, 2), journal, Timeline(), ordered=True)
    plan = WorkerPlan(task=HALVES.with_fields(micro_batch_size=10), strategy=rule)
    parameters = _run(plan, stores, 2, 1, None).states[0][0]
    for name, value in run.model.state_dict().items():
        torch.testing.assert_close(parameters[name], value, rtol=0, atol=WITHIN)


@pytest.mark.parametrize(
    "strategy", slow_but("downpour", ["dynsgd", "agn:window=2", "easgd:period=2", "downpour:bound=1,warmup=3"])
)
def test_a_replica_leases_as_one_and_each_push_is_one_version(strategy: str, tmp_path: Path) -> None:
    """The journal of each stage is that of a server of its own; copies of a tied parameter stay equal."""
    directory = tmp_path / "run"
    run = mh.train(
        TASKS["gpt"],
        workers=4,
        servers=2,
        engine="local",
        strategy=strategy,
        model_parallel=PLAN,
        run_dir=directory,
        threads_per_worker=1,
    )
    steps = steps_of(directory)
    for stage in range(2):
        own = [event for event in steps if event.rank is not None and event.rank % 2 == stage]
        leased = Counter((e.values["epoch"], *e.values["lease"][:2]) for e in own if e.type == "step")
        assert leased == Counter((epoch, index, part) for epoch in range(4) for index in range(3) for part in range(2))
        for shard in range(2):
            versions = sorted(push[shard] for event in own for push in event.values.get("pushes", []))
            assert versions == list(range(1, len(versions) + 1))
            assert versions
    assert run.rows["total"] == 4 * ROWS == sum(run.rows["workers"][::2])
    assert len(run.history) == 12
    assert sorted(row["tick"] for row in run.history) == list(range(12))
    saved = checkpoints.newest(directory / "checkpoints", pytest.fail)
    assert saved is not None
    for replica in range(2):
        copies = [saved.tensors(2 * replica + stage)["parameters/tokens.weight"] for stage in range(2)]
        assert torch.equal(*copies)


@SLOW
def test_a_server_on_two_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica each, whose server has a shard beside them on the first host."""
    monkeypatch.setenv("MANYHANDS_CREDENTIALS", str(tmp_path / "run.pem"))
    strategy, hosts = "downpour:bound=0", Run(Hosts(local_workers=2), joined_by(2))
    run = hosts.during(
        lambda: mh.train(
            TASKS["gpt"],
            workers=4,
            servers=2,
            engine=hosts.engine,
            strategy=strategy,
            model_parallel=PLAN,
            threads_per_worker=1,
        )
    )
    expect_alike(run, trained("gpt", 2, None, strategy))


SCRIPT = """
import os, sys
sys.path.insert(0, sys.argv[1])
import manyhands as mh, torch
from stage_models import TASKS
run = mh.train(TASKS["gpt"], strategy="downpour:bound=0", model_parallel="stages=2", threads_per_worker=1)
torch.save(run.model.state_dict(), f"{sys.argv[2]}." + os.environ["RANK"])
"""


@SLOW
def test_a_server_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    source = str(Path(mh.__file__).resolve().parents[1])
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(script)]
    subprocess.run(
        [*launch, str(Path(__file__).parent), str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])},
        check=True,
        timeout=100,
    )
    expected = trained("gpt", 2, None, "downpour:bound=0").model.state_dict()
    for rank in range(4):
        found = torch.load(tmp_path / f"out.{rank}")
        torch.testing.assert_close(found, expected, rtol=0, atol=WITHIN)


# -- ensembles -------------------------------------------------------------------------------------------------------------


@SLOW
@pytest.mark.parametrize("name", ["gpt", "cnn"])
def test_an_ensemble_of_stages_is_one_of_whole_models(name: str) -> None:
    """Each model, and the metrics of the mean of their outputs."""
    run, expected = (trained(name, *given, "ensemble") for given in ((4, PLAN), (2, None)))
    expect_alike(run, expected)
    assert len(run.model.members) == 2
    first, second = (nn.utils.parameters_to_vector(member.parameters()) for member in run.model.members)
    assert not torch.allclose(first, second)


# -- checkpoints -----------------------------------------------------------------------------------------------------------


def resumed(directory: Path, strategy: str, *plans: tuple[int, str | None]) -> mh.Run:
    """Six steps under the first plan, the rest under the second one."""
    for steps, (workers, plan) in zip((6, 12), plans, strict=True):
        run = mh.train(
            TASKS["gpt"].with_fields(max_steps=steps, schedule=None),
            workers=workers,
            engine="local",
            strategy=strategy,
            model_parallel=plan,
            run_dir=directory,
            resume=directory.exists(),
            threads_per_worker=1,
        )
    return run


OTHER_PLANS = [(2, None), (6, "stages=3"), (4, PLAN)]


@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param((4, PLAN), plan, marks=SLOW) for plan in OTHER_PLANS]
    + [pytest.param(plan, (4, PLAN), marks=SLOW) for plan in OTHER_PLANS[:2]],
)
def test_what_a_server_holds_goes_on_under_any_plan(
    before: tuple[int, str | None], after: tuple[int, str | None], tmp_path: Path
) -> None:
    """Its momentum, too."""
    strategy = "diloco:via=server,bound=0,period=2"
    run = resumed(tmp_path / "run", strategy, before, after)
    expect_alike(run, trained("gpt", 2, None, strategy, schedule=None))


# -- what is refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ("quorum", "counts pushes of whole models"),
        ("diloco:via=server", "bound=0"),
        ("hogwild", "one copy"),
        ("update-sharing", "one threshold"),
    ],
)
def test_strategies_of_whole_models_are_refused(strategy: str, said: str) -> None:
    with pytest.raises(Unsupported, match=said):
        trained("gpt", 2, PLAN, strategy)


def test_a_run_with_stages_is_not_replayed(tmp_path: Path) -> None:
    mh.train(
        TASKS["mlp"].with_fields(max_steps=2),
        workers=2,
        engine="local",
        strategy="downpour",
        model_parallel=PLAN,
        run_dir=tmp_path / "run",
    )
    with pytest.raises(Unsupported, match="stages"):
        mh.replay(tmp_path / "run", task=TASKS["mlp"].with_fields(max_steps=2))
