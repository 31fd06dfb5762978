"""A worker's value as JSON and tensors: how it comes from another host, from which nothing is ever unpickled."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from manyhands.engines.hosts.message_channel import travels
from manyhands.errors import BadInput, ManyhandsError

_TUPLE, _DICT, _TENSOR = "tuple", "dict", "tensor"


def encode(value: Any, what: str) -> tuple[Any, list[Tensor]]:
    """(JSON, the tensors that it refers to by their place). `what` names the value in the error.

    BadInput for other than None, booleans, numbers, strings, lists, tuples, dicts by strings, and dense tensors.
    """
    tensors: list[Tensor] = []
    return _encoded(value, what, tensors), tensors


def _encoded(value: Any, path: str, tensors: list[Tensor]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_encoded(item, f"{path}[{i}]", tensors) for i, item in enumerate(value)]
    if type(value) is tuple:
        return {_TUPLE: [_encoded(item, f"{path}[{i}]", tensors) for i, item in enumerate(value)]}
    if type(value) is dict and all(type(key) is str for key in value):
        return {_DICT: {key: _encoded(item, f"{path}[{key!r}]", tensors) for key, item in value.items()}}
    if isinstance(value, Tensor) and travels(value):
        tensors.append(value)
        return {_TENSOR: len(tensors) - 1}
    raise BadInput(
        f"{path} is a {type(value).__qualname__}, and workers on another host cannot return that: return None, "
        "numbers, strings, lists, tuples, dicts with strings as keys, or dense tensors"
    )


def decode(encoded: Any, tensors: list[Tensor]) -> Any:
    """What `encode` was given. ManyhandsError if it cannot have been `encode` who wrote this."""
    try:
        return _decoded(encoded, tensors)
    except RecursionError as error:
        raise ManyhandsError(f"a value that came from another host is nested too deeply: {error}") from error


def _decoded(encoded: Any, tensors: list[Tensor]) -> Any:
    if isinstance(encoded, list):
        return [_decoded(item, tensors) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if len(encoded) == 1:
        ((kind, held),) = encoded.items()
        if kind == _TUPLE and isinstance(held, list):
            return tuple(_decoded(item, tensors) for item in held)
        if kind == _DICT and isinstance(held, dict):
            return {key: _decoded(item, tensors) for key, item in held.items()}
        if kind == _TENSOR and isinstance(held, int) and 0 <= held < len(tensors):
            return tensors[held]
    raise ManyhandsError(f"a value that came from another host cannot be read: {str(encoded)[:80]}")
