"""train() with a parameter server, leases and workers of their own pace: simulated, and on real processes."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from served_training import learnable, leases, steps, task, train

import manyhands as mh
import plain
from manyhands.engines.local.engine import Local
from manyhands.errors import BadInput, Preempted, Unsupported, WorkerFailed
from manyhands.recording import event_log
from preempting import Preempting

JITTER = "sim:compute='row=1e-3,jitter=exponential'"


@pytest.mark.parametrize(
    ("strategy", "engine"),
    [
        *(("downpour", "local"), ("hogwild", "local"), ("agn", JITTER), ("dynsgd", JITTER), ("distance", JITTER)),
        *(("eamsgd", JITTER), ("diloco:period=3,via=server", JITTER), ("update-sharing", JITTER)),
    ],
)
def test_every_row_once_and_it_learns(strategy: str, engine: str, local: Local, tmp_path: Path) -> None:
    """Semantic 2, for workers of their own pace."""
    given, used = task(validation_data=learnable(130)), local if engine == "local" else engine
    run = train(given, used, strategy, run_dir=tmp_path / "run")
    assert run.rows["total"] == sum(run.rows["workers"]) == 390
    assert run.rows["unused"] == 0
    assert sorted(leases(tmp_path / "run")) == [(e, b, p) for e in range(3) for b in range(11) for p in range(3)]
    events = event_log.read(tmp_path / "run/events.jsonl")
    losses = [e.values["metrics"]["validation_loss"] for e in events if e.type == "validation"]
    assert losses[-1] < losses[0]
    assert (sum(run.staleness.values()) > 0) is (strategy != "hogwild")
    if strategy == "downpour":  # semantic 4: rules that add say so
        assert run.info["effective_rate"] == pytest.approx(3 * run.info["rate"])
        assert "effective rate 0.15" in run.summary()


def test_in_step_it_is_the_same_bits_twice(local: Local, tmp_path: Path) -> None:
    """Semantic 7, CASE 11: whichever engine trains, and whoever is slow; staleness 0, and nothing is leased."""
    runs = [
        train(task(), engine, "downpour:bound=0", 2, run_dir=tmp_path / f"{number}")
        for number, engine in enumerate((local, JITTER, "sim:compute='row=1e-3,1=5x'"))
    ]
    for run in runs:
        assert torch.equal(run.parameters, runs[0].parameters)
        assert (set(run.staleness), run.rows["total"]) == ({0}, 390)
        assert not any("lease" in step.values for step in steps(run.directory))


def test_one_worker_is_a_plain_loop(local: Local) -> None:
    """CASES 1, 7: in this process, over a server in this process; with a schedule, which follows the rows."""
    schedule = lambda optimizer, total: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)  # noqa: E731
    given = task(optimizer=plain.OPTIMIZERS["adamw"], clip_norm=0.5, schedule=schedule)
    alone = train(given, local, "solo", 1).parameters
    for strategy in ("downpour", "dynsgd", "hogwild", "distance:window=1", "quorum", "downpour:bound=0"):
        assert (train(given, local, strategy, 1).parameters - alone).abs().max() < 1e-14, strategy


def test_quorum_of_all_is_allreduce_and_shards_do_not_change_the_result() -> None:
    quorum, allreduce = (train(task(), "sim", strategy).parameters for strategy in ("quorum", "allreduce"))
    assert (quorum - allreduce).abs().max() < 1e-12
    one, three = (train(task(), "sim", "downpour:bound=0", servers=servers).parameters for servers in (1, 3))
    assert (one - three).abs().max() < 1e-14


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "workers", "before", "after"),
    [("downpour", 3, 10, "epoch"), ("downpour", 3, "epoch", 10), ("diloco:period=4,via=server", 2, "epoch", "epoch")],
)
def test_stopped_half_way_and_resumed_every_row_is_trained_once(
    strategy: str, workers: int, before: int | str, after: int | str, local: Local, tmp_path: Path
) -> None:
    """CASE 19 as far as it holds without an order: what was trained is not trained again, what was not is; the server goes on.

    What is left half-way is of the segment as it was, whenever the next validation is due now.
    """
    folder, given = tmp_path / "run", {"epochs": 2, "train_data": learnable(12 * 30), "validation_data": learnable(20)}
    with pytest.raises(Preempted, match="resume it with resume=True"):
        train(task(**given, loss=Preempting(1, 10)), local, strategy, run_dir=folder, validate_every=before)
    assert 10 <= len(leases(folder)) <= 3 * 10  # in the first epoch, of 90
    run = train(task(**given), JITTER, strategy, workers, run_dir=folder, resume=True, validate_every=after)
    assert run.rows["total"] == 2 * 12 * 30
    whole = [(e, b, p) for e in range(2) for b in range(30) for p in range(3)]
    assert sorted(leases(folder)) == (whole if workers == 3 else [(e, b, p) for e, b, p in whole if e == 0 or p < 2])


@pytest.mark.slow
def test_in_step_interrupted_and_resumed_is_uninterrupted(local: Local, tmp_path: Path) -> None:
    """CASE 19: the server's momentum and versions included."""
    strategy = "downpour:bound=0,rule=sgd,outer_rate=0.7,outer_momentum=0.8,push_every=3,pull_every=3"
    folder, given = tmp_path / "run", {"epochs": 2, "train_data": learnable(12 * 20)}
    whole = train(task(**given), local, strategy)
    with pytest.raises(Preempted):
        train(task(**given, loss=Preempting(1, 25)), local, strategy, run_dir=folder)
    assert 24 <= max(step.tick for step in steps(folder)) < 2 * 20
    resumed = train(task(**given), local, strategy, run_dir=folder, resume=True, servers=2)
    assert torch.equal(resumed.parameters, whole.parameters)


def test_max_seconds_ends_all_workers(local: Local) -> None:
    run = train(task(epochs=100_000), local, "downpour", 2, max_seconds=0.1)
    assert run.info["stopped"] == "max_seconds"
    assert run.rows["total"] > 0


class KillsShard:
    """A loss that on worker 1, at its fifth call, kills the one of its siblings that is a server shard."""

    calls = 0

    def __call__(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        self.calls += 1
        worker = mh.worker()
        if self.calls == 2:
            self.workers = worker.group.all_gather_json(os.getpid())
        if worker.rank == 1 and self.calls == 5:
            (victim,) = siblings() - set(self.workers)
            os.kill(victim, signal.SIGKILL)
        return plain.cross_entropy(model, batch)


def siblings() -> set[int]:
    """This process and those with the same parent."""
    stats = {int(path.parent.name): path.read_text() for path in Path("/proc").glob("[0-9]*/stat")}
    return {pid for pid, text in stats.items() if int(text.rpartition(")")[2].split()[1]) == os.getppid()}


def test_a_shard_that_dies_ends_the_run_by_name(local: Local) -> None:
    with pytest.raises(WorkerFailed, match=r"server shard 0 on .* was killed by signal 9"):
        train(task(loss=KillsShard()), local, "downpour", 2)


def test_refused_before_anything_starts(nothing_starts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match="needs a server with one shard"):
        train(task(), "local", "quorum", servers=2)
    for name, value in zip(
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"), ("0", "2", "0", "h", "1"), strict=True
    ):
        monkeypatch.setenv(name, value)
    with pytest.raises(BadInput, match="servers=2 under torchrun, where the first worker of each host holds one shard"):
        mh.train(task(), strategy="downpour", servers=2)
