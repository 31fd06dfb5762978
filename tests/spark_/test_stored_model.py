"""Stored models: what comes back, what is refused; cut, edited or written by somebody else they give the module that the caller
named, or BadInput."""

import io
import json
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from spark_models import Classes, line
from torch import nn

import manyhands as mh
from fuzzing import Damage, bounded, json_bytes, survive, writes_only_in
from manyhands.errors import BadInput
from manyhands.replica.evaluation import AveragedOutputs
from manyhands.spark import stored_model
from manyhands.spark.stored_model import load, recipe_of, save
from refusals import all_refused


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


def test_a_uri_is_a_path_too_also_of_a_folder_elsewhere(tmp_path: Path) -> None:
    model = line()
    for uri in (f"file://{tmp_path}/m", "memory://models/m"):
        save(uri, line, model)
        assert torch.equal(load(uri)[1].weight, model.weight)  # type: ignore[arg-type]
    assert torch.equal(load(str(tmp_path / "m"))[1].weight, model.weight)  # type: ignore[arg-type]


def test_what_has_no_recipe() -> None:
    """What nobody can import, and arguments that JSON does not hold."""
    for make in (lambda: nn.Linear(1, 1), partial(lambda: nn.Linear(1, 1))):
        with pytest.raises(BadInput, match="another process cannot import"):
            recipe_of(make)
    with pytest.raises(BadInput, match=r"spark_models\.Classes was given arguments that JSON does not hold"):
        recipe_of(partial(Classes, torch.ones(1)))  # type: ignore[arg-type]


HOSTILE: dict[str, dict[str, Any]] = {
    "os.system": {"module": "os", "name": "system", "args": ["touch {}"]},
    "torch.fx": {"module": "torch.fx._symbolic_trace", "name": "symbolic_trace", "args": ["touch {}"]},
    "a module that is imported": {"module": "planted", "name": "Net", "args": []},
    "a function that says nothing": {"module": "spark_models", "name": "loose", "args": ["{}"]},
    "nested names": {"module": "spark_models", "name": "mh.spark.Estimator", "args": []},
}


def test_a_file_names_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack: any importable function that says `-> nn.Module` was called with the file's arguments."""
    planted = f"import torch, pathlib\npathlib.Path({str(tmp_path / 'called')!r}).touch()\nNet = torch.nn.Identity\n"
    (tmp_path / "planted.py").write_text(planted)
    monkeypatch.syspath_prepend(str(tmp_path))
    save(str(tmp_path / "m"), line, line())
    recipe = tmp_path / "m" / "model.json"
    whole = json.loads(recipe.read_text())

    def load_with(case: tuple[str, Any]) -> Any:
        name, named = case
        args = [text.format(tmp_path / "called") for text in HOSTILE[name]["args"]]
        recipe.write_text(json.dumps(whole | HOSTILE[name] | {"args": args}))
        return load(str(tmp_path / "m"), named)

    all_refused(load_with, [((name, None), "does not import code that a file names") for name in HOSTILE])
    all_refused(load_with, [((name, line), "as its model; got spark_models.line") for name in HOSTILE])
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


def test_files_that_are_no_recipe_of_this_model(tmp_path: Path) -> None:
    save(str(tmp_path / "m"), line, line())
    recipe = tmp_path / "m" / "model.json"
    whole = json.loads(recipe.read_text())

    def load_with(text: str) -> Any:
        recipe.write_text(text)
        return load(str(tmp_path / "m"))

    damaged = [(json.dumps(whole | {field: None}), f"is damaged: {field}") for field in ("module", "args", "keywords")]
    others = [
        (json.dumps(whole | {"members": None}), "is damaged: members"),
        (json.dumps(whole | {"members": 10**9}), "names: 1000000000, tensors"),
        ("[]", "has format None"),
        ('{"format": 9}', "has format 9, and this version of manyhands reads format 1"),
    ]
    all_refused(load_with, [*damaged, *others])
    save(str(tmp_path / "m"), line, Classes(2))
    with pytest.raises(BadInput, match="was saved from another model"):
        load(str(tmp_path / "m"))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # a model of the arguments in a damaged file
def test_folders(inputs: int, tmp_path: Path) -> None:
    damage, folder = Damage(1), tmp_path / "beside" / "model"
    make = partial(Classes, 3)
    stored_model.save(str(folder), make, make())
    files = {path: path.read_bytes() for path in folder.iterdir()}

    def take(change: tuple[Path, bytes]) -> None:
        path, data = change
        path.write_bytes(data)
        try:
            _, model = stored_model.load(str(folder), Classes)
            assert isinstance(model, nn.Module)
        finally:
            path.write_bytes(files[path])

    def drawn() -> Iterator[tuple[Path, bytes]]:
        for _ in range(inputs // 20):
            path = damage.choice(list(files))
            if path.suffix == ".json" and damage.random() < 0.7:
                yield path, json_bytes(damage.of_json(json.loads(files[path])))
            else:
                yield path, damage.of_bytes(files[path])

    with bounded(256), writes_only_in(folder):
        taken, refused = survive(take, drawn(), BadInput)
    assert taken
    assert refused


@pytest.mark.slow
def test_keras_archives(keras: Any, inputs: int, tmp_path: Path) -> None:
    """Its parts are damaged before they are packed, too: no checksum of the archive tells then."""
    from manyhands.keras.module import KerasModule
    from manyhands.spark.keras_models import from_bytes, to_bytes

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="dense")])
    model.compile("adam", "mse")
    whole = to_bytes(KerasModule(model))
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    damage = Damage(2)

    def drawn() -> Iterator[bytes]:
        for _ in range(inputs // 100):
            if damage.random() < 0.3:
                yield damage.of_bytes(whole)
                continue
            changed = damage.choice(list(parts))
            packed = io.BytesIO()
            with zipfile.ZipFile(packed, "w") as archive:
                for name, data in parts.items():
                    own = (
                        json_bytes(damage.of_json(json.loads(data)))
                        if name.endswith(".json")
                        else damage.of_bytes(data)
                    )
                    archive.writestr(name, own if name == changed else data)
            yield packed.getvalue()

    with bounded(512), writes_only_in(tmp_path / "none"):
        taken, refused = survive(lambda data: from_bytes(data, "it", keras.Sequential), drawn(), BadInput)
    assert taken
    assert refused


def test_an_ensemble_comes_back_with_its_members(tmp_path: Path) -> None:
    ensemble = AveragedOutputs([line(), line()])
    save(str(tmp_path / "m"), line, ensemble)
    _, again = load(str(tmp_path / "m"))
    x = torch.from_numpy(np.ones((2, 2), "float32"))
    assert torch.equal(again(x), ensemble(x))
