"""Engine `sim` loses workers as `local` does: the bits follow from the seed and from who was a member when."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fault_harness import GLOBAL_ROWS, Trial, fired, recorded_once, task

import manyhands as mh
from manyhands.recording import event_log

FAST = "allreduce", "local-sgd:period=2"
SLOW = (
    "diloco:period=2",
    "easgd:via=group,period=2",
    "eamsgd:via=group,period=2",
    "gossip:period=1",
    "gossip:graph=random,weights=push-sum,period=2",
    "quorum",
)
SURVIVE = "max_losses=3,replace=false"


def changes(folder: Path) -> list[int | None]:
    """The steps before which others became members."""
    return [event.tick for event in event_log.read(folder / event_log.FILE) if event.type == "membership"]


@pytest.mark.parametrize(
    "faults", ["kill=2@step:4", pytest.param("kill=0@step:0,kill=2@step:7", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("strategy", [*FAST, *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)])
def test_the_same_bits_as_simulated(strategy: str, faults: str, trial: Trial) -> None:
    run = trial.train(faults=faults, strategy=strategy, survive=SURVIVE, run_dir=trial.run_dir)
    fired(run, *faults.split(","))
    recorded_once(run, trial.seen, trial.run_dir, GLOBAL_ROWS)
    engine = f"sim:compute=step=100ms,faults='{faults},notice=10ms'"
    simulated = mh.train(
        task(), engine=engine, workers=3, strategy=strategy, survive=SURVIVE, run_dir=trial.folder / "simulated"
    )
    states = run.model.state_dict(), simulated.model.state_dict()
    same_members = changes(trial.run_dir) == changes(trial.folder / "simulated")
    if strategy != "quorum" or same_members:  # whose members hear of a loss in the step after it, or in the next
        for name, tensor in states[0].items():
            assert torch.equal(tensor, states[1][name]), name
    assert [one["worker_id"] for one in run.losses] == [one["worker_id"] for one in simulated.losses]
    assert [row["rows"] for row in run.history] == [row["rows"] for row in simulated.history]
