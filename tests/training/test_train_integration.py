"""train() on several real processes, and on simulated ones what needs no process."""

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
import plain
from manyhands.callbacks.base import Callback
from manyhands.engines.local.engine import Local
from manyhands.errors import Preempted
from manyhands.events import Event
from preempting import Preempting
from sharded_streams import Sharded


def task(**fields: Any) -> mh.Task:
    schedule = lambda optimizer, total: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)  # noqa: E731
    return plain.task(**{"epochs": 3, "schedule": schedule, **fields})


def train(given: mh.Task, engine: Local | str, workers: int = 4, **options: Any) -> mh.Run:
    return mh.train(given, engine=engine, workers=workers, threads_per_worker=1, **options)


def apart(a: mh.Run, b: mh.Run) -> float:
    return float((a.parameters - b.parameters).abs().max())


class Dropping(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
        self.double()


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
def test_four_workers_equal_one(optimizer: str) -> None:
    """CASE 2: through train() with a cosine schedule and 39 rows in batches of 12; validation and test metrics too."""
    data = {"validation_data": plain.rows(17, seed=2), "test_data": plain.rows(5, seed=3)}
    given = task(optimizer=plain.OPTIMIZERS[optimizer], clip_norm=0.5, **data)
    one, four = train(given, "local", 1), train(given, "sim")
    assert apart(one, four) < 1e-10
    assert four.metrics == pytest.approx(one.metrics, abs=1e-10)
    assert [row["loss"] for row in four.history] == pytest.approx([row["loss"] for row in one.history], abs=1e-10)
    assert (four.steps, four.rows["total"], sum(four.rows["workers"])) == (12, 117, 117)
    assert four.ledger


def test_the_same_seed_gives_the_same_bits(local: Local) -> None:
    """Whichever engine trains."""
    given = task(model=Dropping, train_data=plain.rows(36), validation_data=plain.rows(17, seed=2))
    a, b = (train(given, engine, 2, strategy="allreduce:overlap=true") for engine in (local, "sim"))
    assert torch.equal(a.parameters, b.parameters)
    assert a.metrics == b.metrics
    assert a.rows["total"] == 108


def test_an_ensemble_averages_outputs_and_its_best_is_each_members_own(tmp_path: Path) -> None:
    x, y = plain.rows(36)
    wrong = (x, (y + 1) % 3)
    given = task(model=Dropping, train_data=(x, y), validation_data=wrong, test_data=wrong, epochs=6, schedule=None)
    options: dict[str, Any] = {"strategy": "ensemble", "keep": "best:validation_loss", "workers": 3}
    run = train(given, "sim", **options)
    assert len(run.models) == 3
    outputs = [model.eval()(x) for model in run.models]
    assert torch.allclose(run.model(x), torch.stack(outputs).mean(0))
    assert not torch.allclose(outputs[0], outputs[1])
    loss = nn.functional.cross_entropy(run.model(x), wrong[1]).item()
    assert [run.metrics[f"{data}_loss"] for data in ("validation", "test")] == pytest.approx([loss] * 2, abs=1e-12)
    train(given.with_fields(epochs=3), "sim", run_dir=tmp_path / "run", **options)
    resumed = train(given, "sim", run_dir=tmp_path / "run", resume=True, **options)
    assert torch.equal(resumed.parameters, run.parameters)
    assert resumed.metrics == run.metrics


def test_streams_of_unequal_length_end_together() -> None:
    """CASE 18: shards of 0, 1, fewer than a batch and many rows; every row once, no hang.

    And ten shards on two workers: one of 5,120 rows, eight of 6,144, one of 5,728, in five hundredths.
    """
    row = torch.ones(5, dtype=torch.float64), torch.tensor(1)  # only how many there are matters
    for strategy in ("allreduce", "local-sgd:period=4", "ensemble"):
        given = task(
            train_data=Sharded([[row] * length for length in (0, 1, 5, 70)]), epochs=2, batch_size=8, schedule=None
        )
        run = train(given, "sim", strategy=strategy)
        assert run.rows["total"] == 2 * 76, strategy
        assert sorted(run.rows["workers"]) == [0, 2, 10, 140]
    lengths = [10, *[12] * 8, 11]
    for strategy in ("allreduce", "local-sgd:period=8"):
        given = task(train_data=Sharded([[row] * length for length in lengths]), epochs=1, batch_size=5, schedule=None)
        run = train(given, "sim", 2, strategy=strategy)
        assert run.rows == {"total": 117, "workers": [sum(lengths[::2]), sum(lengths[1::2])], "unused": 0}, strategy


@pytest.mark.parametrize("strategy", ["allreduce", "local-sgd:period=3", "local-sgd:period=end"])
def test_interrupted_and_resumed_is_uninterrupted(strategy: str, tmp_path: Path) -> None:
    """CASE 19: optimizer, schedule, data position, best kept; on two workers, with dropout and batch-norm."""

    class Stopping(Callback):
        def on_step(self, event: Event) -> str | None:
            return "stop" if event.step == 4 else None

    given = task(model=Dropping, train_data=plain.rows(36), epochs=4, validation_data=plain.rows(5))
    options: dict[str, Any] = {"workers": 2, "keep": "best:validation_loss", "checkpoint_every": 2}
    options |= {"strategy": strategy}
    whole = train(given, "sim", **options)
    part = train(given, "sim", run_dir=tmp_path / "run", callbacks=[Stopping()], **options)
    assert part.info["stopped"] == "callback"
    assert part.steps < whole.steps
    (tmp_path / "run" / "result.json").unlink()
    resumed = train(given, "sim", run_dir=tmp_path / "run", resume=True, **options)
    assert torch.equal(resumed.parameters, whole.parameters)
    assert resumed.metrics == whole.metrics
    assert resumed.rows == whole.rows
    assert [row["loss"] for row in resumed.history] == [row["loss"] for row in whole.history]


@pytest.mark.slow
def test_a_stop_is_obeyed_at_the_same_step_by_all(local: Local) -> None:
    """A worker that stopped alone would leave the others waiting in their next exchange."""
    for strategy in ("allreduce", "local-sgd:period=end"):
        run = train(task(epochs=10**5, schedule=None), local, 2, strategy=strategy, max_seconds=0.2, timeout_s=20)
        assert run.info["stopped"] == "max_seconds", strategy


def test_loader_workers_and_a_dataloaders_own_batch_size() -> None:
    rows = torch.utils.data.TensorDataset(*plain.rows(39))
    loader = torch.utils.data.DataLoader(rows, batch_size=12, shuffle=True, num_workers=1)
    given = task(train_data=loader, batch_size=None)
    one, two = train(given, "local", 1), train(given, "sim", 2)
    assert apart(one, two) < 1e-10
    assert one.info["batch_size"] == 12


def test_sigterm_checkpoints_and_can_be_resumed(local: Local, tmp_path: Path) -> None:
    """Exit code 75 is the command's; the library raises Preempted."""
    with pytest.raises(Preempted, match="resume it with resume=True"):
        train(plain.task(epochs=3, loss=Preempting(0, 6)), local, 2, run_dir=tmp_path / "run")
    (tick,) = {int(path.name.removeprefix("step-")) for path in (tmp_path / "run/checkpoints").iterdir()} - {4}
    assert 6 <= tick < 12
    resumed = train(plain.task(epochs=3), "sim", 2, run_dir=tmp_path / "run", resume=True)
    assert torch.equal(resumed.parameters, train(plain.task(epochs=3), "sim", 2).parameters)


def test_a_workers_end_is_what_the_user_sees(local: Local) -> None:
    """CASE 21: an exception with its own traceback, and a death."""

    def raises() -> None:
        raise RuntimeError("the seventh row is odd")

    def dies() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def loss(model: nn.Module, batch: Any, ends: Callable[[], None]) -> torch.Tensor:
        if mh.worker().rank == 1:
            ends()
        return plain.cross_entropy(model, batch)

    for ends, words in (
        (raises, "(?s)worker 1 .* in phase compute at step 0.*the seventh row is odd"),
        (dies, "worker 1 .*SIGKILL.*in phase compute at step 0"),
    ):
        with pytest.raises(mh.WorkerFailed, match=words) as caught:
            train(task(loss=partial(loss, ends=ends)), local, 2)
        assert ends is dies or "in loss" in caught.value.detail
