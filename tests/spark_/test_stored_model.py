from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from spark_models import Classes, line
from torch import nn

import manyhands as mh
from manyhands.errors import BadInput
from manyhands.spark import stored_model
from manyhands.spark.stored_model import load, recipe_of, save


def test_a_model_comes_back_with_its_buffers(tmp_path: Path) -> None:
    make = partial(Classes, 3, classes=4)
    model = make()
    model(torch.randn(8, 3))  # moves the statistics of the batch norm
    save(str(tmp_path / "m"), make, model)
    again_by, again = load(str(tmp_path / "m"))
    assert isinstance(again, Classes)
    assert recipe_of(again_by) == recipe_of(make)
    x = torch.randn(5, 3)
    assert torch.equal(again.eval()(x), model.eval()(x))
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == ["model.json", "model.safetensors"]


def test_a_uri_is_a_path_too(tmp_path: Path) -> None:
    save(f"file://{tmp_path}/m", line, line())
    assert torch.equal(load(f"file://{tmp_path}/m")[1].weight, load(str(tmp_path / "m"))[1].weight)  # type: ignore[arg-type]


def test_a_folder_elsewhere() -> None:
    model = line()
    save("memory://models/m", line, model)
    assert torch.equal(load("memory://models/m")[1].weight, model.weight)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [lambda: nn.Linear(1, 1), partial(lambda: nn.Linear(1, 1))])
def test_what_nobody_can_import(make: object) -> None:
    with pytest.raises(BadInput, match="another process cannot import"):
        recipe_of(make)  # type: ignore[arg-type]


HOSTILE = {
    "os.system": {"module": "os", "name": "system", "args": ["touch {}"]},
    "torch.fx": {"module": "torch.fx._symbolic_trace", "name": "symbolic_trace", "args": ["touch {}"]},
    "a module that is imported": {"module": "planted", "name": "Net", "args": []},
    "a function that says nothing": {"module": "spark_models", "name": "loose", "args": ["{}"]},
    "nested names": {"module": "spark_models", "name": "mh.spark.Estimator", "args": []},
}


@pytest.mark.parametrize("named", [False, True], ids=["unnamed", "named"])
@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_a_file_names_no_code(
    hostile: dict[str, Any], named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: any importable function that says `-> nn.Module` was called with the file's arguments."""
    planted = f"import torch, pathlib\npathlib.Path({str(tmp_path / 'called')!r}).touch()\nNet = torch.nn.Identity\n"
    (tmp_path / "planted.py").write_text(planted)
    monkeypatch.syspath_prepend(str(tmp_path))
    save(str(tmp_path / "m"), line, line())
    recipe = tmp_path / "m" / "model.json"
    args = [text.format(tmp_path / "called") for text in hostile["args"]]
    recipe.write_text(json.dumps(json.loads(recipe.read_text()) | hostile | {"args": args}))
    with pytest.raises(
        BadInput, match="as its model; got spark_models.line" if named else "does not import code that a file names"
    ):
        load(str(tmp_path / "m"), line if named else None)
    assert not (tmp_path / "called").exists()


def test_the_caller_names_the_model_or_registered_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, elsewhere = partial(Classes, 3, classes=4), str(tmp_path / "m")
    save(elsewhere, make, make())
    monkeypatch.setattr(stored_model, "_registered", {})  # as in another process
    with pytest.raises(BadInput, match="register_model"):
        load(elsewhere)
    for named in (Classes, make):
        assert isinstance(load(elsewhere, named)[1], Classes)
    with pytest.raises(BadInput, match=r"was saved with the arguments \[3\]"):
        load(elsewhere, partial(Classes, 3, classes=5))
    with pytest.raises(BadInput, match="got spark_models.line"):
        load(elsewhere, line)
    with pytest.raises(BadInput, match="must be a class of torch modules"):
        mh.spark.register_model(print)
    assert mh.spark.register_model(Classes) is Classes
    assert isinstance(load(elsewhere)[1], Classes)


def test_an_estimators_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(str(tmp_path / "m"), line, line())
    monkeypatch.setattr(stored_model, "_registered", {})
    task = mh.Task(model=line, loss=lambda model, batch: model, optimizer=len, train_data=[1])  # type: ignore[arg-type]
    stored_model.remember(task.model)
    assert load(str(tmp_path / "m"))[0] is line


@pytest.mark.parametrize("field", ["module", "args", "keywords", "members"])
def test_a_recipe_that_is_none(field: str, tmp_path: Path) -> None:
    save(str(tmp_path / "m"), line, line())
    recipe = tmp_path / "m" / "model.json"
    found = json.loads(recipe.read_text())
    recipe.write_text(json.dumps(found | {field: None}))
    with pytest.raises(BadInput, match=f"is damaged: {field}"):
        load(str(tmp_path / "m"))
    recipe.write_text(json.dumps(found | {"members": 10**9}))
    with pytest.raises(BadInput, match="names: 1000000000, tensors"):
        load(str(tmp_path / "m"))
    recipe.write_text("[]")
    with pytest.raises(BadInput, match="has format None"):
        load(str(tmp_path / "m"))


def test_arguments_that_json_does_not_hold() -> None:
    with pytest.raises(BadInput, match=r"spark_models\.Classes was given arguments that JSON does not hold"):
        recipe_of(partial(Classes, torch.ones(1)))  # type: ignore[arg-type]


def test_another_model_under_the_name(tmp_path: Path) -> None:
    save(str(tmp_path / "m"), line, Classes(2))
    with pytest.raises(BadInput, match="was saved from another model"):
        load(str(tmp_path / "m"))


def test_another_format(tmp_path: Path) -> None:
    save(str(tmp_path / "m"), line, line())
    (tmp_path / "m" / "model.json").write_text('{"format": 9}')
    with pytest.raises(BadInput, match="has format 9, and this version of manyhands reads format 1"):
        load(str(tmp_path / "m"))
