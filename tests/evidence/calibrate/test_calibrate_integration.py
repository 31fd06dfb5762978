"""A calibration from end to end, on real workers; how good its numbers are, no test can say."""

import textwrap
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import manyhands as mh
from manyhands.cli import commands
from manyhands.comm.codecs import CODECS
from manyhands.engines.local.engine import Local
from manyhands.engines.sim.engine import Sim
from manyhands.engines.sim.profile import Profile
from manyhands.evidence.calibrate.calibrate import calibrated
from manyhands.evidence.calibrate.coding import SETTINGS
from manyhands.evidence.estimate.estimate import estimate
from manyhands.evidence.estimate.table import text as estimates_text

TASK = """
    import torch
    import manyhands as mh

    def task():
        rows = torch.arange(240.0).view(120, 2) / 240, torch.arange(120) % 2
        return mh.Task.supervised(
            name="tiny",
            model=lambda: torch.nn.Linear(2, 2),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
            train_data=rows,
            validation_data=rows,
            batch_size=12,
        )
"""


@pytest.fixture
def task(tmp_path: Path) -> str:
    path = tmp_path / "tiny.py"
    path.write_text(textwrap.dedent(TASK))
    return f"{path}:task"


@pytest.mark.slow
def test_all_is_measured_and_an_estimate_lies_within_the_bars(local: Local, task: str, tmp_path: Path) -> None:
    lines: list[str] = []
    torch.manual_seed(3)
    before = torch.get_rng_state()
    names = ("allreduce", "local-sgd:period=4", "downpour")
    found = calibrated(task, strategies=names, steps=16, quick=True, engine=local, say=lines.append)
    assert torch.equal(torch.get_rng_state(), before)
    assert len(lines) == 4 + len(names)
    profile = found.profile
    assert (profile.task, profile.workers, profile.batch_sizes) == ("tiny", 2, (3, 6, 9))
    assert profile.network.workers_per_host == 2
    assert profile.compute.row + profile.compute.step > 0
    assert min(profile.network.latency, profile.network.local_latency) > 0
    assert min(profile.compute.lease, profile.compute.request) >= 0  # beside computing, noise of a tick may hide them
    assert [one.codec for one in found.codecs] == list(SETTINGS)
    assert profile.compute.codecs.keys() == CODECS.keys()
    assert [one.strategy for one in found.predictions] == list(names) == list(profile.errors)
    for one in found.predictions:
        assert 0 < one.real_s <= one.slowest_s
        assert profile.errors[one.strategy] == round(one.worst, 4)
    profile.save(tmp_path / "here.json")
    estimates = estimate(task, profile=tmp_path / "here.json", workers=[2], strategies=names)
    for predicted, one in zip(found.predictions, estimates.estimates, strict=True):
        assert (one.strategy, one.bars.tried) == (predicted.strategy, True)
        assert one.step.low <= one.step.seconds <= one.step.high
    assert "2 workers, 12 rows a step" in estimates_text(estimates)
    with pytest.raises(mh.BadInput, match=r"local-sgd:period=50 .* too rarely .*--steps"):
        calibrated(task, strategies=["local-sgd:period=50"], steps=16, quick=True, engine=local, batch_size=4)


@pytest.mark.slow
def test_the_command_writes_a_profile_that_sim_takes(task: str, tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    words = ["calibrate", task, "--output", str(path), "--quick", "--steps", "16", "--batch-size", "8"]
    done = CliRunner().invoke(commands.app, [*words, "--strategies", "allreduce"])
    assert done.exit_code == 0, done.output
    assert f"--profile {path}" in done.stdout
    profile = Profile.load(path)
    assert 4 in profile.batch_sizes  # rows of a worker
    assert list(profile.errors) == ["allreduce"]
    network, compute, _ = Sim(profile=path).parts
    assert (network, compute) == (profile.network, profile.compute)
    slow = Sim(profile=path, compute="row=1,step=0,jitter=none")
    run = mh.train(task, workers=4, engine=slow, batch_size=8, max_steps=5)
    assert 10 < run.seconds < 11  # 5 steps of 2 rows each; the rest is the profile's network


def test_a_folder_that_is_not_there_is_refused_before_anything_is_measured(task: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(commands.app, ["calibrate", task, "--output", str(tmp_path / "nowhere" / "p.json")])
    assert done.exit_code == 2
    assert "a folder that does not exist" in done.output
