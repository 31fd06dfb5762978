"""data/readers/datasets.py: rows of the user's own code, loaded in the caller's thread."""

import threading

import pytest
import torch
from torch.utils.data import Dataset, default_collate

from manyhands.data.feed import Feed
from manyhands.data.readers.datasets import DatasetRows
from manyhands.data.sharding import epoch_order
from manyhands.errors import BadInput


class Noisy(Dataset):
    """(row + noise from torch's global generator, row)."""

    def __init__(self, rows=23):
        self.rows, self.epochs, self.threads = rows, [], set()

    def __len__(self):
        return self.rows

    def __getitem__(self, i):
        assert type(i) is int
        self.threads.add(threading.current_thread().name)
        return i + torch.rand(2), i

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


class Batched(Noisy):
    """Gives many rows at once, as Hugging Face's do."""

    def __getitems__(self, indices):
        return [(torch.full((2,), float(i)), -i) for i in indices]


def test_rows_that_draw_are_bit_equal_to_a_plain_loop():
    """CASE 1: also where augmentation and dropout share the global generator."""
    dataset, order = Noisy(), epoch_order(23, 5, 1)
    torch.manual_seed(0)
    expected = []
    for i in range(0, 23, 5):
        expected.append(
            (default_collate([dataset[int(j)] for j in order[i : i + 5]]), torch.rand(1))
        )  # the model's dropout
    torch.manual_seed(0)
    parts = Feed(DatasetRows(dataset), batch_size=5, seed=5).epoch(1)
    for part, ((x, y), dropout) in zip(parts, expected, strict=True):
        assert torch.equal(part.batch[0], x)
        assert torch.equal(part.batch[1], y)
        assert torch.equal(torch.rand(1), dropout)


def test_rows_load_in_the_callers_thread():
    dataset = Noisy()
    list(Feed(DatasetRows(dataset), batch_size=4).epoch(0))
    assert dataset.threads == {threading.current_thread().name}


def test_a_dataset_that_wants_to_know_is_told_the_epoch():
    dataset = Noisy()
    feed = Feed(DatasetRows(dataset), batch_size=23)
    for epoch in (0, 4):
        list(feed.epoch(epoch))
    assert dataset.epochs == [0, 4]


def test_rows_are_asked_for_at_once_where_the_dataset_offers_it():
    part = next(Feed(DatasetRows(Batched()), batch_size=3, shuffle=False).epoch(0))
    assert part.batch[1].tolist() == [0, -1, -2]


def test_collate_replaces_the_default():
    part = next(Feed(DatasetRows([10, 20, 30], collate=sum), batch_size=2, shuffle=False).epoch(0))
    assert part.batch == 30


def test_no_rows_are_refused():
    with pytest.raises(BadInput, match="has no rows"):
        DatasetRows([])
