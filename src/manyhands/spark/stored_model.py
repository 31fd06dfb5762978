"""A trained module on disk without pickle: where its class or function is, what it was called with, and its tensors. Keras
models are what Keras itself saves.

The folder may be on any file system that fsspec knows: a path, file:///, hdfs://, s3://.
"""

from __future__ import annotations

import importlib
import json
import typing
from collections.abc import Callable
from functools import partial
from typing import Any

import safetensors.torch
import torch
from torch import nn

from manyhands.errors import BadInput
from manyhands.evaluation import AveragedOutputs
from manyhands.remote_path import path_of
from manyhands.spark.of_keras import from_bytes, keras_module, to_bytes

FORMAT = 1
_RECIPE, _TENSORS, _KERAS = "model.json", "model.safetensors", "model.keras"

Make = Callable[[], nn.Module]


def recipe_of(make: Make) -> dict[str, Any]:
    """How to make the module again, as JSON. BadInput where another process could not."""
    function: Any = make
    args: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}
    if isinstance(make, partial):
        function, args, keywords = make.func, make.args, make.keywords
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if module in ("", "__main__") or "<" in name or _found(module, name) is not function:
        raise BadInput(
            f"a model is saved by the name of what makes it, and {name or function!r} has none that another process could import: put a class "
            "or function into a module of yours, and give that (or a functools.partial of it) as model"
        )
    _check_makes_modules(function)
    recipe = {"format": FORMAT, "module": module, "name": name, "args": list(args), "keywords": dict(keywords)}
    try:
        json.dumps(recipe)
    except TypeError as error:
        raise BadInput(
            f"{module}.{name} was given arguments that JSON does not hold ({error}): numbers, strings and lists of them will do"
        ) from error
    return recipe


def check(make: Make | None, model: nn.Module) -> None:
    """BadInput where `save` could not, before anything is written."""
    if keras_module(model) is not None:
        return
    if make is None:
        raise BadInput(
            "a model that was given as a module is not saved: give its class, or a function of a module, as model="
        )
    recipe_of(make)


def save(path: str, make: Make | None, model: nn.Module) -> None:
    """Write the recipe, parameters and buffers into a folder; a Keras model's own archive in their place."""
    check(make, model)
    folder = path_of(path)
    keras = keras_module(model)
    if keras is not None:
        files = {_RECIPE: json.dumps({"format": FORMAT, "keras": _KERAS}, indent=1).encode(), _KERAS: to_bytes(keras)}
    else:
        assert make is not None
        members = len(model.members) if isinstance(model, AveragedOutputs) else 0
        tensors = {name: tensor.contiguous() for name, tensor in _tensors(model).items()}
        recipe = json.dumps(recipe_of(make) | {"members": members}, indent=1).encode()
        files = {_RECIPE: recipe, _TENSORS: safetensors.torch.save(tensors)}
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


def load(path: str) -> tuple[Make | None, nn.Module]:
    """(what makes it, the module with its tensors); nothing makes a Keras model. BadInput where its code is not here."""
    folder = path_of(path)
    recipe = json.loads((folder / _RECIPE).read_bytes())
    if recipe.get("format") != FORMAT:
        raise BadInput(f"{path} has format {recipe.get('format')!r}, this version reads {FORMAT}")
    if "keras" in recipe:
        return None, from_bytes((folder / _KERAS).read_bytes(), path)
    make = _maker(recipe, path)
    model = AveragedOutputs([make() for _ in range(recipe["members"])]) if recipe["members"] else make()
    _fill(model, safetensors.torch.load((folder / _TENSORS).read_bytes()), path)
    return make, model


def _check_makes_modules(function: Any) -> None:
    """BadInput for anything but a class of modules, or a function that says it returns one: a file must not name what else is called."""
    kind = function
    if not isinstance(function, type):
        try:
            kind = typing.get_type_hints(function).get("return")
        except (NameError, TypeError):
            kind = None
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        name = getattr(function, "__qualname__", repr(function))
        raise BadInput(
            f"a saved model names what makes it, which must be a class of torch modules, or a function that says it returns one: "
            f"def {name}(…) -> nn.Module"
        )


def _maker(recipe: dict[str, Any], path: str) -> Make:
    function = _found(recipe["module"], recipe["name"])
    if function is None:
        raise BadInput(
            f"{path} needs {recipe['module']}.{recipe['name']}, which cannot be imported here: install that module"
        )
    _check_makes_modules(function)
    args, keywords = recipe["args"], recipe["keywords"]
    return partial(function, *args, **keywords) if args or keywords else function


def _fill(model: nn.Module, tensors: dict[str, torch.Tensor], path: str) -> None:
    own = _tensors(model)
    if own.keys() != tensors.keys():
        raise BadInput(
            f"{path} has the tensors of another model: {sorted(own.keys() ^ tensors.keys())[:3]} are in one of them only"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _found(module: str, name: str) -> Any:
    try:
        found: Any = importlib.import_module(module)
    except ImportError:
        return None
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
