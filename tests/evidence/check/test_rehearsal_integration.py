"""--verify: several workers beside one process on a script with noise, and the operation that keeps them apart."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from manyhands.cli.commands import app
from manyhands.evidence.check.rehearsal import LIMIT, Rehearsed, rehearse

MIXING = Path(__file__).with_name("mixing.py")


def rehearsed(loss: str, steps: int = 5, workers: int = 2) -> Rehearsed:
    return rehearse(MIXING, [loss], workers=workers, steps=steps)


def test_noise_is_no_difference() -> None:
    found = rehearsed("mean")
    assert (found.difference, found.steps) == ("", 5)
    assert found.largest < LIMIT


@pytest.mark.slow
def test_differences_are_told_and_what_makes_them() -> None:
    by_hand = rehearsed("masked by hand").difference
    assert by_hand.startswith("after step 3 the loss is ")  # the first whose rows are shared
    assert "the parameter 0.weight is off by" in by_hand
    assert "how the loss adds them up" in by_hand
    normalized = rehearsed("normalized by hand", workers=3).difference
    assert "after step 3" in normalized
    assert "The first operation whose rows differ is sub" in normalized
    assert "mixing.py:17" in normalized
    assert rehearsed("mean", steps=1000).steps == 14  # a script with fewer steps ends well
    assert not rehearsed("sum", workers=3).difference


@pytest.mark.slow
def test_the_command_compares_and_then_runs_or_ends_with_1_and_trains_nothing() -> None:
    def ended(loss: str) -> Result:
        return CliRunner().invoke(app, ["run", "--auto", "--verify", "4", "-n", "2", str(MIXING), loss])

    same, other = ended("mean"), ended("masked by hand")
    assert (same.exit_code, other.exit_code) == (0, 1), same.stderr
    assert "4 steps: parameters, losses, rates and rows are one process's" in same.stderr
    assert "2 workers are not one process: after step 3" in other.stderr
    assert "Nothing was trained" in other.stderr
