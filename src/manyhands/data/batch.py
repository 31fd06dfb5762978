"""Batches: nested dicts, tuples, lists and dataclasses whose leaves are columns of equally many rows.

A column is a tensor or array whose first dimension counts rows, a list or tuple of plain values (strings, numbers), or
rows of different lengths (`Ragged`).
Numbers, strings, None and tensors without dimensions belong to the whole batch: they are neither counted nor cut.
"""

from __future__ import annotations

import copy
import hashlib
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyhands.data.ragged import Ragged
from manyhands.data.strata import Cells
from manyhands.errors import BadInput, users_line

Collate = Callable[[list[Any]], Any]  # [row, …] -> batch

_DIGESTED = 1 << 20
_UNEXPECTED = re.compile(r"(\S+) got an unexpected keyword argument '(.+?)'")
_MISSING = re.compile(r"(\S+) missing \d+ required (?:positional|keyword-only) arguments?: (.+)")
PLAIN = (str, bytes, int, float, bool, complex, type(None), np.generic)


def rows_of(batch: Any) -> int:
    """How many rows a batch has. Raises BadInput where its columns disagree, or where it has none."""
    lengths = {path: len(column) for path, column in columns(batch)}
    if not lengths:
        raise BadInput(
            f"a batch must hold tensors or arrays whose first dimension counts rows (alone, or in dicts, tuples, lists, dataclasses); got {describe(batch)}"
        )
    counts = set(lengths.values())
    if len(counts) > 1:
        listing = ", ".join(f"{path or 'batch'}: {n}" for path, n in lengths.items())
        raise BadInput(f"the columns of a batch must have equally many rows; got {listing}. Let collate make them so")
    return counts.pop()


def slice_rows(batch: Any, start: int, stop: int) -> Any:
    """Rows [start, stop) of a batch, in the same structure; tensors and arrays are views."""
    return map_columns(batch, lambda column: column[start:stop])


def digest_of(batch: Any) -> str:
    """Equal for equal batches; looks at the first megabyte of each column."""
    return _digest(columns(batch))


def digest_of_rows(rows: Sequence[Any]) -> str:
    """Equal for equal rows, also where they hold numbers and texts."""
    return _digest(_values(rows))


def _digest(values: Iterable[tuple[str, Any]]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for path, column in values:
        if isinstance(column, PLAIN):
            digest.update(f"{path} {column!r} ".encode()[:_DIGESTED])
            continue
        if isinstance(column, Tensor):
            flat = column.detach().reshape(-1)[: _DIGESTED // column.itemsize].cpu().contiguous()
            data = flat.view(torch.uint8).numpy().tobytes()
        elif isinstance(column, np.ndarray) and column.dtype != object:
            data = column.reshape(-1)[: _DIGESTED // column.itemsize].tobytes()
        else:
            data = repr(list(column)).encode()[:_DIGESTED]
        shape = tuple(column.shape) if hasattr(column, "shape") else (len(column),)
        digest.update(f"{path} {getattr(column, 'dtype', '')} {shape} ".encode() + data)
    return digest.hexdigest()


def first_rows(batch: Any, n: int) -> Any:
    """The first `n` rows of a batch (all, if it has fewer)."""
    return slice_rows(batch, 0, n)


def row_at(batch: Any, i: int) -> Any:
    """One row of a batch, without its first dimension, in the same structure."""
    return map_columns(batch, lambda column: column[i])


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on `device`; a copy to CUDA goes through pinned memory and does not wait.

    Arrays and lists stay as they are. An object of the user's own is moved by its own `to`, where it has one.
    """

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if leaf.device == device:
                return leaf
            if device.type == "cuda" and leaf.device.type == "cpu":
                return leaf.pin_memory().to(device, non_blocking=True)
            return leaf.to(device)
        move = None if _is_column(leaf) or isinstance(leaf, PLAIN) else getattr(leaf, "to", None)
        return leaf if move is None else move(device)

    return map_leaves(batch, moved)


def columns(batch: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, column) of every column, in order; paths look like `['x'][0]` or `.field`."""
    if _is_column(batch):
        yield path, batch
    else:
        for step, child in _children(batch):
            yield from columns(child, path + step)


def map_columns(batch: Any, function: Callable[[Any], Any]) -> Any:
    """The same structure with `function` applied to every column."""
    return map_leaves(batch, lambda leaf: function(leaf) if _is_column(leaf) else leaf)


def map_leaves(batch: Any, function: Callable[[Any], Any]) -> Any:
    """The same structure with `function` applied to everything that is no container."""
    if _is_column(batch):
        return function(batch)
    if isinstance(batch, Mapping):
        values = {key: map_leaves(value, function) for key, value in batch.items()}
        if not isinstance(batch, MutableMapping):
            return values
        clone = copy.copy(batch)  # keeps what a subclass carries beside its items
        clone.update(values)
        return clone
    if isinstance(batch, list | tuple):
        return like_sequence(batch, [map_leaves(value, function) for value in batch])
    if _is_dataclass(batch):
        return replace(batch, **{f.name: map_leaves(getattr(batch, f.name), function) for f in fields(batch) if f.init})
    return function(batch)


def merged(batches: Sequence[Any], function: Callable[[list[Any]], Any]) -> Any:
    """Dicts, lists and tuples of one structure as one: `function` makes one of all that stand in the same place."""
    first = batches[0]
    if isinstance(first, dict):
        return {name: merged([batch[name] for batch in batches], function) for name in first}
    if isinstance(first, list | tuple):
        return like_sequence(first, [merged(parts, function) for parts in zip(*batches, strict=True)])
    return function(list(batches))


def like_sequence(model: Any, values: list[Any]) -> Any:
    """`values` as the kind of list, tuple or named tuple that `model` is."""
    if hasattr(model, "_fields"):
        return type(model)(*values)
    return type(model)(values)


def describe(value: Any) -> str:
    """A type in a few words, for errors: `dict of str (x, y)`, `Tensor []`."""
    if isinstance(value, Tensor | np.ndarray):
        return f"{type(value).__name__} of shape {list(value.shape)}"
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with keys {', '.join(map(str, value)) or '(none)'}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} of {', '.join(sorted({type(item).__name__ for item in value})) or 'nothing'}"
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


@contextmanager
def naming_columns(batch: Any) -> Iterator[None]:
    """Code of the user's that is given a batch of named columns runs within.

    Raises BadInput where it asks the batch for a column that it has not, or gives the columns to a function whose arguments
    have other names: not in the place of an error that has another reason.
    """
    try:
        yield
    except (KeyError, TypeError) as error:
        if isinstance(batch, Mapping) and (problem := _wrong_column(batch, error)):
            raise BadInput(problem) from error
        raise


def _wrong_column(batch: Mapping[Any, Any], error: KeyError | TypeError) -> str:
    """What is wrong with the names of a batch's columns; "" where the error is not about them."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    held = [value for value in frame.f_locals.values() if isinstance(value, Mapping)]
    whole = any(set(batch) <= set(one) for one in held)  # the batch, a part of its rows, or its columns as arguments
    line, has = users_line(error), f"the data has the columns {', '.join(map(str, batch))}"
    where = f" ({line.in_words})" if line else ""
    if isinstance(error, KeyError):
        if not whole or error.args[0] in batch:
            return ""
        return f"there is no column {error.args[0]!r}, which the program asks for{where}: {has}. Use one of these, or give data with this column"
    text = str(error)
    if (found := _UNEXPECTED.search(text)) and any(found[2] in one for one in held) and found[2] in batch:
        others = ", ".join(repr(name) for name in batch if name != found[2])
        return (
            f"{found[1]} takes no column {found[2]!r}{where}: {has}. Give only columns that it takes: mh.shards(…, columns=[{others}]), or those "
            "that the loss picks from the batch"
        )
    if (found := _MISSING.search(text)) and whole:
        lacking = [name for name in re.findall(r"'(.+?)'", found[2]) if name not in batch]
        if lacking:
            return f"{found[1]} needs {lacking[0]!r}{where}: {has}. Give data with this column, or let the loss give it"
    return ""


def _values(batch: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of every column, and of every number, text and tensor without dimensions."""
    if _is_column(batch) or isinstance(batch, (Tensor, *PLAIN)):
        yield path, batch
    else:
        for step, child in _children(batch):
            yield from _values(child, path + step)


def _is_column(value: Any) -> bool:
    if isinstance(value, Tensor | np.ndarray):
        return value.ndim > 0
    if isinstance(value, Ragged | Cells):
        return True
    if isinstance(value, list) or type(value) is tuple:
        return bool(value) and all(isinstance(item, PLAIN) for item in value)
    return False


def _is_dataclass(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _children(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", child) for key, child in value.items()]
    if isinstance(value, list | tuple):
        return [(f"[{i}]", child) for i, child in enumerate(value)]
    if _is_dataclass(value):
        return [(f".{f.name}", getattr(value, f.name)) for f in fields(value)]
    return []
