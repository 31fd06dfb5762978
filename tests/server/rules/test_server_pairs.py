"""Pairs: every worker's vector at the server, averaged two at a time."""

from __future__ import annotations

import random

import pytest
import torch

from manyhands.errors import BadInput
from manyhands.server.base import ServerSpec
from manyhands.server.pushes import Push
from manyhands.server.rules import make_rule
from manyhands.server.rules.pairs import PairsRule, partner_of
from manyhands.server.store import Store

F64 = torch.float64


def store_of(workers, start=(0.0,), bound=None, **options):
    store = Store(make_rule(ServerSpec(rule="pairs", options=options)), workers, bound)
    store.initialize(torch.tensor(start, dtype=F64))
    for worker in range(workers):
        store.activate(worker, 0)
    return store


def vectors(store):
    return [vector.tolist() for vector in store.rule.vectors().values()]


def push(store, worker, number, *update):
    return store.push(worker, number, torch.tensor(update, dtype=F64), 1.0, 0)


def test_two_workers_by_hand():
    """Both become their mean, then the one that pushes moves; an answer is that one's vector, and stays as it was said."""
    store = store_of(2)
    first = push(store, 0, 1, 4.0)
    assert (first.answer.tolist(), vectors(store), store.center.tolist()) == ([4.0], [[4.0], [0.0]], [2.0])
    second = push(store, 1, 1, 2.0)
    assert (second.answer.tolist(), vectors(store), store.center.tolist()) == ([4.0], [[2.0], [4.0]], [3.0])
    assert first.answer.tolist() == [4.0]
    third = push(store, 0, 2, 0.0)
    assert (third.answer.tolist(), vectors(store), store.center.tolist()) == ([3.0], [[3.0], [3.0]], [3.0])
    assert (first.staleness, second.staleness, third.staleness) == (0, 1, 1)


def test_the_pushes_of_a_round_come_one_after_the_other_in_rank_order():
    store = store_of(2, bound=0)
    push(store, 1, 1, 2.0)
    push(store, 0, 1, 4.0)
    assert vectors(store) == [[2.0], [4.0]]
    assert (store.version, store.center.tolist()) == (1, [3.0])
    assert {worker: reply.answer.tolist() for worker, reply in store.released} == {1: [4.0]}


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_nothing_is_lost(workers):
    """The center is the mean of all vectors, and has moved by the N-th part of all that was pushed."""
    order, store, pushed = random.Random(1), store_of(workers, [1.0, -2.0]), torch.zeros(2, dtype=F64)
    numbers = [0] * workers
    for _ in range(500):
        worker, update = order.randrange(workers), torch.tensor([order.gauss(0, 1), order.gauss(0, 1)], dtype=F64)
        numbers[worker] += 1
        reply = store.push(worker, numbers[worker], update, order.choice([1.0, 7.0]), 0)
        pushed += update
        assert reply.answer.tolist() == vectors(store)[worker]
    wanted = torch.tensor([1.0, -2.0], dtype=F64) + pushed / workers
    assert torch.allclose(torch.tensor(vectors(store), dtype=F64).mean(0), wanted, rtol=0, atol=1e-12)
    assert torch.allclose(store.center, wanted, rtol=0, atol=1e-12)


def test_a_partner_is_anybody_else():
    for worker in range(5):
        assert {partner_of(worker, 5, 0, pushes) for pushes in range(60)} == set(range(5)) - {worker}
    draws = [[partner_of(2, 9, seed, pushes) for pushes in range(30)] for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
    assert partner_of(0, 1, 0, 0) == 0


def test_all_shards_draw_the_same_partner():
    """Whatever came between on one of them: two halves give the bits of the whole."""
    whole, halves = store_of(4, [0.0, 0.0]), [store_of(4, [0.0]) for _ in range(2)]
    order = random.Random(2)
    numbers = [0] * 4
    for _ in range(40):
        worker, a, b = order.randrange(4), order.random(), order.random()
        numbers[worker] += 1
        push(whole, worker, numbers[worker], a, b)
        push(halves[0], worker, numbers[worker], a)
        push(halves[1], worker, numbers[worker], b)
    assert [a + b for a, b in zip(*map(vectors, halves), strict=True)] == vectors(whole)


def test_who_has_not_begun_is_parked_or_lost_stays_in_the_mean_and_a_partner():
    store = store_of(3)
    push(store, 1, 1, 3.0)
    store.deactivate(1)
    store.leave(2)
    for number in range(1, 80):
        push(store, 0, number, 0.0)
    assert vectors(store) == [[pytest.approx(1.0, abs=1e-9)]] * 3
    assert store.center.tolist() == [1.0]


def test_a_snapshot_goes_on_as_if_never_interrupted():
    """CASE 19: the count of pushes, which draws partners, included."""
    stores = [store_of(3, seed=4) for _ in range(2)]
    for number in range(1, 6):
        for worker in range(3):
            push(stores[0], worker, number, worker + number)
    captured, numbers = stores[0].capture()
    stores[1].restore({name: vector.clone() for name, vector in captured.items()}, numbers)
    for store, first in zip(stores, (6, 1), strict=True):
        for later in range(5):
            push(store, later % 3, first + later // 3, 1.0)
    assert vectors(stores[0]) == vectors(stores[1])
    assert torch.equal(stores[0].center, stores[1].center)


def test_with_another_number_of_workers_all_begin_at_the_center():
    store = store_of(2)
    push(store, 0, 1, 4.0)
    fresh = store_of(3)
    fresh.restore(*store.capture())
    assert vectors(fresh) == [[2.0]] * 3
    push(fresh, 2, 1, 3.0)
    assert fresh.center.tolist() == [3.0]


def test_it_leaves_the_version_that_others_read():
    rule = PairsRule()
    rule.expect(range(2))
    old, new = torch.ones(2, dtype=F64), torch.zeros(2, dtype=F64)
    rule.start(old)
    pushes = [Push(worker, torch.full((2,), 2.0, dtype=F64), 1.0) for worker in range(2)]
    rule.merge(old, new, pushes)
    assert (old.tolist(), new.tolist()) == ([1.0, 1.0], [3.0, 3.0])


@pytest.mark.parametrize("seed", [-1, 0.5, True])
def test_options_out_of_range(seed):
    with pytest.raises(BadInput, match="seed must be a whole number"):
        PairsRule(seed=seed)
