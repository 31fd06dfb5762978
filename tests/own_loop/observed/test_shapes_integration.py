"""A script under observation on 2, 3 and 4 workers is the script on one: parameters after each step, rates, printed losses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from observing import Program, Ran, alone, on_workers

SHAPES = (
    *(
        "fresh_loader",
        "zipped",
        "two_iterators",
        "evaluating",
        "next_iter",
        "breaking",
        "catching",
        "accumulating",
        "gan",
    ),
    *("seldom", "thawing", "step_lr", "one_cycle", "plateau", "class_weights", "tokens", "summed", "over_a_constant"),
    *(
        "two_scales",
        "scaler",
        "ahead",
        "averaging",
        "processes",
        "shared",
        "outer_loader",
        "weighted_sampler",
        "stream",
    ),
)
OWN_NUMBERS = {"two_scales"}  # these print a loss that is not what backward() starts from
COMPLAINTS = {
    "accelerate#2773: rates advance N times as fast": ("step_lr", "one_cycle"),
    "accelerate#3547: streams are shared twice": ("stream",),
    "transformers#37474: tokens are normalised by the wrong number": ("tokens", "class_weights"),
    "Lightning#7929: evaluation is padded": ("evaluating", "plateau"),
    "Lightning#1995, ray#22406: samplers are replaced": ("weighted_sampler",),
    "ray#63285: the last rows are dropped": ("fresh_loader",),
}
"""What other libraries' users reported, and the shapes that show it here."""
WITHIN = 1e-10
Runs = Callable[[int], dict[str, Ran]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """All shapes on so many workers, 0: alone; each number of workers once."""
    programs, found = [Program("shapes", (shape,)) for shape in SHAPES], dict[int, dict[str, Ran]]()

    def of(size: int) -> dict[str, Ran]:
        if size not in found:
            folder = tmp_path_factory.mktemp(f"workers-{size}")
            ran = on_workers(size, programs, folder) if size else alone(programs, folder)
            found[size] = dict(zip(SHAPES, ran, strict=True))
        return found[size]

    return of


@pytest.mark.xdist_group("observed shapes")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [3, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_one_process(shape: str, size: int, runs: Runs) -> None:
    expected, ran = runs(0)[shape], runs(size)[shape]
    assert not expected.error
    assert not ran.error, ran.said
    assert len(ran.parameters) == len(expected.parameters) > 5
    for own, one in zip(ran.parameters, expected.parameters, strict=True):
        assert (own - one).abs().max() < WITHIN
    assert ran.dump["rates"] == expected.dump["rates"]
    assert len(ran.dump["printed"]) == len(expected.dump["printed"])
    if shape not in OWN_NUMBERS:
        assert ran.dump["printed"] == pytest.approx(expected.dump["printed"], abs=1e-9)


@pytest.mark.xdist_group("observed shapes")
@pytest.mark.parametrize("complaint", COMPLAINTS)
def test_complaints_about_others(complaint: str, runs: Runs) -> None:
    """Steps, rates and numbers are one process's: as many steps, the same rates, the same evaluation."""
    for shape in COMPLAINTS[complaint]:
        expected, ran = runs(0)[shape].dump, runs(3)[shape].dump
        assert ran["rates"] == expected["rates"]
        assert ran["printed"] == pytest.approx(expected["printed"], abs=1e-9)
        assert (ran["parameters"][-1] - expected["parameters"][-1]).abs().max() < WITHIN


@pytest.mark.xdist_group("observed shapes")
def test_what_was_shared_is_said(runs: Runs) -> None:
    said = runs(3)["evaluating"].said
    assert "the loss is a mean over rows; the rows of shapes.py:" in said
    assert said.count("rows are shared") + said.count("are shared by 3 workers") == 1
    assert "the loss is a sum over rows" in runs(3)["summed"].said
    assert runs(3)["two_scales"].said.count("are shared by 3 workers") == 2


@pytest.mark.parametrize("size", [4])
def test_the_folder_holds_one_process_s_files(size: int, tmp_path: Path) -> None:
    """A log, checkpoints, a best model that is read back, a part of it: byte for byte."""
    (expected,) = alone([Program("shapes", ("files",))], tmp_path / "alone")
    (ran,) = on_workers(size, [Program("shapes", ("files",))], tmp_path / "workers")
    assert not expected.error
    assert not ran.error, ran.said
    one, several = tmp_path / "alone" / "0", tmp_path / "workers" / "0" / "first"
    assert {path.name for path in several.iterdir()} == {path.name for path in one.iterdir()}
    assert len(ran.parameters) == 6
    for name in ("log.txt", "losses.npy", "checkpoint-0.pt", "checkpoint-1.pt", "best.pt", "part.pt"):
        assert (several / name).read_bytes() == (one / name).read_bytes(), name
