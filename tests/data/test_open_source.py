"""data/open_source.py: everything a user may give becomes a source, and everything else an error."""

import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from manyhands.data.feed import Feed
from manyhands.data.open_source import Once, is_function, open_source
from manyhands.data.readers.arrays import Columns
from manyhands.data.readers.datasets import DatasetRows
from manyhands.data.readers.streams import Stream
from manyhands.data.source import Loading
from manyhands.errors import BadInput

X = torch.arange(5.0)


class Squares(Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, i):
        return {"x": torch.tensor(float(i)), "y": i * i}

    def __call__(self):
        raise AssertionError("a dataset that can be called is still a dataset")


class Endless(Dataset):
    def __getitem__(self, i):
        return i


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(3))

    def __call__(self):
        raise AssertionError("a stream that can be called is still a stream")


@dataclass
class Table:
    x: torch.Tensor

    def __call__(self):
        raise AssertionError("columns that can be called are still columns")


class Records(list):
    def __call__(self):
        raise AssertionError("rows that can be called are still rows")


class OldStyle:
    """Rows by __getitem__ alone: an iterable to Python."""

    def __getitem__(self, i):
        if i == 3:
            raise IndexError
        return i

    def __iter__(self):
        return (self[i] for i in range(3))


@pytest.mark.parametrize(
    ("data", "kind", "rows"),
    [
        (X, Columns, 5),
        ((X, X), Columns, 5),
        ({"x": X.numpy(), "y": [1, 2, 3, 4, 5]}, Columns, 5),
        (TensorDataset(X, X), Columns, 5),
        (Squares(), DatasetRows, 5),
        ([(X, 0), (X, 1)], DatasetRows, 2),
        (range(9), DatasetRows, 9),
        (OldStyle(), Stream, None),
        ((i for i in range(3)), Stream, None),
        (lambda: (X, X), Columns, 5),
        (lambda: iter([1]), Stream, None),
        (Squares, DatasetRows, 5),
        (Numbers(), Stream, None),
        (Table(X), Columns, 5),
        (Records([1, 2]), DatasetRows, 2),
    ],
)
def test_what_data_becomes(data, kind, rows):
    source = open_source(data)
    assert type(source) is kind
    assert source.rows == rows


@pytest.mark.parametrize(
    ("data", "processes", "loading"),
    [
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
    ],
)
def test_what_loads_its_rows_and_what_would_load_more(data, processes, loading):
    """What lies in memory starts no processes, and one alone reads a stream."""
    assert open_source(data, loader_processes=processes).loading == loading


@pytest.mark.parametrize("data", [X, (X, X), Squares(), Endless(), Numbers(), Table(X), Records([1]), OldStyle(), "x"])
def test_what_is_read_as_it_is_is_no_function(data):
    assert not is_function(data)


@pytest.mark.parametrize("data", [lambda: X, Squares, Table, Once(lambda: X)])
def test_what_open_source_calls_is_a_function(data):
    assert is_function(data)


def test_rows_of_a_dataset_are_collated_by_torch():
    batch = next(Feed(open_source(Squares()), batch_size=3, shuffle=False).epoch(0)).batch
    assert batch["x"].tolist() == [0.0, 1.0, 2.0]
    assert batch["y"].tolist() == [0, 1, 4]


def test_a_list_is_rows_and_a_tuple_is_columns():
    assert open_source([X, X]).rows == 2
    assert open_source((X, X)).rows == 5


@pytest.mark.parametrize("data", [None, 3, 2.5, {1, 2}, b"abc", object(), lambda: 3])
def test_anything_else_is_refused_with_what_is_accepted(data):
    with pytest.raises(BadInput, match="expected tensors or arrays .*; a Dataset; .*docs/data"):
        open_source(data)


def test_empty_data_and_unequal_lengths_are_refused():
    for data in ([], {}, (), (X[:0],), list):
        with pytest.raises(BadInput, match=r"has no (rows|columns)"):
            open_source(data)
    with pytest.raises(BadInput, match="equally long"):
        open_source((X, X[:4]))


def test_a_dataset_without_a_length_is_refused():
    with pytest.raises(BadInput, match="Endless has no __len__"):
        open_source(Endless())


def test_a_function_that_returns_a_function_is_refused():
    with pytest.raises(BadInput, match="the data function returned"):
        open_source(lambda: open_source)


def test_data_that_a_function_gives_is_read_once_for_all_workers_of_a_process():
    calls = []

    def make():
        calls.append(1)
        return torch.arange(6.0)

    once = Once(make)
    assert once() is once()
    assert len(calls) == 1


def test_what_can_be_read_through_only_once_is_made_for_each_worker():
    once = Once(lambda: iter([1.0, 2.0]))
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


@pytest.mark.parametrize(
    ("data", "name"),
    [(Mosaic(), "StreamingDataset"), (Split(), "split_dataset_by_node"), (Pipeline(), "split_by_node")],
)
def test_a_dataset_that_picks_rows_by_rank_is_refused(monkeypatch, data, name):
    monkeypatch.setitem(
        sys.modules, "streaming", SimpleNamespace(StreamingDataset=Mosaic if type(data) is Mosaic else int)
    )
    for given in (data, DataLoader(data), lambda: data):
        with pytest.raises(BadInput, match=f"{name} shares rows out by itself"):
            open_source(given)
