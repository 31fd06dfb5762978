"""train() with a parameter server, leases and workers of their own pace, on real processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
import plain
from manyhands.engines.local.engine import Local
from manyhands.errors import BadInput, Preempted, Unsupported, WorkerFailed
from manyhands.events import Event
from manyhands.recording import event_log
from preempting import Preempting
from slow_cases import slow_after

OWN_PACE = (
    "downpour",
    "agn",
    "dynsgd",
    "distance",
    "easgd",
    "eamsgd",
    "diloco:period=3,via=server",
    "update-sharing",
    "hogwild",
)
IN_STEP = (
    "downpour:bound=0",
    "easgd:bound=0",
    "easgd:via=group",
    "quorum",
    "dynsgd:bound=0",
    "diloco:period=3,via=server,bound=0",
    "diloco:period=4,streaming=2,overlap=2",
)


def learnable(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, _ = plain.rows(n)
    return x, x[:, :3].argmax(1)


def task(**fields: Any) -> mh.Task:
    return plain.task(**{"train_data": learnable(130), "optimizer": plain.OPTIMIZERS["sgd"], "epochs": 3, **fields})


def train(given: mh.Task, local: Local, strategy: str, workers: int = 3, **options: Any) -> mh.Run:
    return mh.train(given, engine=local, strategy=strategy, workers=workers, threads_per_worker=1, **options)


def leases(folder: Path) -> list[tuple[int, int, int]]:
    """(epoch, batch, part) of every slice that was trained, in all launches."""
    return [(step.values["epoch"], *step.values["lease"][:2]) for step in steps(folder)]


def steps(folder: Path) -> list[Event]:
    return [event for event in event_log.read(folder / event_log.FILE) if event.type == "step"]


@pytest.mark.parametrize("strategy", slow_after(2, OWN_PACE))
def test_every_row_once_and_it_learns(strategy: str, local: Local, tmp_path: Path) -> None:
    """Semantic 2, for workers of their own pace."""
    given = task(validation_data=learnable(130))
    run = train(given, local, strategy, run_dir=tmp_path / "run")
    assert run.rows["total"] == sum(run.rows["workers"]) == 390
    assert run.rows["unused"] == 0
    assert sorted(leases(tmp_path / "run")) == [(e, b, p) for e in range(3) for b in range(11) for p in range(3)]
    losses = [
        e.values["metrics"]["validation_loss"]
        for e in event_log.read(tmp_path / "run/events.jsonl")
        if e.type == "validation"
    ]
    assert losses[-1] < losses[0]
    assert (sum(run.staleness.values()) > 0) is (strategy != "hogwild")


@pytest.mark.parametrize("strategy", slow_after(1, IN_STEP))
def test_in_step_it_is_the_same_bits_twice(strategy: str, local: Local) -> None:
    """Semantic 7; staleness 0. (CASE 11)"""
    runs = [train(task(), local, strategy) for _ in range(2)]
    assert torch.equal(runs[0].parameters, runs[1].parameters)
    assert set(runs[0].staleness) <= {0}
    assert runs[0].rows["total"] == 390


@pytest.mark.parametrize(
    "strategy", ["downpour", "dynsgd", "hogwild", "distance:window=1", "quorum", "downpour:bound=0"]
)
def test_one_worker_is_a_plain_loop(strategy: str, local: Local) -> None:
    """CASES 1, 7: in this process, over a server in this process."""
    given = task(optimizer=plain.OPTIMIZERS["adamw"], clip_norm=0.5)
    assert (train(given, local, strategy, 1).parameters - train(given, local, "solo", 1).parameters).abs().max() < 1e-14


@pytest.mark.slow
def test_quorum_of_all_is_allreduce(local: Local) -> None:
    quorum, allreduce = (train(task(), local, strategy) for strategy in ("quorum", "allreduce"))
    assert (quorum.parameters - allreduce.parameters).abs().max() < 1e-12


@pytest.mark.slow
def test_shards_do_not_change_the_result(local: Local) -> None:
    one, three = (train(task(), local, "downpour:bound=0", servers=servers) for servers in (1, 3))
    assert (one.parameters - three.parameters).abs().max() < 1e-14


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "workers"),
    slow_after(
        2,
        [
            ("downpour", 3),
            ("agn:window=2,bound=2", 3),
            ("easgd:period=2", 3),
            ("diloco:period=4,via=server", 3),
            ("downpour", 2),
            ("diloco:period=4,via=server", 2),
        ],
    ),
)
def test_stopped_half_way_and_resumed_every_row_is_trained_once(
    strategy: str, workers: int, local: Local, tmp_path: Path
) -> None:
    """CASE 19 as far as it holds without an order: what was trained is not trained again, what was not is; the server goes on."""
    folder, given = tmp_path / "run", {"epochs": 2, "train_data": learnable(12 * 60)}
    with pytest.raises(Preempted, match="resume it with resume=True"):
        train(task(**given, loss=Preempting(1, 20)), local, strategy, run_dir=folder)
    assert 20 <= len(leases(folder)) <= 3 * 20  # in the first epoch, of 180
    run = train(task(**given), local, strategy, workers, run_dir=folder, resume=True)
    assert run.rows["total"] == 2 * 12 * 60
    whole = [(e, b, p) for e in range(2) for b in range(60) for p in range(3)]
    assert sorted(leases(folder)) == (whole if workers == 3 else [(e, b, p) for e, b, p in whole if e == 0 or p < 2])


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), slow_after(1, [(30, "epoch"), ("epoch", 30)]))
def test_resumed_with_other_meetings_every_row_is_trained_once(
    before: str | int, after: str | int, local: Local, tmp_path: Path
) -> None:
    """What is left half-way is of the segment as it was, whenever the next validation is due now."""
    folder, given = tmp_path / "run", {"epochs": 1, "train_data": learnable(12 * 60), "validation_data": learnable(20)}
    with pytest.raises(Preempted):
        train(task(**given, loss=Preempting(1, 8)), local, "downpour", run_dir=folder, validate_every=before)
    run = train(task(**given), local, "downpour", run_dir=folder, resume=True, validate_every=after)
    assert run.rows["total"] == 12 * 60
    assert sorted(leases(folder)) == [(0, b, p) for b in range(60) for p in range(3)]


@pytest.mark.slow
def test_in_step_interrupted_and_resumed_is_uninterrupted(local: Local, tmp_path: Path) -> None:
    """CASE 19: the server's momentum and versions included."""
    strategy = "downpour:bound=0,rule=sgd,outer_rate=0.7,outer_momentum=0.8,push_every=3,pull_every=3"
    folder, given = tmp_path / "run", {"epochs": 2, "train_data": learnable(12 * 60)}
    whole = train(task(**given), local, strategy)
    with pytest.raises(Preempted):
        train(task(**given, loss=Preempting(1, 70)), local, strategy, run_dir=folder)
    assert 69 <= max(step.tick for step in steps(folder)) < 2 * 60
    resumed = train(task(**given), local, strategy, run_dir=folder, resume=True, servers=2)
    assert torch.equal(resumed.parameters, whole.parameters)


def test_max_seconds_ends_all_workers(local: Local) -> None:
    run = train(task(epochs=100_000), local, "downpour", max_seconds=0.5)
    assert run.info["stopped"] == "max_seconds"
    assert run.rows["total"] > 0


class Killed:
    """A loss that ends its process at its n-th call on one rank."""

    def __init__(self, rank: int, call: int) -> None:
        self.rank, self.call, self.calls = rank, call, 0

    def __call__(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        self.calls += 1
        worker = mh.worker()
        if worker.rank == self.rank and self.calls == self.call:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain.cross_entropy(model, batch)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["downpour", "downpour:bound=1", "quorum", "hogwild"])
def test_a_worker_that_dies_ends_the_run_by_name(strategy: str, local: Local) -> None:
    with pytest.raises(WorkerFailed, match=r"worker 1 on .* was killed by signal 9") as caught:
        train(task(loss=Killed(1, 5)), local, strategy)
    assert caught.value.rank == 1


class ShardKilled(Killed):
    """The same for the server: the process among this one's siblings that is no worker."""

    def __call__(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        self.calls += 1
        worker = mh.worker()
        if self.calls == 2:
            self.workers = worker.group.all_gather_json(os.getpid())
        if worker.rank == self.rank and self.calls == self.call:
            (shard,) = siblings() - set(self.workers)
            os.kill(shard, signal.SIGKILL)
        return plain.cross_entropy(model, batch)


def siblings() -> set[int]:
    """This process and those with the same parent."""
    stats = {int(path.parent.name): path.read_text() for path in Path("/proc").glob("[0-9]*/stat")}
    return {pid for pid, text in stats.items() if int(text.rpartition(")")[2].split()[1]) == os.getppid()}


def test_a_shard_that_dies_ends_the_run_by_name(local: Local) -> None:
    with pytest.raises(WorkerFailed, match=r"server shard 0 on .* was killed by signal 9"):
        train(task(loss=ShardKilled(1, 5)), local, "downpour")


def test_refused_before_anything_starts(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match="needs a server with one shard"):
        train(task(), local, "quorum", servers=2)
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadInput, match="servers=2 under torchrun, where the first worker of each host holds one shard"):
        mh.train(task(), strategy="downpour", servers=2)


def test_summary_says_how_far_a_batch_moves_the_answer(local: Local) -> None:
    """Semantic 4: rules that add say so."""
    run = train(task(), local, "downpour")
    assert run.info["effective_rate"] == pytest.approx(3 * run.info["rate"])
    assert "effective rate 0.15" in run.summary()
