"""The table of docs/zero.md: scripts of well-known shapes, each as it came out, beside one process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from observing import SCRIPTS, Program, Ran, alone, on_workers

EXACT = ("--double", "--no-noise")
EQUAL = {"mnist": (), "vae": (), "imagenet": ("--dummy", "--no-norm"), "nano_gpt": ("--share",)}
"""Equal in float64 without noise: parameters after each of 20 steps, rates, printed losses and evaluations."""
NOISY = {"mnist": ("--epochs", "1"), "vae": ("--epochs", "1"), "imagenet": ("--epochs", "1"), "dcgan": ("--niter", "1")}
"""As they stand, with noise: as many steps, and as much is printed."""
WITHIN = 1e-10
Runs = dict[str, Ran]


EXACT_PROGRAMS = {f"{name} exact": Program(name, (*EXACT, *args)) for name, args in EQUAL.items()}
NOISY_PROGRAMS = {f"{name} noisy": Program(name, args) for name, args in NOISY.items()}
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("observed scripts"), pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    asked = EXACT_PROGRAMS | NOISY_PROGRAMS
    return dict(zip(asked, alone(list(asked.values()), tmp_path_factory.mktemp("one")), strict=True))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    asked = EXACT_PROGRAMS | NOISY_PROGRAMS
    return dict(zip(asked, on_workers(2, list(asked.values()), tmp_path_factory.mktemp("two")), strict=True))


@pytest.mark.parametrize("name", EXACT_PROGRAMS)
def test_equal(name: str, one: Runs, two: Runs) -> None:
    ran, expected = two[name], one[name]
    assert not expected.error
    assert not ran.error, ran.said
    assert len(ran.parameters) == len(expected.parameters) >= 8
    for own, theirs in zip(ran.parameters, expected.parameters, strict=True):
        assert (own - theirs).abs().max() < WITHIN
    assert ran.dump["rates"] == expected.dump["rates"]
    assert ran.dump["printed"] == pytest.approx(expected.dump["printed"], rel=1e-6)
    assert ran.dump["evaluated"] == pytest.approx(expected.dump["evaluated"], rel=1e-6)


@pytest.mark.parametrize("name", NOISY_PROGRAMS)
def test_as_it_stands(name: str, one: Runs, two: Runs) -> None:
    expected, ran = one[name], two[name]
    assert not ran.error, ran.said
    assert len(ran.parameters) == len(expected.parameters)
    assert len(ran.dump["printed"]) == len(expected.dump["printed"])


def test_what_is_said(two: Runs) -> None:
    shared = "each of 2 workers computes its rows of a call"
    for name in EXACT_PROGRAMS | NOISY_PROGRAMS:
        assert re.search(rf"\w+: {shared}", two[name].said), two[name].said
        assert "computed whole by every worker" not in two[name].said
    assert two["dcgan noisy"].said.count(f"Sequential: {shared}") == 1  # a line is said once


# -- programs that are no loops ----------------------------------------------------------------------------------------


def auto(folder: Path, name: str, *options: str) -> subprocess.CompletedProcess[str]:
    words = (sys.executable, "-m", "manyhands", "run", "--auto", "-n", "2", *options, str(SCRIPTS / f"{name}.py"))
    how = {"cwd": folder, "env": {**os.environ, "OMP_NUM_THREADS": "1"}, "capture_output": True, "text": True}
    return subprocess.run([*words, "--dump", str(folder / "2.pt")], **how, timeout=100, check=False)


def test_keras_fit_is_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    pytest.importorskip("keras")
    (ran,) = alone([Program("keras_fit")], tmp_path)
    ended = auto(tmp_path, "keras_fit", "--verify", "3")
    assert ended.returncode == 0, ended.stderr
    assert "3 steps: parameters, losses, rates and rows are one process's" in ended.stderr
    assert "keras_fit.py is run as keras" in ended.stderr
    assert ended.stdout.count("Epoch ") == 2
    one, several = ran.dump, torch.load(tmp_path / "2.pt")
    assert several["history"].keys() == one["history"].keys()
    for name, values in one["history"].items():
        assert several["history"][name] == pytest.approx(values, rel=1e-6)
    for own, theirs in zip(several["weights"], one["weights"], strict=True):
        torch.testing.assert_close(own, theirs, atol=1e-6, rtol=0)


def test_a_program_that_makes_no_group_is_a_loop(tmp_path: Path) -> None:
    ended = auto(tmp_path, "imagenet")
    assert ended.returncode == 0, ended.stderr
    assert "imagenet.py is run as distributed" in ended.stderr
    assert "each of 2 workers computes its rows of a call" in ended.stderr
    assert ended.stdout.count("=> creating model") == 1
    assert ended.stdout.count("Acc@1 ") == 10
