from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import manyhands as mh
import plain
from manyhands.errors import BadInput
from manyhands.inference.trained import trained

X = plain.rows(30)[0]
FILE = """
import torch
import manyhands as mh
import plain

task = mh.Task.supervised(
    model=plain.mlp, optimizer=plain.OPTIMIZERS["sgd"], train_data=plain.rows(40), batch_size=8, epochs=1
)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[mh.Run, Path]:
    """A finished run whose task lies in a file, and its directory."""
    (tmp_path / "own_task.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "run"
    return mh.train("own_task.py:task", epochs=2, run_dir=directory), directory


def test_a_module_a_run_and_a_directory_predict_alike(run: tuple[mh.Run, Path]) -> None:
    made, directory = run
    wanted = made.predict(X)
    assert torch.equal(mh.predict(made, X), wanted)
    assert torch.equal(mh.predict(made.model, X), wanted)
    assert torch.equal(mh.predict(str(directory), X, task="own_task.py:task"), wanted)
    assert torch.equal(mh.predict(directory, X, task="own_task.py:task", workers=2, engine="sim"), wanted)


def test_a_file_that_a_directory_names_is_not_imported(run: tuple[mh.Run, Path]) -> None:
    with pytest.raises(BadInput, match=r"code that a run directory names is not imported.*--task own_task.py:task"):
        mh.predict(run[1], X)
    assert trained(run[0], None, "predict")[1] is None  # the same file


def test_the_strategy_of_a_directory_is_not_imported(run: tuple[mh.Run, Path]) -> None:
    """It is not needed: what a file of one's own says of strategies stays what it is, a text."""
    _, directory = run
    config = json.loads((directory / "config.json").read_text())
    assert config["strategy"]
    found = trained(directory, "own_task.py:task", "predict")
    assert found[1] is not None
    assert found[1].epochs == 2  # with the fields that the run was given


def test_a_ready_made_task_is_rebuilt_by_its_name(tmp_path: Path) -> None:
    made = mh.train("digits:epochs=1", max_steps=3, run_dir=tmp_path / "run")
    task = trained(tmp_path / "run", None, "predict")[1]
    assert task is not None
    assert task.max_steps == 3
    known = trained(made, None, "evaluate")[1]
    assert known is not None
    assert known.name == task.name


def test_a_task_that_was_an_object_has_to_be_given(tmp_path: Path) -> None:
    task = plain.task(epochs=1)
    made = mh.train(task, run_dir=tmp_path / "run")
    with pytest.raises(BadInput, match=r"given its task as an object.*mh.predict\(directory, …, task=…\)"):
        mh.predict(tmp_path / "run", X)
    assert torch.equal(mh.predict(tmp_path / "run", X, task=task), made.predict(X))


def test_a_damaged_model_is_refused(run: tuple[mh.Run, Path]) -> None:
    path = run[1] / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(BadInput, match=r"is damaged \(changed after it was written: model.safetensors\)"):
        mh.predict(run[1], X, task="own_task.py:task")


def test_another_model_is_refused(run: tuple[mh.Run, Path]) -> None:
    with pytest.raises(BadInput, match="are not this model's"):
        mh.predict(run[1], X, task="digits")


@pytest.mark.parametrize(("name", "words"), [("none", "does not exist"), (".", "holds no result.json")])
def test_no_finished_run(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=f"{words}: give the directory of a finished run"):
        mh.predict(tmp_path / name, X)
