"""A run whose replicas are several stages goes on when one of their workers is lost: with whole replicas."""

from pathlib import Path
from typing import Any

import pytest
from driver_script import wait_until
from joined_run import Run, joined_by
from stage_models import ROWS, classified
from stage_runs import alone, expect_alike, train
from torch import Tensor, nn

import manyhands as mh
from manyhands.engines.hosts.engine import Hosts
from manyhands.engines.local.engine import Local
from manyhands.errors import WorkerFailed
from manyhands.events import Event
from manyhands.worker import current

slow = pytest.mark.slow


class Changes(mh.Callback):
    """What happened to members, in order: (kind, worker). back: a file that is made when one is back."""

    def __init__(self, back: Path | None = None) -> None:
        self.found: list[tuple[str, int]] = []
        self.back = back

    def on_notice(self, event: Event) -> None:
        if event.type == "change":
            self.found.append((event.values["kind"], event.values["worker_id"]))
            if self.back is not None and event.values["kind"] == "back":
                self.back.touch()


class Patient:
    """A loss that waits in its tenth call until another worker asks to join, or is back: else the run may be over by then."""

    def __init__(self, back: Path) -> None:
        self.calls = 0
        self.back = back

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        worker = current()
        self.calls += 1
        if self.calls == 10 and worker is not None:
            wait_until(lambda: worker.interrupted or self.back.exists(), 30)
        return classified(model, batch)


def survives(
    name: str, workers: int, engine: Any, stages: int = 2, survive: str = "max_losses=3", **given: Any
) -> mh.Run:
    return train(name, workers, f"stages={stages}", engine=engine, survive=survive, **given)


@slow
def test_a_lost_workers_replica_starts_anew_and_takes_the_others_state(tmp_path: Path) -> None:
    changes = Changes(tmp_path / "back")
    loss = Patient(tmp_path / "back")
    run = survives("mlp", 4, Local(faults="kill=2@step:3"), callbacks=[changes], loss=loss, epochs=6)
    expect_alike(run, alone("mlp", epochs=6), losses=False)
    assert changes.found[0] == ("lost", 2)
    assert sorted(changes.found[1:]) == [("back", 2), ("back", 3)]
    assert min(run.rows["workers"][::2]) > 2 * ROWS  # both replicas train to the end


@slow
@pytest.mark.parametrize(
    ("name", "workers", "stages", "faults"),
    [
        ("gpt", 4, 2, "kill=0@step:6:save"),
        ("mlp", 4, 2, "kill=0@step:11:commit"),
        ("mlp", 6, 2, "kill=2@step:3:exchange,kill=1@step:8"),
        pytest.param("mlp", 9, 3, "kill=0@step:2,kill=4@step:8:exchange", marks=pytest.mark.nightly),
    ],
)
def test_whenever_and_whoever(name: str, workers: int, stages: int, faults: str, tmp_path: Path) -> None:
    """With validations, checkpoints and the best model kept: what was under way is done again."""
    often: dict[str, Any] = {"validate_every": 2, "keep": "best:validation_loss", "epochs": 4}
    run = survives(name, workers, Local(faults=faults), stages, run_dir=tmp_path, checkpoint_every=3, **often)
    assert len(run.losses) == faults.count("kill")
    expect_alike(run, alone(name, **often), losses=False)


@slow
def test_a_replica_that_loses_a_worker_leaves_and_the_other_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two hosts, of which one has a stage alone."""
    monkeypatch.setenv("MANYHANDS_CREDENTIALS", str(tmp_path / "run.pem"))
    changes, hosts = Changes(), Run(Hosts(local_workers=3, faults="kill=3@step:4"), joined_by(1))
    given: dict[str, Any] = {"survive": "max_losses=1,replace=false", "callbacks": [changes]}
    run = hosts.during(lambda: survives("mlp", 4, hosts.engine, **given))
    expect_alike(run, alone("mlp"), losses=False)
    assert changes.found == [("lost", 3)]
    assert [(loss["worker_id"], loss["cause"]) for loss in run.losses] == [(3, "death")]


@slow
def test_one_replica_ends_the_run_or_starts_again_from_its_newest_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="no whole replica of 2 workers is left that has the model's state"):
        survives("mlp", 2, Local(faults="kill=1@step:2"))
    given = {"survive": "max_losses=1,max_restarts=1", "run_dir": tmp_path, "checkpoint_every": 3}
    run = survives("mlp", 2, Local(faults="kill=1@step:5"), **given)
    expect_alike(run, alone("mlp"), losses=False)
    assert [one["step"] for one in run.restarts] in ([3], [0])  # whether that of step 3 was whole by then
