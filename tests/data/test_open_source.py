"""data/open_source.py: everything a user may give becomes a source, and everything else an error."""

import sys
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from manyhands.data.open_source import Once, is_function, open_source
from manyhands.data.readers.arrays import Columns
from manyhands.data.readers.datasets import DatasetRows
from manyhands.data.readers.streams import Stream
from manyhands.data.source import Loading
from refusals import refused

X = torch.arange(5.0)


class Uncalled:
    """Can be called, and is data all the same."""

    def __call__(self):
        raise AssertionError("data that can be called was called")


class Squares(Uncalled, Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, i):
        return {"x": torch.tensor(float(i)), "y": i * i}


class Endless(Dataset):
    def __getitem__(self, i):
        return i


class Numbers(Uncalled, IterableDataset):
    def __iter__(self):
        return iter(range(3))


@dataclass
class Table(Uncalled):
    x: torch.Tensor


class Records(Uncalled, list):
    pass


class OldStyle:
    """Rows by __getitem__ alone: an iterable to Python."""

    def __getitem__(self, i):
        if i == 3:
            raise IndexError
        return i

    def __iter__(self):
        return (self[i] for i in range(3))


def test_what_data_becomes():
    for data, kind, rows in [
        (X, Columns, 5),
        ((X, X), Columns, 5),
        ({"x": X.numpy(), "y": [1, 2, 3, 4, 5]}, Columns, 5),
        (TensorDataset(X, X), Columns, 5),
        (Squares(), DatasetRows, 5),
        ([(X, 0), (X, 1)], DatasetRows, 2),
        ([X, X], DatasetRows, 2),
        (range(9), DatasetRows, 9),
        (OldStyle(), Stream, None),
        ((i for i in range(3)), Stream, None),
        (lambda: (X, X), Columns, 5),
        (lambda: iter([1]), Stream, None),
        (Squares, DatasetRows, 5),
        (Numbers(), Stream, None),
        (Table(X), Columns, 5),
        (Records([1, 2]), DatasetRows, 2),
    ]:
        source = open_source(data)
        assert (type(source), source.rows) == (kind, rows), data


def test_what_loads_its_rows_and_what_would_load_more():
    """What lies in memory starts no processes, and one alone reads a stream."""
    for data, processes, loading in [
        ((X, X), 2, Loading()),
        (TensorDataset(X, X), 2, Loading()),
        (Squares(), 0, Loading(0, "--loader-processes")),
        (Squares(), 2, Loading(2, "--loader-processes")),
        (DataLoader(Squares()), 2, Loading(2, "--loader-processes")),
        (DataLoader(Squares(), num_workers=1), 2, Loading(1, "num_workers")),
        (DataLoader(TensorDataset(X, X)), 0, Loading()),
        (Numbers(), 0, Loading(0, "--loader-processes")),
        (Numbers(), 2, Loading(1)),
        (DataLoader(Numbers(), num_workers=1), 2, Loading(1, "num_workers")),
    ]:
        assert open_source(data, loader_processes=processes).loading == loading, (data, processes)


def test_what_is_a_function():
    for data in (X, (X, X), Squares(), Endless(), Numbers(), Table(X), Records([1]), OldStyle(), "x"):
        assert not is_function(data), data
    for data in (lambda: X, Squares, Table, Once(lambda: X)):
        assert is_function(data), data


def test_what_is_refused():
    for data in (None, 3, 2.5, {1, 2}, b"abc", object(), lambda: 3):
        refused("expected tensors or arrays .*; a Dataset; .*docs/data", open_source, data)
    for data in ([], {}, (), (X[:0],), list):
        refused("has no (rows|columns)", open_source, data)
    refused("equally long", open_source, (X, X[:4]))
    refused("Endless has no __len__", open_source, Endless())
    refused("the data function returned", open_source, lambda: open_source)


def test_data_that_a_function_gives_is_read_once_for_all_workers_of_a_process():
    calls = []
    once = Once(lambda: calls.append(1) or torch.arange(6.0))
    assert once() is once()
    assert len(calls) == 1
    once = Once(lambda: iter([1.0, 2.0]))  # what can be read through only once is made for each worker
    assert list(once()) == list(once()) == [1.0, 2.0]


class Mosaic(IterableDataset):
    __module__ = "streaming.base.dataset"

    def __iter__(self):
        return iter(range(3))


class Split(Mosaic):
    __module__ = "datasets.iterable_dataset"
    _distributed = (0, 2)


def split_by_node(rows):
    return rows


class Pipeline(Mosaic):
    __module__ = "webdataset.pipeline"
    pipeline = (iter, split_by_node)


def test_a_dataset_that_picks_rows_by_rank_is_refused(monkeypatch):
    for data, name in [
        (Mosaic(), "StreamingDataset"),
        (Split(), "split_dataset_by_node"),
        (Pipeline(), "split_by_node"),
    ]:
        library = SimpleNamespace(StreamingDataset=Mosaic if type(data) is Mosaic else int)
        monkeypatch.setitem(sys.modules, "streaming", library)
        for given in (data, DataLoader(data), lambda data=data: data):
            refused(f"{name} shares rows out by itself", open_source, given)
