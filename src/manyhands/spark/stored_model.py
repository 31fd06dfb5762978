"""A trained module on disk without pickle: where its class or function is, what it was called with, and its tensors.

The folder may be on any file system that pyarrow knows: a path, file://, hdfs://, s3://.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import safetensors.torch
import torch
from pyarrow import fs
from torch import nn

from manyhands.errors import BadInput

FORMAT = 1
_RECIPE, _TENSORS = "model.json", "model.safetensors"


def recipe_of(make: Callable[[], nn.Module]) -> dict[str, Any]:
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
    recipe = {"format": FORMAT, "module": module, "name": name, "args": list(args), "keywords": dict(keywords)}
    try:
        json.dumps(recipe)
    except TypeError as error:
        raise BadInput(
            f"{module}.{name} was given arguments that JSON does not hold ({error}): numbers, strings and lists of them will do"
        ) from error
    return recipe


def save(path: str, make: Callable[[], nn.Module], model: nn.Module) -> None:
    """Write the recipe, parameters and buffers into a folder."""
    place, folder = fs.FileSystem.from_uri(path) if "://" in path else (fs.LocalFileSystem(), path)
    recipe = json.dumps(recipe_of(make), indent=1).encode()
    tensors = safetensors.torch.save({name: tensor.contiguous() for name, tensor in _tensors(model).items()})
    place.create_dir(folder)
    for name, data in ((_RECIPE, recipe), (_TENSORS, tensors)):
        with place.open_output_stream(f"{folder}/{name}") as file:
            file.write(data)


def load(path: str) -> tuple[Callable[[], nn.Module], nn.Module]:
    """(what makes it, the module with its tensors). BadInput where its code is not here."""
    place, folder = fs.FileSystem.from_uri(path) if "://" in path else (fs.LocalFileSystem(), path)
    with place.open_input_stream(f"{folder}/{_RECIPE}") as file:
        recipe = json.loads(file.read())
    if recipe.get("format") != FORMAT:
        raise BadInput(f"{path} has format {recipe.get('format')!r}, this version reads {FORMAT}")
    function = _found(recipe["module"], recipe["name"])
    if function is None:
        raise BadInput(
            f"{path} needs {recipe['module']}.{recipe['name']}, which cannot be imported here: install that module"
        )
    make = (
        partial(function, *recipe["args"], **recipe["keywords"]) if recipe["args"] or recipe["keywords"] else function
    )
    with place.open_input_stream(f"{folder}/{_TENSORS}") as file:
        tensors = safetensors.torch.load(file.read())
    model = make()
    own = _tensors(model)
    if own.keys() != tensors.keys():
        raise BadInput(
            f"{path} has the tensors of another model: {sorted(own.keys() ^ tensors.keys())[:3]} are in one of them only"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
    return make, model


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
