"""Code of its own beside the loop: when it is called, what it sees, and what it may change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
import plain
from manyhands.replica.replica import Replica
from manyhands.worker import Worker
from manyhands.worker_callback import WorkerCallback, WorkerCallbackFactory


@dataclass
class Said(WorkerCallbackFactory):
    """Notes of all workers, which share a process here; `stop`: (method, epoch or tick) at which worker 0 ends the run."""

    stop: tuple[str, int] = ("", 0)
    fill: tuple[str, float] = ("", 0.0)
    notes: list[tuple[int, str, Any]] = field(default_factory=list)
    models: list[int] = field(default_factory=list)
    heard: list[Any] = field(default_factory=list)

    def check(self, one_model: bool) -> None:
        if not one_model:
            raise mh.Unsupported("many models")

    def join(self, worker: Worker, replica: Replica) -> WorkerCallback | None:
        return Noted(self, worker, replica)

    def hear(self, said: Any) -> None:
        self.heard.append(said)


class Noted(WorkerCallback):
    def __init__(self, said: Said, worker: Worker, replica: Replica) -> None:
        self.said, self.worker, self.replica, self.ticks = said, worker, replica, 0

    def note(self, name: str, value: Any) -> bool:
        """Whether all shall stop here."""
        self.said.notes.append((self.worker.rank, name, value))
        kind, number = self.said.fill
        if kind == name and self.worker.rank == 0:
            self.replica.parameters.fill_(number)
        return self.said.stop == (name, value)

    def begin(self, facts: Mapping[str, Any]) -> None:
        self.note("begin", facts["epochs"])

    def epoch_begins(self, epoch: int) -> None:
        self.note("epoch_begins", epoch)

    def ticked(self, loss: float | None) -> bool:
        self.ticks += 1
        return self.note("ticked", self.ticks) and self.worker.rank == 0

    def epoch_ends(self, epoch: int, metrics: Mapping[str, float]) -> bool:
        self.said.notes.append((self.worker.rank, "metrics", dict(metrics)))
        assert not self.replica.model.training
        return self.note("epoch_ends", epoch)

    def end(self) -> Any:
        self.note("end", None)
        return {"rank": self.worker.rank}


def trained(said: Said, strategy: str = "local-sgd:period=3", **options: Any) -> mh.Run:
    fields = {"train_data": plain.rows(24), "validation_data": plain.rows(7, seed=2), "batch_size": 6, "epochs": 3}
    return mh.train(plain.task(**fields, companion=said), strategy=strategy, engine="sim", **{"workers": 2, **options})


def called(said: Said, rank: int) -> list[tuple[str, Any]]:
    return [(name, value) for r, name, value in said.notes if r == rank and name != "metrics"]


@pytest.mark.parametrize("strategy", ["allreduce", "downpour"])
def test_every_worker_is_called_in_order(strategy: str) -> None:
    said = Said()
    trained(said, strategy)
    for rank in range(2):
        names = [name for name, _ in called(said, rank)]
        epoch = ["epoch_begins", *["ticked"] * (names.count("ticked") // 3), "epoch_ends"]
        assert names[0] == "begin"
        assert [n for n in names if n != "ticked"] == ["begin", *["epoch_begins", "epoch_ends"] * 3, "end"]
        if strategy == "allreduce":
            assert names == ["begin", *epoch * 3, "end"]
            assert len(epoch) == 6
    assert said.heard == [{"rank": 0}]


def test_it_hears_the_metrics_of_the_validation_of_its_epoch() -> None:
    said = Said()
    run = trained(said)
    metrics = [value for rank, name, value in said.notes if (rank, name) == (1, "metrics")]
    assert metrics[-1] == run.metrics
    assert [list(one) for one in metrics] == [["validation_loss"]] * 3


def test_without_a_validation_there_are_no_metrics() -> None:
    said = Said()
    trained(said, validate_every=100)
    assert {str(value) for _, name, value in said.notes if name == "metrics"} == {"{}"}


def test_an_epochs_end_may_end_the_run() -> None:
    said = Said(stop=("epoch_ends", 1))
    run = trained(said)
    assert (run.steps, run.info["stopped"]) == (8, "callback")
    assert called(said, 1)[-1] == ("end", None)


@pytest.mark.parametrize("strategy", ["allreduce", "local-sgd:period=2", "downpour"])
def test_one_workers_tick_ends_it_for_all(strategy: str) -> None:
    said = Said(stop=("ticked", 2))
    run = trained(said, strategy)
    assert run.info["stopped"] == "callback"
    assert run.steps < 12
    assert [called(said, rank)[-1] for rank in range(2)] == [("end", None)] * 2


def test_what_worker_0_leaves_in_the_model_is_the_answer(tmp_path: Path) -> None:
    """In the model, in the metrics, and in the run directory."""
    run = trained(Said(fill=("end", 0.5)), test_data=plain.rows(9, seed=3), run_dir=tmp_path / "run")
    assert torch.equal(run.parameters, torch.full_like(run.parameters, 0.5))
    for part, rows in (("validation", plain.rows(7, seed=2)), ("test", plain.rows(9, seed=3))):
        with torch.no_grad():
            assert run.metrics[f"{part}_loss"] == pytest.approx(float(plain.cross_entropy(run.model, rows)), abs=1e-12)
    again = trained(Said(), test_data=plain.rows(9, seed=3), run_dir=tmp_path / "run", resume=True)
    assert torch.equal(again.parameters, run.parameters)


def test_parameters_are_left_alone_between_epochs() -> None:
    with pytest.raises((mh.Unsupported, mh.WorkerFailed), match="between two epochs"):
        trained(Said(fill=("epoch_ends", 0.5)))


def test_it_may_refuse_before_anything_starts() -> None:
    said = Said()
    with pytest.raises(mh.Unsupported, match="many models"):
        trained(said, "ensemble")
    assert said.notes == []


def test_a_companion_that_looks_changes_nothing() -> None:
    ours = trained(Said())
    fields = {"train_data": plain.rows(24), "validation_data": plain.rows(7, seed=2), "batch_size": 6, "epochs": 3}
    without = mh.train(plain.task(**fields), strategy="local-sgd:period=3", engine="sim", workers=2)
    assert torch.equal(ours.parameters, without.parameters)
