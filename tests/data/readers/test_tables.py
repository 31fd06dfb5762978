"""data/readers/tables.py: pandas, Arrow and Hugging Face, read as they are."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from manyhands.data.feed import Feed
from manyhands.data.open_source import open_source
from manyhands.data.readers.tables import arrow_columns, frame_columns
from manyhands.data.source import Reading
from manyhands.errors import BadInput

datasets = pytest.importorskip("datasets")


def first(data, **options):
    return next(Feed(open_source(data, **options), batch_size=3, shuffle=False).epoch(0)).batch


def test_a_data_frame_is_a_dict_of_columns_without_its_index():
    frame = pd.DataFrame({"x": [1.5, 2.5, 3.5, 4.5], "label": [0, 1, 0, 1], "name": list("abcd")}, index=[9, 8, 7, 6])
    batch = first(frame)
    assert batch["x"].tolist() == [1.5, 2.5, 3.5]
    assert batch["x"].dtype == torch.float64
    assert batch["label"].dtype == torch.int64
    assert list(batch["name"]) == ["a", "b", "c"]
    assert first(frame["label"]).tolist() == [0, 1, 0]


def test_a_nullable_column_with_gaps_is_named():
    with pytest.raises(BadInput, match="'x' .* has missing values"):
        frame_columns(pd.DataFrame({"x": pd.array([1, None], dtype="Int64")}))


def test_arrow_lists_of_one_length_become_dimensions():
    nested = [[[1, 2], [3, 4], [5, 6]], [[7, 8], [9, 10], [11, 12]]]
    table = pa.table(
        {"x": nested, "fixed": pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2)), "text": ["a", "b"]}
    )
    columns = arrow_columns(table, "t")
    np.testing.assert_array_equal(columns["x"], np.array(nested))
    assert columns["fixed"].dtype == np.float32
    assert columns["fixed"].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert columns["text"].tolist() == ["a", "b"]
    assert first(table)["x"].shape == (2, 3, 2)


def test_arrow_slices_are_read_from_where_they_begin():
    table = pa.table({"x": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int64(), 2)), "y": [[1], [2], [3]]}).slice(1)
    columns = arrow_columns(table, "t")
    assert columns["x"].tolist() == [[3, 4], [5, 6]]
    assert columns["y"].tolist() == [[2], [3]]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ([1, None], "missing values .1."),
        ([[1], [2, 3]], "lists of 1 to 2 values"),
        ([[1, None], [2, 3]], "missing values .1."),
        ([], "has no rows"),
    ],
)
def test_arrow_columns_that_are_no_arrays_are_named(column, message):
    with pytest.raises(BadInput, match=message):
        arrow_columns(pa.table({"x": column}), "t")


@pytest.fixture
def spoken():
    return datasets.Dataset.from_dict(
        {"x": [[i, i + 1] for i in range(7)], "y": [i / 2 for i in range(7)], "text": [f"row {i}" for i in range(7)]}
    )


def test_a_hugging_face_dataset_gives_tensors_by_column(spoken):
    batch = first(spoken)
    assert torch.equal(batch["x"], torch.tensor([[0, 1], [1, 2], [2, 3]]))
    assert batch["y"].dtype == torch.float32
    assert batch["text"] == ["row 0", "row 1", "row 2"]
    assert spoken.format["type"] is None


def test_a_format_that_was_set_is_kept(spoken):
    batch = first(spoken.with_format("numpy", columns=["y"]))
    assert set(batch) == {"y"}
    assert isinstance(batch["y"], np.ndarray)


def test_a_transform_runs_in_the_callers_thread(spoken):
    plain, transformed = (
        open_source(spoken),
        open_source(spoken.with_transform(lambda batch: {"n": torch.tensor(batch["y"]) * 2})),
    )
    assert plain.in_background(Reading())
    assert not transformed.in_background(Reading())
    assert next(Feed(transformed, batch_size=3, shuffle=False).epoch(0)).batch["n"].tolist() == [0.0, 1.0, 2.0]


def test_collate_gets_its_rows(spoken):
    assert first(spoken, collate=lambda rows: [row["text"] for row in rows]) == ["row 0", "row 1", "row 2"]


def test_every_row_once_on_three_workers(spoken):
    """CASE 18."""
    seen = []
    for rank in range(3):
        for part in Feed(open_source(spoken), rank=rank, size=3, batch_size=4).epoch(0):
            seen += [] if part.batch is None else part.batch["x"][:, 0].tolist()
    assert sorted(seen) == list(range(7))


def test_ragged_columns_and_splits_are_refused(spoken):
    with pytest.raises(BadInput, match="rows of column x differ in length"):
        first(datasets.Dataset.from_dict({"x": [[1], [2, 3], [4]]}))
    with pytest.raises(BadInput, match=r"splits \(train, test\)"):
        open_source(datasets.DatasetDict(train=spoken, test=spoken))


def test_a_hugging_face_stream_is_read_by_shards(spoken):
    stream = spoken.to_iterable_dataset(num_shards=2)
    ranks = [
        [part.batch["y"].tolist() for part in Feed(open_source(stream), rank=rank, size=2, batch_size=4).epoch(0)]
        for rank in range(2)
    ]
    assert sorted(sum(sum(ranks, []), [])) == [i / 2 for i in range(7)]
    shared = [
        [part.batch["y"].tolist() for part in Feed(open_source(stream), rank=rank, size=3, batch_size=7).epoch(0)]
        for rank in range(3)
    ]
    assert sum(sum(shared, []), []) == [i / 2 for i in range(7)]


def test_a_shuffled_hugging_face_stream_differs_by_epoch_and_agrees_on_all_ranks(spoken):
    def read(epoch, rank=0, size=1):
        stream = spoken.to_iterable_dataset(num_shards=1).shuffle(seed=1, buffer_size=5)
        return sum(
            [
                part.batch["y"].tolist()
                for part in Feed(open_source(stream), rank=rank, size=size, batch_size=7).epoch(epoch)
            ],
            [],
        )

    assert read(0) != read(1)
    assert read(1, 0, 2) + read(1, 1, 2) == read(1)


@pytest.mark.parametrize("size", [1, 2])
def test_an_iterable_hugging_face_dataset_gives_tensors_as_the_map_style_one_does(size: int) -> None:
    """Its rows are Python's lists and numbers, which no collate function makes batches of."""
    rows = datasets.Dataset.from_dict({"x": [[i, i + 1] for i in range(8)], "y": list(range(8))})
    reading = Reading(rank=size - 1, size=size, batch_size=4, shuffle=False)
    for stream in (rows.to_iterable_dataset(), rows.to_iterable_dataset().with_format("torch")):
        batch, plainly = (next(open_source(data).slices(reading)).batch for data in (stream, rows))
        assert {name: (part.dtype, part.tolist()) for name, part in batch.items()} == {
            name: (part.dtype, part.tolist()) for name, part in plainly.items()
        }
