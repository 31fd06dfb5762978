"""What several workers cannot run is refused in one line that names the script's line."""

import re

import pytest
from observing import SCRIPTS, Program, Ran, on_workers
from typer.testing import CliRunner

from manyhands.cli.commands import app

REFUSED = {
    "no_loader": "follows no DataLoader's batch.*mh.share.*--own-batches",
    "closure": r"step\(closure\) evaluates the model several times",
    "contrast": "rows of a batch look at each other",
    "penalized_sum": "a part of it is a sum over rows, and another part is none",
    "sampler": "DistributedSampler",
    "started": "trains in processes of its own",
    "data_parallel": "DataParallel",
    "prepared": "calls mh.prepare.*leave --auto out",
    "small_batches": "batch_size=1 is for all workers together",
    "shared_apart": "equally many rows",
    "tensor": r"shape \[10, 4\].*no nn.Module",
    "sharded_data": "gives each worker a part of its rows already",
    "no_optimizer": "no torch.optim.Optimizer steps",
    "second_optimizer": "another optimizer|two optimizers",
}


TAKEN_AS_MEANS = ("normalized_over_the_batch", "late")
DRIFTING = {
    "drift": "must be equal, and differ at step 7",
    "drifting_average": "after step 10 a Linear of worker 1 is not what it is on worker 0",
}


pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("refused scripts"), pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    programs = {name: Program("refused", (name,), batches="slices") for name in (*REFUSED, *DRIFTING)}
    programs |= {name: Program("refused", (name,), batches="slices") for name in TAKEN_AS_MEANS}
    programs |= {
        f"{name} whole": Program("refused", (name,), batches="whole") for name in (*REFUSED, *TAKEN_AS_MEANS, *DRIFTING)
    }
    programs["own_loader"] = Program("refused", ("own_loader",), own_batches=True)
    programs["own_batches"] = Program("shapes", ("own_batches",), own_batches=True)
    return dict(zip(programs, on_workers(2, list(programs.values()), tmp_path_factory.mktemp("refused")), strict=True))


def test_refused_with_the_scripts_line(refused: dict[str, Ran]) -> None:
    for name, message in REFUSED.items():
        error = refused[name].error
        assert error.startswith(("Unsupported: refused.py, line ", "BadInput: refused.py, line ")), name
        assert "trained" not in refused[name].output, name
        assert re.search(message, error), error


def test_with_whole_batches_they_come_out_as_in_one_process(refused: dict[str, Ran]) -> None:
    """But for those that start processes or prepare themselves, whose workers each worker would have."""
    for name in (*REFUSED, *TAKEN_AS_MEANS, *DRIFTING):
        ran = refused[f"{name} whole"]
        if name in ("started", "prepared"):
            assert re.search(REFUSED[name], ran.error), name
        else:
            assert (ran.error, ran.output[-8:]) == ("", "trained\n"), name


def test_what_a_graph_does_not_show_is_said(refused: dict[str, Ran]) -> None:
    for name in TAKEN_AS_MEANS:
        assert refused[name].said.count("the loss is taken as a mean over rows: mh.weight says otherwise") == 1, name


def test_models_that_drift_apart_are_named(refused: dict[str, Ran]) -> None:
    for name, message in DRIFTING.items():
        assert refused[name].error.startswith("ManyhandsError: refused.py, line "), name
        assert message in refused[name].error, name


def test_own_batches(refused: dict[str, Ran]) -> None:
    """Each worker draws its own: the batch is N times as large, and models stay equal. A loader does not go with it."""
    ran = refused["own_batches"]
    assert not ran.error, ran.said
    assert ran.dump["printed"][-1] == 1.0
    error = refused["own_loader"].error
    assert "BadInput: refused.py, line " in error
    assert "--own-batches is for a loop that draws its batches itself, and the DataLoader of refused.py:" in error


def test_a_model_of_one_batch_size_ends_with_exit_code_2() -> None:
    """The other worker fails on its part of the second batch, while the first one waits for it."""
    ended = CliRunner().invoke(
        app, ["run", "--auto", "--batches", "slices", "-n", "2", str(SCRIPTS / "refused.py"), "one_batch_size"]
    )
    assert ended.exit_code == 2
    assert "refused.py, line " in ended.stderr
    assert "the batch size must not be fixed" in ended.stderr
