"""Any interleaving of any workers' calls keeps what the store promises."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.server.base import ServerSpec
from manyhands.server.pushes import Applied, Held
from manyhands.server.rules import make_rule
from manyhands.server.store import Duplicate, Go, Store, WaitForGate

WORKERS = 3
CALLS = st.lists(
    st.tuples(
        st.integers(0, WORKERS - 1),
        st.sampled_from(["activate", "pull", "push", "again", "empty", "tick", "tick", "deactivate", "leave"]),
    ),
    max_size=60,
)


class Model:
    """What must be so, kept beside the store by the simplest means."""

    def __init__(self, bound):
        self.bound = bound
        self.store = Store(make_rule(ServerSpec(rule="add")), WORKERS, bound)
        self.store.initialize(torch.zeros(1, dtype=torch.float64))
        self.active, self.waiting = set(), set()
        self.finished, self.sequence, self.generation = [0] * WORKERS, [0] * WORKERS, [0] * WORKERS
        self.pulled, self.own, self.lost = [0] * WORKERS, [0] * WORKERS, set()
        self.total, self.pushes, self.seen = 0.0, 0, 0
        self.unheard = []  # bound 0: (worker, value) of held pushes

    def call(self, worker, name):
        may_work = worker in self.active and worker not in self.waiting
        if name in ("push", "empty", "tick", "again") and not may_work:
            return
        getattr(self, name)(worker)
        self.released()
        self.check()

    def activate(self, worker):
        if worker in self.lost:
            self.generation[worker] += 1
            self.sequence[worker] = self.own[worker] = 0
            self.pulled[worker] = self.store.version
            self.lost.discard(worker)
        if worker not in self.active:
            self.finished[worker] = min((self.finished[other] for other in self.active), default=0)
            self.active.add(worker)
        self.store.activate(worker, self.generation[worker])

    def pull(self, worker):
        self.pulled[worker] = self.store.pull(worker)
        self.own[worker] = 0

    def push(self, worker, weight=1.0):
        self.pushes += 1
        self.sequence[worker] += 1
        value = float(2 ** (self.pushes % 40)) if weight else float("nan")
        version = self.store.version
        update = torch.tensor([value], dtype=torch.float64)
        reply = self.store.push(worker, self.sequence[worker], update, weight, 0)
        update.fill_(float("nan"))
        assert reply.staleness == version - self.pulled[worker] - self.own[worker]
        if self.bound == 0:
            assert reply == Held(version + bool(weight), reply.staleness)
            self.unheard.append((worker, value if weight else 0.0, bool(weight)))
            return
        assert reply == Applied(version + bool(weight), reply.staleness)
        self.total += value if weight else 0.0
        self.own[worker] += bool(weight)

    def empty(self, worker):
        self.push(worker, 0.0)

    def again(self, worker):
        if self.sequence[worker]:
            before = self.store.version
            update = torch.ones(1, dtype=torch.float64)
            reply = self.store.push(worker, self.sequence[worker], update, 1.0, 0)
            assert isinstance(reply, Duplicate)
            assert self.store.version == before

    def tick(self, worker):
        self.finished[worker] += 1
        reply = self.store.tick(worker, 0)
        if isinstance(reply, WaitForGate):
            self.waiting.add(worker)

    def deactivate(self, worker):
        self.active.discard(worker)
        self.waiting.discard(worker)
        self.store.deactivate(worker)

    def leave(self, worker):
        self.lost.add(worker)
        self.active.discard(worker)
        self.waiting.discard(worker)
        self.store.leave(worker)

    def released(self):
        for worker, reply in self.store.released:
            assert isinstance(reply, Go)
            assert worker in self.waiting, "somebody was let go who did not wait"
            self.waiting.discard(worker)
        self.store.released.clear()

    def check(self):
        ticks = [self.finished[worker] for worker in self.active]
        if ticks and self.bound is not None:
            assert max(ticks) - min(ticks) <= self.bound + 1
            for worker in self.active:
                must_wait = self.finished[worker] - min(ticks) > self.bound
                assert (worker in self.waiting) == must_wait
        elif self.bound is None:
            assert not self.waiting
        self.check_rounds()
        assert self.store.center.tolist() == [self.total], "the center is the sum of all pushes that are in"

    def check_rounds(self):
        """Bound 0: when the center moved, all that were held are in, as one version."""
        if self.bound == 0 and float(self.store.center) != self.total:
            self.total += sum(value for _, value, _ in self.unheard)
            assert self.store.version == self.seen + 1
        if self.bound == 0 and self.store.version != self.seen:
            for worker in {worker for worker, _, live in self.unheard if live}:
                self.own[worker] += 1
            self.unheard = []
        self.seen = self.store.version


@settings(max_examples=100, deadline=None)
@given(bound=st.sampled_from([None, 0, 1, 3]), calls=CALLS)
def test_interleavings(bound, calls):
    """CASE 11: gap at most bound + 1, each push in once, nobody waits for those who left."""
    model = Model(bound)
    for worker in range(WORKERS):
        model.call(worker, "activate")
    for worker, name in calls:
        model.call(worker, name)
    for worker in range(1, WORKERS):
        model.call(worker, "leave")
    assert not model.waiting, "nobody is left to wait for"
    model.call(0, "deactivate")
    assert model.store.center.tolist() == [model.total + sum(value for _, value, _ in model.unheard)]
