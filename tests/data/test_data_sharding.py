"""data/sharding.py: every index is handed out exactly once, whatever the numbers."""

import random
import weakref

import numpy as np

from manyhands.data.sharding import FixedPartition, epoch_order, shared, slice_of, ticks
from refusals import refused


def test_an_epoch_order_is_numpys_permutation_of_seed_and_epoch():
    np.testing.assert_array_equal(epoch_order(100, 3, 7), np.random.default_rng((3, 7)).permutation(100))
    orders = [epoch_order(50, seed, epoch) for seed in (0, 1, 2**63) for epoch in range(3)]
    assert len(set(map(tuple, orders))) == 9
    for order in [*orders, epoch_order(0, 0, 0), epoch_order(1, 0, 0)]:
        assert order.dtype == np.int64
        assert sorted(order.tolist()) == list(range(len(order)))
    for given in ((-1, 0, 0), (1, -1, 0), (1, 0, -1)):
        refused("0 or more", epoch_order, *given)


def test_a_fixed_partition_gives_each_part_its_own_neighbours_in_every_epoch():
    draw = random.Random(0)
    for _ in range(60):
        rows, batch_size, parts = draw.choice((0, 1, 7, 60, 200)), draw.randint(1, 70), draw.randint(1, 9)
        shuffle, case = draw.random() < 0.5, f"{rows=} {batch_size=} {parts=}"
        order = FixedPartition(rows=rows, batch_size=batch_size, parts=parts, seed=3, shuffle=shuffle)
        of_epochs = []
        for epoch in range(2):
            whole, owned = order(epoch), [[] for _ in range(parts)]
            for first in range(0, rows, batch_size):
                batch = whole[first : first + batch_size]
                for part in range(parts):
                    owned[part] += batch[slice(*slice_of(len(batch), part, parts))].tolist()
            assert [row for own in owned for row in sorted(own)] == list(range(rows)), case
            assert shuffle or all(own == sorted(own) for own in owned), case
            lengths = [len(own) for own in owned]
            assert max(lengths) - min(lengths) <= ticks(rows, batch_size), case
            of_epochs.append([sorted(own) for own in owned])
        assert of_epochs[0] == of_epochs[1], case


def test_within_its_part_an_order_is_drawn_by_seed_epoch_and_part():
    def order(seed=0, epoch=0):
        return FixedPartition(rows=60, batch_size=20, parts=2, seed=seed)(epoch)

    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4
    assert order()[:10].argsort().tolist() != order()[10:20].argsort().tolist()


def test_workers_of_one_process_share_an_order_only_while_one_holds_it():
    order = shared(epoch_order, 11, 3, 0)
    assert shared(epoch_order, 11, 3, 0) is order
    assert shared(epoch_order, 11, 3, 1) is not order
    assert shared(lambda *arguments: epoch_order(*arguments), 11, 3, 0) is not order
    assert order.tolist() == epoch_order(11, 3, 0).tolist()
    gone = weakref.ref(order)
    del order
    assert gone() is None
