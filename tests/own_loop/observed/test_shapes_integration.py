"""A script under observation on several workers is the script on one: parameters after each step, rates, printed losses."""

from pathlib import Path

import pytest
from observing import Program, Ran, alone, on_workers

LOOPS = (
    "fresh_loader",  # the last rows are not dropped (ray#63285)
    "two_iterators",
    "evaluating",  # evaluation is not padded (Lightning#7929)
    "next_iter",
    "breaking",
    "gan",
    "thawing",
    "step_lr",  # rates do not advance N times as fast (accelerate#2773)
    "one_cycle",
    "plateau",
    "averaging",
    "siamese",
    "processes",
    "weighted_sampler",  # samplers are not replaced (Lightning#1995, ray#22406)
    "stream",  # streams are not shared twice (accelerate#3547)
)
LOSSES = (
    "class_weights",
    "tokens",  # tokens are normalised by the right number (transformers#37474)
    "summed",
    "over_a_constant",
    "two_scales",
    "scaler",
    "ahead",
)
"""In brackets: what users of other libraries reported."""
OWN_NUMBERS = {"two_scales"}  # these print a loss that is not what backward() starts from
WITHIN = 1e-10
SIZES = {3: (*LOOPS, *LOSSES), 2: LOSSES, 4: ("evaluating", "stream", "files")}
"""Two workers tell the scale of a loss in a way of their own. With four, parts of 8 rows are powers of 2."""
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("observed shapes"), pytest.mark.timeout(400)]
Runs = dict[int, dict[str, Ran]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shapes")


@pytest.fixture(scope="module")
def runs(root: Path) -> Runs:
    """The shapes on so many workers, 1: alone."""
    found = {}
    for size, names in {1: (*LOOPS, *LOSSES, "files"), **SIZES}.items():
        programs, folder = [Program("shapes", (name,)) for name in names], root / str(size)
        ran = on_workers(size, programs, folder) if size > 1 else alone(programs, folder)
        found[size] = dict(zip(names, ran, strict=True))
    return found


@pytest.mark.parametrize("shape", [*LOOPS, *LOSSES, "files"])
def test_one_process(shape: str, runs: Runs) -> None:
    expected = runs[1][shape]
    assert not expected.error
    for size in [size for size, shapes in SIZES.items() if shape in shapes]:
        ran = runs[size][shape]
        assert not ran.error, (size, ran.said)
        assert len(ran.parameters) == len(expected.parameters) > 3
        for own, theirs in zip(ran.parameters, expected.parameters, strict=True):
            assert (own - theirs).abs().max() < WITHIN, size
        assert ran.dump["rates"] == expected.dump["rates"], size
        assert len(ran.dump["printed"]) == len(expected.dump["printed"])
        if shape not in OWN_NUMBERS:
            assert ran.dump["printed"] == pytest.approx(expected.dump["printed"], abs=1e-9), size


def test_what_was_shared_is_said(runs: Runs) -> None:
    said = runs[3]["evaluating"].said
    assert "the loss is a mean over rows; the rows of shapes.py:" in said
    assert said.count("rows are shared") + said.count("are shared by 3 workers") == 1
    assert "the loss is a sum over rows" in runs[3]["summed"].said
    assert runs[3]["two_scales"].said.count("are shared by 3 workers") == 2


def test_the_folder_holds_one_process_s_files(runs: Runs, root: Path) -> None:
    """A log, checkpoints, a best model that is read back, a part of it: byte for byte."""
    one, several = root / "1" / str(len(runs[1]) - 1), root / "4" / str(len(runs[4]) - 1) / "first"
    assert {path.name for path in several.iterdir()} == {path.name for path in one.iterdir()}
    for name in ("log.txt", "losses.npy", "checkpoint-0.pt", "checkpoint-1.pt", "best.pt", "part.pt"):
        assert (several / name).read_bytes() == (one / name).read_bytes(), name
