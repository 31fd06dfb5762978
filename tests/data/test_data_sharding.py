"""data/sharding.py: every index is handed out exactly once, whatever the numbers."""

import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.data.sharding import FixedPartition, epoch_order, shared, slice_of, ticks
from manyhands.errors import BadInput

COUNTS = st.integers(0, 200)


@given(rows=COUNTS, seed=st.integers(0, 2**63), epoch=st.integers(0, 1000))
def test_an_epoch_order_is_a_permutation(rows, seed, epoch):
    order = epoch_order(rows, seed, epoch)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(rows))


def test_an_epoch_order_is_numpys_generator_seeded_by_seed_and_epoch():
    np.testing.assert_array_equal(epoch_order(100, 3, 7), np.random.default_rng((3, 7)).permutation(100))


def test_orders_differ_by_seed_and_by_epoch():
    orders = {tuple(epoch_order(50, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


@pytest.mark.parametrize("arguments", [(-1, 0, 0), (1, -1, 0), (1, 0, -1)])
def test_negative_arguments_are_refused(arguments):
    with pytest.raises(BadInput, match="must be 0 or more"):
        epoch_order(*arguments)


@given(b=COUNTS, size=st.integers(1, 40))
def test_slices_cover_a_batch_once_and_evenly(b, size):
    slices = [slice_of(b, rank, size) for rank in range(size)]
    assert [i for start, stop in slices for i in range(start, stop)] == list(range(b))
    lengths = [stop - start for start, stop in slices]
    assert max(lengths) - min(lengths) <= 1


@given(rows=COUNTS, batch_size=st.integers(1, 70), size=st.integers(1, 9))
def test_every_index_is_handed_out_exactly_once(rows, batch_size, size):
    """CASE 18, CASE 27: shards of nothing, of one row, of fewer than a batch, on any number of workers."""
    order = epoch_order(rows, 0, 0)
    handed = []
    for tick in range(ticks(rows, batch_size)):
        batch = order[tick * batch_size : (tick + 1) * batch_size]
        assert len(batch)
        for rank in range(size):
            start, stop = slice_of(len(batch), rank, size)
            handed += batch[start:stop].tolist()
    assert handed == order.tolist()


@given(rows=COUNTS, batch_size=st.integers(1, 70), parts=st.integers(1, 9), shuffle=st.booleans())
def test_a_fixed_partition_gives_each_part_its_own_neighbours_in_every_epoch(rows, batch_size, parts, shuffle):
    order = FixedPartition(rows=rows, batch_size=batch_size, parts=parts, seed=3, shuffle=shuffle)
    of_epochs = []
    for epoch in range(2):
        whole, owned = order(epoch), [[] for _ in range(parts)]
        assert sorted(whole.tolist()) == list(range(rows))
        for first in range(0, rows, batch_size):
            batch = whole[first : first + batch_size]
            for part in range(parts):
                start, stop = slice_of(len(batch), part, parts)
                owned[part] += batch[start:stop].tolist()
        assert all(sorted(own) == list(range(min(own), min(own) + len(own))) for own in owned if own)
        assert [row for own in owned for row in sorted(own)] == list(range(rows))
        assert shuffle or all(own == sorted(own) for own in owned)
        lengths = [len(own) for own in owned]
        assert max(lengths) - min(lengths) <= ticks(rows, batch_size)
        of_epochs.append([sorted(own) for own in owned])
    assert of_epochs[0] == of_epochs[1]


def test_within_its_part_an_order_is_drawn_by_seed_epoch_and_part():
    orders = {
        tuple(FixedPartition(rows=60, batch_size=20, parts=2, seed=seed)(epoch)) for seed in (0, 1) for epoch in (0, 1)
    }
    assert len(orders) == 4
    order = FixedPartition(rows=60, batch_size=20, parts=2)(0)
    ranks = [order[:10].argsort().tolist(), order[10:20].argsort().tolist()]
    assert ranks[0] != ranks[1]


def test_workers_of_one_process_share_an_order_only_while_one_holds_it():
    order = shared(epoch_order, 11, 3, 0)
    assert shared(epoch_order, 11, 3, 0) is order
    assert shared(epoch_order, 11, 3, 1) is not order
    assert shared(lambda *arguments: epoch_order(*arguments), 11, 3, 0) is not order
    assert order.tolist() == epoch_order(11, 3, 0).tolist()
    gone = weakref.ref(order)
    del order
    assert gone() is None
