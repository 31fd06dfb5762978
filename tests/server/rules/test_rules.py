"""Rules on numbers that a hand can check; the outer optimizer; pairs. In place and out of place: the rules' suite."""

import random

import pytest
import torch
from torch import tensor

from manyhands.comm.reducing import naive_mean
from manyhands.errors import UnknownName
from manyhands.server.base import ServerSpec
from manyhands.server.pushes import Push
from manyhands.server.rules import RULES, make_rule
from manyhands.server.rules.base import weighted_mean
from manyhands.server.rules.outer import ELEMENTWISE
from manyhands.server.rules.pairs import PairsRule, partner_of
from manyhands.server.store import Store
from refusals import refused


def push(update, worker=0, **fields):
    return Push(worker=worker, update=tensor(update, dtype=torch.float64), weight=fields.pop("weight", 1.0), **fields)


def merged(rule, pushes, old=(1.0, 2.0), **options):
    """The next center."""
    old = tensor(old, dtype=torch.float64)
    made, new = make_rule(ServerSpec(rule=rule, options=options)), torch.full_like(old, float("nan"))
    made.start(old)
    made.merge(old, new, pushes)
    return new.tolist()


def test_what_is_added():
    """CASE 12: an update of staleness 3 enters with weight 1/4. A center that moved by sqrt(rate) halves an update."""
    pulled = tensor([1.0, 4.0], dtype=torch.float64)
    for rule, pushes, options, wanted in [
        ("add", [push([0.5, -1.0])], {}, [1.5, 1.0]),
        ("add", [push([0.5, -1.0]), push([1.0, 1.0], worker=1)], {}, [2.5, 2.0]),
        ("staleness", [push([4.0, 8.0], staleness=3)], {}, [2.0, 4.0]),
        ("staleness", [push([4.0, 8.0], staleness=0)], {}, [5.0, 10.0]),
        ("distance", [push([1.0, 1.0], pulled=pulled)], {"rate": 4.0}, [2.0, 2.5]),
        ("distance", [push([1.0, 1.0])], {"rate": 4.0}, [2.0, 3.0]),
        ("elastic", [push([5.0, 2.0]), push([1.0, -2.0], worker=1)], {"alpha": 0.25}, [2.0, 1.0]),
        ("adagrad", [push([0.0, 1.0])], {"rate": 0.5}, [1.0, pytest.approx(1.5)]),  # one never had a gradient
    ]:
        assert merged(rule, pushes, **options) == wanted, (rule, pushes)


def test_weighted_mean_is_the_naive_one():
    """CASE 24: a mean, not a sum; bit-equal to the reference, and one push is not multiplied."""
    updates, weights = [torch.randn(50) for _ in range(4)], [1.0, 3.0, 0.7, 2.2]
    wanted = naive_mean(updates, weights)
    assert torch.equal(
        weighted_mean([Push(w, u.clone(), x) for w, (u, x) in enumerate(zip(updates, weights, strict=True))]), wanted
    )
    assert weighted_mean([Push(0, updates[0], 7.0)]) is updates[0]
    updates = [tensor([256.0], dtype=torch.bfloat16)] + [tensor([3.0], dtype=torch.bfloat16)] * 3
    mean = weighted_mean([Push(w, u.clone(), 1.0) for w, u in enumerate(updates)])
    assert mean.dtype == torch.bfloat16
    assert float(mean) == float(tensor(265 / 4, dtype=torch.bfloat16)), "numbers of 16 bits are added in 32"


def test_names_that_do_not_exist_list_those_that_do_and_options_out_of_range_are_refused():
    for rule, options, words in [
        ("sum", {}, "add, staleness, distance"),
        ("elastic", {"beta": 1}, "alpha"),
        ("add", {"_sum": 1}, "none"),
    ]:
        refused(words, make_rule, ServerSpec(rule=rule, options=options), kind=UnknownName)
    for rule, options in [
        ("elastic", {"alpha": 0.0}),
        ("elastic", {"alpha": float("nan")}),
        ("distance", {"rate": -1}),
        ("adagrad", {"rate": "fast"}),
        ("adagrad", {"eps": 0}),
        ("quorum", {"backups": -1}),
        ("quorum", {"backups": True}),
        ("outer", {"rate": 0}),
        ("outer", {"optimizer": "Adam", "momentum": 0.9}),
        ("outer", {"options": {"speed": 1}}),
        ("pairs", {"seed": -1}),
        ("pairs", {"seed": 0.5}),
        ("pairs", {"seed": True}),
        *(("rounds", {"quorum": value}) for value in (0, 1.5)),
        *(("rounds", {"grace": value}) for value in (-1, None)),
        *(("rounds", {"momentum": value}) for value in (-0.1, 2, "0.9")),
        ("rounds", {"rate": 0.0}),
    ]:
        refused("", make_rule, ServerSpec(rule=rule, options=options))


def test_which_rules_add_what_the_workers_own_steps_moved():
    assert {name for name, rule in RULES.items() if rule.adds_steps} == {"add", "staleness", "distance"}
    assert {name for name, rule in RULES.items() if rule.divides_by_staleness} == {"staleness"}


def outer(**options):
    return make_rule(ServerSpec(rule="outer", options=options))


def merge(rule, center, update):
    rule.merge(center, center, [Push(0, update.clone(), 1.0)])


def test_every_optimizer_steps_along_minus_the_update():
    """Over shards too: each weight is treated by itself. Its state comes back."""
    for optimizer in ELEMENTWISE:
        updates = [torch.randn(5, dtype=torch.float64) for _ in range(4)]
        start = torch.randn(5, dtype=torch.float64)
        parameter = torch.nn.Parameter(start.clone())
        reference = getattr(torch.optim, optimizer)([parameter], lr=0.1)
        whole, left, again = (outer(optimizer=optimizer, rate=0.1) for _ in range(3))
        center, part = start.clone(), start[:2].clone()
        whole.start(center)
        left.start(part)
        for number, update in enumerate(updates):
            parameter.grad = -update
            reference.step()
            if number == 3:
                copy = center.clone()
                again.load(copy, {name: v.clone() for name, v in whole.vectors().items()}, whole.numbers())
                merge(again, copy, update)
            merge(whole, center, update)
            merge(left, part, update[:2])
        assert torch.equal(center, parameter.detach()), optimizer
        assert torch.equal(copy, center), optimizer
        assert torch.equal(part, center[:2]), optimizer


def test_before_the_first_step_there_is_nothing_to_remember():
    rule, again = outer(optimizer="Adam"), outer(optimizer="Adam")
    center = torch.zeros(3)
    rule.start(center)
    again.load(center, rule.vectors(), rule.numbers())
    merge(again, center, torch.ones(3))
    assert center.tolist() == pytest.approx([0.7] * 3)


def test_others_are_refused():
    for optimizer in ("LBFGS", "Muon", "Adafactor", "SparseAdam", "Optimizer", "sgd"):
        refused("SGD, Adagrad", make_rule, ServerSpec(rule="outer", options={"optimizer": optimizer}))


F64 = torch.float64


def pairs_of(workers, start=(0.0,), bound=None, **options):
    store = Store(make_rule(ServerSpec(rule="pairs", options=options)), workers, bound)
    store.initialize(torch.tensor(start, dtype=F64))
    for worker in range(workers):
        store.activate(worker, 0)
    return store


def vectors(store):
    return [vector.tolist() for vector in store.rule.vectors().values()]


def give(store, worker, number, *update):
    return store.push(worker, number, torch.tensor(update, dtype=F64), 1.0, 0)


def test_two_workers_by_hand():
    """Both become their mean, then the one that pushes moves; an answer is that one's vector, and stays."""
    store = pairs_of(2)
    first = give(store, 0, 1, 4.0)
    assert (first.answer.tolist(), vectors(store), store.center.tolist()) == ([4.0], [[4.0], [0.0]], [2.0])
    second = give(store, 1, 1, 2.0)
    assert (second.answer.tolist(), vectors(store), store.center.tolist()) == ([4.0], [[2.0], [4.0]], [3.0])
    assert first.answer.tolist() == [4.0]
    third = give(store, 0, 2, 0.0)
    assert (third.answer.tolist(), vectors(store), store.center.tolist()) == ([3.0], [[3.0], [3.0]], [3.0])
    assert (first.staleness, second.staleness, third.staleness) == (0, 1, 1)
    store = pairs_of(2, bound=0)  # the pushes of a round come one after the other in rank order
    give(store, 1, 1, 2.0)
    give(store, 0, 1, 4.0)
    assert (vectors(store), store.version, store.center.tolist()) == ([[2.0], [4.0]], 1, [3.0])
    assert {worker: reply.answer.tolist() for worker, reply in store.released} == {1: [4.0]}


def test_nothing_is_lost():
    """The center is the mean of all vectors, and has moved by the N-th part of all that was pushed."""
    for workers in (1, 2, 3, 8):
        order, store, pushed = random.Random(1), pairs_of(workers, [1.0, -2.0]), torch.zeros(2, dtype=F64)
        numbers = [0] * workers
        for _ in range(100):
            worker, update = order.randrange(workers), torch.tensor([order.gauss(0, 1), order.gauss(0, 1)], dtype=F64)
            numbers[worker] += 1
            reply = store.push(worker, numbers[worker], update, order.choice([1.0, 7.0]), 0)
            pushed += update
            assert reply.answer.tolist() == vectors(store)[worker], workers
        wanted = torch.tensor([1.0, -2.0], dtype=F64) + pushed / workers
        assert torch.allclose(torch.tensor(vectors(store), dtype=F64).mean(0), wanted, rtol=0, atol=1e-12), workers
        assert torch.allclose(store.center, wanted, rtol=0, atol=1e-12), workers


def test_a_partner_is_anybody_else():
    for worker in range(5):
        assert {partner_of(worker, 5, 0, pushes) for pushes in range(60)} == set(range(5)) - {worker}
    draws = [[partner_of(2, 9, seed, pushes) for pushes in range(30)] for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
    assert partner_of(0, 1, 0, 0) == 0


def test_who_has_not_begun_is_parked_or_lost_stays_in_the_mean_and_a_partner():
    store = pairs_of(3)
    give(store, 1, 1, 3.0)
    store.deactivate(1)
    store.leave(2)
    for number in range(1, 80):
        give(store, 0, number, 0.0)
    assert vectors(store) == [[pytest.approx(1.0, abs=1e-9)]] * 3
    assert store.center.tolist() == [1.0]


def test_it_leaves_the_version_that_others_read():
    rule = PairsRule()
    rule.expect(range(2))
    old, new = torch.ones(2, dtype=F64), torch.zeros(2, dtype=F64)
    rule.start(old)
    pushes = [Push(worker, torch.full((2,), 2.0, dtype=F64), 1.0) for worker in range(2)]
    rule.merge(old, new, pushes)
    assert (old.tolist(), new.tolist()) == ([1.0, 1.0], [3.0, 3.0])
