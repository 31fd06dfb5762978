"""A run whose replicas are several stages goes on when one of their workers is lost: with whole replicas."""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from stage_models import ROWS, TASKS, classified, masked
from test_stages_integration import WITHIN, trained
from torch import Tensor, nn

import manyhands as mh
from manyhands.engines.base import Engine, LaunchSpec
from manyhands.engines.hosts.engine import Hosts
from manyhands.engines.local.engine import Local
from manyhands.errors import BadInput, PeerLost, Unsupported, WorkerFailed
from manyhands.events import Event
from manyhands.parallel.spec import ModelParallel
from manyhands.recording import event_log
from manyhands.training.plan import WorkerPlan
from manyhands.training.worker_main import work
from manyhands.worker import Worker, current

sys.path.append(str(Path(__file__).resolve().parents[1] / "engines" / "hosts"))
from joined_run import Run, joined_by

SLOW = pytest.mark.slow


class Changes(mh.Callback):
    """What happened to members, in order: (kind, worker)."""

    def __init__(self) -> None:
        self.found: list[tuple[str, int]] = []

    def on_notice(self, event: Event) -> None:
        if event.type == "change":
            self.found.append((event.values["kind"], event.values["worker_id"]))


class Patient:
    """A loss that waits in its tenth call until another worker asks to join: else the run may be over by then."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        worker, until = current(), time.monotonic() + 30.0
        self.calls += 1
        while self.calls == 10 and worker is not None and not worker.interrupted and time.monotonic() < until:
            time.sleep(0.01)
        return classified(model, batch)


def survives(
    name: str, workers: int, engine: Engine, stages: int = 2, survive: str = "max_losses=3", **given: Any
) -> mh.Run:
    fields = given.pop("fields", {})
    return mh.train(
        TASKS[name].with_fields(**fields),
        workers=workers,
        engine=engine,
        model_parallel=f"stages={stages}",
        survive=survive,
        threads_per_worker=1,
        **given,
    )


def expect_result_of(run: mh.Run, expected: mh.Run) -> None:
    """Parameters, buffers, metrics, and every step with its rows and its loss, once."""
    for name, value in expected.model.state_dict().items():
        torch.testing.assert_close(run.model.state_dict()[name], value, rtol=0, atol=WITHIN)
    assert run.metrics == pytest.approx(expected.metrics, abs=WITHIN)
    assert run.rows["total"] == expected.rows["total"]
    assert [row["rows"] for row in run.history] == [row["rows"] for row in expected.history]
    assert [row["step"] for row in run.history] == [row["step"] for row in expected.history]


def test_a_replica_that_loses_a_worker_leaves_and_the_other_goes_on(tmp_path: Path) -> None:
    changes, directory = Changes(), tmp_path / "run"
    run = survives(
        "gpt",
        4,
        Local(faults="kill=1@step:4"),
        survive="max_losses=1,replace=false",
        callbacks=[changes],
        run_dir=directory,
    )
    expect_result_of(run, trained("gpt", 1, None))
    assert changes.found == [("lost", 1)]
    assert [(loss["worker_id"], loss["cause"]) for loss in run.losses] == [(1, "death")]
    events = list(event_log.read(directory / event_log.FILE))
    killed = next(event.time_s for event in events if event.type == "fault")
    goes_on = next(event for event in events if event.type == "step" and event.generation == 1)
    assert goes_on.rank in (2, 3)
    assert goes_on.time_s - killed < 10  # 0.2 s where nothing else runs


@SLOW
def test_a_lost_workers_replica_starts_anew_and_takes_the_others_state() -> None:
    changes = Changes()
    engine = Local(faults="kill=2@step:3")
    run = survives("mlp", 4, engine, callbacks=[changes], fields={"loss": Patient(), "epochs": 20})
    expect_result_of(run, trained("mlp", 1, None, epochs=20))
    assert changes.found[0] == ("lost", 2)
    assert sorted(changes.found[1:]) == [("back", 2), ("back", 3)]
    assert min(run.rows["workers"][::2]) > 3 * ROWS  # both replicas train to the end


@SLOW
@pytest.mark.parametrize(
    ("name", "workers", "stages", "faults"),
    [
        ("gpt", 4, 2, "kill=1@step:4:exchange"),
        ("gpt", 4, 2, "kill=3@step:6:commit"),
        ("gpt", 4, 2, "kill=0@step:6:save"),
        ("gpt", 4, 2, "kill=0@step:7"),
        ("gpt", 4, 2, "kill=0@step:34:commit"),
        ("mlp", 6, 2, "kill=2@step:7:exchange,kill=1@step:20"),
        ("mlp", 9, 3, "kill=0@step:5,kill=4@step:24:exchange"),
    ],
)
def test_whenever_and_whoever(name: str, workers: int, stages: int, faults: str, tmp_path: Path) -> None:
    """With validations, checkpoints and the best model kept: what was under way is done again."""
    often: dict[str, Any] = {"validate_every": 2, "keep": "best:validation_loss"}
    run = survives(
        name,
        workers,
        Local(faults=faults),
        stages,
        fields={"epochs": 12},
        run_dir=tmp_path / "run",
        checkpoint_every=3,
        **often,
    )
    assert len(run.losses) == faults.count("kill")
    alone = mh.train(TASKS[name].with_fields(epochs=12), workers=1, engine="local", threads_per_worker=1, **often)
    expect_result_of(run, alone)


@SLOW
def test_on_two_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_CREDENTIALS", str(tmp_path / "run.pem"))
    hosts = Run(Hosts(local_workers=2, faults="kill=3@step:4"), joined_by(2))
    run = hosts.during(lambda: survives("gpt", 4, hosts.engine, survive="max_losses=1,replace=false"))
    expect_result_of(run, trained("gpt", 1, None))


def test_without_another_whole_replica_the_run_ends() -> None:
    with pytest.raises(WorkerFailed, match="no whole replica of 2 workers is left that has the model's state"):
        survives("gpt", 2, Local(faults="kill=1@step:4"))


@SLOW
def test_one_replica_starts_again_from_its_newest_checkpoint(tmp_path: Path) -> None:
    run = survives(
        "gpt",
        2,
        Local(faults="kill=1@step:8"),
        survive="max_losses=1,max_restarts=1",
        run_dir=tmp_path / "run",
        checkpoint_every=5,
    )
    expect_result_of(run, trained("gpt", 1, None))
    assert [one["step"] for one in run.restarts] == [5]


@pytest.mark.parametrize(
    ("strategy", "survive", "error", "said"),
    [
        ("local-sgd", "max_losses=1", Unsupported, "make each step together"),
        ("allreduce:compress=topk:0.1", "max_losses=1", Unsupported, "compresses"),
        ("downpour", "max_losses=1", Unsupported, "max_restarts"),
        ("allreduce", "max_losses=1,max_workers=5", BadInput, "give a multiple of 2"),
    ],
)
def test_what_a_run_with_stages_cannot_survive(strategy: str, survive: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        survives("gpt", 4, Local(), survive=survive, strategy=strategy)


# -- without survive: the others hear of it --------------------------------------------------------------------------------


def dies(folder: Path, model: nn.Module, batch: Any) -> Any:
    """A loss in whose ninth micro-batch worker 1 kills itself."""
    worker, calls = current(), folder / "calls"
    assert worker is not None
    if worker.rank == 1:
        calls.write_text(calls.read_text() + "." if calls.exists() else ".")
        if len(calls.read_text()) == 9:
            (folder / "died").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
    return masked(model, batch)


def noted(folder: Path, worker: Worker) -> None:
    """Train; note whose loss ended it, and when."""
    task = TASKS["gpt"].with_fields(loss=partial(dies, folder))
    plan = WorkerPlan(
        task=task, strategy=mh.strategies.strategy_of("allreduce"), model_parallel=ModelParallel(stages=worker.size)
    )
    try:
        work(plan, worker)
    except PeerLost as error:
        note = folder / f"{worker.rank}.part"
        note.write_text(f"{error.rank} {time.time()}")
        note.rename(folder / f"{worker.rank}")  # whole, or not there: the driver ends this worker meanwhile
        raise


@pytest.mark.parametrize("where", ["local", pytest.param("hosts", marks=SLOW)])
def test_a_stage_that_is_killed_is_named_to_all_others_at_once(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANYHANDS_CREDENTIALS", str(tmp_path / "run.pem"))
    launch = Local().launch if where == "local" else Run(Hosts(local_workers=1), joined_by(2)).launch
    with pytest.raises(WorkerFailed, match="worker 1") as raised:
        launch(partial(noted, tmp_path), LaunchSpec(workers=3, threads_per_worker=1))
    ended = time.time()
    assert raised.value.rank == 1
    died = float((tmp_path / "died").read_text())
    for note in (tmp_path / "0", tmp_path / "2"):
        if note.exists():  # else the driver has ended that worker before it had written
            named, when = note.read_text().split()
            assert int(named) == 1
            assert float(when) - died < 5  # 20 ms where nothing else runs
    assert ended - died < 10  # 0.2 s
