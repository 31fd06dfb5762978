"""Code of its own beside the loop: when it is called, what it sees, and what it may change."""

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
class Shared(WorkerCallbackFactory):
    """Notes of all workers, which share a process here; `stop`: (method, epoch or tick) at which worker 0 ends the run."""

    stop: tuple[str, int] = ("", 0)
    fill: tuple[str, float] = ("", 0.0)
    notes: list[tuple[int, str, Any]] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)

    def check(self, one_model: bool) -> None:
        if not one_model:
            raise mh.Unsupported("many models")

    def create(self, worker: Worker, replica: Replica) -> WorkerCallback | None:
        return Noted(self, worker, replica)

    def on_result(self, result: Any) -> None:
        self.results.append(result)


class Noted(WorkerCallback):
    def __init__(self, shared: Shared, worker: Worker, replica: Replica) -> None:
        self.shared, self.worker, self.replica, self.ticks = shared, worker, replica, 0

    def note(self, name: str, value: Any) -> bool:
        """Whether all shall stop here."""
        self.shared.notes.append((self.worker.rank, name, value))
        kind, number = self.shared.fill
        if kind == name and self.worker.rank == 0:
            self.replica.parameters.fill_(number)
        return self.shared.stop == (name, value)

    def on_start(self, facts: Mapping[str, Any]) -> None:
        self.note("begin", facts["epochs"])

    def on_epoch_start(self, epoch: int) -> None:
        self.note("epoch_begins", epoch)

    def on_step(self, loss: float | None) -> bool:
        self.ticks += 1
        return self.note("ticked", self.ticks) and self.worker.rank == 0

    def on_epoch_end(self, epoch: int, metrics: Mapping[str, float]) -> bool:
        self.shared.notes.append((self.worker.rank, "metrics", dict(metrics)))
        assert not self.replica.model.training
        return self.note("epoch_ends", epoch)

    def on_end(self) -> Any:
        self.note("end", None)
        return {"rank": self.worker.rank}


def trained(shared: Shared | None, strategy: str = "local-sgd:period=3", **options: Any) -> mh.Run:
    fields = {"train_data": plain.rows(24), "validation_data": plain.rows(7, seed=2), "batch_size": 6, "epochs": 3}
    given = plain.task(**fields, worker_callback=shared)
    return mh.train(given, strategy=strategy, engine="sim", workers=2, **options)


def called(shared: Shared, rank: int) -> list[tuple[str, Any]]:
    return [(name, value) for r, name, value in shared.notes if r == rank and name != "metrics"]


def test_every_worker_is_called_in_order() -> None:
    for strategy in ("allreduce", "downpour"):
        shared = Shared()
        trained(shared, strategy)
        for rank in range(2):
            names = [name for name, _ in called(shared, rank)]
            assert [n for n in names if n != "ticked"] == ["begin", *["epoch_begins", "epoch_ends"] * 3, "end"]
            epoch = ["epoch_begins", *["ticked"] * 4, "epoch_ends"]
            assert strategy == "downpour" or names == ["begin", *epoch * 3, "end"]
        assert shared.results == [{"rank": 0}], strategy


def test_it_hears_the_metrics_of_the_validation_of_its_epoch() -> None:
    """Without a validation there are none. And one that reads changes nothing."""
    shared, seldom = Shared(), Shared()
    run = trained(shared)
    trained(seldom, validate_every=100)
    metrics, none = ([value for _, name, value in one.notes if name == "metrics"] for one in (shared, seldom))
    assert metrics[-2:] == [run.metrics] * 2
    assert [list(one) for one in metrics] == [["validation_loss"]] * 6
    assert none == [{}] * 6
    assert run.parameters.equal(trained(None).parameters)


def test_an_epochs_end_or_one_workers_step_ends_the_run_for_all() -> None:
    for stop, strategy, steps in (
        (("epoch_ends", 1), "local-sgd:period=3", {8}),
        (("ticked", 2), "allreduce", range(12)),
        (("ticked", 2), "local-sgd:period=2", range(12)),
        (("ticked", 2), "downpour", range(12)),
    ):
        shared = Shared(stop=stop)
        run = trained(shared, strategy)
        assert run.info["stopped"] == "callback", (stop, strategy)
        assert run.steps in steps, (stop, strategy)
        assert [called(shared, rank)[-1] for rank in range(2)] == [("end", None)] * 2, (stop, strategy)


def test_what_worker_0_leaves_in_the_model_is_the_answer(tmp_path: Path) -> None:
    """In the model, in the metrics, and in the run directory."""
    run = trained(Shared(fill=("end", 0.5)), test_data=plain.rows(9, seed=3), run_dir=tmp_path / "run")
    assert torch.equal(run.parameters, torch.full_like(run.parameters, 0.5))
    for part, rows in (("validation", plain.rows(7, seed=2)), ("test", plain.rows(9, seed=3))):
        with torch.no_grad():
            assert run.metrics[f"{part}_loss"] == pytest.approx(float(plain.cross_entropy(run.model, rows)), abs=1e-12)
    again = trained(Shared(), test_data=plain.rows(9, seed=3), run_dir=tmp_path / "run", resume=True)
    assert again.parameters.equal(run.parameters)


def test_parameters_are_left_alone_between_epochs() -> None:
    with pytest.raises((mh.Unsupported, mh.WorkerFailed), match="between two epochs"):
        trained(Shared(fill=("epoch_ends", 0.5)))


def test_it_may_refuse_before_anything_starts() -> None:
    shared = Shared()
    with pytest.raises(mh.Unsupported, match="many models"):
        trained(shared, "ensemble")
    assert shared.notes == []
