"""Searches random schedules of deaths, cuts and late messages for one in which copies of a shard break a promise.

Workers lease slices from the driver, push each into the center and finish a tick; a slice's push adds one to its own
element. Messages of one connection stay in order. Copies and workers die or are cut off from the driver, connections break.
The driver judges late, fences lost workers, and hands what they did not push out again. `World(seed).run()` repeats a failure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator
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
from manyhands.server.replication.views import CopiesChanged, LostShard, NewView, ShardView, StartCopy, StopCopy, Views
from manyhands.server.rules import make_rule
from manyhands.server.store import Duplicate, Go, Store

SLICES = 10
SILENCE_S, PATIENCE_S = 1.0, 0.5
WHATS = (
    "kill_copy",
    "kill_copy",
    "kill_worker",
    "kill_worker",
    "cut_worker",
    "cut_copies",
    "cut_connection",
    "cut_primary",
)


@dataclass(frozen=True)
class Rules:
    """What a mutation of the search takes out."""

    copy: type[Copy] = Copy
    store: type[Store] = Store
    replies: type[ReleasedReplies] = ReleasedReplies
    fence_at_server: bool = True
    ticks_numbered: bool = True
    counts_at_server: bool = True  # the driver goes by what the shard has, not by what the worker has heard
    goes_on_alone: bool = False


@dataclass(eq=False)
class CopyProcess:
    """One process of a copy of the shard."""

    index: int
    copy: Copy
    store: Store
    released: ReleasedReplies
    alive: bool = True
    cut_off: bool = False  # from the driver
    connections: dict[int, WorkerProcess] = field(default_factory=dict)
    link: Link | None = None
    waiting: list[tuple[int, Callable[[], None]]] = field(default_factory=list)  # (index, what leaves then)
    asking: dict[int, Callable[[Any, int], None]] = field(default_factory=dict)  # worker id -> who waits for a release
    counted: set[tuple[str, int, int, int]] = field(default_factory=set)  # calls that are to count once


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
    number: int  # of the worker id's processes
    alive: bool = True
    cut_off: bool = False  # from the driver: neither hears the other
    to: CopyProcess | None = None
    view: int = -1
    ready: bool = False  # connected, and active there where it was before
    active: bool = False
    sequence: int = 0
    heard: int = 0  # pushes that were answered
    leased: int | None = None
    program: Generator[Request | None, Any, None] | None = None
    request: Request | None = None
    serial: int = 0  # of its requests: what answers an older one is dropped


class World(chaos.World):
    BOUND_S = 200.0

    def __init__(self, seed: int, rules: Rules = Rules()) -> None:
        super().__init__(seed)
        draw, self.rules = self.random, rules
        self.workers = draw.randint(1, 3)
        self.bound = draw.choice((None, 0, 1, 2))
        self.views = Views([0, 1])
        self.copies: dict[int, CopyProcess] = {}
        self.processes: dict[int, WorkerProcess] = {}
        self.all_workers: list[WorkerProcess] = []
        self.left = list(range(SLICES))  # slices that nobody has
        self.leases: dict[tuple[int, int], list[tuple[int, int]]] = {}  # process -> (its push, slice)
        self.fencing: dict[int, int] = {}  # worker id -> its lost process
        self.requests = list[tuple[float, WorkerProcess, int]]()  # for a connection: since when, a view after this one
        self.idle: list[WorkerProcess] = []  # who gets a slice when one comes back
        self.answered: set[tuple[int, int, int]] = set()  # (worker id, process, push)
        self.seen = torch.zeros(SLICES)  # the newest center that any worker saw, element by element
        self.harmed: list[tuple[float, int]] = []  # copies to which something happened
        self.counts = dict.fromkeys(("views", "fenced", "again", "answers"), 0)
        for index in (0, 1):
            self.start_copy(index)
        self.decide()
        for worker_id in range(self.workers):
            self.start_worker(worker_id, 0)
        self.befall((0, 1, 1, 2, 2, 3, 4), 4, WHATS)

    # -- what befalls ------------------------------------------------------------------------------------------------

    def living(self) -> list[CopyProcess]:
        return [one for one in self.copies.values() if one.alive]

    def kill_copy(self) -> None:
        if living := self.living():
            self.die(self.random.choice(living))

    def die(self, one: CopyProcess) -> None:
        if not one.alive:
            return
        one.alive = False
        self.harmed.append((self.now, one.index))
        for process in self.all_workers:
            if process.to is one:
                self.after(self.late(), partial(self.lost_connection, process, one))
        if one.link is not None:
            self.break_link(one.link)
        self.after(self.late() + 0.01, partial(self.lost_copy, one))

    def cut_primary(self) -> None:
        """It lives, serves, and the driver takes it for lost."""
        one = self.copies.get(self.views.view.primary)
        if one is None or not one.alive or self.end:
            return
        one.cut_off = True
        self.harmed.append((self.now, one.index))
        self.after(SILENCE_S, partial(self.lost_copy, one))
        self.after(SILENCE_S + self.random.uniform(0, 3), partial(self.die, one))  # it ends itself

    def cut_copies(self) -> None:
        links = [one.link for one in self.living() if one.link is not None and one.link.open]
        if links:
            self.harmed += [(self.now, end.index) for end in links[0].ends]
            self.break_link(self.random.choice(links))

    def cut_connection(self) -> None:
        connected = [one for one in self.processes.values() if one.alive and one.to is not None]
        if connected:
            process = self.random.choice(connected)
            to = process.to
            assert to is not None
            self.close_connection(process, to)
            self.after(self.late(), partial(self.lost_connection, process, to))

    def any_worker(self) -> WorkerProcess | None:
        living = [one for one in self.processes.values() if one.alive and not one.cut_off]
        return self.random.choice(living) if living and not self.end else None

    def kill_worker(self) -> None:
        if process := self.any_worker():
            self.end_worker(process)
            self.after(self.late() + 0.01, partial(self.lost_worker, process))

    def cut_worker(self) -> None:
        """It lives, and goes on with its slice as long as its shard answers; the driver takes it for lost."""
        if process := self.any_worker():
            process.cut_off = True
            self.after(SILENCE_S * self.random.random(), partial(self.lost_worker, process))
            self.after(SILENCE_S + self.random.uniform(0, 5), partial(self.end_worker, process))

    def end_worker(self, process: WorkerProcess) -> None:
        process.alive = False
        if process.to is not None:
            self.after(self.late(), partial(self.close_connection, process, process.to))

    # -- the driver --------------------------------------------------------------------------------------------------

    def to_copy(self, one: CopyProcess, deliver: Callable[[], None]) -> None:
        self.send(one, lambda: deliver() if one.alive and not one.cut_off else None)

    def to_driver(self, one: CopyProcess, deliver: Callable[[], None]) -> None:
        def arrive() -> None:
            if self.copies.get(one.index) is one and not one.cut_off and not self.end:
                deliver()
                self.decide()

        self.after(self.late(), arrive)

    def start_copy(self, index: int) -> None:
        store = self.rules.store(make_rule(ServerSpec(rule="add")), self.workers, self.bound)
        self.copies[index] = CopyProcess(index, self.rules.copy(index), store, self.rules.replies())

    def lost_copy(self, one: CopyProcess) -> None:
        if self.copies.get(one.index) is one and not self.end:
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
                        if not self.end:
                            self.start_copy(index)
                            self.views.started(index)
                            self.decide()

                    self.after(self.random.uniform(0, 0.5), start)
                case StopCopy(index):
                    stopped = self.copies.pop(index, None)
                    if stopped is not None:
                        self.after(self.late(), partial(self.die, stopped))
                case LostShard():
                    expect(len(self.harmed) >= 2, f"the shard is lost, and this happened: {self.harmed}")
                    self.end = "lost"
                case CopiesChanged():
                    pass
        self.answer_requests()

    def tell(self, view: ShardView) -> None:
        ends = [self.copies.get(index) for index in (view.primary, view.other) if index is not None]
        link = None
        if view.recruit is not None and all(ends) and len(ends) == 2:
            link = Link(view.link, (ends[0], ends[1]))  # type: ignore[arg-type]
        for one in ends:
            if one is not None:
                self.to_copy(one, partial(self.take_view, one, view, link))
        for worker_id, number in self.fencing.items():
            self.send_fence(worker_id, number)

    def answer_requests(self) -> None:
        """A worker is connected to the primary of a view after the one that it knows, or after a while to the same."""
        serving = self.views.serving
        if serving is None:
            return
        for request in list(self.requests):
            since, process, view = request
            primary = self.copies.get(serving.primary)
            fenced = process.worker_id in self.fencing
            if primary is None or fenced or (view >= serving.number and self.now - since < PATIENCE_S - 1e-6):
                continue
            self.requests.remove(request)
            if process.alive and not process.cut_off:
                self.after(self.late(), partial(self.connected, process, primary, serving.number))

    def wants_connection(self, process: WorkerProcess) -> None:
        def arrive() -> None:
            if self.processes.get(process.worker_id) is process:
                self.requests.append((self.now, process, process.view))
                self.answer_requests()
                self.after(PATIENCE_S, self.answer_requests)

        if not process.cut_off:
            self.after(self.late(), arrive)

    def start_worker(self, worker_id: int, number: int) -> None:
        process = self.processes[worker_id] = WorkerProcess(worker_id, number)
        self.all_workers.append(process)
        self.leases[worker_id, number] = []
        self.after(self.random.uniform(0, 0.4), partial(self.wants_connection, process))

    def lost_worker(self, process: WorkerProcess) -> None:
        """Nothing of it is handed out again before the shard says what it has of it."""
        if self.processes.get(process.worker_id) is not process or self.end:
            return
        del self.processes[process.worker_id]
        self.idle = [one for one in self.idle if one is not process]
        self.requests = [one for one in self.requests if one[1] is not process]
        self.fencing[process.worker_id] = process.number
        self.counts["fenced"] += 1
        process.cut_off = True  # the driver hears nothing of it any more
        self.send_fence(process.worker_id, process.number)

    def send_fence(self, worker_id: int, number: int) -> None:
        primary = self.copies.get(self.views.view.primary)
        if primary is not None:
            self.to_copy(primary, partial(self.fence, primary, worker_id, number))

    def closed(self, worker_id: int, number: int, applied: int, heard: int) -> None:
        if self.fencing.get(worker_id) != number:
            return
        del self.fencing[worker_id]
        until = applied if self.rules.counts_at_server else heard
        for push, one in self.leases[worker_id, number]:
            if push > until:
                self.left.append(one)
                self.counts["again"] += 1
        self.start_worker(worker_id, number + 1)
        for process in self.idle:
            self.after(0.0, partial(self.lease, process))
        self.idle = []

    def lease(self, process: WorkerProcess) -> None:
        """It asks the driver for a slice, and says how many pushes were answered."""

        def arrive() -> None:
            if self.processes.get(process.worker_id) is not process or self.end:
                return
            process.leased = None
            held = [one for one in self.processes.values() if one.leased is not None]
            if self.left:
                one = process.leased = self.left.pop(self.random.randrange(len(self.left)))
                self.leases[process.worker_id, process.number].append((process.sequence + 1, one))
                self.after(self.late(), partial(self.go_on, process, one))
            elif not held and not self.fencing:  # all are pushed, as far as it knows: who holds one has not asked again
                self.end = "done"
            elif process.active:
                self.after(self.late(), partial(self.go_on, process))
            else:
                self.idle.append(process)

        if process.alive and not process.cut_off:
            self.after(self.late(), arrive)

    # -- a worker ----------------------------------------------------------------------------------------------------

    def work(self, process: WorkerProcess) -> Generator[Request | None, Any, None]:
        """What it asks its shard, and the driver (None): a slice comes of that, or nothing while others may leave some."""
        activate, ticks = (Call.ACTIVATE, {"number": process.number}), 0
        yield Call.INITIALIZE, {}
        yield activate
        process.active = True
        while True:
            one = yield None
            if one is None:
                process.active = False
                yield Call.DEACTIVATE, {}
                continue
            if not process.active:
                yield activate
                process.active = True
            self.seen = torch.maximum(self.seen, (yield Call.PULL, {}))
            process.sequence += 1
            update = torch.zeros(SLICES)
            update[one] = 1
            yield Call.PUSH, {"number": process.sequence, "vectors": (update,)}
            process.heard += 1
            self.answered.add((process.worker_id, process.number, process.sequence))
            ticks += 1
            if self.bound is not None:
                yield Call.TICK, {"number": ticks}

    def go_on(self, process: WorkerProcess, value: Any = None) -> None:
        """With the answer to what it asked last."""
        if not process.alive:
            return
        assert process.program is not None
        process.request = process.program.send(value)
        if process.request is None:
            self.lease(process)
        else:
            self.resend(process)

    def connected(self, process: WorkerProcess, to: CopyProcess, view: int) -> None:
        if not process.alive or process.cut_off:
            return
        if not to.alive:
            self.lost_connection(process, to)
            return
        process.to, process.view = to, view
        self.to_copy(to, lambda: to.connections.update({process.worker_id: process}))  # the driver hands it its end
        if process.active:
            self.post(process, Call.ACTIVATE, {"number": process.number}, lambda _: self.make_ready(process))
        else:
            self.make_ready(process)

    def make_ready(self, process: WorkerProcess) -> None:
        process.ready = True
        if process.program is None:
            process.program = self.work(process)
            self.go_on(process)
        else:
            self.resend(process)

    def resend(self, process: WorkerProcess) -> None:
        if process.request is not None and process.ready:
            self.post(process, *process.request, partial(self.go_on, process))

    def post(self, process: WorkerProcess, call: Call, values: dict[str, Any], answered: Callable[[Any], None]) -> None:
        process.serial += 1
        serial, to = process.serial, process.to
        if to is None or not process.alive:
            return

        def arrive() -> None:
            if to.alive and to.connections.get(process.worker_id) is process and process.to is to:
                self.serve(to, process, call, values, lambda value: self.after(self.late(), partial(back, value)))
            elif to.alive and process.to is to and process.alive:
                self.after(0.05, arrive)  # it waits in the socket until that end is taken

        def back(value: Any) -> None:
            if process.alive and process.serial == serial and process.to is to:
                self.counts["answers"] += 1
                answered(value)

        self.send(process, arrive)

    def lost_connection(self, process: WorkerProcess, to: CopyProcess) -> None:
        if process.alive and process.to in (to, None):
            process.to, process.ready = None, False
            process.serial += 1
            self.wants_connection(process)

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
            for process in list(one.connections.values()):
                self.close_connection(process, one)
                self.after(self.late(), partial(self.lost_connection, process, one))
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
            if self.rules.goes_on_alone:
                one.copy.alone = True  # type: ignore[attr-defined]
                self.let_go(one)

    def close_connection(self, process: WorkerProcess, one: CopyProcess) -> None:
        """The copy notices: the worker may come again."""
        if one.connections.get(process.worker_id) is process:
            del one.connections[process.worker_id]
            one.asking.pop(process.worker_id, None)

    def fence(self, one: CopyProcess, worker_id: int, number: int) -> None:
        if not one.copy.is_primary:
            return
        heard, process = 0, one.connections.get(worker_id)
        if process is not None and process.number == number:
            heard = process.heard
            if self.rules.fence_at_server:
                self.close_connection(process, one)

        def leaves(applied: Any, index: int) -> None:
            closed = partial(self.closed, worker_id, number, applied, heard)
            self.leave(one, index, partial(self.to_driver, one, closed))

        if self.rules.fence_at_server:
            self.call(one, Call.FENCE, worker_id, {"number": number}, leaves)
        else:
            state = one.store._states[worker_id]
            leaves(state.sequence if state.generation == number else 0, one.copy.index)

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
        self,
        one: CopyProcess,
        process: WorkerProcess,
        call: Call,
        values: dict[str, Any],
        answer: Callable[[Any], None],
    ) -> None:
        worker_id = process.worker_id
        if call == Call.PULL and not one.store.initialized:
            return

        def replied(reply: Any, index: int) -> None:
            original = reply.reply if isinstance(reply, Duplicate) else reply
            if call == Call.TICK and not isinstance(original, Go):
                one.asking[worker_id] = lambda released, at: self.leave(one, at, partial(answer, released))
                self.take_released(one)
            elif isinstance(original, Exception):
                lost = self.processes.get(worker_id) is not process
                expect(lost, f"worker {worker_id}, which nobody lost, is refused: {original}")
            elif call == Call.PULL:
                self.leave(one, index - 1, partial(answer, one.store.center.clone()))
            else:
                self.leave(one, index, partial(answer, original))

        if call == Call.INITIALIZE:
            values = {"vectors": (torch.zeros(SLICES),)}
        self.call(one, call, worker_id, values, replied)

    def call(
        self, one: CopyProcess, call: Call, worker_id: int, values: dict[str, Any], replied: Callable[[Any, int], None]
    ) -> None:
        if call == Call.DEACTIVATE and not one.copy.is_primary:
            return
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
        replied(reply, entry.index)
        self.take_released(one)

    def take_released(self, one: CopyProcess) -> None:
        for worker_id in [worker_id for worker_id in one.asking if worker_id in one.released]:
            one.asking.pop(worker_id)(*one.released.take(worker_id))

    def make(self, one: CopyProcess, entry: Entry) -> Any:
        """The call, on whatever copy; a push and a tick count once."""
        store, worker_id, number = one.store, entry.worker_id, entry.number
        if entry.call == Call.TICK and not self.rules.ticks_numbered:
            entry = replace(entry, number=0)
        generation = store._states[worker_id].generation if worker_id >= 0 else -1
        before = store._gate.finished(worker_id)
        try:
            reply = make(store, entry)
        except ManyhandsError as error:
            return error
        finally:
            if not one.copy.is_primary:
                store.released = []
        key = (entry.call.name, worker_id, generation, number)
        if entry.call == Call.TICK:
            times = store._gate.finished(worker_id) - before
            expect(times == (key not in one.counted), f"tick {number} of worker {worker_id} counted {times} times more")
            one.counted.add(key)
        if isinstance(reply, Applied | Held):
            one.counted.add(key)
        return reply

    # -- what must be so ---------------------------------------------------------------------------------------------

    def state(self) -> str:
        return f"{self.views.view}, {self.left} left"

    def check_end(self) -> None:
        if self.end == "lost":
            return
        expect(self.end == "done", f"it stopped with {self.left} left, {self.views.view}")
        view = self.views.view
        for index in (view.primary, view.backup):
            one = None if index is None else self.copies.get(index)
            if one is None or not one.alive or one.copy.view.number < 0:
                continue
            if index in (one.copy.view.primary, one.copy.view.backup):
                self.check_copy(one)

    def check_copy(self, one: CopyProcess) -> None:
        """It has all that was answered, each slice once, and all that any worker saw."""
        center = one.store.center.clone()
        for push in one.store.policy.held:
            center += push.update
        for worker_id, number, push in self.answered:
            has = ("PUSH", worker_id, number, push) in one.counted
            expect(has, f"push {push} of worker {worker_id}, process {number}, was answered and is not in the center")
        expect(bool((center >= self.seen).all()), "a worker saw what is not in the center")
        expect(bool((center == 1).all()), f"slices are in the center {center.int().tolist()} times")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


MUTATIONS = {
    "the fence at the server": Rules(fence_at_server=False),
    "TICK has no number": Rules(ticks_numbered=False),
    "the worker's own count of answers": Rules(counts_at_server=False),
    "rule 2": Rules(copy=AnswersAtOnce),
    "rule 3": Rules(copy=TakesOldEntries),
    "rule 4": Rules(copy=IsCopiedWithTheImage),
    "rule 5": Rules(copy=GoesOnAlone, goes_on_alone=True),
    "rule 6": Rules(replies=KeepsReplies),
}


def check(seed: int, rules: Rules = Rules()) -> World:
    world = World(seed, rules)
    world.run()
    return world


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
    found = first_broken(World.run, (World(seed, MUTATIONS[mutation]) for seed in range(10_000)))
    World(found.seed).run()
