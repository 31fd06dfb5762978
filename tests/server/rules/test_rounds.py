"""The rule of rounds: when a round is over, what it weighs, and that the outer momentum comes once a round."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from manyhands.errors import BadInput
from manyhands.server.base import ServerSpec
from manyhands.server.pushes import Applied
from manyhands.server.rules import make_rule
from manyhands.server.rules.rounds import LAST
from manyhands.server.store import Store

F64 = torch.float64
PLAIN = {"rate": 1.0, "momentum": 0.0}  # the center goes to the weighted mean of the updates


def store(workers: int, **options: Any) -> Store:
    """With a center of 0, and everybody taking part and looking at it."""
    made = Store(make_rule(ServerSpec(rule="rounds", options={**PLAIN, **options})), workers)
    made.initialize(torch.zeros(1, dtype=F64))
    for worker in range(workers):
        made.activate(worker, 0)
        made.pull(worker)
    return made


class Pusher:
    """Numbers the pushes."""

    def __init__(self, at: Store) -> None:
        self.store, self.sequences = at, [0] * at.workers

    def __call__(self, worker: int, update: float, weight: float = 1.0) -> float:
        """Where the center is after this push, each of which is a version."""
        self.sequences[worker] += 1
        version = self.store.version
        reply = self.store.push(worker, self.sequences[worker], torch.tensor([update], dtype=F64), weight, 0)
        assert isinstance(reply, Applied)
        assert reply.version == version + 1
        return float(self.store.center)


def test_a_round_of_all_is_over_with_the_last_and_weighs_by_rows() -> None:
    push = Pusher(store(3, quorum=3))
    assert [push(2, 8.0, 1.0), push(0, 2.0, 3.0)] == [0.0, 0.0]
    assert push(1, 5.0, 4.0) == (3 * 2 + 4 * 5 + 1 * 8) / 8


@pytest.mark.parametrize(("grace", "over_at"), [(0, 1), (1, 2), (2, 3)])
def test_after_the_quorum_a_round_waits_for_so_many_pushes_of_who_is_in(grace: int, over_at: int) -> None:
    push = Pusher(store(3, quorum=2, grace=grace))
    moved = [push(worker, 1.0) != 0 for worker in (0, 1, 0, 1)]
    assert moved.index(True) == over_at


def test_pushes_before_the_quorum_use_up_no_grace() -> None:
    push = Pusher(store(3, quorum=2, grace=1))
    assert [push(worker, 1.0) for worker in (0, 0, 0, 1)] == [0.0] * 4
    assert push(0, 1.0) > 0


def test_everybody_is_not_waited_for_any_longer() -> None:
    push = Pusher(store(2, quorum=1, grace=9))
    assert [push(0, 1.0), push(1, 3.0)] == [0.0, 2.0]


@pytest.mark.parametrize(("workers", "quorum"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3)])
def test_by_default_more_than_half_make_a_round(workers: int, quorum: int) -> None:
    push = Pusher(store(workers, grace=0))
    assert [push(worker, 1.0) for worker in range(quorum)] == [0.0] * (quorum - 1) + [1.0]


def test_what_one_worker_pushes_twice_in_a_round_adds_up() -> None:
    """It went on from where it was: 1 + 2 away from the center, with the weight of both windows."""
    push = Pusher(store(2, quorum=2))
    push(0, 1.0, 2.0)
    push(0, 2.0, 4.0)
    assert push(1, 9.0, 6.0) == (6 * 3 + 6 * 9) / 12


def test_an_old_push_weighs_less() -> None:
    """Worker 2 looked two rounds before it pushed: its 8 rows weigh 8/3 beside the 4 of worker 0."""
    made = store(3, quorum=1, grace=0)
    push = Pusher(made)
    for _ in range(2):
        push(0, 0.0)
        made.pull(0)
    made.rule.quorum = 2
    assert push(2, 6.0, 8.0) == 0.0
    assert push(0, 3.0, 4.0) == pytest.approx((8 / 3 * 6 + 4 * 3) / (8 / 3 + 4), abs=1e-15)


def test_who_looks_a_moment_before_its_own_round_is_over_is_not_late() -> None:
    """Three windows each, worker 0 always first: it looks before worker 1 pushes. Both count the same."""
    made = store(2)
    push = Pusher(made)
    for center in (3.0, 6.0, 9.0):
        push(0, 1.0)
        made.pull(0)
        assert push(1, 5.0) == center
        made.pull(1)


def test_rounds_without_a_worker_make_it_late_also_after_its_own() -> None:
    """Worker 0 looks, then come its own round and two without it: its 9 rows weigh 3."""
    made = store(3, quorum=2, grace=0)
    push = Pusher(made)
    push(0, 0.0)
    made.pull(0)
    for worker in (1, 2, 1, 2, 1, 2):
        push(worker, 0.0)
        made.pull(worker)
    assert push(0, 4.0, 9.0) == (3 * 4.0 + 1 * 0.0) / 4


def test_after_a_snapshot_is_restored_everybody_has_seen_its_center() -> None:
    """Worker 2 looked a round before, which counts no more."""
    made = store(3, quorum=1, grace=0)
    push = Pusher(made)
    push(0, 0.0)
    made.pull(0)
    for worker in range(3):
        made.deactivate(worker)
    made.restore(*made.capture())
    for worker in range(3):
        made.activate(worker, 0)
    made.rule.quorum = 2
    push(2, 6.0, 8.0)
    assert push(0, 3.0, 4.0) == (8 * 6 + 4 * 3) / 12


def test_a_late_push_is_of_the_next_round() -> None:
    """Nothing is lost: all three updates are in after two rounds."""
    push = Pusher(store(3, quorum=2, grace=0))
    assert [push(0, 2.0), push(1, 4.0)] == [0.0, 3.0]
    assert push(2, 6.0) == 3.0
    assert push(0, 3.0) == 3.0 + (0.5 * 6.0 + 3.0) / 1.5  # worker 0 was in the round that both looked before


def test_the_momentum_is_applied_once_a_round() -> None:
    """Torch's own Nesterov SGD along each round's mean, however many pushes a round has."""
    made = store(2, rate=0.7, momentum=0.9, quorum=2)
    push = Pusher(made)
    point = torch.nn.Parameter(torch.zeros(1, dtype=F64))
    optimizer = torch.optim.SGD([point], lr=0.7, momentum=0.9, nesterov=True)
    for a, again, b in ((1.0, 0.5, 3.0), (-2.0, 0.0, 1.0), (0.5, 1.0, 0.5)):
        for worker, update in ((0, a), (0, again), (1, b)):
            push(worker, update)
        for worker in range(2):
            made.pull(worker)
        point.grad = -torch.tensor([(2 * (a + again) + b) / 3], dtype=F64)
        optimizer.step()
        assert float(made.center) == pytest.approx(float(point.detach()), abs=1e-14)


def test_a_round_is_closed_when_the_center_is_read_while_nobody_takes_part() -> None:
    """Rows do not vanish: what waits for a quorum counts; reading again moves nothing."""
    made = store(3, quorum=3)
    push = Pusher(made)
    push(0, 4.0)
    push(1, 2.0)
    for worker in (0, 1):
        made.deactivate(worker)
        assert float(made.read()) == 0.0
    made.deactivate(2)
    assert float(made.center) == 0.0
    assert [float(made.read()) for _ in range(2)] == [3.0, 3.0]
    assert made.version == 2


def test_a_worker_that_activates_again_pushes_into_the_open_round() -> None:
    """At its own age, 0: of all three updates comes one outer step."""
    made = store(2, quorum=2, momentum=0.5)
    push = Pusher(made)
    push(0, 4.0)
    for worker in range(2):
        made.deactivate(worker)
    for worker in range(2):
        made.activate(worker, 0)
    assert push(1, 2.0) == 1.5 * 3.0


def test_a_pull_while_nobody_takes_part_sees_the_closed_round() -> None:
    made = store(2, quorum=2)
    push = Pusher(made)
    push(0, 4.0, 2.0)
    for worker in range(2):
        made.deactivate(worker)
    made.pull(1)
    assert float(made.center) == 4.0
    for worker in range(2):
        made.activate(worker, 0)
    push(1, 9.0, 2.0)  # not late: it looked afterwards
    assert push(0, 3.0, 4.0) == 4.0 + (2 * 9 + 4 * 3) / 6


def test_last_pushes_are_of_one_round_whoever_is_in_it() -> None:
    """Everybody is in with the second, the grace is over with the third, and still it is open; then one step is made."""
    made = store(2, quorum=1, grace=0, momentum=0.5)
    for worker, update in ((0, 1.0), (1, 2.0)):
        made.push(worker, 1, torch.tensor([update], dtype=F64), 1.0, LAST)
    made.push(0, 2, torch.tensor([3.0], dtype=F64), 2.0, LAST)
    made.deactivate(0)
    assert float(made.center) == 0.0
    made.deactivate(1)
    assert float(made.read()) == 1.5 * (3 * 4.0 + 2.0) / 4


def test_after_last_pushes_the_next_look_ends_the_round() -> None:
    """Also where others take part: a new epoch begins, and all begin it at the same center."""
    made = store(2, quorum=2)
    for worker in range(2):
        made.push(worker, 1, torch.tensor([1.0 + worker], dtype=F64), 1.0, LAST)
    assert float(made.center) == 0.0
    for worker in range(2):
        made.pull(worker)
        assert float(made.center) == 1.5
    made.push(1, 2, torch.tensor([5.0], dtype=F64), 1.0, 0)
    made.pull(1)
    assert float(made.center) == 1.5


def test_a_lost_worker_is_not_waited_for() -> None:
    made = store(3, quorum=3)
    push = Pusher(made)
    push(0, 2.0)
    made.leave(2)
    assert push(1, 4.0) == 3.0


def test_a_lost_workers_push_counts_but_not_for_those_who_live() -> None:
    """Worker 0 pushes and is lost; 1 and 2 push; 3 lives, and the grace is not over."""
    made = store(4, quorum=2, grace=5)
    push = Pusher(made)
    push(0, 1.0)
    made.leave(0)
    assert [push(1, 2.0), push(2, 3.0)] == [0.0, 0.0]
    assert push(3, 6.0) == 3.0


def test_when_the_last_one_that_a_round_waits_for_is_lost_it_is_over_at_once() -> None:
    made = store(3, quorum=3)
    push = Pusher(made)
    push(0, 2.0)
    push(1, 4.0)
    made.leave(2)
    assert (float(made.center), made.version) == (3.0, 2)
    made.leave(2)
    assert float(made.center) == 3.0


def test_a_worker_that_comes_back_is_waited_for_again() -> None:
    made = store(2, quorum=2)
    made.leave(1)
    made.activate(1, 1)
    push = Pusher(made)
    assert push(0, 2.0) == 0.0
    assert push(1, 4.0) == 3.0


def test_a_round_is_closed_into_the_memory_that_the_server_gives() -> None:
    """Readers of the old center see no half of the new one."""
    made = store(2, quorum=2)
    buffers = [torch.zeros(1, dtype=F64) for _ in range(9)]
    made.next_buffer = lambda: buffers.pop()
    Pusher(made)(0, 4.0)
    old = made.center
    for worker in range(2):
        made.deactivate(worker)
    assert (float(made.read()), float(old)) == (4.0, 0.0)


PUSHES = ((0, 1.0), (1, 2.0), (2, 5.0), (2, 1.0), (1, -4.0), (0, 3.0), (2, 2.0), (1, 7.0), (0, 1.0))


@pytest.mark.parametrize("at", range(1, len(PUSHES)))
def test_a_snapshot_has_the_open_round_and_goes_on_from_there(at: int) -> None:
    """Taking it changes nothing; what the store had before it is restored is forgotten."""
    options = {"rate": 0.5, "momentum": 0.9, "quorum": 3, "grace": 2}
    first, second = store(3, **options), store(3, **options)
    push, again = Pusher(first), Pusher(second)
    for worker, update in PUSHES[:at]:
        push(worker, update)
    for worker, update in ((0, 9.0), (2, 8.0)):
        again(worker, update)
    vectors, numbers = first.capture()
    second.restore({name: vector.clone() for name, vector in vectors.items()}, json.loads(json.dumps(numbers)))
    for worker in range(3):  # a restored store takes it that everybody looks
        first.pull(worker)
    for worker, update in PUSHES[at:]:
        assert push(worker, update) == again(worker, update)
    for made in (first, second):
        for worker in range(3):
            made.deactivate(worker)
    assert torch.equal(first.read(), second.read())


def test_a_snapshot_after_last_pushes_leaves_their_round_open() -> None:
    made, other = store(2), store(2)
    for worker in range(2):
        made.push(worker, 1, torch.ones(1, dtype=F64), 1.0, LAST)
        made.deactivate(worker)
    other.restore(*made.capture())
    for worker in range(2):
        other.activate(worker, 1)
    assert float(other.center) == 0.0
    other.pull(0)
    assert float(other.center) == 1.0


def test_a_round_of_more_workers_than_go_on_is_over_with_theirs() -> None:
    """What workers pushed that are no more counts: (2 + 4 + 6 + 8) / 4."""
    made, fewer = store(4, quorum=4), store(2, quorum=2, grace=9)
    push = Pusher(made)
    for worker, update in ((1, 2.0), (2, 4.0), (3, 6.0)):
        push(worker, update)
    fewer.restore(*made.capture())
    assert Pusher(fewer)(0, 8.0) == 5.0


def test_a_round_has_the_same_sum_in_whatever_order_its_pushes_come() -> None:
    updates = [1e17, 1.0, -1e17, 1.0]  # in another order, a part is rounded away
    ends = []
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        push = Pusher(store(4, quorum=4))
        ends.append([push(worker, updates[worker]) for worker in order][-1])
    assert ends == [0.25, 0.25]


@pytest.mark.parametrize(
    "options",
    [
        {"quorum": 0},
        {"quorum": 1.5},
        {"grace": -1},
        {"grace": None},
        {"rate": 0.0},
        {"momentum": -0.1},
        {"momentum": 2},
        {"momentum": "0.9"},
    ],
)
def test_options_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        make_rule(ServerSpec(rule="rounds", options=options))
