"""Full vectors and their shards."""

import torch

from manyhands.server.base import ServerSpec
from manyhands.server.shard_ranges import cut, joined, make_stores, parts_of, shards_of
from refusals import refused


def test_parts_are_contiguous_views_of_all():
    vector = torch.arange(7.0)
    parts = parts_of(vector, 3)
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3], [4, 5, 6]]
    parts[1].zero_()
    assert vector.tolist() == [0, 1, 0, 0, 4, 5, 6]
    assert [len(part) for part in parts_of(vector[:2], 3)] == [0, 1, 1]


def test_what_was_joined_is_cut_again():
    captured = [({"center": torch.ones(2), "sum": torch.zeros(2)}, {"version": v, "scalars": {}}) for v in (4, 5, 4)]
    snapshot = joined(captured)
    assert snapshot.numbers == {"version": 5, "scalars": {}}, "the newest version, where a worker died in between"
    assert {name: len(vector) for name, vector in snapshot.vectors.items()} == {"center": 6, "sum": 6}
    assert [len(vectors["sum"]) for vectors, _ in cut(snapshot, 4)] == [1, 2, 1, 2]
    captured[0][0]["center"].zero_()
    assert bool(snapshot.vectors["center"].all()), "a snapshot shares the store's memory"


def test_stores_of_a_spec():
    stores = make_stores(ServerSpec(rule="add", bound=3), 2, 4)
    assert [(store.workers, store.bound) for store in stores] == [(2, 3)] * 4
    assert len({id(store.rule) for store in stores}) == 4
    assert len(make_stores(ServerSpec(rule="quorum", one_shard=True), 2, 4)) == 1
    for workers, shards in ((0, 1), (1, 0)):
        refused("at least one", make_stores, ServerSpec(rule="add"), workers, shards)
    assert shards_of(ServerSpec(rule="add"), 2) == 2
