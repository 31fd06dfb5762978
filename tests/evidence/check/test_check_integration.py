"""The proof on real processes; --verify: several workers beside one process, and the operation that keeps them apart."""

import os
from pathlib import Path
from typing import Any

import planted
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner, Result

import manyhands as mh
from manyhands.cli.commands import app
from manyhands.engines.local.engine import Local
from manyhands.evidence.check.check import check
from manyhands.evidence.check.rehearsal import LIMIT, Rehearsed, rehearse
from manyhands.own_loop.observed.script import Observed


@pytest.mark.slow
def test_digits_pass_on_processes(local: Local) -> None:
    checked = check("digits", engine=local, steps=2)
    assert checked.passed
    assert checked.findings == ()
    assert [proof.engine for proof in checked.proofs] == ["local", "local"]
    assert checked.largest < 1e-11
    assert "metrics are means (loss, accuracy)" in checked.held
    assert any("model() builds the same from the seed" in held for held in checked.held)


@pytest.mark.slow
def test_three_workers_and_a_function_that_gives_data(local: Local) -> None:
    assert check(planted.task(train_data=planted.drawn_rows), engine=local, workers=3, steps=2).findings == ()
    for plant, kind, fields in (
        ("unseeded function", "data-order", {"train_data": planted.unseeded_rows}),
        ("eight rows", "fails-on-workers", {"model": planted.AtLeastEight, "train_data": planted.rows(36)}),
    ):
        checked = check(planted.task(**fields), engine=local, steps=3)
        assert [finding.kind for finding in checked.findings if finding.breaks] == [kind]
        assert checked.findings[0].places[0].line == planted.line_of(plant)


def of_this_process() -> nn.Module:
    torch.manual_seed(os.getpid())
    return planted.mlp()


@pytest.mark.slow
def test_what_only_processes_of_their_own_show(local: Local) -> None:
    checked = check(planted.task(model=of_this_process), engine=local, steps=2)
    assert [finding.kind for finding in checked.findings] == ["not-rebuilt"]
    assert checked.findings[0].places[0].line == of_this_process.__code__.co_firstlineno
    assert checked.findings[0].numbers["names"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    home = os.getpid()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return planted.cross_entropy(model, batch) * (1.0 if os.getpid() == home else 1.5)

    checked = check(planted.task(loss=loss), engine=local, steps=2)  # never a silent pass
    assert [finding.kind for finding in checked.findings] == ["unexplained"]
    assert "depends on its process" in checked.findings[0].text
    assert not checked.passed


@pytest.mark.slow
@pytest.mark.usefixtures("cold")
def test_the_default_starts_processes_of_its_own_and_leaves_none() -> None:
    assert check(planted.task(), steps=2).passed
    assert mh.worker().size == 1


MIXING = Path(__file__).with_name("mixing.py")


def rehearsed(loss: str, steps: int = 5, workers: int = 2, batches: str = "slices") -> Rehearsed:
    return rehearse(MIXING, [loss], workers=workers, steps=steps, observed=Observed(batches=batches))


def test_noise_is_no_difference() -> None:
    for batches in ("slices", "whole"):
        found = rehearsed("mean", batches=batches)
        assert (found.difference, found.steps) == ("", 5)
        assert found.largest < LIMIT


@pytest.mark.slow
def test_differences_are_told_and_what_makes_them() -> None:
    normalized = rehearsed("normalized by hand", workers=3).difference
    assert normalized.startswith("after step 1 the parameter 0.weight is off by")
    assert "The first operation whose rows differ is sub" in normalized
    lines = MIXING.read_text().splitlines()
    assert f"mixing.py:{next(i for i, line in enumerate(lines, 1) if 'normalized by hand' in line)}" in normalized
    whole = rehearsed("sum", steps=1000)  # a script with fewer steps ends well
    assert (whole.difference, whole.steps) == ("", 14)


@pytest.mark.slow
def test_the_command_compares_and_then_runs_or_ends_with_1_and_trains_nothing() -> None:
    def ended(loss: str) -> Result:
        slices = ["--batches", "slices"]
        return CliRunner().invoke(app, ["run", "--auto", *slices, "--verify", "4", "-n", "2", str(MIXING), loss])

    same, other = ended("mean"), ended("normalized by hand")
    assert (same.exit_code, other.exit_code) == (0, 1), same.stderr
    assert "4 steps: parameters, losses, rates and rows are one process's" in same.stderr
    assert "2 workers are not one process: after step 1" in other.stderr
    assert "Nothing was trained" in other.stderr
