"""Who joins a run that trains, and must be alike: whoever is not is refused alone."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
import plain
from manyhands.engines.local.engine import Local
from manyhands.events import Event
from manyhands.worker import current


class Other(torch.nn.Sequential):
    """The same numbers, by another name."""


class Patient:
    """A loss at whose tenth call a worker waits until another one asks to join: else the run may be over by then."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        worker, until = current(), time.monotonic() + 30.0
        self.calls += 1
        while self.calls == 10 and worker is not None and not worker.interrupted and time.monotonic() < until:
            time.sleep(0.01)
        return plain.cross_entropy(model, batch)


class Changes(mh.Callback):
    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.last = ""

    def on_notice(self, event: Event) -> None:
        if event.type == "change":
            self.kinds.append(event.values["kind"])
            self.last = event.values["message"]


@pytest.mark.slow
def test_a_replacement_with_another_program_is_refused_and_the_others_go_on(local: Local, tmp_path: Path) -> None:
    """It is no loss that counts, and it is not started again: every further one would be refused, too."""
    mark = tmp_path / "mark"

    def another_the_second_time() -> torch.nn.Module:
        worker = current()
        if worker is None or worker.worker_id != 1:
            return plain.mlp()
        again = mark.exists()
        mark.touch()
        return Other(*plain.mlp()) if again else plain.mlp()

    engine, changes = Local(faults="kill=1@step:4"), Changes()
    object.__setattr__(engine, "_slot", local._slot)
    task = plain.task(epochs=40, model=another_the_second_time, loss=Patient())
    alone = mh.train(plain.task(epochs=40), workers=1)
    run = mh.train(task, engine=engine, workers=3, survive="max_losses=1", callbacks=[changes])
    assert (run.parameters - alone.parameters).abs().max() < 1e-10
    assert [(loss["worker_id"], loss["cause"]) for loss in run.losses] == [(1, "death")]
    assert changes.kinds == ["lost", "left-out"]
    assert "worker 1 on " in changes.last
    assert "cannot take part: worker 1 on " in changes.last
    assert "the model is Other of 84 parameters, and on worker 0" in changes.last
    assert [row["step"] for row in run.history] == list(range(1, 161))
