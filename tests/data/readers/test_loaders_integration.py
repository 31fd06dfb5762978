"""data/readers/loaders.py with the loader's own processes."""

import multiprocessing

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from manyhands.data.feed import Feed
from manyhands.data.readers.loaders import open_loader


class Where(Dataset):
    opened = 0

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return i, get_worker_info().id, self.opened


def open_file(worker):
    get_worker_info().dataset.opened = 1 + worker


class Stream(IterableDataset):
    def __iter__(self):
        return iter([get_worker_info().id] * 6)


def test_its_processes_and_their_init_function_are_kept():
    loader = DataLoader(Where(), batch_size=4, num_workers=2, worker_init_fn=open_file, prefetch_factor=1)
    parts = list(Feed(open_loader(loader), rank=1, size=2).epoch(0))
    rows, workers, opened = (torch.cat([part.batch[column] for part in parts]) for column in range(3))
    assert rows.tolist() == [2, 3, 6, 7, 10, 11]
    assert workers.tolist() == [0, 0, 1, 1, 0, 0]
    assert opened.tolist() == [1, 1, 2, 2, 1, 1]
    assert multiprocessing.active_children() == []


def test_processes_of_the_task_serve_a_loader_without_any():
    part = next(Feed(open_loader(DataLoader(Where(), batch_size=4), processes=1)).epoch(0))
    assert part.batch[1].tolist() == [0, 0, 0, 0]
    assert multiprocessing.active_children() == []


def test_a_streams_processes_are_kept_and_end_when_closed():
    parts = Feed(open_loader(DataLoader(Stream(), batch_size=2, num_workers=2))).epoch(0)
    assert [next(parts).batch.tolist() for _ in range(3)] == [[0, 0], [1, 1], [0, 0]]
    parts.close()
    assert multiprocessing.active_children() == []
