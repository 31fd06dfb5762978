"""--verify: several workers beside one process on a script with noise, and the operation that keeps them apart."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from manyhands.cli.commands import app
from manyhands.evidence.check.rehearsal import LIMIT, Rehearsed, rehearse

SCRIPTS = Path(__file__).parents[2] / "own_loop" / "observed" / "scripts"
MIXING = SCRIPTS / "mixing.py"


def rehearsed(loss: str, steps: int = 5, workers: int = 2) -> Rehearsed:
    return rehearse(MIXING, [loss], workers=workers, steps=steps)


@pytest.mark.parametrize(("loss", "workers"), [("mean", 2), pytest.param("sum", 3, marks=pytest.mark.slow)])
def test_noise_is_no_difference(loss: str, workers: int) -> None:
    found = rehearsed(loss, workers=workers)
    assert not found.difference
    assert found.steps == 5
    assert found.largest < LIMIT


def test_a_mean_that_is_taken_by_hand_is_told_with_two_workers() -> None:
    found = rehearsed("masked by hand")
    assert found.difference.startswith("after step 3 the loss is ")  # the first whose rows are shared
    assert "the parameter 0.weight is off by" in found.difference
    assert "how the loss adds them up" in found.difference


@pytest.mark.slow
def test_the_operation_that_mixes_rows_is_named() -> None:
    found = rehearsed("normalized by hand")
    assert "after step 3" in found.difference
    assert "The first operation whose rows differ is sub" in found.difference
    assert "mixing.py:17" in found.difference


@pytest.mark.slow
def test_a_script_with_fewer_steps_ends_well() -> None:
    assert rehearsed("mean", steps=1000).steps == 14


@pytest.mark.slow
def test_the_command_compares_and_then_runs() -> None:
    ended = CliRunner().invoke(app, ["run", "--auto", "--verify", "4", "-n", "2", str(MIXING), "mean"])
    assert ended.exit_code == 0, ended.stderr
    assert "4 steps: parameters, losses, rates and rows are one process's" in ended.stderr


@pytest.mark.slow
def test_a_difference_ends_with_1_and_trains_nothing() -> None:
    ended = CliRunner().invoke(app, ["run", "--auto", "--verify", "4", "-n", "2", str(MIXING), "masked by hand"])
    assert ended.exit_code == 1
    assert "2 workers are not one process: after step 3" in ended.stderr
    assert "Nothing was trained" in ended.stderr
