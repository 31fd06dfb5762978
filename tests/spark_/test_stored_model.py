from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from spark_models import Classes, line
from torch import nn

from manyhands.errors import BadInput
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
    with pytest.raises(BadInput, match="none that another process could import"):
        recipe_of(make)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["loose", "system"])
def test_a_file_cannot_name_what_else_is_called(name: str, tmp_path: Path) -> None:
    save(str(tmp_path / "m"), line, line())
    recipe = tmp_path / "m" / "model.json"
    module, called = {"loose": ("spark_models", "loose"), "system": ("os", "system")}[name]
    found = json.loads(recipe.read_text()) | {"module": module, "name": called, "args": [f"touch {tmp_path}/called"]}
    recipe.write_text(json.dumps(found))
    with pytest.raises(BadInput, match=f"a function that says it returns one: def {called}"):
        load(str(tmp_path / "m"))
    assert not (tmp_path / "called").exists()


def test_arguments_that_json_does_not_hold() -> None:
    with pytest.raises(BadInput, match=r"spark_models\.Classes was given arguments that JSON does not hold"):
        recipe_of(partial(Classes, torch.ones(1)))  # type: ignore[arg-type]


def test_another_model_under_the_name(tmp_path: Path) -> None:
    save(str(tmp_path / "m"), line, Classes(2))
    with pytest.raises(BadInput, match="has the tensors of another model"):
        load(str(tmp_path / "m"))


def test_code_that_is_not_here(tmp_path: Path) -> None:
    save(str(tmp_path / "m"), line, line())
    recipe = tmp_path / "m" / "model.json"
    recipe.write_text(recipe.read_text().replace("spark_models", "gone_models"))
    with pytest.raises(BadInput, match=r"needs gone_models\.line, which cannot be imported here"):
        load(str(tmp_path / "m"))
    recipe.write_text('{"format": 9}')
    with pytest.raises(BadInput, match="has format 9, this version reads 1"):
        load(str(tmp_path / "m"))
