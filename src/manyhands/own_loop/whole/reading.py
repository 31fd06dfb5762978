"""A DataLoader's batches: each worker reads its rows, where the whole batch is what all workers' rows make.

That is so for rows that draw no random numbers, put together by torch's own `collate_fn`, or by one that is shown to do it
row by row. Other loaders are read whole by every worker, which is one process's batch whatever they do.
"""

from __future__ import annotations

import copy
import random
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, default_collate

from manyhands import rng
from manyhands.data.readers.loaders import is_indexed
from manyhands.errors import BadInput, Line, calling_line
from manyhands.own_loop.batches import ROWS, WHOLE
from manyhands.own_loop.whole.equality import EqualFacts, digest_of
from manyhands.own_loop.whole.exchange import Workers
from manyhands.own_loop.whole.layout import RowLayout
from manyhands.own_loop.whole.lazy import ShardedOutput
from manyhands.own_loop.whole.module_state import Kept, variables_in

_iterate: Callable[[Any], Iterator[Any]] = DataLoader.__iter__
_LOOKED_AT = 2  # rows that are read once more, to see whether they draw random numbers


@dataclass
class _Asked:
    """What was read of a batch."""

    indices: list[Any]  # of the whole batch
    rows: int | None  # of which this worker has read its own; None: it has read all


@dataclass
class _ByRows:
    """A loader of which each worker reads its rows."""

    shared: DataLoader[Any]
    line: Line
    checked: bool  # whether each batch shows anew that it consists of rows: its collate_fn is the script's


class LoaderReading:
    """The passes of a script over its loaders."""

    def __init__(
        self,
        workers: Workers,
        say: Callable[[str], None],
        facts: EqualFacts,
        plainly: Callable[[], AbstractContextManager[None]],
        wanted: str | None = None,
    ) -> None:
        """facts: gets which rows were asked for. plainly: within, calls of modules are not cut. wanted: ROWS, WHOLE, or
        None: rows where they are known to make the batch."""
        self._workers, self._say, self._facts, self._plainly, self._wanted = workers, say, facts, plainly, wanted
        self._known: weakref.WeakKeyDictionary[Any, _ByRows | None] = weakref.WeakKeyDictionary()

    def install(self) -> None:
        reading = self

        def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
            return reading._iterate(loader)

        DataLoader.__iter__ = iterate  # type: ignore[method-assign,assignment]

    def remove(self) -> None:
        DataLoader.__iter__ = _iterate  # type: ignore[method-assign,assignment]

    def _iterate(self, loader: DataLoader[Any]) -> Iterator[Any]:
        if self._wanted == WHOLE or not self._workers.in_own_thread:
            return _iterate(loader)
        if loader not in self._known:
            self._known[loader] = self._by_rows(loader)
        known = self._known[loader]
        if known is None:
            return _iterate(loader)
        parts = known.shared.batch_sampler
        assert isinstance(parts, _OwnRows)
        asked = parts.asked = deque[_Asked]()  # of this pass: another one may be under way
        return self._batches(_iterate(known.shared), asked, loader, known)

    def _batches(
        self, batches: Iterator[Any], asked: deque[_Asked], loader: DataLoader[Any], known: _ByRows
    ) -> Iterator[Any]:
        while True:
            with self._plainly():  # each worker reads other rows
                batch = next(batches, _OVER)
            if batch is _OVER:
                return
            about = asked.popleft()
            if not loader.num_workers:
                self._facts.add(known.line, "what random numbers come after rows of the DataLoader", rng.digest())
            digest = zlib.crc32(repr(about.indices).encode())
            self._facts.add(known.line, "which rows the DataLoader reads", digest)
            if about.rows is None:
                yield batch
            elif not known.checked or self._are_rows(batch, about.rows):
                yield self._seen_whole(batch, about.rows)
            else:
                self._read_whole(loader, known.line, "its collate_fn does not put every batch together row by row")
                yield loader.collate_fn([loader.dataset[i] for i in about.indices])

    def _seen_whole(self, batch: Any, rows: int) -> Any:
        """Of this worker's rows, seen as the whole."""
        return pytree.tree_map_only(Tensor, lambda own: ShardedOutput.of(own, RowLayout(0, rows), self._workers), batch)

    def _are_rows(self, batch: Any, rows: int) -> bool:
        """Whether all workers have what `default_collate` would give them of a batch, by its shapes. A collective."""
        self._workers.check_thread()
        own, (leaves, structure) = self._workers.own_rows(rows)[1], pytree.tree_flatten(batch)
        tensors = all(isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == own for leaf in leaves)
        kinds = [f"{list(leaf.shape[1:])} {leaf.dtype}" for leaf in leaves] if tensors else []
        everyone = self._workers.group.all_gather_json([str(structure), kinds])
        return bool(kinds) and all(one == everyone[0] for one in everyone)

    def _by_rows(self, loader: DataLoader[Any]) -> _ByRows | None:
        """None where each worker reads all. A collective."""
        line = calling_line()
        everyone = self._workers.group.all_gather_json(self._looked_at(loader))
        if reason := next((why for why, _ in everyone if why), ""):
            self._read_whole(loader, line, reason)
            return None
        if any(digest != everyone[0][1] for _, digest in everyone):
            raise BadInput(
                f"the workers have other data: the first rows of the DataLoader in {line} are not the same on all of them. Every worker runs the whole script: "
                "make random data alike by a seed"
            )
        shared = copy.copy(loader)
        object.__setattr__(shared, "batch_sampler", _OwnRows(loader.batch_sampler, self._workers))
        return _ByRows(shared, line, checked=loader.collate_fn is not default_collate)

    def _read_whole(self, loader: DataLoader[Any], line: Line, reason: str) -> None:
        """From its next pass on."""
        if self._wanted == ROWS:
            raise BadInput(
                f"--read rows has each worker read its rows of a batch, and of the DataLoader in {line} they do not make the batch: {reason}. Leave it out: every "
                "worker then reads all rows"
            )
        self._say(
            f"every worker reads all rows of the DataLoader of {line}, for {reason}: where reading is dear, take --batches slices"
        )
        self._known[loader] = None

    def _looked_at(self, loader: DataLoader[Any]) -> tuple[str, int]:
        """(why a worker's rows are not known to be those of the whole batch, or ""; a digest of some rows)"""
        if not is_indexed(loader):
            return "it is a stream, or makes its batches itself", 0
        own = loader.collate_fn is not default_collate
        rows = loader.batch_size or 2 * self._workers.size
        if _holds_generator([loader.dataset, loader.collate_fn]):
            return "its rows draw random numbers", 0
        read = [loader.dataset, loader.collate_fn]
        before = Kept([held for one in read for held in _held(one)], variables_in(read))
        try:
            with rng.kept(), self._plainly():
                drawn = rng.generator_states()
                items = [loader.dataset[i] for i in range(min(rows if own else _LOOKED_AT, len(loader.dataset)))]  # type: ignore[arg-type]
                if rng.generator_states() != drawn:
                    return "its rows draw random numbers", 0
                if not items:
                    return "it has no rows", 0
                batch = loader.collate_fn(items)
                leaves = pytree.tree_leaves(batch)
                if not all(isinstance(leaf, Tensor) for leaf in leaves):
                    return "its rows hold more than numbers", 0
                if own and not self._is_by_rows(loader, items, batch):
                    return "its collate_fn does not put a batch together row by row", 0
                if rng.generator_states() != drawn:
                    return "its collate_fn draws random numbers", 0
                if before.changed:
                    return "its dataset or its collate_fn changes while it is read", 0
                return "", zlib.crc32(repr([digest_of(leaf) for leaf in leaves]).encode())
        except Exception as error:  # noqa: BLE001 - the script's own pass raises it
            return f"reading a row raised {type(error).__name__}", 0
        finally:
            before.put_back()

    def _is_by_rows(self, loader: DataLoader[Any], items: Sequence[Any], batch: Any) -> bool:
        """Whether each worker's rows alone make its part of the batch."""
        leaves, structure = pytree.tree_flatten(batch)
        count = len(items) // self._workers.size
        if not count or any(not leaf.dim() or len(leaf) != len(items) for leaf in leaves):
            return False
        for start in range(0, count * self._workers.size, count):
            own, theirs = pytree.tree_flatten(loader.collate_fn(list(items[start : start + count])))
            expected = [leaf[start : start + count] for leaf in leaves]
            if theirs != structure or not all(map(torch.equal, own, expected)):
                return False
        return True


_OVER = object()
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def _held(value: Any, depth: int = 3) -> list[Any]:
    """The objects of the script that an object consists of, itself included."""
    found = [value] if hasattr(value, "__dict__") and not isinstance(value, type | FunctionType | nn.Module) else []
    if depth:
        inner = [*vars(value).values()] if found else value if isinstance(value, list | tuple) else []
        for one in inner:
            if (isinstance(one, list | tuple) and len(one) < 32) or hasattr(one, "__dict__"):
                found += _held(one, depth - 1)
    return found


def _holds_generator(values: Sequence[Any]) -> bool:
    """Whether a dataset or a function draws from a generator of its own."""
    for value in values:
        cells = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
        named = (
            [value.__globals__.get(name) for name in value.__code__.co_names] if isinstance(value, FunctionType) else []
        )
        for one in (*cells, *named, *(inner for held in _held(value) for inner in vars(held).values())):
            if isinstance(one, _GENERATORS):
                return True
    return False


class _OwnRows:
    """A batch sampler that gives this worker's rows of each batch; `asked` has what it gave, in order."""

    def __init__(self, plain: Any, workers: Workers) -> None:
        self._plain, self._workers = plain, workers
        self.asked: deque[_Asked] = deque()

    def __len__(self) -> int:
        return len(self._plain)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_plain":
            raise AttributeError(name)
        return getattr(self._plain, name)

    def __iter__(self) -> Iterator[list[Any]]:
        return self._parts(self.asked)

    def _parts(self, asked: deque[_Asked]) -> Iterator[list[Any]]:
        for batch in self._plain:
            batch = list(batch)
            if len(batch) < self._workers.size:
                asked.append(_Asked(batch, None))
                yield batch
                continue
            start, own = self._workers.own_rows(len(batch))
            asked.append(_Asked(batch, len(batch)))
            yield batch[start : start + own]
