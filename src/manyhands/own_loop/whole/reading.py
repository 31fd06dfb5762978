"""A DataLoader's batches: each worker reads its rows, where the whole batch is what all workers' rows make.

That is so for rows that draw no random numbers, put together by torch's own `collate_fn`, or by one of which the first
batch shows it. Other loaders are read whole by every worker, which is one process's batch whatever they do.
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, default_collate

from manyhands import rng
from manyhands.data.readers.loaders import generators_of, is_indexed, samplers_of
from manyhands.errors import calling_line
from manyhands.own_loop.whole.exchange import Workers
from manyhands.own_loop.whole.layout import Shard
from manyhands.own_loop.whole.lazy import ShardedOutput

_iterate: Callable[[Any], Iterator[Any]] = DataLoader.__iter__
_LOOKED_AT = 2  # rows that are read once more, to see whether they draw random numbers


class Reading:
    """The passes of a script over its loaders."""

    def __init__(self, workers: Workers, say: Callable[[str], None]) -> None:
        self._workers, self._say = workers, say
        self._by_rows: weakref.WeakKeyDictionary[Any, DataLoader[Any] | None] = weakref.WeakKeyDictionary()

    def install(self) -> None:
        reading = self

        def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
            return reading._iterate(loader)

        DataLoader.__iter__ = iterate  # type: ignore[method-assign,assignment]

    def remove(self) -> None:
        DataLoader.__iter__ = _iterate  # type: ignore[method-assign,assignment]

    def _iterate(self, loader: DataLoader[Any]) -> Iterator[Any]:
        if loader not in self._by_rows:
            self._by_rows[loader] = self._shared(loader)
        shared = self._by_rows[loader]
        if shared is None:
            return _iterate(loader)
        parts = shared.batch_sampler
        assert isinstance(parts, _OwnRows)
        asked = parts.rows = deque[int | None]()  # of this pass: another one may be under way
        return self._wrapped(_iterate(shared), asked)

    def _wrapped(self, batches: Iterator[Any], asked: deque[int | None]) -> Iterator[Any]:
        for batch in batches:
            rows = asked.popleft()
            yield batch if rows is None else self._batch(batch, rows)

    def _batch(self, batch: Any, rows: int) -> Any:
        """Of this worker's rows, seen as the whole."""
        return pytree.tree_map_only(Tensor, lambda own: ShardedOutput.of(own, Shard(0, rows), self._workers), batch)

    def _shared(self, loader: DataLoader[Any]) -> DataLoader[Any] | None:
        """One that reads this worker's rows; None where that is not known to be the same. A collective."""
        reasons = [why for why in self._workers.group.all_gather_json(self._why_whole(loader)) if why]
        if reasons:
            self._say(
                f"every worker reads all rows of the DataLoader of {calling_line()}, for {reasons[0]}: where reading is dear, take --batches slices"
            )
            return None
        shared = copy.copy(loader)
        object.__setattr__(shared, "batch_sampler", _OwnRows(loader.batch_sampler, self._workers))
        return shared

    def _why_whole(self, loader: DataLoader[Any]) -> str:
        """Why a worker's rows are not known to be those of the whole batch; "" where they are."""
        if type(loader).__iter__ is not DataLoader.__iter__ or not is_indexed(loader) or loader.batch_sampler is None:
            return "it is a stream, or makes its batches itself"
        if loader.collate_fn is not default_collate:
            return "its collate_fn is the script's own"
        if not all(type(one).__module__ == "torch.utils.data.sampler" for one in samplers_of(loader)):
            return "its sampler is the script's own"
        states = [(generator, generator.get_state()) for generator in generators_of(loader)]
        try:
            with rng.kept():
                indices = next(iter(loader.batch_sampler), [])[:_LOOKED_AT]
                drawn = rng.generator_states()
                items = [loader.dataset[i] for i in indices]
                if rng.generator_states() != drawn:
                    return "its rows draw random numbers"
                return "" if items and _has_tensors_alone(default_collate(items)) else "its rows hold more than numbers"
        except Exception as error:  # noqa: BLE001 - the script's own pass raises it
            return f"reading a row raised {type(error).__name__}"
        finally:
            for generator, state in states:
                generator.set_state(state)


def _has_tensors_alone(batch: Any) -> bool:
    return all(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(batch))


class _OwnRows:
    """A batch sampler that gives this worker's rows of each batch; of so many `rows` it was asked, in order; None: all."""

    def __init__(self, plain: Any, workers: Workers) -> None:
        self._plain, self._workers = plain, workers
        self.rows: deque[int | None] = deque()

    def __len__(self) -> int:
        return len(self._plain)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_plain":
            raise AttributeError(name)
        return getattr(self._plain, name)

    def __iter__(self) -> Iterator[list[Any]]:
        return self._parts(self.rows)

    def _parts(self, asked: deque[int | None]) -> Iterator[list[Any]]:
        for batch in self._plain:
            batch = list(batch)
            if len(batch) < self._workers.size:
                asked.append(None)
                yield batch
                continue
            start, own = self._workers.own_rows(len(batch))
            asked.append(len(batch))
            yield batch[start : start + own]
