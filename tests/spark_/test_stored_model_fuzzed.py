"""Stored models that were cut, edited or written by somebody else: the module that the caller named, or BadInput."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import pytest
from spark_models import Classes
from torch import nn

from fuzzing import Damage, bounded, json_bytes, survive, writes_only_in
from manyhands.errors import BadInput
from manyhands.keras.module import KerasModule
from manyhands.spark import stored_model
from manyhands.spark.keras_models import from_bytes, to_bytes


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


def test_keras_archives(inputs: int, tmp_path: Path) -> None:
    """Its parts are damaged before they are packed, too: no checksum of the archive tells then."""
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
