"""Which pushes become one version, and when: what neither the store's tests nor the suite of servers sees."""

import torch

from manyhands.server.base import ServerSpec
from manyhands.server.merging import ImmediateMerge, MergePolicy, QuorumMerge, TickMerge
from manyhands.server.pushes import Applied, Held, Push
from manyhands.server.rules import make_rule
from manyhands.server.store import InvalidCall, Store
from refusals import refused


def store_of(workers: int, policy: MergePolicy | None) -> Store:
    store = Store(make_rule(ServerSpec(rule="add")), workers, policy=policy)
    store.initialize(torch.zeros(1))
    for worker in range(workers):
        store.activate(worker, 0)
    return store


def test_a_step_is_complete_with_enough_weight_or_with_everybody() -> None:
    for needed, weights, active, wanted in [
        (2, [1.0], [0, 1, 2], []),
        (1, [1.0], [0, 1, 2], [0]),
        (2, [1.0, 0.0], [0, 1, 2], []),
        (2, [1.0, 0.0], [0, 1], [0, 1]),
        (2, [1.0, 0.0], [], [0, 1]),  # all who pushed have left
        (0, [], [0], []),  # a step that nobody came to
    ]:
        policy = QuorumMerge(3, needed)
        for worker, weight in enumerate(weights):
            policy.receive(Push(worker, torch.zeros(1), weight), 0, 0)
        taken = policy.take_complete(dict.fromkeys(active, 0), 0)
        assert [push.worker for push in taken] == wanted, (needed, weights, active)


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
