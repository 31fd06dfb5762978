"""A script under observation on several workers is the script on one: parameters after each step, rates, printed losses."""

import re
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
REFUSED = {
    "two_iterators": "several batches came since the backward",
    "evaluating": "no optimizer took a step in a pass .* torch.no_grad",
    "processes": "no optimizer took a step in a pass .* torch.no_grad",
    "over_a_constant": "adds up over rows .*, and is divided by a number",
    "two_scales": "adds up over rows .*, and is divided by a number",
    "ahead": "several batches came since the backward",
}
"""By slices, at the step where it shows."""
WITHIN = 1e-10
SHAPES = (*LOOPS, *LOSSES, "files")
SIZES = {"whole": 3, "slices": 2}  # workers, by what each one's loop sees
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("observed shapes"), pytest.mark.timeout(400)]
Runs = dict[str, dict[str, Ran]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shapes")


@pytest.fixture(scope="module")
def runs(root: Path) -> Runs:
    """The shapes, with whole batches, with slices, and alone."""
    found = {}
    for batches, size in {"alone": 1, **SIZES}.items():
        programs, folder = [Program("shapes", (name,), batches=batches) for name in SHAPES], root / batches
        ran = on_workers(size, programs, folder) if size > 1 else alone(programs, folder)
        found[batches] = dict(zip(SHAPES, ran, strict=True))
    found["four"] = {"files": on_workers(4, [Program("shapes", ("files",))], root / "four")[0]}
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_one_process(shape: str, runs: Runs) -> None:
    expected = runs["alone"][shape]
    assert not expected.error
    for batches in SIZES:
        ran = runs[batches][shape]
        if batches == "slices" and shape in REFUSED:
            assert re.match(f"Unsupported: shapes.py, line .*{REFUSED[shape]}.*--batches whole", ran.error), ran.error
            continue
        assert not ran.error, (batches, ran.said)
        assert len(ran.parameters) == len(expected.parameters) > 3
        for own, theirs in zip(ran.parameters, expected.parameters, strict=True):
            assert (own - theirs).abs().max() < WITHIN, batches
        assert ran.dump["rates"] == expected.dump["rates"], batches
        assert len(ran.dump["printed"]) == len(expected.dump["printed"])
        if batches == "whole":
            assert ran.dump["printed"] == pytest.approx(expected.dump["printed"], abs=1e-9), batches


def test_what_was_shared_is_said(runs: Runs) -> None:
    whole, said = runs["whole"]["evaluating"].said, runs["slices"]["breaking"].said
    assert whole.count("each of 3 workers computes its rows of a call") == 1
    assert "reads all rows" not in whole
    stream = runs["whole"]["stream"].said
    assert re.search(r"reads all rows of the DataLoader of shapes.py:\d+, for it is a stream", stream)
    assert said.count("Adam steps Sequential") == 1
    assert runs["slices"]["summed"].said.count("the loss is a sum over rows") == 1


def test_the_folder_holds_one_process_s_files(runs: Runs, root: Path) -> None:
    """A log, checkpoints, a best model that is read back, a part of it: byte for byte."""
    number = str(SHAPES.index("files"))
    one = root / "alone" / number
    assert not runs["four"]["files"].error
    several = root / "four" / "0" / "first"  # parts are powers of 2
    assert {path.name for path in several.iterdir()} == {path.name for path in one.iterdir()}
    for name in ("log.txt", "losses.npy", "checkpoint-0.pt", "checkpoint-1.pt", "best.pt", "part.pt"):
        assert (several / name).read_bytes() == (one / name).read_bytes(), name
