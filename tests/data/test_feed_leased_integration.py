"""Leased readings with loader processes: the same bits whoever loads a slice, and nothing left behind."""

import multiprocessing
import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from manyhands.data.feed import Feed
from manyhands.data.leases import Leases, Segment
from manyhands.data.open_source import open_source


class Drawing(Dataset[Any]):
    """Rows that draw from all three generators, and say whether a loader process loaded them."""

    def __len__(self) -> int:
        return 21

    def __getitem__(self, i: int) -> Any:
        return i, torch.rand(1).item(), np.random.rand(), random.random(), get_worker_info() is not None


def columns(batch: Any) -> torch.Tensor:
    return torch.stack([column.double() for column in batch[:4]])


def test_a_slice_draws_the_same_whether_it_was_read_ahead_or_taken_from_another() -> None:
    """CASE 19: the draws of a slice belong to (seed, epoch, tick, part)."""
    loader = DataLoader(Drawing(), batch_size=6, shuffle=True, num_workers=2)
    feeds = [Feed(open_source(loader), rank=rank, size=2, seed=3) for rank in range(2)]
    static = {(part.index, part.part): columns(part.batch) for feed in feeds for part in feed.epoch(0)}
    leases, segment, before = Leases(), Segment(epoch=0, first=0, until=4, parts=2), torch.get_rng_state()
    begun = feeds[1].leased(segment, lambda: leases.take(1, segment))  # type: ignore[arg-type,return-value]
    first = next(begun)
    got = {
        (first.index, first.part): first,
        **{(p.index, p.part): p for p in feeds[0].leased(segment, lambda: leases.take(0, segment))},
    }  # type: ignore[arg-type,return-value]
    assert list(begun) == []
    assert got.keys() == static.keys()
    assert all(torch.equal(columns(part.batch), static[key]) for key, part in got.items())
    assert {key: bool(part.batch[4].all()) for key, part in got.items()} == {  # own queues by processes, others' here
        key: key == (0, 1) or key[1] == 0 for key in static
    }
    assert torch.equal(torch.get_rng_state(), before)
    assert multiprocessing.active_children() == []
