"""Rows that processes load: the same bits however many, those of the loader's own kind, and nothing left behind."""

import multiprocessing
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from manyhands.data.feed import Feed
from manyhands.data.leases import Leases, Segment
from manyhands.data.open_source import open_source
from manyhands.data.readers.datasets import DatasetRows
from manyhands.data.readers.loaders import open_loader


@pytest.fixture(autouse=True)
def all_end():
    yield
    assert multiprocessing.active_children() == []


class Drawing(Dataset):
    """Rows that draw from all three generators, say which process loaded them, and fail where told."""

    opened = 0

    def __init__(self, fail_at=None):
        self.fail_at = fail_at

    def __len__(self):
        return 21

    def __getitem__(self, i):
        if i == self.fail_at:
            raise KeyError(f"row {i} is broken")
        info = get_worker_info()
        return i, torch.rand(1).item(), np.random.rand(), random.random(), -1 if info is None else info.id, self.opened


def columns(part):
    return None if part.batch is None else torch.stack([column.double() for column in part.batch[:4]])


def same(a, b):
    return all((x is None and y is None) or torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.slow
def test_what_rows_draw_depends_on_no_process_count_and_resumes_exactly():
    """CASE 19: the draws of a slice belong to (seed, epoch, tick, rank)."""

    def read(processes, seed=3, first_tick=0):
        feed = Feed(DatasetRows(Drawing(), processes=processes), batch_size=5, seed=seed)
        return [columns(part) for part in feed.epoch(0, first_tick)]

    before = torch.get_rng_state()
    one = read(1)
    assert same(one, read(2))
    assert same(one[2:], read(2, first_tick=2))
    assert not same(one, read(1, seed=4))
    assert len(set(torch.cat([batch[1] for batch in one]).tolist())) == 21  # no two slices draw the same
    assert torch.equal(torch.get_rng_state(), before)  # who asks draws nothing


@pytest.mark.slow
def test_a_slice_draws_the_same_whether_it_was_read_ahead_or_taken_from_another():
    """CASE 19: the draws of a slice belong to (seed, epoch, tick, part)."""
    loader = DataLoader(Drawing(), batch_size=6, shuffle=True, num_workers=2)
    feeds = [Feed(open_source(loader), rank=rank, size=2, seed=3) for rank in range(2)]
    static = {(part.index, part.part): columns(part) for feed in feeds for part in feed.epoch(0)}
    leases, segment = Leases(), Segment(epoch=0, first=0, until=4, parts=2)
    begun = feeds[1].leased(segment, lambda: leases.take(1, segment))
    got = [next(begun), *feeds[0].leased(segment, lambda: leases.take(0, segment))]
    assert list(begun) == []
    assert {(part.index, part.part) for part in got} == static.keys()
    for part in got:
        key = part.index, part.part
        assert torch.equal(columns(part), static[key])
        # own queues are loaded by processes, others' here
        assert bool((part.batch[4] >= 0).all()) == (key == (0, 1) or key[1] == 0), key


def test_ranks_without_rows_get_empty_slices():
    """CASE 18: a last batch of one row on four workers."""
    parts = {r: list(Feed(DatasetRows(Drawing(), processes=1), rank=r, size=4, batch_size=5).epoch(0)) for r in (0, 3)}
    assert [[part.rows for part in own] for own in parts.values()] == [[1, 1, 1, 1, 0], [2, 2, 2, 2, 1]]
    assert parts[0][-1].batch is None
    assert all(len(part.batch[0]) == part.rows for part in parts[3])


def test_an_error_in_a_process_comes_out_with_its_own_traceback():
    with pytest.raises(KeyError, match="row 7 is broken"):
        list(Feed(DatasetRows(Drawing(fail_at=7), processes=1), batch_size=5, shuffle=False).epoch(0))


def open_file(worker):
    get_worker_info().dataset.opened = 1 + worker


def test_a_loaders_processes_and_their_init_function_are_kept():
    loader = DataLoader(Drawing(), batch_size=4, num_workers=2, worker_init_fn=open_file, prefetch_factor=1)
    parts = list(Feed(open_loader(loader), rank=1, size=2).epoch(0))
    rows, workers, opened = (torch.cat([part.batch[column] for part in parts]) for column in (0, 4, 5))
    assert rows.tolist() == [2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 20]
    assert workers.tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1]
    assert opened.tolist() == [1 + worker for worker in workers.tolist()]


def test_processes_of_the_task_serve_a_loader_without_any_and_end_when_closed():
    parts = Feed(open_loader(DataLoader(Drawing(), batch_size=4), processes=2)).epoch(0)
    assert next(parts).batch[4].tolist() == [0, 0, 0, 0]
    assert len(multiprocessing.active_children()) == 2
    parts.close()


class Shuffled(IterableDataset):
    """Of a stream, one process reads ahead: the rows tell how many there are, and which one it is."""

    def __iter__(self):
        info = get_worker_info()
        more = [] if info is None else [100 * info.num_workers, 100 + info.id]
        yield from [*torch.randperm(14).tolist(), *more]


def test_of_a_stream_one_process_alone_reads_ahead_the_same_rows():
    def read(processes):
        feed = Feed(open_source(Shuffled(), loader_processes=processes), rank=1, size=2, batch_size=14)
        return [(part.rows, part.global_rows, part.index, part.batch.tolist()) for part in feed.epoch(2)]

    here, there = read(0), read(3)
    assert there[:1] == here
    whole = list(Feed(open_source(Shuffled(), loader_processes=3), batch_size=14).epoch(2))
    assert whole[-1].batch.tolist() == [100, 100]


class Identity(IterableDataset):
    def __iter__(self):
        return iter([get_worker_info().id] * 6)


def test_the_processes_of_a_streams_loader_are_kept_and_end_when_closed():
    parts = Feed(open_loader(DataLoader(Identity(), batch_size=2, num_workers=2))).epoch(0)
    assert [next(parts).batch.tolist() for _ in range(3)] == [[0, 0], [1, 1], [0, 0]]
    parts.close()
