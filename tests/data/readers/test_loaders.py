"""data/readers/loaders.py and datasets.py: DataLoaders keep their sampler, collate function and batches, on any number of workers."""

import random
import threading

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from manyhands.data.feed import Feed
from manyhands.data.readers.datasets import DatasetRows
from manyhands.data.readers.loaders import open_loader
from manyhands.data.sharding import epoch_order
from refusals import refused

DATA = TensorDataset(torch.arange(23), torch.arange(23) * 10)


def indices(loader, epoch=0, size=1, **options):
    """[rank][tick] -> row numbers."""
    feeds = [Feed(open_loader(loader), rank=rank, size=size, **options) for rank in range(size)]
    return [[[] if part.batch is None else part.batch[0].tolist() for part in feed.epoch(epoch)] for feed in feeds]


def joined(ranks):
    return [[row for part in parts for row in part] for parts in zip(*ranks, strict=True)]


def test_workers_share_the_batches_of_one():
    source = open_loader(DataLoader(DATA, batch_size=6))
    feed = Feed(source)  # its batch size is the global one
    assert (source.batch_size, source.rows, feed.batch_size, feed.ticks, feed.rows) == (6, 23, 6, 4, 23)
    for shuffle in (False, True):
        loader = DataLoader(DATA, batch_size=6, shuffle=shuffle)
        [alone] = indices(loader)
        assert sorted(sum(alone, [])) == list(range(23))
        assert (sum(alone, []) == list(range(23))) is not shuffle
        for size in (2, 3, 5):
            assert joined(indices(loader, size=size)) == alone, (shuffle, size)
    rows = [part.batch[0].tolist() for part in Feed(DatasetRows(DATA), batch_size=6, shuffle=False).epoch(0)]
    assert rows == indices(DataLoader(DATA, batch_size=6))[0]


def test_orders_differ_by_epoch_and_seed_and_disturb_no_generator():
    def states():
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()

    loader, before = DataLoader(DATA, batch_size=6, shuffle=True), states()
    orders = [indices(loader, epoch, seed=seed) for epoch in range(2) for seed in range(2)]
    assert len({str(order) for order in orders}) == 4
    assert indices(loader, 1, seed=1) == orders[3]
    assert states() == before
    generators = [torch.Generator().manual_seed(i) for i in range(2)]  # of the loader's own: is left alone
    kept = generators[0].get_state()
    first, second = (indices(DataLoader(DATA, batch_size=6, shuffle=True, generator=one)) for one in generators)
    assert first == second
    assert torch.equal(generators[0].get_state(), kept)


class Doubled(DataLoader):
    def __iter__(self):
        return ({"x": 2 * batch[0]} for batch in super().__iter__())


def test_a_loader_with_an_iter_of_its_own_is_iterated():
    expected = [[2 * row for row in range(start, min(start + 6, 23))] for start in (0, 6, 12, 18)]
    for size in (1, 2):
        feeds = [Feed(open_loader(Doubled(DATA, batch_size=6)), rank=rank, size=size) for rank in range(size)]
        ticks = zip(*(feed.epoch(0) for feed in feeds), strict=True)
        assert [[row for part in tick for row in part.batch["x"].tolist()] for tick in ticks] == expected, size


def test_drop_last_and_weighted_samplers_are_kept():
    dropped = DataLoader(DATA, batch_size=6, drop_last=True)
    assert Feed(open_loader(dropped)).rows == 18
    assert joined(indices(dropped, size=2)) == [list(range(i, i + 6)) for i in (0, 6, 12)]
    sampler = WeightedRandomSampler([1.0] + [0.0] * 22, 12)
    assert sum(indices(DataLoader(DATA, batch_size=6, sampler=sampler))[0], []) == [0] * 12


class Growing:
    """Batches of 1, 2, 3, 4 rows, told the epoch."""

    epochs = ()

    def __init__(self, length=4):
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter([[9], [1, 2], [3, 4, 5], [6, 7, 8, 0]])

    def set_epoch(self, epoch):
        self.epochs += (epoch,)


def test_a_batch_sampler_of_the_users_own_keeps_its_batches():
    """CASE 18: the first batch has fewer rows than there are workers."""
    sampler = Growing()
    ranks = indices(DataLoader(DATA, batch_sampler=sampler), epoch=3, size=3)
    assert joined(ranks) == list(sampler)
    assert ranks[0][0] == []
    assert sampler.epochs == (3, 3, 3)


def test_collate_and_transforms_of_the_loader_are_used_and_its_bits_are_those_of_a_gather():
    part = next(Feed(open_loader(DataLoader(DATA, batch_size=4, collate_fn=lambda rows: len(rows)))).epoch(0))
    assert part.batch == 4
    data = TensorDataset(torch.randn(23, 3, dtype=torch.float64), torch.arange(23))
    ours = [part.batch for part in Feed(open_loader(DataLoader(data, batch_size=6))).epoch(0)]
    for own, plain in zip(ours, DataLoader(data, batch_size=6), strict=True):
        assert type(own) is type(plain)
        assert all(torch.equal(a, b) for a, b in zip(own, plain, strict=True))


def test_resume_skips_without_loading():
    loaded = []
    loader = DataLoader(range(20), batch_size=5, collate_fn=lambda rows: loaded.extend(rows) or rows)
    parts = list(Feed(open_loader(loader)).epoch(0, first_tick=3))
    assert [part.index for part in parts] == [3]
    assert loaded == [15, 16, 17, 18, 19]


def test_another_batch_size_recuts_a_plain_loader_and_conflicts_with_any_other():
    own = DataLoader(DATA, batch_sampler=type("Own", (BatchSampler,), {})(SequentialSampler(DATA), 6, False))
    for loader, options, lengths in [
        (DataLoader(DATA, batch_size=6), {"batch_size": 10}, [10, 10, 3]),
        (DataLoader(DATA, batch_size=6, drop_last=True), {"batch_size": 10}, [10, 10]),
        (own, {}, [6, 6, 6, 5]),
    ]:
        assert [len(batch) for batch in indices(loader, **options)[0]] == lengths
    refused("batch_size=10 was given", lambda: Feed(open_loader(own), batch_size=10))


def test_what_cannot_be_is_refused():
    distributed = DistributedSampler(DATA, num_replicas=2, rank=0)
    wrong = DataLoader(DATA, batch_sampler=Growing(3))
    for make, words in [
        (lambda: open_loader(DataLoader(DATA, sampler=distributed)), "DistributedSampler"),
        (lambda: open_loader(DataLoader(DATA), collate=list), "give collate_fn to the DataLoader"),
        (lambda: Feed(open_loader(DataLoader(DATA)), order=lambda epoch: [0]), "order was given with a DataLoader"),
        (lambda: open_loader(DataLoader(DATA, sampler=iter([1]), batch_size=2)), r"has no len\(\)"),
        (lambda: open_loader(DataLoader([], batch_size=2)), "has no rows"),
        (lambda: list(Feed(open_loader(wrong)).epoch(0)), "batch sampler is 3, and it gave more"),
    ]:
        refused(words, make)


class Counting(IterableDataset):
    def __iter__(self):
        return iter(torch.randperm(10).tolist())


def test_a_loader_over_a_stream_is_read_by_all_and_shared_by_slices():
    loader = DataLoader(Counting(), batch_size=4)
    before = torch.get_rng_state()
    ranks = [list(Feed(open_loader(loader), rank=rank, size=3).epoch(0)) for rank in range(3)]
    alone = [part.batch.tolist() for part in Feed(open_loader(loader)).epoch(0)]
    assert torch.equal(torch.get_rng_state(), before)
    assert [len(batch) for batch in alone] == [4, 4, 2]
    assert joined([[[] if p.batch is None else p.batch.tolist() for p in own] for own in ranks]) == alone
    assert [part.global_rows for part in ranks[0]] == [4, 4, 2]
    assert [part.batch.tolist() for part in Feed(open_loader(loader)).epoch(0, first_tick=2)] == alone[2:]
    refused("batch_size=5 was given", lambda: Feed(open_loader(loader), batch_size=5))
    loader = DataLoader([torch.arange(3), torch.arange(5)], batch_size=None)  # without automatic batches
    feed = Feed(open_loader(loader), rank=1, size=2)
    assert feed.ticks is None
    assert [part.batch.tolist() for part in feed.epoch(0)] == [[1, 2], [2, 3, 4]]


# -- datasets.py: rows of the user's own code, loaded in the caller's thread ---------------------------------------------


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
        rows = default_collate([dataset[int(j)] for j in order[i : i + 5]])
        expected.append((rows, torch.rand(1)))  # the model's dropout
    torch.manual_seed(0)
    parts = Feed(DatasetRows(dataset), batch_size=5, seed=5).epoch(1)
    for part, ((x, y), dropout) in zip(parts, expected, strict=True):
        assert torch.equal(part.batch[0], x)
        assert torch.equal(part.batch[1], y)
        assert torch.equal(torch.rand(1), dropout)
    assert dataset.threads == {threading.current_thread().name}


def test_what_a_dataset_offers_is_used():
    dataset = Noisy()
    feed = Feed(DatasetRows(dataset), batch_size=23)
    for epoch in (0, 4):
        list(feed.epoch(epoch))
    assert dataset.epochs == [0, 4]
    part = next(Feed(DatasetRows(Batched()), batch_size=3, shuffle=False).epoch(0))
    assert part.batch[1].tolist() == [0, -1, -2]
    part = next(Feed(DatasetRows([10, 20, 30], collate=sum), batch_size=2, shuffle=False).epoch(0))
    assert part.batch == 30
    refused("has no rows", DatasetRows, [])
