"""Who may begin the next tick; which pushes become one version, and when: policies with and without a store."""

from __future__ import annotations

import torch
from torch import Tensor

from manyhands.server.base import ServerSpec
from manyhands.server.gate import Gate
from manyhands.server.merging import ImmediateMerge, MergePolicy, QuorumMerge, TickMerge
from manyhands.server.pushes import Applied, Dropped, Held, Push
from manyhands.server.rules import make_rule
from manyhands.server.store import InvalidCall, Store
from refusals import refused


def begun(workers, bound):
    gate = Gate(workers, bound)
    for worker in range(workers):
        gate.activate(worker)
    return gate


def test_the_fastest_waits_bound_ticks_ahead():
    """CASE 11: who finished c ticks goes on when the slowest finished c - bound; without a bound nobody waits."""
    for bound in (0, 1, 3):
        gate = begun(2, bound)
        for _ in range(bound):
            gate.tick(0, 4)
            assert gate.opened() == [(0, 4)], bound
        gate.tick(0, 4)
        assert gate.opened() == [], bound
        assert gate.is_waiting(0), bound
        gate.tick(1, 1)
        assert [worker for worker, _ in gate.opened()] == [0, 1], bound
        assert not gate.is_waiting(0), bound
    gate = begun(2, None)
    for tick in range(5):
        gate.tick(0, tick)
        assert gate.opened() == [(0, tick)]


def test_in_step_everybody_gets_the_or_of_all_bits_of_the_tick():
    gate = begun(3, 0)
    for bits in (1, 8):
        for worker in (2, 0):
            gate.tick(worker, bits << worker)
            assert gate.opened() == []
        gate.tick(1, bits << 1)
        assert gate.opened() == [(worker, 7 * bits) for worker in range(3)]
    gate.tick(0, 5)
    for worker in range(3):
        gate.deactivate(worker)
    gate.activate(0)
    gate.tick(0, 2)
    assert gate.opened() == [(0, 2)], "bits of a tick that nobody completed are forgotten"


def test_who_begins_has_the_ticks_of_the_slowest():
    gate = Gate(3, 2)
    gate.activate(0)
    for _ in range(5):
        gate.tick(0, 0)
        gate.opened()
    gate.activate(1)
    assert gate.finished(1) == 5
    gate.tick(1, 0)
    gate.opened()
    gate.activate(2)
    assert (gate.finished(2), gate.slowest) == (5, 5)
    gate.activate(1)
    assert gate.finished(1) == 6, "a worker that takes part began again"
    assert Gate(2, 0).slowest is None


# -- pushes ------------------------------------------------------------------------------------------------------------


def push(worker: int, weight: float = 1.0) -> Push:
    return Push(worker, torch.zeros(1), weight)


def store_of(
    workers: int, policy: MergePolicy | None, rule: str = "add", start: float = 0.0, **options: float
) -> Store:
    store = Store(make_rule(ServerSpec(rule=rule, options=options)), workers, policy=policy)
    store.initialize(torch.tensor([start]))
    for worker in range(workers):
        store.activate(worker, 0)
    return store


def ticks(*workers: int) -> dict[int, int]:
    return dict.fromkeys(workers, 0)


def taken(policy: MergePolicy, workers: dict[int, int], version: int = 0) -> list[int]:
    return [one.worker for one in policy.take_complete(workers, version)]


def test_immediate_holds_nothing() -> None:
    policy = ImmediateMerge()
    assert policy.receive(push(0), 3, 0) is None
    assert (policy.held, taken(policy, ticks(0, 1))) == ([], [])


def test_a_tick_is_complete_when_all_who_take_part_have_finished_it_and_comes_in_rank_order() -> None:
    policy = TickMerge(answers=False)
    assert policy.receive(push(2), 7, 4) == Held(8, 0)
    assert policy.receive(push(0, 0.0), 7, 4) == Held(7, 0)
    assert taken(policy, {0: 5, 1: 4, 2: 5}) == []
    assert taken(policy, {0: 5, 1: 5, 2: 5}) == [0, 2]
    assert taken(policy, {0: 5, 1: 5, 2: 5}) == []


def test_with_a_rule_that_answers_a_push_is_enough() -> None:
    policy = TickMerge(answers=True)
    policy.receive(push(1), 0, 0)
    assert taken(policy, {0: 0, 1: 0}) == []
    assert taken(policy, {0: 1, 1: 0}) == [1]


def test_a_step_is_complete_with_enough_weight_or_with_everybody() -> None:
    def of(needed: int, *weights: float) -> QuorumMerge:
        policy = QuorumMerge(3, needed)
        for worker, weight in enumerate(weights):
            policy.receive(push(worker, weight), 0, 0)
        return policy

    assert taken(of(2), ticks(0, 1, 2)) == []
    assert taken(of(2, 1.0), ticks(0, 1, 2)) == []
    assert taken(of(1, 1.0), ticks(0, 1, 2)) == [0]
    assert taken(of(2, 1.0, 0.0), ticks(0, 1, 2)) == []
    assert taken(of(2, 1.0, 0.0), ticks(0, 1)) == [0, 1]
    assert taken(of(2, 1.0, 0.0), ticks()) == [0, 1], "all who pushed have left"
    assert taken(QuorumMerge(3, 0), ticks(0)) == [], "a step that nobody came to"


def test_who_missed_a_step_gets_its_answer_once() -> None:
    policy = QuorumMerge(2, 1)
    assert policy.receive(push(0), 0, 0) == Held()
    assert policy.replies(policy.take_complete(ticks(0, 1), 0), 1) == [Applied(1, 0, None, 1.0, 0)]
    assert policy.receive(push(1), 1, 0) == Dropped(1, None, 1.0, 0, 0)
    assert policy.receive(push(1), 1, 0) == Held(), "its next push is of the open step"
    policy.take_complete(ticks(0, 1), 5)
    policy.begin(1, 0)
    assert policy.receive(push(1), 5, 0) == Held(), "an answer that all have had is not kept"


class InPairs(MergePolicy):
    """Every two pushes are one version, whoever they are from."""

    def receive(self, push: Push, version: int, tick: int) -> Held:
        self.held.append(push)
        return Held(version + 1, push.staleness)

    def take_complete(self, ticks: dict[int, int], version: int) -> list[Push]:  # type: ignore[override]
        pair, self.held = (self.held[:2], self.held[2:]) if len(self.held) > 1 else ([], self.held)
        return pair


def test_a_policy_of_ones_own() -> None:
    """By hand: center 0; pushes of 1, 2 | 4, 8 make versions 1 and 2; the fifth waits, and no snapshot is taken."""
    store = store_of(3, InPairs())

    def give(worker: int, sequence: int, value: float) -> tuple[Applied | Held, int, list[float]]:
        reply = store.push(worker, sequence, torch.tensor([value]), 1.0, 0)
        assert isinstance(reply, Held)
        return reply, store.version, store.center.tolist()

    assert give(0, 1, 1.0) == (Held(1, 0), 0, [0.0])
    assert give(2, 1, 2.0) == (Held(1, 0), 1, [3.0])
    assert give(1, 1, 4.0) == (Held(2, 1), 1, [3.0]), "version 1 was made by others since it began"
    assert give(0, 2, 8.0) == (Held(2, 0), 2, [15.0]), "it had a part in version 1"
    assert store.pull(1) == 2
    assert give(1, 2, 16.0) == (Held(3, 0), 2, [15.0])
    refused("pushes are held", store.capture, kind=InvalidCall)
    assert give(2, 2, 32.0) == (Held(3, 1), 3, [63.0])
    vectors, numbers = store.capture()
    assert (vectors["center"].tolist(), numbers) == ([63.0], {"version": 3})


def test_a_policy_may_answer_for_the_rule() -> None:
    """What `replies` says is what workers get."""

    class Praises(InPairs):
        def replies(self, pushes: list[Push], version: int) -> list[Applied]:  # type: ignore[override]
            return [Applied(version, 0, torch.full((1,), float(version)), 9.0, 5)] * len(pushes)

    store = store_of(2, Praises(), "elastic", alpha=0.5)
    assert store.push(0, 1, torch.ones(1), 1.0, 0) == Held(1, 0)
    reply = store.push(1, 1, torch.ones(1), 1.0, 0)
    released: list[tuple[int, Applied]] = store.released  # type: ignore[assignment]
    answers: list[Tensor | None] = [reply.answer, released[0][1].answer]  # type: ignore[union-attr]
    assert [answer.tolist() for answer in answers if answer is not None] == [[1.0], [1.0]]


def test_one_call_may_complete_several_versions() -> None:
    """By hand: four pushes wait until the tick is over; then 1 + 2 make version 1, and 4 + 8 make version 2."""

    class PairsOfATick(InPairs):
        def take_complete(self, ticks: dict[int, int], version: int) -> list[Push]:  # type: ignore[override]
            return super().take_complete(ticks, version) if all(ticks.values()) else []

    store = store_of(1, PairsOfATick())
    for sequence, value in enumerate([1.0, 2.0, 4.0, 8.0], 1):
        store.push(0, sequence, torch.tensor([value]), 1.0, 0)
    assert (store.version, store.center.tolist()) == (0, [0.0])
    store.tick(0, 0)
    assert (store.version, store.center.tolist()) == (2, [15.0])


def test_a_rule_that_does_not_move_the_center_leaves_it_where_it_is() -> None:
    """Also where each version has memory of its own: nothing would be written there."""
    store = store_of(1, None, "quorum", 3.0)
    store.next_buffer = lambda: torch.full((1,), torch.nan)
    reply = store.push(0, 1, torch.tensor([5.0]), 1.0, 0)
    assert isinstance(reply, Applied)
    assert reply.answer is not None
    assert (reply.version, reply.answer.tolist(), store.center.tolist()) == (1, [5.0], [3.0])


def test_when_a_third_push_may_come_again() -> None:
    held, quorum = TickMerge(answers=False), QuorumMerge(workers=2, needed=1)
    for policy, weight, version, into, may in [
        (ImmediateMerge(), 1.0, 4, 5, True),
        (ImmediateMerge(), 1.0, 3, 5, False),  # others come first
        (ImmediateMerge(), 1.0, 5, 5, False),
        (ImmediateMerge(), 0.0, 5, 5, True),  # it makes none
        (ImmediateMerge(), 1.0, 3, None, True),
        (held, 1.0, 3, 5, True),  # it is held until its tick is complete
        (held, 1.0, 5, 5, False),
        (held, 0.0, 5, 5, True),
        (quorum, 1.0, 0, 3, True),
        (quorum, 0.0, 0, 3, True),
        (quorum, 1.0, 2, None, False),  # it came after its step was decided
        (quorum, 1.0, 3, None, True),
    ]:
        assert policy.may_come(2, weight, version, into) is may, (policy, weight, version, into)
