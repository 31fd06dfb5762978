"""A trained module on disk without pickle: the name of its class or function, the arguments, and its tensors.

A Keras model is stored in Keras's own format.

The class or function that a stored model names is never imported. `load` uses one that its caller gives, or one that
this process registered: by `register_model`, or by giving it to an Estimator or to `save`. The arguments come from the
file.

The folder may be on any file system of fsspec: a path, file:///, hdfs://, s3://.
"""

from __future__ import annotations

import importlib
import json
import typing
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn

from manyhands.checkpoint.paths import AnyPath, path_of
from manyhands.errors import BadInput
from manyhands.replica.evaluation import AveragedOutputs
from manyhands.spark.keras_models import DAMAGE, from_bytes, keras_module, to_bytes
from manyhands.units import printable

FORMAT = 1
_RECIPE, _TENSORS, _KERAS = "model.json", "model.safetensors", "model.keras"

Make = Callable[[], nn.Module]
T = TypeVar("T")


def recipe_of(make: Make) -> dict[str, Any]:
    """How to make the module again, as JSON. Raises BadInput if another process could not."""
    function = _called(make)
    args, keywords = (make.args, make.keywords) if isinstance(make, partial) else ((), {})
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if module in ("", "__main__") or "<" in name or _found(module, name) is not function:
        raise BadInput(
            "a model is saved by the name of its class or function, and another process cannot import "
            f"{name or function!r}: put it into a module of your own, and give it (or a functools.partial of it) as "
            "model"
        )
    _check_makes_modules(function)
    recipe = {"format": FORMAT, "module": module, "name": name, "args": list(args), "keywords": dict(keywords)}
    try:
        json.dumps(recipe)
    except TypeError as error:
        raise BadInput(
            f"{module}.{name} was given arguments that JSON does not hold ({error}): give numbers, strings and lists of "
            "them"
        ) from error
    return recipe


def check(make: Make | None, model: nn.Module) -> None:
    """Raise BadInput if `save` would fail, before anything is written."""
    if keras_module(model) is not None:
        return
    if make is None:
        raise BadInput(
            "a model that was given as a module object cannot be saved: give its class, or a function from a file, as "
            "model="
        )
    recipe_of(make)


def save(path: str, make: Make | None, model: nn.Module) -> None:
    """Write the recipe, parameters and buffers into a folder; of a Keras model its own archive instead."""
    check(make, model)
    if make is not None:
        register_model(make)
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


def register_model(make: T) -> T:
    """Allow loading of stored models that name this class or function, in this process. Returns it, as a decorator.

    It is called with the arguments in the file: register only what does no harm with any numbers, strings and lists.
    Raises BadInput for anything but a class of torch modules, or a function that is annotated to return one.
    """
    _check_makes_modules(_called(make))
    remember(make)
    return make


def remember(make: Any) -> None:
    """As `register_model`, if it is a class or function: an Estimator's own model may be something else."""
    if callable(make) and not isinstance(make, nn.Module):
        function = _called(make)
        _registered[_name_of(function)] = function


_registered: dict[str, Any] = {}  # by module.name
_RECIPE_FIELDS = {"format": int, "module": str, "name": str, "args": list, "keywords": dict, "members": int}


def load(path: str, make: Any = None) -> tuple[Make | None, nn.Module]:
    """(the class or function, the module with its tensors); (None, the module) of a Keras model.

    make: the class, the function or the functools.partial that the stored model must name; of a Keras model, its class.
    None: one that this process registered. Raises BadInput for anything else, before it is called.
    """
    folder = path_of(path)
    recipe = _read(folder / _RECIPE, json.loads)
    if not isinstance(recipe, dict) or recipe.get("format") != FORMAT:
        found = recipe.get("format") if isinstance(recipe, dict) else None
        raise BadInput(
            f"{path} has format {found!r}, and this version of manyhands reads format {FORMAT}: save the model again "
            "with it"
        )
    if "keras" in recipe:
        return None, _read(folder / _KERAS, lambda data: from_bytes(data, path, make))
    if wrong := [name for name, kind in _RECIPE_FIELDS.items() if not isinstance(recipe.get(name), kind)]:
        raise BadInput(f"{path} is damaged: {', '.join(wrong)} is missing, or has the wrong type. Save the model again")
    tensors = _read(folder / _TENSORS, safetensors.torch.load)
    made_by = _maker(recipe, path, make)
    members = recipe["members"]
    if not 0 <= members <= len(tensors):
        raise BadInput(
            f"{path} is damaged (ensemble members that it names: {members}, tensors: {len(tensors)}). Save the model "
            "again"
        )
    try:
        model = AveragedOutputs([made_by() for _ in range(members)]) if members else made_by()
    except DAMAGE as error:
        arguments = f"{recipe['args']}, {recipe['keywords']}"
        raise BadInput(
            f"{printable(recipe['name'])} cannot build a model from the arguments in {path} ({printable(arguments)}): "
            f"{error}. Was its code changed since?"
        ) from error
    _fill(model, tensors, path)
    return made_by, model


def _read(file: AnyPath, read: Callable[[bytes], T]) -> T:
    """The content of a file. Raises BadInput if it cannot be read."""
    try:
        return read(file.read_bytes())
    except BadInput:
        raise
    except (*DAMAGE, SafetensorError) as error:
        raise BadInput(f"{file} is missing or damaged ({error!r:.200}): save the model again") from error


def _called(make: Any) -> Any:
    return make.func if isinstance(make, partial) else make


def _name_of(function: Any) -> str:
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', repr(function))}"


def _check_makes_modules(function: Any) -> None:
    """Raise BadInput for anything but a class of modules, or a function that is annotated to return one."""
    kind = function
    if not isinstance(function, type):
        try:
            kind = typing.get_type_hints(function).get("return")
        except (NameError, TypeError):
            kind = None
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        name = getattr(function, "__qualname__", repr(function))
        raise BadInput(
            "what a saved model names must be a class of torch modules, or a function that says it returns one: "
            f"def {name}(…) -> nn.Module"
        )


def _maker(recipe: dict[str, Any], path: str, make: Any) -> Make:
    """The caller's class or function, or a registered one, if it has the recipe's name; with the recipe's arguments."""
    name, args, keywords = f"{recipe['module']}.{recipe['name']}", recipe["args"], recipe["keywords"]
    if make is None:
        if name not in _registered:
            raise BadInput(
                f"{path} names {printable(name)}, and manyhands does not import code that a file names. If you trust "
                f"it, give it (Model.load(path, model={printable(recipe['name'])})), or call mh.spark.register_model "
                "with it before loading"
            )
        function = _registered[name]
    else:
        function = _called(make)
        if _name_of(function) != name:
            raise BadInput(
                f"{path} was saved with {printable(name)} as its model; got {_name_of(function)}: give that one"
            )
        if isinstance(make, partial) and (json.loads(json.dumps(make.args)), make.keywords) != (args, keywords):
            raise BadInput(
                f"{path} was saved with the arguments {args}, {keywords}; got {list(make.args)}, {dict(make.keywords)}: "
                f"give these, or {recipe['name']} alone"
            )
    _check_makes_modules(function)
    return partial(function, *args, **keywords) if args or keywords else function


def _fill(model: nn.Module, tensors: dict[str, torch.Tensor], path: str) -> None:
    own = _tensors(model)
    if own.keys() != tensors.keys():
        raise BadInput(
            f"{path} was saved from another model (tensors in only one of them: "
            f"{sorted(own.keys() ^ tensors.keys())[:3]}): give the model that was saved"
        )
    if other := [name for name, tensor in own.items() if tensor.shape != tensors[name].shape]:
        name = other[0]
        raise BadInput(
            f"{path} holds {name} of shape {list(tensors[name].shape)}, and the model's is {list(own[name].shape)}: was it "
            "changed since?"
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
