import json
import shutil
from pathlib import Path

import pytest
import torch

import manyhands as mh
import plain
from manyhands.inference.trained import trained
from refusals import refused

X = plain.rows(30)[0]
FILE = """
import torch
import manyhands as mh
import plain

task = mh.Task.supervised(
    model=plain.mlp, optimizer=plain.OPTIMIZERS["sgd"], train_data=plain.rows(40), batch_size=8, epochs=1
)
"""
GIVEN = "own_task.py:task"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[mh.Run, Path]:
    """A finished run whose task lies in a file, and its directory."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "own_task.py").write_text(FILE)
        return mh.train(GIVEN, epochs=2, run_dir=folder / "run"), folder / "run"


@pytest.fixture
def run(made: tuple[mh.Run, Path], monkeypatch: pytest.MonkeyPatch) -> tuple[mh.Run, Path]:
    monkeypatch.chdir(made[1].parent)
    return made


def test_a_module_a_run_and_a_directory_predict_alike(run: tuple[mh.Run, Path]) -> None:
    made, directory = run
    wanted = made.predict(X)
    assert torch.equal(mh.predict(made, X), wanted)
    assert torch.equal(mh.predict(made.model, X), wanted)
    assert torch.equal(mh.predict(str(directory), X, task=GIVEN), wanted)
    assert torch.equal(mh.predict(directory, X, task=GIVEN, workers=2, engine="sim"), wanted)
    # the strategy is not needed, nor imported: what a directory says of it stays a text
    assert json.loads((directory / "config.json").read_text())["strategy"]
    assert trained(directory, GIVEN, "predict")[1].epochs == 2  # with the fields that the run was given
    refused(rf"code that a run directory names is not imported.*--task {GIVEN}", mh.predict, directory, X)
    assert trained(made, None, "predict")[1] is None  # the same file
    refused("are not this model's", lambda: mh.predict(directory, X, task="digits"))


def test_a_ready_made_task_is_rebuilt_by_its_name_and_one_that_was_an_object_has_to_be_given(tmp_path: Path) -> None:
    made = mh.train("digits:epochs=1", max_steps=1, run_dir=tmp_path / "digits")
    task = trained(tmp_path / "digits", None, "predict")[1]
    assert (task.max_steps, task.name) == (1, trained(made, None, "evaluate")[1].name)
    task = plain.task(epochs=1)
    made = mh.train(task, run_dir=tmp_path / "run")
    refused(r"given its task as an object.*mh.predict\(directory, …, task=…\)", mh.predict, tmp_path / "run", X)
    assert torch.equal(mh.predict(tmp_path / "run", X, task=task), made.predict(X))


def test_a_damaged_model_and_what_is_no_finished_run_are_refused(run: tuple[mh.Run, Path], tmp_path: Path) -> None:
    shutil.copytree(run[1], tmp_path / "run")
    path = tmp_path / "run" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for place, words in (
        (tmp_path / "run", r"is damaged \(changed after it was written: model.safetensors\)"),
        (tmp_path / "none", "does not exist: give the directory of a finished run"),
        (tmp_path, "holds no result.json: give the directory of a finished run"),
    ):
        refused(words, lambda place=place: mh.predict(place, X, task=GIVEN))
