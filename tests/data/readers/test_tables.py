"""data/readers/tables.py: pandas, Arrow and Hugging Face, read as they are."""

import numpy as np
import pyarrow as pa
import pytest
import torch

from manyhands.data.feed import Feed
from manyhands.data.open_source import open_source
from manyhands.data.readers.tables import arrow_columns, frame_columns
from manyhands.data.source import Reading
from refusals import refused


def first(data, **options):
    return next(Feed(open_source(data, **options), batch_size=3, shuffle=False).epoch(0)).batch


def test_a_data_frame_is_a_dict_of_columns_without_its_index():
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"x": [1.5, 2.5, 3.5, 4.5], "label": [0, 1, 0, 1], "name": list("abcd")}, index=[9, 8, 7, 6])
    batch = first(frame)
    assert batch["x"].tolist() == [1.5, 2.5, 3.5]
    assert (batch["x"].dtype, batch["label"].dtype) == (torch.float64, torch.int64)
    assert list(batch["name"]) == ["a", "b", "c"]
    assert first(frame["label"]).tolist() == [0, 1, 0]
    refused("'x' .* has missing values", frame_columns, pd.DataFrame({"x": pd.array([1, None], dtype="Int64")}))


def test_arrow_lists_of_one_length_become_dimensions():
    nested = [[[1, 2], [3, 4], [5, 6]], [[7, 8], [9, 10], [11, 12]]]
    fixed = pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2))
    table = pa.table({"x": nested, "fixed": fixed, "text": ["a", "b"]})
    columns = arrow_columns(table, "t")
    np.testing.assert_array_equal(columns["x"], np.array(nested))
    assert columns["fixed"].dtype == np.float32
    assert columns["fixed"].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert columns["text"].tolist() == ["a", "b"]
    assert first(table)["x"].shape == (2, 3, 2)
    pairs = pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int64(), 2))
    columns = arrow_columns(pa.table({"x": pairs, "y": [[1], [2], [3]]}).slice(1), "t")  # from where a slice begins
    assert columns["x"].tolist() == [[3, 4], [5, 6]]
    assert columns["y"].tolist() == [[2], [3]]


def test_arrow_columns_that_are_no_arrays_are_named():
    for column, words in [
        ([1, None], "missing values .1."),
        ([[1], [2, 3]], "lists of 1 to 2 values"),
        ([[1, None], [2, 3]], "missing values .1."),
        ([], "has no rows"),
    ]:
        refused(words, lambda column: arrow_columns(pa.table({"x": column}), "t"), column)


@pytest.fixture
def datasets():
    return pytest.importorskip("datasets")


@pytest.fixture
def spoken(datasets):
    rows = range(7)
    text = [f"row {i}" for i in rows]
    return datasets.Dataset.from_dict({"x": [[i, i + 1] for i in rows], "y": [i / 2 for i in rows], "text": text})


def test_a_hugging_face_dataset_gives_tensors_by_column(datasets, spoken):
    batch = first(spoken)
    assert torch.equal(batch["x"], torch.tensor([[0, 1], [1, 2], [2, 3]]))
    assert batch["y"].dtype == torch.float32
    assert batch["text"] == ["row 0", "row 1", "row 2"]
    assert spoken.format["type"] is None
    batch = first(spoken.with_format("numpy", columns=["y"]))  # a format that was set is kept
    assert set(batch) == {"y"}
    assert isinstance(batch["y"], np.ndarray)
    assert first(spoken, collate=lambda rows: [row["text"] for row in rows]) == ["row 0", "row 1", "row 2"]
    refused("rows of column x differ in length", first, datasets.Dataset.from_dict({"x": [[1], [2, 3], [4]]}))
    refused(r"splits \(train, test\)", open_source, datasets.DatasetDict(train=spoken, test=spoken))


def test_a_transform_runs_in_the_callers_thread(spoken):
    transformed = open_source(spoken.with_transform(lambda batch: {"n": torch.tensor(batch["y"]) * 2}))
    assert open_source(spoken).in_background(Reading())
    assert not transformed.in_background(Reading())
    assert next(Feed(transformed, batch_size=3, shuffle=False).epoch(0)).batch["n"].tolist() == [0.0, 1.0, 2.0]


def values(data, size, batch_size, epoch=0):
    """Of column y, all that so many workers read, one after the other."""
    parts = [
        part
        for rank in range(size)
        for part in Feed(open_source(data), rank=rank, size=size, batch_size=batch_size).epoch(epoch)
    ]
    return [y for part in parts if part.batch is not None for y in part.batch["y"].tolist()]


def test_every_row_once_on_several_workers_by_number_and_by_shards(spoken):
    """CASE 18."""
    rows = [i / 2 for i in range(7)]
    assert sorted(values(spoken, 3, 4)) == rows
    stream = spoken.to_iterable_dataset(num_shards=2)
    assert sorted(values(stream, 2, 4)) == rows
    assert values(stream, 3, 7) == rows  # more workers than shards share the batches of one
    shuffled = spoken.to_iterable_dataset(num_shards=1).shuffle(seed=1, buffer_size=5)
    assert values(shuffled, 1, 7, epoch=0) != values(shuffled, 1, 7, epoch=1)
    assert values(shuffled, 2, 7, epoch=1) == values(shuffled, 1, 7, epoch=1)


def test_an_iterable_hugging_face_dataset_gives_tensors_as_the_map_style_one_does(datasets):
    """Its rows are Python's lists and numbers, which no collate function makes batches of."""
    rows = datasets.Dataset.from_dict({"x": [[i, i + 1] for i in range(8)], "y": list(range(8))})
    for size in (1, 2):
        reading = Reading(rank=size - 1, size=size, batch_size=4, shuffle=False)
        for stream in (rows.to_iterable_dataset(), rows.to_iterable_dataset().with_format("torch")):
            batch, plainly = (
                {name: (part.dtype, part.tolist()) for name, part in next(open_source(d).slices(reading)).batch.items()}
                for d in (stream, rows)
            )
            assert batch == plainly, size
