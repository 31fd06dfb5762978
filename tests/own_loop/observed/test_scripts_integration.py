"""The table of docs/zero.md: scripts of well-known shapes, each as it came out, beside one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from observing import SCRIPTS, Program, Ran, alone, on_workers

EXACT = ("--double", "--no-noise")
EQUAL = {
    "mnist": ("--save-model",),
    "vae": (),
    "super_resolution": (),
    "siamese_network": (),
    "imagenet": ("--dummy", "--no-norm"),
    "nano_gpt": ("--share",),
}
"""Equal in float64 without noise: parameters after each of 20 steps, rates, printed losses and evaluations."""
NOISY = ("mnist", "vae", "super_resolution", "siamese_network", "imagenet", "dcgan")
"""As they stand: the first two steps, a whole batch and a probe, have one process's bits."""
REFUSED = {
    "word_language_model": "follows no DataLoader's batch",
    "reinforce": "follows no DataLoader's batch",
    "time_sequence_prediction": r"LBFGS's step\(closure\)",
    "mnist_hogwild": "processes of its own",
    "nano_gpt": "mh.share",
    "imagenet --data-parallel": "DataParallel",
}
WITHIN = 1e-10
Runs = dict[str, Ran]


def programs() -> dict[str, Program]:
    found = {f"{name} exact": Program(name, (*EXACT, *args)) for name, args in EQUAL.items()}
    found.update({f"{name} noisy": Program(name) for name in NOISY})
    for text in REFUSED:
        name, *args = text.split()
        found[f"{text} refused"] = Program(name, tuple(args))
    return found


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    asked = {name: program for name, program in programs().items() if not name.endswith("refused")}
    return dict(zip(asked, alone(list(asked.values()), tmp_path_factory.mktemp("one")), strict=True))


@pytest.fixture(
    scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def several(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    asked, size = programs(), request.param
    return dict(zip(asked, on_workers(size, list(asked.values()), tmp_path_factory.mktemp(f"{size}")), strict=True))


pytestmark = pytest.mark.xdist_group("observed scripts")


@pytest.mark.parametrize("name", EQUAL)
def test_equal(name: str, one: Runs, several: Runs) -> None:
    expected, ran = one[f"{name} exact"], several[f"{name} exact"]
    assert not expected.error
    assert not ran.error, ran.said
    assert len(ran.parameters) == len(expected.parameters) >= 8
    for own, theirs in zip(ran.parameters, expected.parameters, strict=True):
        assert (own - theirs).abs().max() < WITHIN
    assert ran.dump["rates"] == expected.dump["rates"]
    assert ran.dump["printed"] == pytest.approx(expected.dump["printed"], rel=1e-6)
    assert ran.dump["evaluated"] == pytest.approx(expected.dump["evaluated"], rel=1e-6)


@pytest.mark.parametrize("name", NOISY)
def test_as_it_stands(name: str, one: Runs, several: Runs) -> None:
    expected, ran = one[f"{name} noisy"], several[f"{name} noisy"]
    assert not ran.error, ran.said
    assert len(ran.parameters) == len(expected.parameters)
    first = 4 if name == "dcgan" else 2  # two optimizers
    for own, theirs in zip(ran.parameters[:first], expected.parameters[:first], strict=True):
        assert torch.equal(own, theirs)
    assert len(ran.dump["printed"]) == len(expected.dump["printed"])


def test_the_models_of_dcgan_are_two(several: Runs) -> None:
    assert several["dcgan noisy"].said.count("Adam steps Sequential") == 1  # a line is said once
    assert len({tuple(p.shape) for p in several["dcgan noisy"].parameters}) == 2


@pytest.mark.parametrize("text", REFUSED)
def test_refused(text: str, several: Runs) -> None:
    error = several[f"{text} refused"].error
    assert re.match(rf"(Unsupported|BadInput): {text.split()[0]}\.py, line \d+: ", error), error
    assert re.search(REFUSED[text], error)


def test_numbers_of_worker_0_s_rows_are_named(several: Runs) -> None:
    assert re.search(r"vae.py:\d+, vae.py:\d+: a number is divided by len", several["vae exact"].said)
    assert "is divided by len" not in several["siamese_network exact"].said


# -- programs that are no loops ----------------------------------------------------------------------------------------


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False)


def auto(folder: Path, name: str, workers: int = 2, *options: str) -> subprocess.CompletedProcess[str]:
    script = str(SCRIPTS / f"{name}.py")
    words = (sys.executable, "-m", "manyhands", "run", "--auto", *options, "-n", str(workers), script)
    return run(folder, *words, "--dump", str(folder / f"{workers}.pt"))


@pytest.mark.slow
def test_keras_fit_is_one_process(tmp_path: Path) -> None:
    assert run(tmp_path, sys.executable, str(SCRIPTS / "keras_fit.py"), "--dump", "1.pt").returncode == 0
    ended = auto(tmp_path, "keras_fit", 3)
    assert ended.returncode == 0, ended.stderr
    assert "keras_fit.py is run as keras" in ended.stderr
    assert ended.stdout.count("Epoch ") == 3
    one, several = (torch.load(tmp_path / f"{size}.pt") for size in (1, 3))
    assert several["history"].keys() == one["history"].keys()
    for name, values in one["history"].items():
        assert several["history"][name] == pytest.approx(values, abs=1e-5)
    for own, theirs in zip(several["weights"], one["weights"], strict=True):
        torch.testing.assert_close(own, theirs, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nlp_example", "run_glue"])
def test_a_program_of_another_library_makes_its_group(name: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    ended = auto(tmp_path, name)
    assert ended.returncode == 0, ended.stderr
    assert f"{name}.py is run as distributed" in ended.stderr
    assert torch.load(tmp_path / "2.pt")["size"] == 2


@pytest.mark.slow
def test_a_program_that_makes_no_group_is_a_loop(tmp_path: Path) -> None:
    ended = auto(tmp_path, "imagenet")
    assert ended.returncode == 0, ended.stderr
    assert "imagenet.py is run as distributed" in ended.stderr
    assert "the loss is a mean over rows" in ended.stderr
    assert ended.stdout.count("=> creating model") == 1
    assert ended.stdout.count("Acc@1 ") == 10
