"""data/readers/streams.py with a loader process."""

import multiprocessing

import torch
from torch.utils.data import IterableDataset, get_worker_info

from manyhands.data.feed import Feed
from manyhands.data.open_source import open_source


class Shuffled(IterableDataset):
    def __iter__(self):
        yield from torch.randperm(14).tolist()


class Inside(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        return iter([info.num_workers, info.id] * 100)


def test_one_process_reads_ahead_the_same_rows():
    def read(processes, rank):
        feed = Feed(open_source(Shuffled(), loader_processes=processes), rank=rank, size=3, batch_size=4)
        return [
            (part.rows, part.global_rows, part.index, None if part.batch is None else part.batch.tolist())
            for part in feed.epoch(2)
        ]

    for rank in (0, 2):
        assert read(1, rank) == read(0, rank)
    assert multiprocessing.active_children() == []


def test_more_processes_are_not_started_and_closing_ends_the_one():
    parts = Feed(open_source(Inside(), loader_processes=3), batch_size=2).epoch(0)
    assert next(parts).batch.tolist() == [1, 0]
    parts.close()
    assert multiprocessing.active_children() == []
