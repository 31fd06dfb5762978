"""The bare store on scripted orders: what the conformance suite of servers, which needs no store, does not see."""

import math

import pytest
import torch
from torch import tensor

from manyhands.errors import BadInput
from manyhands.server.base import ServerSpec
from manyhands.server.pushes import Applied, Dropped, Held
from manyhands.server.rules import make_rule
from manyhands.server.store import Duplicate, Go, InvalidCall, Store, WaitForGate
from refusals import refused

F64 = torch.float64
ONE = tensor([1.0], dtype=F64)


class Pushes:
    """Numbers a store's pushes."""

    def __init__(self, store):
        self.store, self.sequence = store, [0] * store.workers

    def __call__(self, worker, value, weight=1.0, bits=0):
        self.sequence[worker] += 1
        update = torch.full_like(self.store.center, value)
        return self.store.push(worker, self.sequence[worker], update, weight, bits)


def store_of(rule="add", workers=2, bound=None, n=1, **options):
    """A store whose workers all take part, its center zeros [n]; and its pushes."""
    store = Store(make_rule(ServerSpec(rule=rule, options=options)), workers, bound)
    store.initialize(torch.zeros(n, dtype=F64))
    for worker in range(workers):
        store.activate(worker, 0)
    return store, Pushes(store)


def taken(store):
    released, store.released = store.released, []
    return released


def answered(store):
    return [(worker, reply.answer.tolist()) for worker, reply in taken(store)]


def test_what_is_refused_changes_nothing():
    store, _ = store_of(n=2)
    good = torch.ones(2, dtype=F64)
    for given in ((good[:1], 1.0, 0), (good.float(), 1.0, 0), (good, -1.0, 0), (good, math.nan, 0), (good, 1.0, -1)):
        refused("", store.push, 0, 1, *given)
    assert store.push(0, 1, good, 1.0, 0) == Applied(1, 0)
    store.deactivate(1)
    refused("activate", store.push, 1, 1, good, 1.0, 0, kind=InvalidCall)
    refused("activate", store.tick, 1, 0, kind=InvalidCall)
    refused("from 0 to 1; got 2", store.pull, 2, kind=InvalidCall)
    fresh = Store(make_rule(ServerSpec(rule="add")), 1)
    assert not fresh.initialized
    refused("no center yet", fresh.pull, 0, kind=InvalidCall)
    store, push = store_of("elastic", bound=0, alpha=0.5)
    assert isinstance(push(0, 1.0), Held)
    refused("one call at a time", push, 0, 1.0, kind=InvalidCall)
    refused("one call at a time", store.tick, 0, 0, kind=InvalidCall)


def test_generations():
    """A newer one starts with sequence 1; an older one, and the one in which a worker was lost, are refused."""
    store, push = store_of()
    push(0, 1.0)
    store.activate(0, 0)
    assert push(0, 1.0).version == 2, "beginning again in the same generation goes on"
    store.activate(0, 3)
    refused("expected 1", store.push, 0, 3, ONE, 1.0, 0, kind=InvalidCall)
    assert store.push(0, 1, ONE, 1.0, 0) == Applied(3, 0)
    refused("newer generation", store.activate, 0, 2, kind=InvalidCall)
    store.leave(0)
    refused("declared lost", store.activate, 0, 3, kind=InvalidCall)
    store.activate(0, 4)


def test_each_push_is_applied_once():
    store, _ = store_of()
    first = store.push(0, 1, ONE, 1.0, 0)
    assert store.push(0, 1, ONE, 1.0, 0) == Duplicate(first)
    assert store.push(0, 2, ONE, 1.0, 0) == Applied(2, 0)
    for sequence in (1, 4, 0, -1):
        refused(f"number {sequence}, expected 3", store.push, 0, sequence, ONE, 1.0, 0, kind=InvalidCall)
    store.deactivate(0)
    assert store.push(0, 2, ONE, 1.0, 0) == Duplicate(Applied(2, 0)), "also when it is sent again after parking"
    assert (store.center.tolist(), store.version) == ([2.0], 2)
    store, push = store_of("elastic", bound=0, alpha=0.5)
    assert store.push(0, 1, ONE, 1.0, 0) == Held(1, 0)
    assert store.push(0, 1, ONE, 1.0, 0) == Duplicate(Held(1, 0))
    push(1, 1.0)
    assert [worker for worker, _ in taken(store)] == [0]
    duplicate = store.push(0, 1, ONE, 1.0, 0)
    assert isinstance(duplicate.reply, Applied)
    assert duplicate.reply.answer.tolist() == [0.5], "a held push sent again gets its real answer"


def test_staleness_of_a_rule_that_never_pulls_counts_from_the_last_answer():
    _, push = store_of("elastic", alpha=0.5)
    assert [push(worker, 1.0).staleness for worker in (0, 0, 1, 0, 1, 1)] == [0, 0, 2, 1, 1, 0]


def test_the_next_version_is_written_where_the_server_says():
    store, push = store_of("adagrad", n=2, rate=1.0)
    buffers = [torch.empty(2, dtype=F64) for _ in range(3)]
    spare = iter(buffers)
    store.next_buffer = lambda: next(spare)
    old = store.center
    push(0, 2.0)
    assert store.center is buffers[0]
    assert (old.tolist(), store.center.tolist()) == ([0.0, 0.0], pytest.approx([-1.0, -1.0]))
    push(0, math.nan, weight=0.0)
    assert store.center is buffers[0], "a push of weight 0 wants no memory"
    store, push = store_of("quorum", workers=1)
    store.next_buffer = lambda: tensor([math.nan])
    assert (push(0, 5.0).answer.tolist(), store.center.tolist()) == ([5.0], [0.0]), (
        "a rule that moves no center, neither"
    )


def test_distance_is_to_the_center_that_this_worker_pulled():
    """Also in a run that is resumed between pull and push: the centers that workers pulled are part of a snapshot."""
    store, push = store_of("distance", rate=1.0)
    store.pull(0)
    push(1, 1.0)
    vectors, numbers = store.capture()
    assert list(vectors) == ["center", "pulled 0"]
    resumed = Store(make_rule(ServerSpec(rule="distance", options={"rate": 1.0})), 2)
    resumed.restore({name: vector.clone() for name, vector in vectors.items()}, numbers)
    for worker in range(2):
        resumed.activate(worker, 0)
    Pushes(resumed)(0, 1.0)
    store.pull(1)
    push(0, 1.0)
    assert store.center.tolist() == resumed.center.tolist() == [1.5], "it moved by 1 since: half of an update counts"
    push(1, 1.0)
    assert store.center.tolist() == [pytest.approx(1.5 + 1 / 1.25)]


def test_the_tick_of_a_last_push_is_counted_from_where_its_worker_became_active():
    store, push = store_of(bound=0)
    assert store.pushed_in(1, 0) == -1
    for worker in (0, 1):
        push(worker, 1.0)
        store.tick(worker, 0)
    store.tick(0, 0)
    store.tick(1, 0)
    push(1, 1.0)
    assert (store.pushed_in(0, 0), store.pushed_in(1, 0), store.pushed_in(1, 1)) == (0, 2, -1)
    store.deactivate(1)
    assert store.pushed_in(1, 0) == 2
    store.activate(1, 0)
    assert store.pushed_in(1, 0) == -1
    push(1, 1.0)
    assert store.pushed_in(1, 0) == 0


def test_pushes_that_are_held_are_no_part_of_a_snapshot():
    """Two pushes in one tick are one version of one's own; a last one before parking is one when all have parked."""
    store, push = store_of(bound=0)
    push(0, 1.0)
    push(0, 2.0)
    for bits in (1, 0):
        store.tick(1, bits)
        assert store.tick(0, 2 * bits) == Go(3 * bits), "the OR of this tick's bits"
        taken(store)
        assert push(0, 1.0).staleness == 0
    assert push(1, 0.0) == Held(3, 2), "the other had no part in them"
    refused("held", store.capture, kind=InvalidCall)
    refused("held", store.restore, {}, {}, kind=InvalidCall)
    store.deactivate(1)
    store.deactivate(0)
    assert (store.center.tolist(), store.version) == ([5.0], 3)
    for worker in range(2):
        store.activate(worker, 0)
    store.tick(0, 5)
    for worker in range(2):
        store.deactivate(worker)
    store.activate(0, 0)
    assert store.tick(0, 2) == Go(2), "bits of a tick that nobody completed are forgotten"


def test_rules_that_answer_do_so_inside_the_tick():
    """The round is complete when everybody has pushed in this tick, finished it, or takes no part."""
    store, push = store_of("elastic", workers=4, bound=0, alpha=0.5)
    assert isinstance(push(2, 2.0), Held)
    assert isinstance(push(0, 4.0), Held)
    store.deactivate(3)
    assert taken(store) == []
    assert store.tick(1, 0) == WaitForGate()
    assert dict(answered(store)) == {0: [2.0], 2: [1.0]}
    assert store.center.tolist() == [3.0]
    push(0, 3.0)
    assert store.tick(2, 0) == WaitForGate()
    assert [(worker, reply.version) for worker, reply in taken(store)] == [(0, 2)], "a second push in the same tick"


def test_a_round_does_not_answer_a_worker_that_is_gone_or_came_back():
    """Its push of the older generation counts, but the answer is nobody's: the new one has asked for nothing."""
    store, push = store_of("elastic", workers=3, bound=0, alpha=0.5)
    push(0, 2.0)
    store.leave(0)
    push(1, 2.0)
    store.tick(2, 0)
    assert [worker for worker, _ in taken(store)] == [1]
    assert store.center.tolist() == [2.0]
    store, push = store_of("elastic", bound=0, alpha=0.5)
    push(0, 2.0)
    store.activate(0, 1)
    assert push(1, 4.0).answer.tolist() == [2.0]
    assert taken(store) == []
    assert store.center.tolist() == [3.0]
    assert store.tick(0, 0) == WaitForGate()
    assert store.tick(1, 0) == Go(0)
    push.sequence[0] = 0
    assert isinstance(push(0, 1.0), Held)


def test_the_first_of_a_step_make_the_mean():
    """CASE 24: two of three count, in rank order; the third is dropped and gets the mean of its step."""
    store, push = store_of("quorum", workers=3, backups=1)
    assert isinstance(push(2, 4.0, 3.0, 4), Held)
    reply = push(0, 8.0, 1.0, 1)
    assert (reply.version, reply.answer.tolist(), reply.weight, reply.bits) == (1, [5.0], 4.0, 5)
    assert answered(store) == [(2, [5.0])]
    push(0, 1.0)
    push(2, 3.0)
    late = push(1, 100.0, 1.0, 2)
    assert (late.version, late.answer.tolist(), late.weight, late.bits, late.behind) == (1, [5.0], 4.0, 5, 1)
    caught_up = push(1, 0.0, 0.0)
    assert isinstance(caught_up, Dropped)
    assert (caught_up.answer.tolist(), caught_up.behind) == ([2.0], 0)
    assert isinstance(push(1, 0.0, 0.0), Held), "then it takes part in the open step"
    assert store.center.tolist() == [0.0]
    for order in ((0, 1, 2), (2, 1, 0), (0, 2, 1)):
        store, push = store_of("quorum", workers=3)
        replies = [push(worker, [0.1, 0.2, 0.3][worker]) for worker in order]
        assert replies[-1].answer.tolist() == [0.1 * (1 / 3) + 0.2 * (1 / 3) + 0.3 * (1 / 3)], order


def test_answers_are_kept_as_long_as_somebody_has_not_had_them():
    store, push = store_of("quorum", workers=3, backups=2)
    for step in range(5):
        push(0, float(step))
        push(1, 0.0)
    assert len(store.policy._decided) == 5
    assert [push(2, 0.0).answer.tolist() for _ in range(3)] == [[0.0], [1.0], [2.0]]
    assert len(store.policy._decided) == 2
    store.leave(2)
    assert len(store.policy._decided) == 0


def test_workers_without_rows_are_not_waited_for_as_if_they_had_some():
    """CASE 27: a step is complete when all have pushed, also where fewer than the quorum have rows."""
    store, push = store_of("quorum", workers=4, backups=1)
    for worker in (0, 1, 3):
        assert isinstance(push(worker, math.nan, 0.0, 1 << worker), Held)
    reply = push(2, 6.0, 2.0, 4)
    assert (reply.answer.tolist(), reply.weight, reply.bits) == ([6.0], 2.0, 15)
    assert len(taken(store)) == 3
    for worker in range(4):
        reply = push(worker, math.nan, 0.0, 1 << worker)
    assert (reply.version, reply.answer, reply.weight, reply.bits) == (2, None, 0.0, 15), "a step of total weight 0"


def test_a_lost_worker_is_one_of_the_backups():
    store, push = store_of("quorum", workers=4, backups=1)
    store.leave(3)
    push(0, 1.0)
    push(1, 1.0)
    assert taken(store) == []
    assert push(2, 4.0).answer.tolist() == [2.0]
    push(0, 1.0)
    push(1, 3.0)
    taken(store)
    store.leave(2)
    assert answered(store) == [(0, [2.0]), (1, [2.0])]


def test_a_new_generation_of_a_worker_joins_the_open_step_and_after_parking_all_go_on_with_their_own_steps():
    """An epoch's end: a worker that deactivates and activates again while another is late pushes for its next step."""
    store, push = store_of("quorum", workers=2, backups=1)
    for _ in range(3):
        push(0, 1.0)
    store.activate(1, 1)
    assert push(1, 5.0) == Applied(4, 0, store.policy._decided[3].answer, 1.0, 0)
    assert store.policy._decided[3].answer.tolist() == [5.0]
    push(0, 0.0, 0.0)
    assert isinstance(push(0, 0.0, 0.0), Held), "the fifth step is not decided before the new generation comes to it"
    assert push(1, 0.0, 0.0).version == 5
    store, push = store_of("quorum", workers=3, backups=1)
    for step in range(2):
        push(0, float(step))
        push(1, float(step))
        taken(store)
    store.deactivate(0)
    store.activate(0, 0)
    assert isinstance(push(0, 9.0), Held)
    assert [push(2, 0.0).answer.tolist() for _ in range(2)] == [[0.0], [1.0]]
    assert push(2, 3.0).answer.tolist() == [6.0]


def test_a_restored_center_is_the_first_and_of_the_same_model():
    store, push = store_of("adagrad", rate=1.0, n=2)
    push(0, 1.0)
    fresh = Store(make_rule(ServerSpec(rule="adagrad", options={"rate": 1.0})), 3)
    fresh.restore(*store.capture())
    assert not fresh.initialize(torch.zeros(2))
    refused("resume with the model", fresh.restore, {"center": torch.zeros(3)}, {"version": 2}, kind=BadInput)


def test_what_was_pulled_before_a_restored_center_is_forgotten():
    store, push = store_of()
    for _ in range(3):
        push(0, 1.0)
    vectors, numbers = store.capture()
    vectors = {name: vector.clone() for name, vector in vectors.items()}
    push(0, 1.0)
    store.restore(vectors, numbers)
    assert (push(1, 1.0), push(0, 1.0)) == (Applied(4, 0), Applied(5, 1))


def test_a_restored_quorum_goes_on_with_the_snapshots_step():
    store, push = store_of("quorum")
    for _ in range(2):
        push(0, 1.0)
        push(1, 1.0)
        taken(store)
    store.restore({"center": store.center.clone()}, {"version": 7})
    assert isinstance(push(0, 0.0, 0.0), Held)
    assert push(1, 0.0, 0.0).version == 8
    fresh = Store(make_rule(ServerSpec(rule="quorum")), 1)
    fresh.restore(*store.capture())
    fresh.activate(0, 0)
    assert Pushes(fresh)(0, 4.0).version == 9
