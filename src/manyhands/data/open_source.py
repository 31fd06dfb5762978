"""What a user may give as data, and the source that it becomes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from manyhands.data.batch import Collate, describe
from manyhands.data.dataframe_rows import DistributedFrame
from manyhands.data.ragged import Ragged
from manyhands.data.readers.arrays import Columns
from manyhands.data.readers.datasets import DatasetRows
from manyhands.data.readers.files import open_file
from manyhands.data.readers.loaders import open_loader, unshared
from manyhands.data.readers.ragged_rows import RaggedRows
from manyhands.data.readers.streams import Stream
from manyhands.data.readers.tables import HuggingFace, arrow_columns, frame_columns
from manyhands.data.shards.source import Shards
from manyhands.data.source import Slice, Source
from manyhands.errors import BadInput

__all__ = ["Slice", "Source", "is_function", "open_source"]

ACCEPTED = (
    "tensors or arrays (also in dicts, tuples, dataclasses); a Dataset; a list or other iterable of rows; a "
    "DataLoader; a DataFrame or Arrow table; a Csr or Corpus; a path or URL; shards(…); or a function that gives one of these (see docs/data.md)"
)


def open_source(data: Any, *, collate: Collate | None = None, loader_processes: int = 0) -> Source:
    """The source that `data` is; opened by every worker for itself.

    data: one of ACCEPTED. A tuple or dict is columns, a list is rows. A function is called here, on every worker; where
        it gives an iterator (a generator), it is called anew for each epoch.
    collate: [row, …] -> batch, instead of torch's default_collate, or of gathering columns.
    loader_processes: processes that load the rows of a Dataset or stream; what lies in memory needs none and starts
        none. A DataLoader's own `num_workers` comes first.

    Raises BadInput for anything else, for arrays of different lengths, and for no rows at all.
    """
    if isinstance(data, DistributedFrame):
        return data.open(collate)
    _refuse_self_sharded(data.dataset if isinstance(data, DataLoader) else data)
    if source := _open_library(data, collate, loader_processes):  # first: a Hugging Face DatasetDict is a dict, too
        return source
    if isinstance(data, Shards):
        return data.open(collate)
    if isinstance(data, Ragged):
        return RaggedRows(data, collate)
    if isinstance(data, DataLoader):
        return open_loader(unshared(data), collate, loader_processes)
    if isinstance(data, IterableDataset):
        return Stream(lambda: data, collate, loader_processes)
    if isinstance(data, Dataset) and not _has_rows(data):
        raise BadInput(
            f"{type(data).__name__} has no __len__: a Dataset needs __len__ and __getitem__; one without a length is an IterableDataset"
        )
    if type(data) is TensorDataset:
        return Columns(data.tensors, collate, "the TensorDataset")
    if _has_columns(data):
        return Columns(data, collate)
    if isinstance(data, str | Path):
        return open_file(data, collate)
    if is_function(data):
        made = data()
        if isinstance(made, Iterator):
            first = [made]
            return Stream(lambda: first.pop() if first else data(), collate, loader_processes)
        if is_function(made) and not isinstance(made, Iterable):
            raise BadInput(f"the data function returned {describe(made)}: expected {ACCEPTED.rpartition(';')[0]}")
        return open_source(made, collate=collate, loader_processes=loader_processes)
    if _has_rows(data):
        return DatasetRows(data, collate, loader_processes, f"the {type(data).__name__}")
    if isinstance(data, Iterable) and not isinstance(data, bytes | set | frozenset):
        return Stream(lambda: data, collate, loader_processes)
    raise BadInput(f"cannot read data from {describe(data)}: expected {ACCEPTED}")


def is_function(data: Any) -> bool:
    """Whether `data` is a function that returns data, to be called by `open_source`; callable datasets are not."""
    is_data = (
        isinstance(data, Dataset | DataLoader | DistributedFrame | Shards | Ragged)
        or _has_rows(data)
        or _has_columns(data)
    )
    return callable(data) and not is_data


def _open_library(data: Any, collate: Collate | None, processes: int) -> Source | None:
    """Types of libraries that are loaded already, else `data` could not be one of theirs."""
    if _is_a(data, "datasets", "Dataset"):
        by_row = processes and collate is not None
        return DatasetRows(data, collate, processes) if by_row else HuggingFace(data, collate)
    if _is_a(data, "datasets", "IterableDataset") and getattr(data, "_formatting", None) is None:
        tensors = data.with_format("torch")  # its rows are lists and numbers of Python's otherwise
        return Stream(lambda: tensors, collate, processes)
    if _is_a(data, "datasets", "DatasetDict") or _is_a(data, "datasets", "IterableDatasetDict"):
        raise BadInput(
            f"a {type(data).__name__} holds several splits ({', '.join(data)}): give one of them, train_data=dataset['train']"
        )
    if _is_a(data, "pandas", "DataFrame"):
        return Columns(frame_columns(data), collate, "the DataFrame")
    if _is_a(data, "pandas", "Series"):
        return Columns(np.asarray(data), collate, "the Series")
    if _is_a(data, "pyarrow", "Table"):
        return Columns(arrow_columns(data, "the Arrow table"), collate, "the Arrow table")
    return None


def _refuse_self_sharded(data: Any) -> None:
    """BadInput for a dataset that picks rows by variables such as RANK: each worker's rows would be shared out once more."""
    by = ""
    if _is_a(data, "streaming", "StreamingDataset"):
        by, instead = "Mosaic's StreamingDataset", "give mh.shards() its folder"
    elif getattr(data, "_distributed", None) is not None and type(data).__module__.startswith("datasets."):
        by, instead = "split_dataset_by_node", "give the dataset that it was called with"
    elif type(data).__module__.startswith("webdataset"):
        parts = [getattr(one, "__name__", "") for one in getattr(data, "pipeline", ())]
        args = [getattr(one, "f", None) for one in getattr(data, "pipeline", ())]
        names = {
            *parts,
            *(getattr(one, "__name__", "") for one in args),
            *(type(one).__name__ for one in getattr(data, "pipeline", ())),
        }
        if found := sorted(names & {"split_by_node", "ResampledShards"}):
            by, instead = (
                f"webdataset's {found[0]}",
                "give mh.shards() the paths of the tars, or leave the splitting out",
            )
    if by:
        raise BadInput(
            f"{by} shares rows out by itself, by the process's rank, and every worker's rows would be shared out once more: {instead}"
        )


def _is_a(data: Any, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(data, kind)


def _has_rows(data: Any) -> bool:
    return hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, type | str | bytes | set)


def _has_columns(data: Any) -> bool:
    if isinstance(data, Tensor | np.ndarray | tuple | Mapping):
        return True
    return is_dataclass(data) and not isinstance(data, type) and not _has_rows(data)


class Once:
    """A function that returns data, called once a process; what can be read only once is made anew."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._kept: list[Any] = []

    def __call__(self) -> Any:
        if self._kept:
            return self._kept[0]
        made = self._make()
        if not isinstance(made, Iterator | IterableDataset | DataLoader):
            self._kept.append(made)
        return made
