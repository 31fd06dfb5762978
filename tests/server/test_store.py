"""The bare store on scripted orders."""

import math

import pytest
import torch
from torch import tensor

from manyhands.errors import BadInput
from manyhands.server.base import ServerSpec
from manyhands.server.pushes import Applied, Dropped, Held
from manyhands.server.rules import make_rule
from manyhands.server.store import Duplicate, Go, InvalidCall, Store, WaitForGate


def store_of(rule="add", workers=2, bound=None, n=1, **options):
    """A store whose workers all take part, its center zeros [n]."""
    store = Store(make_rule(ServerSpec(rule=rule, options=options)), workers, bound)
    store.initialize(torch.zeros(n, dtype=torch.float64))
    for worker in range(workers):
        store.activate(worker, 0)
    return store


class Pushes:
    """Numbers a store's pushes."""

    def __init__(self, store):
        self.store, self.sequence = store, [0] * store.workers

    def __call__(self, worker, value, weight=1.0, bits=0):
        self.sequence[worker] += 1
        update = torch.full_like(self.store.center, value)
        return self.store.push(worker, self.sequence[worker], update, weight, bits)


def taken(store):
    released, store.released = store.released, []
    return released


# -- begin, initialize, refusals ---------------------------------------------------------------------------------------


def test_the_first_center_wins():
    store = Store(make_rule(ServerSpec(rule="add")), 1)
    assert not store.initialized
    with pytest.raises(InvalidCall, match="no center yet"):
        store.pull(0)
    assert store.initialize(tensor([1.0]))
    assert not store.initialize(tensor([2.0]))
    assert store.center.tolist() == [1.0]


def test_a_worker_that_takes_no_part_is_refused():
    store = store_of()
    store.deactivate(1)
    for call in (lambda: store.push(1, 1, tensor([1.0]), 1.0, 0), lambda: store.tick(1, 0)):
        with pytest.raises(InvalidCall, match="activate"):
            call()
    with pytest.raises(InvalidCall, match="from 0 to 1; got 2"):
        store.pull(2)


def test_generations():
    """A newer one starts with sequence 1; an older one, and the one in which a worker was lost, are refused."""
    store = store_of()
    push = Pushes(store)
    push(0, 1.0)
    store.activate(0, 0)
    assert push(0, 1.0).version == 2, "beginning again in the same generation goes on"
    store.activate(0, 3)
    with pytest.raises(InvalidCall, match="expected 1"):
        store.push(0, 3, tensor([1.0], dtype=torch.float64), 1.0, 0)
    assert store.push(0, 1, tensor([1.0], dtype=torch.float64), 1.0, 0) == Applied(3, 0)
    with pytest.raises(InvalidCall, match="newer generation"):
        store.activate(0, 2)
    store.leave(0)
    with pytest.raises(InvalidCall, match="declared lost"):
        store.activate(0, 3)
    store.activate(0, 4)


def test_what_cannot_be_merged_is_bad_input_and_changes_nothing():
    store = store_of(n=2)
    good = torch.ones(2, dtype=torch.float64)
    for update, weight, bits in (
        (good[:1], 1.0, 0),
        (good.float(), 1.0, 0),
        (good, -1.0, 0),
        (good, math.nan, 0),
        (good, 1.0, -1),
    ):
        with pytest.raises(BadInput):
            store.push(0, 1, update, weight, bits)
    assert store.push(0, 1, good, 1.0, 0) == Applied(1, 0)


def test_one_call_at_a_time():
    store = store_of("elastic", bound=0, alpha=0.5)
    push = Pushes(store)
    assert isinstance(push(0, 1.0), Held)
    for call in (lambda: push(0, 1.0), lambda: store.tick(0, 0)):
        with pytest.raises(InvalidCall, match="one call at a time"):
            call()


# -- exactly once, versions, staleness ---------------------------------------------------------------------------------


def test_each_push_is_applied_once():
    store = store_of()
    one = tensor([1.0], dtype=torch.float64)
    first = store.push(0, 1, one, 1.0, 0)
    assert store.push(0, 1, one, 1.0, 0) == Duplicate(first)
    assert store.push(0, 2, one, 1.0, 0) == Applied(2, 0)
    for sequence in (1, 4, 0, -1):
        with pytest.raises(InvalidCall, match=f"number {sequence}, expected 3"):
            store.push(0, sequence, one, 1.0, 0)
    store.deactivate(0)
    assert store.push(0, 2, one, 1.0, 0) == Duplicate(Applied(2, 0)), "also when it is sent again after parking"
    assert (store.center.tolist(), store.version) == ([2.0], 2)


def test_a_held_push_sent_again_gets_its_real_answer():
    store = store_of("elastic", bound=0, alpha=0.5)
    push, x = Pushes(store), tensor([1.0], dtype=torch.float64)
    assert store.push(0, 1, x, 1.0, 0) == Held(1, 0)
    assert store.push(0, 1, x, 1.0, 0) == Duplicate(Held(1, 0))
    push(1, 1.0)
    assert [worker for worker, _ in taken(store)] == [0]
    duplicate = store.push(0, 1, x, 1.0, 0)
    assert isinstance(duplicate.reply, Applied)
    assert duplicate.reply.answer.tolist() == [0.5]


def test_staleness_counts_the_versions_of_others():
    """CASE 12: three versions of others between pull and push; the update enters with weight 1/4. Own ones do not count."""
    store = store_of("staleness")
    push = Pushes(store)
    store.pull(0)
    for _ in range(3):
        store.pull(1)
        assert push(1, 0.0).staleness == 0
    assert push(0, 8.0) == Applied(4, 3)
    assert store.center.tolist() == [2.0]
    assert push(0, 8.0) == Applied(5, 3)
    assert push(1, 0.0).staleness == 2
    store.pull(0)
    assert push(0, 1.0).staleness == 0


def test_the_next_version_is_written_where_the_server_says():
    store = store_of("adagrad", n=2, rate=1.0)
    buffers = [torch.empty(2, dtype=torch.float64) for _ in range(3)]
    spare = iter(buffers)
    store.next_buffer = lambda: next(spare)
    push, old = Pushes(store), store.center
    push(0, 2.0)
    assert store.center is buffers[0]
    assert (old.tolist(), store.center.tolist()) == ([0.0, 0.0], pytest.approx([-1.0, -1.0]))
    push(0, math.nan, weight=0.0)
    assert store.center is buffers[0], "a push of weight 0 wants no memory"


def test_distance_is_to_the_center_that_this_worker_pulled():
    store = store_of("distance", rate=1.0)
    push = Pushes(store)
    store.pull(0)
    store.pull(1)
    push(1, 1.0)
    store.pull(1)
    push(0, 1.0)
    assert store.center.tolist() == [1.5], "the center moved by 1 since worker 0 pulled: half of its update counts"
    push(1, 1.0)
    assert store.center.tolist() == [pytest.approx(1.5 + 1 / 1.25)]


# -- the gate and rounds -----------------------------------------------------------------------------------------------


def test_a_dead_worker_blocks_until_it_is_declared_lost():
    """CASE 11."""
    store = store_of(workers=3, bound=1)
    for worker in (0, 1):
        assert store.tick(worker, 0) == Go(0)
        assert store.tick(worker, 4) == WaitForGate()
    assert store.slowest == 2
    store.leave(2)
    assert taken(store) == [(0, Go(4)), (1, Go(4))]
    assert store.tick(0, 0) == Go(0)
    store.leave(2)


def test_the_tick_of_a_last_push_is_counted_from_where_its_worker_became_active():
    store = store_of(bound=0)
    push = Pushes(store)
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


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a_tick_in_step_is_one_version_in_rank_order(order):
    """CASE 11: bit-equal whatever the speeds, staleness 0, the OR of all bits."""
    values = [0.1, 1e16, -1e16]
    store = store_of(workers=3, bound=0)
    push = Pushes(store)
    for tick in range(2):
        for worker in range(3):
            assert store.pull(worker) == tick
        for worker in order:
            assert push(worker, values[worker]) == Held(tick + 1, 0)
        assert store.version == tick
        for worker in order[:2]:
            assert store.tick(worker, 1 << worker) == WaitForGate()
        assert store.tick(order[2], 1 << order[2]) == Go(7)
        assert taken(store) == [(worker, Go(7)) for worker in sorted(order[:2])]
    center = 0.0
    for value in values * 2:
        center += value
    assert store.center.tolist() == [center]
    assert store.version == 2


def test_a_held_push_may_not_change_afterwards():
    store = store_of(workers=1, bound=0)
    update = tensor([1.0], dtype=torch.float64)
    store.push(0, 1, update, 1.0, 0)
    update.fill_(math.nan)
    store.tick(0, 0)
    assert store.center.tolist() == [1.0]


def test_who_leaves_completes_the_round_and_what_it_pushed_counts():
    store = store_of(workers=3, bound=0)
    push = Pushes(store)
    for worker in range(3):
        push(worker, 1.0)
    store.tick(0, 0)
    store.tick(1, 0)
    store.leave(2)
    assert taken(store) == [(0, Go(0)), (1, Go(0))]
    assert (store.center.tolist(), store.version) == ([3.0], 1)


def test_pushes_before_parking_become_one_version_when_all_have_parked():
    store = store_of(workers=2, bound=0)
    push = Pushes(store)
    push(1, 1e16)
    store.deactivate(1)
    push(0, 1.0)
    with pytest.raises(InvalidCall, match="held"):
        store.capture()
    with pytest.raises(InvalidCall, match="held"):
        store.restore({}, {})
    store.deactivate(0)
    assert (store.center.tolist(), store.version) == ([1.0 + 1e16], 1)


def test_rules_that_answer_do_so_inside_the_tick():
    """The round is complete when everybody has pushed in this tick, finished it, or takes no part."""
    store = store_of("elastic", workers=4, bound=0, alpha=0.5)
    push = Pushes(store)
    assert isinstance(push(2, 2.0), Held)
    assert isinstance(push(0, 4.0), Held)
    store.deactivate(3)
    assert taken(store) == []
    assert store.tick(1, 0) == WaitForGate()
    answers = {worker: reply.answer.tolist() for worker, reply in taken(store)}
    assert answers == {0: [2.0], 2: [1.0]}
    assert store.center.tolist() == [3.0]
    push(0, 3.0)
    assert store.tick(2, 0) == WaitForGate()
    assert [(worker, reply.version) for worker, reply in taken(store)] == [(0, 2)], "a second push in the same tick"


def test_a_round_does_not_answer_a_worker_that_is_gone():
    store = store_of("elastic", workers=3, bound=0, alpha=0.5)
    push = Pushes(store)
    push(0, 2.0)
    store.leave(0)
    push(1, 2.0)
    store.tick(2, 0)
    assert [worker for worker, _ in taken(store)] == [1]
    assert store.center.tolist() == [2.0]


def test_two_pushes_in_one_tick_are_one_version_of_ones_own():
    store = store_of(workers=2, bound=0)
    push = Pushes(store)
    push(0, 1.0)
    push(0, 2.0)
    for _ in range(2):
        store.tick(1, 0)
        store.tick(0, 0)
        taken(store)
        assert push(0, 1.0).staleness == 0
    assert push(1, 0.0) == Held(3, 2), "the other had no part in them"


def test_a_round_does_not_answer_a_worker_that_came_back():
    """Its push of the older generation counts, but the answer is nobody's: the new one has asked for nothing."""
    store = store_of("elastic", workers=2, bound=0, alpha=0.5)
    push = Pushes(store)
    push(0, 2.0)
    store.activate(0, 1)
    assert push(1, 4.0).answer.tolist() == [2.0]
    assert taken(store) == []
    assert store.center.tolist() == [3.0]
    assert store.tick(0, 0) == WaitForGate()
    assert store.tick(1, 0) == Go(0)
    push.sequence[0] = 0
    assert isinstance(push(0, 1.0), Held)


@pytest.mark.parametrize("bound", [None, 0])
@pytest.mark.parametrize("rule", ["add", "staleness", "distance", "elastic", "adagrad", "outer"])
def test_weight_zero_changes_nothing(rule, bound):
    """CASE 27: NaN included; a round of total weight 0 leaves version, sums and momentum as they were."""
    options = {"elastic": {"alpha": 0.5}, "outer": {"momentum": 0.9}, "distance": {"rate": 1.0}}.get(rule, {})
    store = store_of(rule, workers=1, bound=bound, **options)
    push = Pushes(store)
    push(0, 1.0)
    store.tick(0, 0)
    center, vectors = store.center.clone(), {n: v.clone() for n, v in store.rule.vectors().items()}
    reply = push(0, math.nan, weight=0.0)
    store.tick(0, 0)
    assert (store.version, store.center.tolist()) == (1, center.tolist())
    assert {n: v.tolist() for n, v in store.rule.vectors().items()} == {n: v.tolist() for n, v in vectors.items()}
    if rule == "elastic":
        assert reply.answer.tolist() == [0.0]


def test_an_update_moves_the_center_once():
    """CASE 26: nothing of a push is left in what the next one adds."""
    store = store_of()
    push = Pushes(store)
    push(0, 1.0)
    push(0, 0.0)
    assert store.center.tolist() == [1.0]


# -- quorum ------------------------------------------------------------------------------------------------------------


def test_the_first_of_a_step_make_the_mean():
    """CASE 24: two of three count, in rank order; the third is dropped and gets the mean of its step."""
    store = store_of("quorum", workers=3, backups=1)
    push = Pushes(store)
    assert isinstance(push(2, 4.0, 3.0, 4), Held)
    reply = push(0, 8.0, 1.0, 1)
    assert (reply.version, reply.answer.tolist(), reply.weight, reply.bits) == (1, [5.0], 4.0, 5)
    assert [(worker, released.answer.tolist()) for worker, released in taken(store)] == [(2, [5.0])]
    push(0, 1.0)
    push(2, 3.0)
    late = push(1, 100.0, 1.0, 2)
    assert (late.version, late.answer.tolist(), late.weight, late.bits, late.behind) == (1, [5.0], 4.0, 5, 1)
    caught_up = push(1, 0.0, 0.0)
    assert isinstance(caught_up, Dropped)
    assert (caught_up.answer.tolist(), caught_up.behind) == ([2.0], 0)
    assert isinstance(push(1, 0.0, 0.0), Held), "then it takes part in the open step"
    assert store.center.tolist() == [0.0]


def test_answers_are_kept_as_long_as_somebody_has_not_had_them():
    store = store_of("quorum", workers=3, backups=2)
    push = Pushes(store)
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
    store = store_of("quorum", workers=4, backups=1)
    push = Pushes(store)
    for worker in (0, 1, 3):
        assert isinstance(push(worker, math.nan, 0.0, 1 << worker), Held)
    reply = push(2, 6.0, 2.0, 4)
    assert (reply.answer.tolist(), reply.weight, reply.bits) == ([6.0], 2.0, 15)
    assert len(taken(store)) == 3
    for worker in range(4):
        reply = push(worker, math.nan, 0.0, 1 << worker)
    assert (reply.version, reply.answer, reply.weight, reply.bits) == (2, None, 0.0, 15), "a step of total weight 0"


def test_a_lost_worker_is_one_of_the_backups():
    store = store_of("quorum", workers=4, backups=1)
    push = Pushes(store)
    store.leave(3)
    push(0, 1.0)
    push(1, 1.0)
    assert taken(store) == []
    assert push(2, 4.0).answer.tolist() == [2.0]
    push(0, 1.0)
    push(1, 3.0)
    taken(store)
    store.leave(2)
    assert [reply.answer.tolist() for _, reply in taken(store)] == [[2.0], [2.0]]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1)])
def test_a_mean_is_added_up_in_rank_order(order):
    values = [0.1, 0.2, 0.3]
    store = store_of("quorum", workers=3)
    push = Pushes(store)
    for worker in order:
        reply = push(worker, values[worker])
    assert reply.answer.tolist() == [0.1 * (1 / 3) + 0.2 * (1 / 3) + 0.3 * (1 / 3)]


def test_a_new_generation_of_a_worker_joins_the_open_step():
    store = store_of("quorum", workers=2, backups=1)
    push = Pushes(store)
    for _ in range(3):
        push(0, 1.0)
    store.activate(1, 1)
    assert push(1, 5.0) == Applied(4, 0, store.policy._decided[3].answer, 1.0, 0)
    assert store.policy._decided[3].answer.tolist() == [5.0]
    push(0, 0.0, 0.0)
    assert isinstance(push(0, 0.0, 0.0), Held), "the fifth step is not decided before the new generation comes to it"
    assert push(1, 0.0, 0.0).version == 5


def test_the_mean_of_one_worker_is_not_multiplied():
    store = store_of("quorum", workers=1)
    assert Pushes(store)(0, 0.1, 3.0).answer.tolist() == [0.1]


def test_workers_go_on_with_their_own_steps_after_parking():
    """An epoch's end: a worker that deactivates and activates again while another is late pushes for its next step, not for an old one."""
    store = store_of("quorum", workers=3, backups=1)
    push = Pushes(store)
    for step in range(2):
        push(0, float(step))
        push(1, float(step))
        taken(store)
    store.deactivate(0)
    store.activate(0, 0)
    assert isinstance(push(0, 9.0), Held)
    assert [push(2, 0.0).answer.tolist() for _ in range(2)] == [[0.0], [1.0]]
    assert push(2, 3.0).answer.tolist() == [6.0]


# -- snapshots ---------------------------------------------------------------------------------------------------------


def test_capture_and_restore():
    store = store_of("adagrad", rate=1.0, n=2)
    push = Pushes(store)
    push(0, 1.0)
    push(1, 2.0)
    vectors, numbers = store.capture()
    assert numbers == {"version": 2}
    vectors = {name: vector.clone() for name, vector in vectors.items()}
    wanted = push(0, 1.0), store.center.tolist()
    fresh = Store(make_rule(ServerSpec(rule="adagrad", options={"rate": 1.0})), 3)
    fresh.restore(vectors, numbers)
    assert not fresh.initialize(torch.zeros(2)), "a restored center is the first"
    fresh.activate(2, 0)
    assert fresh.push(2, 1, torch.ones(2, dtype=torch.float64), 1.0, 0) == Applied(3, 0)
    assert fresh.center.tolist() == wanted[1]
    with pytest.raises(BadInput, match="resume with the model"):
        fresh.restore({"center": torch.zeros(3)}, numbers)


def test_what_was_pulled_before_a_restored_center_is_forgotten():
    store = store_of()
    push = Pushes(store)
    for _ in range(3):
        push(0, 1.0)
    vectors, numbers = store.capture()
    vectors = {name: vector.clone() for name, vector in vectors.items()}
    push(0, 1.0)
    store.restore(vectors, numbers)
    assert (push(1, 1.0), push(0, 1.0)) == (Applied(4, 0), Applied(5, 1))


def test_the_centers_that_workers_pulled_are_part_of_a_snapshot_where_a_rule_keeps_them():
    """A run that is resumed between pull and push goes on as if it had not been interrupted."""
    store = store_of("distance", rate=1.0)
    push = Pushes(store)
    store.pull(0)
    push(1, 1.0)
    vectors, numbers = store.capture()
    assert list(vectors) == ["center", "pulled 0"]
    fresh = Store(make_rule(ServerSpec(rule="distance", options={"rate": 1.0})), 2)
    fresh.restore({name: vector.clone() for name, vector in vectors.items()}, numbers)
    for worker in range(2):
        fresh.activate(worker, 0)
    Pushes(fresh)(0, 1.0)
    push(0, 1.0)
    assert fresh.center.tolist() == store.center.tolist() == [1.5]


def test_a_quorum_restored_under_its_workers_goes_on_with_the_snapshots_step():
    store = store_of("quorum", workers=2)
    push = Pushes(store)
    for _ in range(2):
        push(0, 1.0)
        push(1, 1.0)
        taken(store)
    store.restore({"center": store.center.clone()}, {"version": 7})
    assert isinstance(push(0, 0.0, 0.0), Held)
    assert push(1, 0.0, 0.0).version == 8


def test_a_restored_quorum_goes_on_with_its_next_step():
    store = store_of("quorum", workers=2)
    push = Pushes(store)
    push(0, 1.0)
    push(1, 1.0)
    fresh = Store(make_rule(ServerSpec(rule="quorum")), 1)
    fresh.restore(*store.capture())
    fresh.activate(0, 0)
    assert Pushes(fresh)(0, 4.0).version == 2


def test_an_answer_counts_as_a_pull() -> None:
    """Elastic averaging never pulls: staleness is what others did since this worker's last exchange."""
    store = Store(make_rule(ServerSpec(rule="elastic", options={"alpha": 0.5})), workers=2)
    store.initialize(torch.zeros(1, dtype=torch.float64))
    for worker in range(2):
        store.activate(worker, 0)
    found = []
    for number, worker in enumerate([0, 0, 1, 0, 1, 1], start=1):
        sequence = [0, 0, 1, 0, 1, 1][:number].count(worker)
        reply = store.push(worker, sequence, torch.ones(1, dtype=torch.float64), 1.0, 0)
        assert isinstance(reply, Applied)
        found.append(reply.staleness)
    assert found == [0, 0, 2, 1, 1, 0]
