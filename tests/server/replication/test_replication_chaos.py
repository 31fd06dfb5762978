"""Searches random schedules of deaths, cuts and late messages for one in which copies of a shard break a promise.

Workers push slices into the center and finish a tick after each; a slice's push adds one to its own element. Messages of one
connection stay in order. Copies die or are cut off from the driver, connections break; the driver judges late. Workers that are
lost and fenced, with copies, are in engines/sim/test_training_chaos.py. `World(seed).run()` repeats a failure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch

import chaos
from chaos import expect, first_broken, keeps
from manyhands.errors import ManyhandsError
from manyhands.server.base import ServerSpec
from manyhands.server.pushes import Applied, Held
from manyhands.server.replication.log import Call, Copy, Entry, OutOfOrder, ReleasedReplies, make
from manyhands.server.replication.views import LostShard, NewView, ShardView, StartCopy, StopCopy, Views
from manyhands.server.rules import make_rule
from manyhands.server.store import Duplicate, Go, Store

SLICES = 10
SILENCE_S, PATIENCE_S = 1.0, 0.5
WHATS = ("kill_copy", "kill_copy", "cut_copies", "cut_connection", "cut_primary")


@dataclass(eq=False)
class CopyProcess:
    """One process of a copy of the shard."""

    index: int
    copy: Copy
    store: Store
    released: ReleasedReplies
    alive: bool = True
    cut_off: bool = False  # from the driver
    connections: dict[WorkerProcess, int] = field(default_factory=dict)  # and which of the worker's connections it is
    link: Link | None = None
    waiting: list[tuple[int, Callable[[], None]]] = field(default_factory=list)  # (index, what leaves then)
    asking: dict[int, Callable[[Any, int], None]] = field(default_factory=dict)  # worker id -> who waits for a release
    counted: set[tuple[Call, int, int]] = field(default_factory=set)  # calls that are to count once


@dataclass(eq=False)
class Link:
    """The connection from a primary to its backup or to a new copy."""

    number: int
    ends: tuple[CopyProcess, CopyProcess]
    open: bool = True
    arrived: list[tuple[str, Any]] = field(default_factory=list)  # before the other end had its view


Request = tuple[Call, dict[str, Any]]


@dataclass(eq=False)
class WorkerProcess:
    worker_id: int
    program: Generator[Request, Any, None]
    request: Request | None = None
    to: CopyProcess | None = None
    connection: int = 0  # how many it has had
    view: int = -1
    ready: bool = False  # connected, and active there where it was before
    active: bool = False
    done: bool = False
    serial: int = 0  # of its requests: what answers an older one is dropped


class World(chaos.World):
    BOUND_S = 200.0

    def __init__(
        self,
        seed: int,
        copy: type[Copy] = Copy,
        replies: type[ReleasedReplies] = ReleasedReplies,
        ticks_numbered: bool = True,
    ) -> None:
        super().__init__(seed)
        draw, self.copy, self.replies, self.ticks_numbered = self.random, copy, replies, ticks_numbered
        number = draw.randint(1, 3)
        self.bound = draw.choice((None, 0, 1, 2))
        self.views = Views([0, 1])
        self.copies: dict[int, CopyProcess] = {}
        self.workers = [WorkerProcess(n, self.work(n, range(n, SLICES, number))) for n in range(number)]
        self.requests = list[tuple[float, WorkerProcess, int]]()  # for a connection: since when, a view after this one
        self.answered: set[tuple[int, int]] = set()  # (worker id, push)
        self.seen = torch.zeros(SLICES)  # the newest center that any worker saw, element by element
        self.harmed = 0  # copies to which something happened
        self.counts = dict.fromkeys(("views", "connections", "answers"), 0)
        for index in (0, 1):
            self.start_copy(index)
        self.decide()
        for worker in self.workers:
            self.after(draw.uniform(0, 0.4), partial(self.wants_connection, worker))
        self.befall((0, 1, 1, 2, 2, 3, 4), 3, WHATS)

    # -- what befalls ------------------------------------------------------------------------------------------------

    def kill_copy(self) -> None:
        if living := [one for one in self.copies.values() if one.alive]:
            self.die(self.random.choice(living))

    def die(self, one: CopyProcess) -> None:
        if not one.alive:
            return
        one.alive = False
        self.harmed += 1
        for worker in self.workers:
            if worker.to is one:
                self.after(self.late(), partial(self.lost_connection, worker, one))
        if one.link is not None:
            self.break_link(one.link)
        self.after(self.late() + 0.01, partial(self.lost_copy, one))

    def cut_primary(self) -> None:
        """It lives, serves, and the driver takes it for lost."""
        one = self.copies.get(self.views.view.primary)
        if one is not None and one.alive:
            one.cut_off = True
            self.harmed += 1
            self.after(SILENCE_S, partial(self.lost_copy, one))
            self.after(SILENCE_S + self.random.uniform(0, 3), partial(self.die, one))  # it ends itself

    def cut_copies(self) -> None:
        links = [one.link for one in self.copies.values() if one.alive and one.link is not None and one.link.open]
        if links:
            self.harmed += 2
            self.break_link(self.random.choice(links))

    def cut_connection(self) -> None:
        if connected := [worker for worker in self.workers if worker.to is not None]:
            worker = self.random.choice(connected)
            assert worker.to is not None
            self.close_connection(worker, worker.to)
            self.after(self.late(), partial(self.lost_connection, worker, worker.to))

    # -- the driver --------------------------------------------------------------------------------------------------

    def to_copy(self, one: CopyProcess, deliver: Callable[[], None]) -> None:
        self.send(one, lambda: deliver() if one.alive and not one.cut_off else None)

    def to_driver(self, one: CopyProcess, deliver: Callable[[], None]) -> None:
        def arrive() -> None:
            if self.copies.get(one.index) is one and not one.cut_off:
                deliver()
                self.decide()

        self.after(self.late(), arrive)

    def start_copy(self, index: int) -> None:
        store = Store(make_rule(ServerSpec(rule="add")), len(self.workers), self.bound)
        self.copies[index] = CopyProcess(index, self.copy(index), store, self.replies())

    def lost_copy(self, one: CopyProcess) -> None:
        if self.copies.get(one.index) is one:
            del self.copies[one.index]
            self.views.lost(one.index)
            self.decide()

    def decide(self) -> None:
        for action in self.views.decide():
            match action:
                case NewView(view):
                    self.counts["views"] += 1
                    self.tell(view)
                case StartCopy(index):

                    def start(index: int = index) -> None:
                        self.start_copy(index)
                        self.views.started(index)
                        self.decide()

                    self.after(self.random.uniform(0, 0.5), start)
                case StopCopy(index):
                    if stopped := self.copies.pop(index, None):
                        self.after(self.late(), partial(self.die, stopped))
                case LostShard():
                    expect(self.harmed >= 2, f"the shard is lost, and {self.harmed} copies were harmed")
                    self.end = "lost"
        self.answer_requests()

    def tell(self, view: ShardView) -> None:
        ends = [self.copies.get(index) for index in (view.primary, view.other) if index is not None]
        link = None
        if view.recruit is not None and all(ends) and len(ends) == 2:
            link = Link(view.link, (ends[0], ends[1]))  # type: ignore[arg-type]
        for one in ends:
            if one is not None:
                self.to_copy(one, partial(self.take_view, one, view, link))

    def answer_requests(self) -> None:
        """A worker is connected to the primary of a view after the one that it knows, or after a while to the same."""
        serving = self.views.serving
        primary = None if serving is None else self.copies.get(serving.primary)
        if serving is None or primary is None:
            return
        for request in list(self.requests):
            since, worker, view = request
            if view < serving.number or self.now - since >= PATIENCE_S - 1e-6:
                self.requests.remove(request)
                self.after(self.late(), partial(self.connected, worker, primary, serving.number))

    def wants_connection(self, worker: WorkerProcess) -> None:
        def arrive() -> None:
            self.requests.append((self.now, worker, worker.view))
            self.answer_requests()
            self.after(PATIENCE_S, self.answer_requests)

        self.after(self.late(), arrive)

    # -- a worker ----------------------------------------------------------------------------------------------------

    def work(self, worker_id: int, slices: range) -> Generator[Request, Any, None]:
        """What it asks its shard."""
        yield Call.INITIALIZE, {"vectors": (torch.zeros(SLICES),)}
        yield Call.ACTIVATE, {}
        self.workers[worker_id].active = True
        for number, one in enumerate(slices, 1):
            self.seen = torch.maximum(self.seen, (yield Call.PULL, {}))
            update = torch.zeros(SLICES)
            update[one] = 1
            yield Call.PUSH, {"number": number, "vectors": (update,)}
            self.answered.add((worker_id, number))
            if self.bound is not None:
                yield Call.TICK, {"number": number}
        self.workers[worker_id].active = False
        yield Call.DEACTIVATE, {}

    def go_on(self, worker: WorkerProcess, value: Any = None) -> None:
        """With the answer to what it asked last."""
        try:
            worker.request = worker.program.send(value)
            self.resend(worker)
        except StopIteration:
            worker.request, worker.done = None, True
            if all(one.done for one in self.workers):
                self.end = "done"

    def connected(self, worker: WorkerProcess, to: CopyProcess, view: int) -> None:
        self.counts["connections"] += 1
        if not to.alive:
            self.lost_connection(worker, to)
            return
        worker.to, worker.view, worker.connection = to, view, worker.connection + 1
        taken = {worker: worker.connection}
        self.to_copy(to, lambda: to.connections.update(taken))  # the driver hands it its end
        if worker.active:
            self.post(worker, Call.ACTIVATE, {}, lambda _: self.make_ready(worker))
        else:
            self.make_ready(worker)

    def make_ready(self, worker: WorkerProcess) -> None:
        worker.ready = True
        if worker.request is None and not worker.done:
            self.go_on(worker)
        else:
            self.resend(worker)

    def resend(self, worker: WorkerProcess) -> None:
        if worker.request is not None and worker.ready:
            self.post(worker, *worker.request, partial(self.go_on, worker))

    def post(self, worker: WorkerProcess, call: Call, values: dict[str, Any], answered: Callable[[Any], None]) -> None:
        worker.serial += 1
        serial, to, connection = worker.serial, worker.to, worker.connection
        if to is None:
            return

        def arrive() -> None:
            if to.alive and to.connections.get(worker) == connection and worker.to is to:
                self.serve(to, worker, call, values, lambda value: self.after(self.late(), partial(back, value)))
            elif to.alive and worker.to is to and worker.connection == connection:
                self.after(0.05, arrive)  # it waits in the socket until that end is taken

        def back(value: Any) -> None:
            if worker.serial == serial and worker.to is to:
                self.counts["answers"] += 1
                answered(value)

        self.send(worker, arrive)

    def lost_connection(self, worker: WorkerProcess, to: CopyProcess) -> None:
        if worker.to in (to, None):
            worker.to, worker.ready = None, False
            worker.serial += 1
            self.wants_connection(worker)

    # -- a copy ------------------------------------------------------------------------------------------------------

    def take_view(self, one: CopyProcess, view: ShardView, link: Link | None) -> None:
        if not one.copy.take_view(view):
            return
        if link is not None and one in link.ends:
            one.link = link
            if one is link.ends[0]:
                vectors, numbers = one.store.image()
                image = {name: vector.clone() for name, vector in vectors.items()}, json.dumps(numbers)
                self.over_link(link, "image", (one.copy.index, *image, set(one.counted)))
            elif link.open:
                arrived, link.arrived = link.arrived, []
                for kind, value in arrived:
                    self.receive(one, link, kind, value)
            if not link.open:
                self.broken_link(one, link)
        if not one.copy.is_primary:
            for worker in list(one.connections):
                self.close_connection(worker, one)
                self.after(self.late(), partial(self.lost_connection, worker, one))
            one.waiting.clear()
            one.asking.clear()
        self.let_go(one)

    def over_link(self, link: Link, kind: str, value: Any) -> None:
        other = link.ends[1]

        def arrive() -> None:
            if not other.alive or (not link.open and self.random.random() < 0.5):
                return
            if other.copy.view.number < link.number:
                link.arrived.append((kind, value))
            else:
                self.receive(other, link, kind, value)

        if link.open:
            self.send((link, "there"), arrive)

    def receive(self, one: CopyProcess, link: Link, kind: str, value: Any) -> None:
        try:
            if kind == "image":
                index, vectors, numbers, counted = value
                one.copy.take_image(link.number, index)
                one.store.take_image(vectors, json.loads(numbers))
                one.counted |= counted
            else:
                index = value.index
                one.copy.receive(link.number, index)
                self.make(one, value)
        except OutOfOrder:
            self.break_link(link)
            return
        if link.open:
            self.send((link, "back"), partial(self.acknowledged, link, index))

    def acknowledged(self, link: Link, index: int) -> None:
        primary = link.ends[0]
        if not primary.alive or not link.open:
            return
        try:
            if primary.copy.acknowledge(link.number, index):
                self.to_driver(primary, lambda: self.views.copied(link.number))
        except OutOfOrder:
            return
        self.let_go(primary)

    def break_link(self, link: Link) -> None:
        link.open = False
        for one in link.ends:
            if one.alive and one.link is link:
                self.after(self.late(), partial(self.broken_link, one, link))

    def broken_link(self, one: CopyProcess, link: Link) -> None:
        if one.alive and one.copy.is_primary and one.copy.view.link == link.number:
            self.to_driver(one, lambda: self.views.backup_lost(link.number))
            if isinstance(one.copy, GoesOnAlone):
                one.copy.alone = True
                self.let_go(one)

    def close_connection(self, worker: WorkerProcess, one: CopyProcess) -> None:
        """The copy notices: the worker may come again."""
        if worker in one.connections:
            del one.connections[worker]
            one.asking.pop(worker.worker_id, None)

    def leave(self, one: CopyProcess, index: int, action: Callable[[], None]) -> None:
        """Do it as soon as all entries up to this one are acknowledged."""
        one.waiting.append((index, action))
        self.let_go(one)

    def let_go(self, one: CopyProcess) -> None:
        ready = [entry for entry in one.waiting if one.copy.may_leave(entry[0])]
        one.waiting = [entry for entry in one.waiting if entry not in ready]
        for _, action in ready:
            action()

    def serve(
        self, one: CopyProcess, worker: WorkerProcess, call: Call, values: dict[str, Any], answer: Callable[[Any], None]
    ) -> None:
        """A worker's call at a primary, which the backup makes too; the answer leaves in time."""
        worker_id = worker.worker_id
        try:
            entry = Entry(one.copy.append(), call, worker_id, **values)
        except OutOfOrder:
            return
        if one.link is not None and one.link.number == one.copy.view.link and one is one.link.ends[0]:
            vectors = tuple(vector.clone() for vector in entry.vectors)
            self.over_link(one.link, "entry", replace(entry, vectors=vectors))
        one.released.begin(worker_id)
        reply = self.make(one, entry)
        one.released.put(one.store.released, entry.index)
        one.store.released = []
        original = reply.reply if isinstance(reply, Duplicate) else reply
        expect(not isinstance(original, Exception), f"worker {worker_id} is refused: {original}")
        if call == Call.TICK and not isinstance(original, Go):
            one.asking[worker_id] = lambda released, at: self.leave(one, at, partial(answer, released))
        elif call == Call.PULL:
            self.leave(one, entry.index - 1, partial(answer, one.store.center.clone()))
        else:
            self.leave(one, entry.index, partial(answer, original))
        for other in [other for other in one.asking if other in one.released]:
            one.asking.pop(other)(*one.released.take(other))

    def make(self, one: CopyProcess, entry: Entry) -> Any:
        """The call, on whatever copy; a push and a tick count once."""
        store, worker_id, key = one.store, entry.worker_id, (entry.call, entry.worker_id, entry.number)
        if entry.call == Call.TICK and not self.ticks_numbered:
            entry = replace(entry, number=0)
        before = store._gate.finished(worker_id)
        try:
            reply = make(store, entry)
        except ManyhandsError as error:
            return error
        finally:
            if not one.copy.is_primary:
                store.released = []
        if entry.call == Call.TICK:
            times = store._gate.finished(worker_id) - before
            expect(times == (key not in one.counted), f"{key} counted {times} times more")
            one.counted.add(key)
        if isinstance(reply, Applied | Held):
            one.counted.add(key)
        return reply

    # -- what must be so ---------------------------------------------------------------------------------------------

    def state(self) -> str:
        return str(self.views.view)

    def check_end(self) -> None:
        if self.end == "lost":
            return
        expect(self.end == "done", f"it stopped at {self.state()}")
        view = self.views.view
        for index in (view.primary, view.backup):
            one = None if index is None else self.copies.get(index)
            if one is not None and one.alive and index in (one.copy.view.primary, one.copy.view.backup):
                self.check_copy(one)

    def check_copy(self, one: CopyProcess) -> None:
        """It has all that was answered, each slice once, and all that any worker saw."""
        center = one.store.center.clone()
        for push in one.store.policy.held:
            center += push.update
        lacking = {
            (worker_id, push) for worker_id, push in self.answered if (Call.PUSH, worker_id, push) not in one.counted
        }
        expect(not lacking, f"(worker, push) {lacking} were answered and are not in the center")
        expect(bool((center >= self.seen).all()), "a worker saw what is not in the center")
        expect(bool((center == 1).all()), f"slices are in the center {center.int().tolist()} times")


class AnswersAtOnce(Copy):
    """Rule 2 out: what a call gave leaves before the backup has it."""

    def may_leave(self, index: int) -> bool:
        return self.is_primary


class TakesOldEntries(Copy):
    """Rule 3 out: a copy makes and acknowledges the calls of a primary in whose place it is."""

    def receive(self, link: int, index: int) -> None:
        if not self.is_primary:
            super().receive(link, index)


class IsCopiedWithTheImage(Copy):
    """Rule 4 out: a new copy is the backup once it has the image, whatever was answered meanwhile."""

    def acknowledge(self, link: int, index: int) -> bool:
        first = not self.waits and link == self.view.link and self.is_primary
        done = super().acknowledge(link, index)
        self._copied_at = None
        return first or done

    def may_leave(self, index: int) -> bool:
        return self.is_primary and (self.view.backup is None or self.acknowledged >= index)


class GoesOnAlone(Copy):
    """Rule 5 out: a primary whose backup does not acknowledge answers all the same, once it has asked for a view."""

    alone = False

    def may_leave(self, index: int) -> bool:
        return self.is_primary and (self.alone or super().may_leave(index))


class KeepsReplies(ReleasedReplies):
    """Rule 6 out: what was given for an earlier call answers a later one."""

    def begin(self, worker_id: int) -> None:
        pass


MUTATIONS: dict[str, dict[str, Any]] = {
    "TICK has no number": {"ticks_numbered": False},
    "rule 2": {"copy": AnswersAtOnce},
    "rule 3": {"copy": TakesOldEntries},
    "rule 4": {"copy": IsCopiedWithTheImage},
    "rule 5": {"copy": GoesOnAlone},
    "rule 6": {"replies": KeepsReplies},
}


def test_some_schedules_keep_all_promises_and_come_everywhere() -> None:
    worlds = list(map(World, range(100)))
    keeps(World.run, worlds)
    assert {world.end for world in worlds} == {"done", "lost"}
    assert all(sum(world.counts[what] for world in worlds) > 10 for what in worlds[0].counts)
    assert max(world.views.view.number for world in worlds) > 5
    assert any(world.views.serving is None for world in worlds)


@pytest.mark.nightly
def test_many_more_schedules_keep_all_promises() -> None:
    keeps(World.run, map(World, range(100, 20_100)))


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_search_finds_a_rule_that_is_left_out(mutation: str) -> None:
    first_broken(World.run, (World(seed, **MUTATIONS[mutation]) for seed in range(10_000)))
