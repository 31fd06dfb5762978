"""data/readers/loaders.py: DataLoaders keep their sampler, collate function and batches, on any number of workers."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from manyhands.data.feed import Feed
from manyhands.data.readers.datasets import DatasetRows
from manyhands.data.readers.loaders import open_loader
from manyhands.errors import BadInput

DATA = TensorDataset(torch.arange(23), torch.arange(23) * 10)


def indices(loader, epoch=0, size=1, **options):
    """[rank][tick] -> row numbers."""
    feeds = [Feed(open_loader(loader), rank=rank, size=size, **options) for rank in range(size)]
    return [[[] if part.batch is None else part.batch[0].tolist() for part in feed.epoch(epoch)] for feed in feeds]


def joined(ranks):
    return [[row for part in parts for row in part] for parts in zip(*ranks, strict=True)]


def test_its_batch_size_is_the_global_one():
    source = open_loader(DataLoader(DATA, batch_size=6))
    feed = Feed(source)
    assert (source.batch_size, source.rows, feed.batch_size, feed.ticks, feed.rows) == (6, 23, 6, 4, 23)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_workers_share_the_batches_of_one(shuffle, size):
    loader = DataLoader(DATA, batch_size=6, shuffle=shuffle)
    [alone] = indices(loader)
    assert joined(indices(loader, size=size)) == alone
    assert sorted(sum(alone, [])) == list(range(23))
    assert (sum(alone, []) == list(range(23))) is not shuffle


def test_orders_differ_by_epoch_and_seed_and_disturb_no_generator():
    loader = DataLoader(DATA, batch_size=6, shuffle=True)
    torch_before, numpy_before, python_before = (
        torch.get_rng_state(),
        np.random.get_state()[1].copy(),
        random.getstate(),
    )
    orders = [indices(loader, epoch, seed=seed) for epoch in range(2) for seed in range(2)]
    assert len({str(order) for order in orders}) == 4
    assert indices(loader, 1, seed=1) == orders[3]
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert (np.random.get_state()[1] == numpy_before).all()
    assert random.getstate() == python_before


def test_a_generator_of_its_own_gives_all_workers_one_order_and_is_left_alone():
    loaders = [
        DataLoader(DATA, batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(i)) for i in range(2)
    ]
    before = loaders[0].generator.get_state()
    assert indices(loaders[0]) == indices(loaders[1])
    assert torch.equal(loaders[0].generator.get_state(), before)


class Doubled(DataLoader):
    def __iter__(self):
        return ({"x": 2 * batch[0]} for batch in super().__iter__())


@pytest.mark.parametrize("size", [1, 2])
def test_a_loader_with_an_iter_of_its_own_is_iterated(size):
    feeds = [Feed(open_loader(Doubled(DATA, batch_size=6)), rank=rank, size=size) for rank in range(size)]
    ticks = zip(*(feed.epoch(0) for feed in feeds), strict=True)
    expected = [[2 * row for row in range(start, min(start + 6, 23))] for start in (0, 6, 12, 18)]
    assert [[row for part in tick for row in part.batch["x"].tolist()] for tick in ticks] == expected


def test_drop_last_and_weighted_samplers_are_kept():
    dropped = DataLoader(DATA, batch_size=6, drop_last=True)
    assert Feed(open_loader(dropped)).rows == 18
    assert joined(indices(dropped, size=2)) == [list(range(i, i + 6)) for i in (0, 6, 12)]
    weights = [1.0] + [0.0] * 22
    assert set(sum(indices(DataLoader(DATA, batch_size=6, sampler=WeightedRandomSampler(weights, 12)))[0], [])) == {0}


class Growing:
    """Batches of 1, 2, 3, 4 rows, told the epoch."""

    epochs = ()

    def __len__(self):
        return 4

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


def test_a_batch_sampler_that_miscounts_is_refused():
    class Wrong(Growing):
        def __len__(self):
            return 3

    with pytest.raises(BadInput, match=r"batch sampler is 3, and it gave more"):
        list(Feed(open_loader(DataLoader(DATA, batch_sampler=Wrong()))).epoch(0))


def test_collate_and_transforms_of_the_loader_are_used():
    part = next(Feed(open_loader(DataLoader(DATA, batch_size=4, collate_fn=lambda rows: len(rows)))).epoch(0))
    assert part.batch == 4


def test_a_tensor_dataset_gathered_at_once_has_the_bits_of_its_loader():
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
    loader = DataLoader(DATA, batch_size=6)
    assert [len(batch) for batch in indices(loader, batch_size=10)[0]] == [10, 10, 3]
    assert [len(batch) for batch in indices(DataLoader(DATA, batch_size=6, drop_last=True), batch_size=10)[0]] == [
        10,
        10,
    ]

    class Own(BatchSampler):
        pass

    own = DataLoader(DATA, batch_sampler=Own(SequentialSampler(DATA), 6, False))
    assert [len(batch) for batch in indices(own)[0]] == [6, 6, 6, 5]
    with pytest.raises(BadInput, match="batch_size=10 was given"):
        Feed(open_loader(own), batch_size=10)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: open_loader(DataLoader(DATA, sampler=DistributedSampler(DATA, num_replicas=2, rank=0))),
            "DistributedSampler",
        ),
        (lambda: open_loader(DataLoader(DATA), collate=list), "give collate_fn to the DataLoader"),
        (lambda: Feed(open_loader(DataLoader(DATA)), order=lambda epoch: [0]), "order was given with a DataLoader"),
        (lambda: open_loader(DataLoader(DATA, sampler=iter([1]), batch_size=2)), r"has no len\(\)"),
        (lambda: open_loader(DataLoader([], batch_size=2)), "has no rows"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(BadInput, match=message):
        make()


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
    resumed = [part.batch.tolist() for part in Feed(open_loader(loader)).epoch(0, first_tick=2)]
    assert resumed == alone[2:]
    with pytest.raises(BadInput, match="batch_size=5 was given"):
        Feed(open_loader(loader), batch_size=5)


def test_a_loader_without_automatic_batches_gives_its_own():
    loader = DataLoader([torch.arange(3), torch.arange(5)], batch_size=None)
    feed = Feed(open_loader(loader), rank=1, size=2)
    assert feed.ticks is None
    assert [part.batch.tolist() for part in feed.epoch(0)] == [[1, 2], [2, 3, 4]]


def test_rows_and_loader_agree_where_nothing_is_shuffled():
    rows = [part.batch[0].tolist() for part in Feed(DatasetRows(DATA), batch_size=6, shuffle=False).epoch(0)]
    assert rows == indices(DataLoader(DATA, batch_size=6))[0]
