"""data/readers/datasets.py with loader processes: bits, resume, and what is left behind."""

import multiprocessing
import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from manyhands.data.feed import Feed
from manyhands.data.readers.datasets import DatasetRows


class Drawing(Dataset):
    """Rows that draw from all three generators, and fail where told."""

    scale = 2.0

    def __init__(self, fail_at=None):
        self.fail_at = fail_at

    def __len__(self):
        return 21

    def __getitem__(self, i):
        if i == self.fail_at:
            raise KeyError(f"row {i} is broken")
        assert get_worker_info().dataset.scale == 2.0
        return i, torch.rand(1).item(), np.random.rand(), random.random()


def table(feed, epoch=0, first_tick=0):
    return [
        None if part.batch is None else torch.stack([c.double() for c in part.batch])
        for part in feed.epoch(epoch, first_tick)
    ]


def same(a, b):
    return all((x is None and y is None) or torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_what_rows_draw_depends_on_no_process_count_and_resumes_exactly():
    """CASE 19: the draws of a slice belong to (seed, epoch, tick, rank)."""
    one = table(Feed(DatasetRows(Drawing(), processes=1), batch_size=5, seed=3))
    assert same(one, table(Feed(DatasetRows(Drawing(), processes=2), batch_size=5, seed=3)))
    assert same(one[2:], table(Feed(DatasetRows(Drawing(), processes=2), batch_size=5, seed=3), first_tick=2))
    assert not same(one, table(Feed(DatasetRows(Drawing(), processes=1), batch_size=5, seed=4)))
    draws = torch.cat([batch[1] for batch in one])
    assert len(set(draws.tolist())) == 21  # no two slices draw the same
    assert multiprocessing.active_children() == []


def test_the_process_that_asks_draws_nothing():
    before = torch.get_rng_state()
    table(Feed(DatasetRows(Drawing(), processes=1), batch_size=10))
    assert torch.equal(torch.get_rng_state(), before)


def test_ranks_without_rows_get_empty_slices():
    """CASE 18: a last batch of one row on four workers."""
    feeds = [Feed(DatasetRows(Drawing(), processes=1), rank=rank, size=4, batch_size=5) for rank in range(4)]
    parts = [list(feed.epoch(0)) for feed in feeds]
    assert [[part.rows for part in own] for own in parts] == [
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 0],
        [2, 2, 2, 2, 1],
    ]
    rows = [i for own in parts for part in own if part.batch is not None for i in part.batch[0].tolist()]
    assert sorted(rows) == list(range(21))


def test_closing_early_ends_the_processes_at_once():
    parts = Feed(DatasetRows(Drawing(), processes=2), batch_size=2).epoch(0)
    next(parts)
    assert len(multiprocessing.active_children()) == 2
    parts.close()
    assert multiprocessing.active_children() == []


def test_an_error_in_a_process_comes_out_with_its_own_traceback():
    with pytest.raises(KeyError, match="row 7 is broken"):
        table(Feed(DatasetRows(Drawing(fail_at=7), processes=1), batch_size=5, shuffle=False))
    assert multiprocessing.active_children() == []
