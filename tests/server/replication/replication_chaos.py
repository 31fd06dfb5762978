"""A world of one shard's copies, workers and the driver: a seed draws what happens, and what must be so is checked.

Workers lease slices from the driver, push each into the center and finish a tick; a slice's push adds one to its own
element. Messages are late by chance; those of one connection stay in order. Copies and workers die or are cut off from
the driver, connections break. The driver judges late, fences lost workers, and hands what they did not push out again.
"""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from manyhands.errors import ManyhandsError
from manyhands.server.base import ServerSpec
from manyhands.server.pushes import Applied, Held
from manyhands.server.replication.log import Call, Copy, Entry, OutOfOrder, ReleasedReplies, make
from manyhands.server.replication.views import CopiesChanged, LostShard, NewView, ShardView, StartCopy, StopCopy, Views
from manyhands.server.rules import make_rule
from manyhands.server.store import Duplicate, Go, Store

SLICES = 10
BOUND_S = 200.0  # of virtual time: more than all that is planned, and all that is waited for
LATE = (0.001, 0.01, 0.05, 0.3)
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


class Broken(AssertionError):
    """A promise was broken."""


def expect(holds: object, message: str) -> None:
    if not holds:
        raise Broken(message)


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
    alive: bool = True
    cut_off: bool = False  # from the driver
    connections: dict[int, WorkerProcess] = field(default_factory=dict)
    outgoing: CopyProcess | None = None  # whom it sends its log
    link: Link | None = None
    waiting: list[tuple[int, Callable[[], None]]] = field(default_factory=list)  # (index, what leaves then)
    released: ReleasedReplies = field(default_factory=ReleasedReplies)
    asking: dict[int, Callable[[Any, int], None]] = field(default_factory=dict)  # worker id -> who waits for a release
    counted: set[tuple[str, int, int, int]] = field(default_factory=set)  # calls that are to count once


@dataclass(eq=False)
class Link:
    """The connection from a primary to its backup or to a new copy."""

    number: int
    ends: tuple[CopyProcess, CopyProcess]
    open: bool = True
    arrived: list[tuple[str, Any]] = field(default_factory=list)  # before the other end had its view
    sent_at: float = 0.0
    back_at: float = 0.0


@dataclass(eq=False)
class WorkerProcess:
    worker_id: int
    number: int  # of the worker id's processes
    alive: bool = True
    cut_off: bool = False  # from the driver: neither hears the other
    to: CopyProcess | None = None
    view: int = -1
    begun: bool = False
    ready: bool = False  # connected, and active there where it was before
    active: bool = False
    sequence: int = 0
    ticks: int = 0
    heard: int = 0  # pushes that were answered
    leased: int | None = None
    request: tuple[Call, dict[str, Any]] | None = None
    answer: Callable[[Any], None] | None = None
    serial: int = 0  # of its requests: what answers an older one is dropped
    sent_at: float = 0.0


class World:
    def __init__(self, seed: int, rules: Rules = Rules()) -> None:
        self.random = draw = random.Random(seed)
        self.rules = rules
        self.now, self.order, self.queue = 0.0, 0, list[tuple[float, int, Callable[[], None]]]()
        self.workers = draw.randint(1, 3)
        self.bound = draw.choice((None, 0, 1, 2))
        self.views = Views([0, 1])
        self.copies: dict[int, CopyProcess] = {}
        self.all_copies: list[CopyProcess] = []
        self.processes: dict[int, WorkerProcess] = {}
        self.all_workers: list[WorkerProcess] = []
        self.left = list(range(SLICES))  # slices that nobody has
        self.leases: dict[tuple[int, int], list[tuple[int, int]]] = {}  # process -> (its push, slice)
        self.fencing: dict[int, int] = {}  # worker id -> its lost process
        self.requests: list[
            tuple[float, WorkerProcess, int]
        ] = []  # for a connection: since when, a view after this one
        self.idle: list[WorkerProcess] = []  # who gets a slice when one comes back
        self.answered: set[tuple[int, int, int]] = set()  # (worker id, process, push)
        self.seen = torch.zeros(SLICES)  # the newest center that any worker saw, element by element
        self.harmed: list[tuple[float, int]] = []  # copies to which something happened
        self.out_of_touch = 0
        self.end = ""
        self.counts = dict.fromkeys(("views", "fenced", "again", "answers"), 0)
        self.driver_sent: dict[int, float] = {}
        for index in (0, 1):
            self.start_copy(index)
        self.decide()
        for worker_id in range(self.workers):
            self.start_worker(worker_id, 0)
        for _ in range(draw.choice((0, 1, 1, 2, 2, 3, 4))):
            self.after(draw.uniform(0, 4), getattr(self, draw.choice(WHATS)))

    def run(self) -> None:
        while self.queue and not self.end:
            self.now, _, action = heapq.heappop(self.queue)
            expect(self.now <= BOUND_S, f"no end by {self.now:.0f} s: {self.views.view}, {self.left} left")
            action()
        self.check_end()

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.order += 1
        heapq.heappush(self.queue, (self.now + seconds, self.order, action))

    def late(self) -> float:
        return self.random.choice(LATE) * self.random.random()

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
                self.after(self.late(), lambda process=process: self.lost_connection(process, one))
        if one.link is not None:
            self.break_link(one.link)
        self.after(self.late() + 0.01, lambda: self.lost_copy(one))

    def cut_primary(self) -> None:
        """It lives, serves, and the driver takes it for lost."""
        one = self.copies.get(self.views.view.primary)
        if one is None or not one.alive or self.end:
            return
        one.cut_off = True
        self.harmed.append((self.now, one.index))
        self.after(SILENCE_S, lambda: self.lost_copy(one))
        self.after(SILENCE_S + self.random.uniform(0, 3), lambda: self.die(one))  # it ends itself

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
            self.after(self.late(), lambda: self.lost_connection(process, to))

    def kill_worker(self) -> None:
        living = [one for one in self.processes.values() if one.alive and not one.cut_off]
        if living and not self.end:
            process = self.random.choice(living)
            self.end_worker(process)
            self.after(self.late() + 0.01, lambda: self.lost_worker(process))

    def cut_worker(self) -> None:
        """It lives, and goes on with its slice as long as its shard answers; the driver takes it for lost."""
        living = [one for one in self.processes.values() if one.alive and not one.cut_off]
        if living and not self.end:
            process = self.random.choice(living)
            process.cut_off = True
            self.after(SILENCE_S * self.random.random(), lambda: self.lost_worker(process))
            self.after(SILENCE_S + self.random.uniform(0, 5), lambda: self.end_worker(process))

    def end_worker(self, process: WorkerProcess) -> None:
        process.alive = False
        if process.to is not None:
            to = process.to
            self.after(self.late(), lambda: self.close_connection(process, to))

    # -- the driver --------------------------------------------------------------------------------------------------

    def to_copy(self, one: CopyProcess, deliver: Callable[[], None]) -> None:
        at = max(self.now + self.late(), self.driver_sent.get(id(one), 0.0))
        self.driver_sent[id(one)] = at

        def arrive() -> None:
            if one.alive and not one.cut_off:
                deliver()

        self.after(at - self.now, arrive)

    def to_driver(self, one: CopyProcess, deliver: Callable[[], None]) -> None:
        def arrive() -> None:
            if self.copies.get(one.index) is one and not one.cut_off and not self.end:
                deliver()
                self.decide()

        self.after(self.late(), arrive)

    def start_copy(self, index: int) -> None:
        store = self.rules.store(make_rule(ServerSpec(rule="add")), self.workers, self.bound)
        one = CopyProcess(index, self.rules.copy(index), store, released=self.rules.replies())
        self.copies[index] = one
        self.all_copies.append(one)

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
                        self.after(self.late(), lambda stopped=stopped: self.die(stopped))
                case LostShard():
                    times = [(at, index) for at, index in self.harmed]
                    expect(len(times) >= 2, f"the shard is lost, and this happened: {times}")
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
                self.to_copy(one, lambda one=one: self.take_view(one, view, link))
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
                self.after(
                    self.late(),
                    lambda process=process, primary=primary: self.connected(process, primary, serving.number),
                )

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
        self.after(self.random.uniform(0, 0.4), lambda: self.wants_connection(process))

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
            self.to_copy(primary, lambda: self.fence(primary, worker_id, number))

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
            self.after(0.0, lambda process=process: self.lease(process))
        self.idle = []

    def over(self) -> bool:
        """All slices are pushed, as far as the driver knows: who holds one has not asked again."""
        held = [one for one in self.processes.values() if one.leased is not None]
        return not self.left and not held and not self.fencing

    def lease(self, process: WorkerProcess) -> None:
        """It asks the driver for a slice, and says how many pushes were answered."""

        def arrive() -> None:
            if self.processes.get(process.worker_id) is not process or self.end:
                return
            process.leased = None
            if self.left:
                one = self.left.pop(self.random.randrange(len(self.left)))
                process.leased = one
                self.leases[process.worker_id, process.number].append((process.sequence + 1, one))
                self.after(self.late(), lambda: self.push(process, one))
            elif self.over():
                self.end = "done"
            elif process.active:
                self.after(self.late(), lambda: self.ask(process, Call.DEACTIVATE, {}, lambda _: self.lease(process)))
            else:
                self.idle.append(process)

        if process.alive and not process.cut_off:
            self.after(self.late(), arrive)

    # -- a worker ----------------------------------------------------------------------------------------------------

    def connected(self, process: WorkerProcess, to: CopyProcess, view: int) -> None:
        if not process.alive or process.cut_off:
            return
        if not to.alive:
            self.lost_connection(process, to)
            return
        process.to, process.view = to, view

        def use() -> None:
            to.connections[process.worker_id] = process

        self.to_copy(to, use)  # the driver hands it its end
        if process.active:
            self.post(process, Call.ACTIVATE, {"number": process.number}, lambda _: self.make_ready(process))
        else:
            self.make_ready(process)

    def make_ready(self, process: WorkerProcess) -> None:
        process.ready = True
        if not process.begun:
            process.begun = True
            self.begin(process)
        else:
            self.resend(process)

    def begin(self, process: WorkerProcess) -> None:
        def active(_: Any) -> None:
            process.active = True
            self.lease(process)

        def initialized(_: Any) -> None:
            self.ask(process, Call.ACTIVATE, {"number": process.number}, active)

        self.ask(process, Call.INITIALIZE, {}, initialized)

    def ask(self, process: WorkerProcess, call: Call, values: dict[str, Any], answer: Callable[[Any], None]) -> None:
        process.request, process.answer = (call, values), answer
        if call == Call.DEACTIVATE:
            process.active = False
        self.resend(process)

    def resend(self, process: WorkerProcess) -> None:
        if process.request is not None and process.ready:
            call, values = process.request

            def answered(value: Any) -> None:
                answer, process.request, process.answer = process.answer, None, None
                assert answer is not None
                answer(value)

            self.post(process, call, values, answered)

    def post(self, process: WorkerProcess, call: Call, values: dict[str, Any], answered: Callable[[Any], None]) -> None:
        process.serial += 1
        serial, to = process.serial, process.to
        if to is None or not process.alive:
            return

        def arrive() -> None:
            if to.alive and to.connections.get(process.worker_id) is process and process.to is to:
                self.serve(to, process, call, values, lambda value: self.after(self.late(), lambda: back(value)))
            elif to.alive and process.to is to and process.alive:
                self.after(0.05, arrive)  # it waits in the socket until that end is taken

        def back(value: Any) -> None:
            if process.alive and process.serial == serial and process.to is to:
                self.counts["answers"] += 1
                answered(value)

        process.sent_at = max(self.now + self.late(), process.sent_at)
        self.after(process.sent_at - self.now, arrive)

    def lost_connection(self, process: WorkerProcess, to: CopyProcess) -> None:
        if process.alive and process.to in (to, None):
            process.to, process.ready = None, False
            process.serial += 1
            self.wants_connection(process)

    def push(self, process: WorkerProcess, one: int) -> None:
        if not process.alive:
            return
        if not process.active:

            def active(_: Any) -> None:
                process.active = True
                self.push(process, one)

            self.ask(process, Call.ACTIVATE, {"number": process.number}, active)
            return

        def pulled(value: Any) -> None:
            self.see(value)
            process.sequence += 1
            update = torch.zeros(SLICES)
            update[one] = 1
            self.ask(process, Call.PUSH, {"number": process.sequence, "vectors": (update,)}, pushed)

        def pushed(_: Any) -> None:
            process.heard += 1
            self.answered.add((process.worker_id, process.number, process.sequence))
            process.ticks += 1
            if self.bound is None:
                self.lease(process)
            else:
                self.ask(process, Call.TICK, {"number": process.ticks}, lambda _: self.lease(process))

        self.ask(process, Call.PULL, {}, pulled)

    def see(self, center: torch.Tensor) -> None:
        self.seen = torch.maximum(self.seen, center)

    # -- a copy ------------------------------------------------------------------------------------------------------

    def take_view(self, one: CopyProcess, view: ShardView, link: Link | None) -> None:
        if not one.copy.take_view(view):
            return
        if link is not None and one in link.ends:
            one.link = link
            if one is link.ends[0]:
                self.send_image(one, link)
            elif link.open:
                arrived, link.arrived = link.arrived, []
                for kind, value in arrived:
                    self.receive(one, link, kind, value)
            if not link.open:
                self.broken_link(one, link)
        if not one.copy.is_primary:
            for process in list(one.connections.values()):
                self.close_connection(process, one)
                self.after(self.late(), lambda process=process: self.lost_connection(process, one))
            one.waiting.clear()
            one.asking.clear()
        self.let_go(one)

    def send_image(self, one: CopyProcess, link: Link) -> None:
        vectors, numbers = one.store.image()
        image = {name: vector.clone() for name, vector in vectors.items()}, json.dumps(numbers)
        self.send(link, "image", (one.copy.index, *image, set(one.counted)))

    def send(self, link: Link, kind: str, value: Any) -> None:
        other = link.ends[1]

        def arrive() -> None:
            if not other.alive or (not link.open and self.random.random() < 0.5):
                return
            if other.copy.view.number < link.number:
                link.arrived.append((kind, value))
            else:
                self.receive(other, link, kind, value)

        link.sent_at = max(self.now + self.late(), link.sent_at)
        if link.open:
            self.after(link.sent_at - self.now, arrive)

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
        self.acknowledge(link, index)

    def acknowledge(self, link: Link, index: int) -> None:
        primary = link.ends[0]

        def arrive() -> None:
            if not primary.alive or not link.open:
                return
            try:
                if primary.copy.acknowledge(link.number, index):
                    self.to_driver(primary, lambda: self.views.copied(link.number))
            except OutOfOrder:
                return
            self.let_go(primary)

        link.back_at = max(self.now + self.late(), link.back_at)
        if link.open:
            self.after(link.back_at - self.now, arrive)

    def break_link(self, link: Link) -> None:
        link.open = False
        for one in link.ends:
            if one.alive and one.link is link:
                self.after(self.late(), lambda one=one: self.broken_link(one, link))

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
        heard = 0
        process = one.connections.get(worker_id)
        if process is not None and process.number == number:
            heard = process.heard
            if self.rules.fence_at_server:
                del one.connections[worker_id]
                one.asking.pop(worker_id, None)
        call = Call.FENCE
        values = {"number": number}

        def leaves(applied: Any, index: int) -> None:
            said = lambda: self.to_driver(one, lambda: self.closed(worker_id, number, applied, heard))  # noqa: E731
            self.leave(one, index, said)

        if self.rules.fence_at_server:
            self.call(one, call, worker_id, values, leaves)
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
                one.asking[worker_id] = lambda released, at: self.leave(one, at, lambda: answer(released))
                self.take_released(one)
            elif isinstance(original, Exception):
                lost = self.processes.get(worker_id) is not process
                expect(lost, f"worker {worker_id}, which nobody lost, is refused: {original}")
            elif call == Call.PULL:
                center = one.store.center.clone()
                self.leave(one, index - 1, lambda: answer(center))
            else:
                self.leave(one, index, lambda: answer(original))

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
            self.send(one.link, "entry", replace(entry, vectors=vectors))
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
        store, worker_id, kind = one.store, entry.worker_id, entry.call.name
        number = entry.number
        if entry.call == Call.TICK and not self.rules.ticks_numbered:
            entry = Entry(entry.index, entry.call, worker_id, 0, entry.weight, entry.bits)
        generation = store._states[worker_id].generation if worker_id >= 0 else -1
        before = store._gate.finished(worker_id)
        try:
            reply = make(store, entry)
        except ManyhandsError as error:
            return error
        finally:
            if not one.copy.is_primary:
                store.released = []
        if kind == "TICK":
            times = store._gate.finished(worker_id) - before
            key = (kind, worker_id, generation, number)
            expect(times == (key not in one.counted), f"tick {number} of worker {worker_id} counted {times} times more")
            one.counted.add(key)
        if isinstance(reply, Applied | Held):
            one.counted.add(("PUSH", worker_id, generation, number))
        return reply

    # -- what must be so ---------------------------------------------------------------------------------------------

    def check_end(self) -> None:
        if self.end == "lost":
            return
        expect(self.end == "done", f"it stopped with {self.left} left, {self.views.view}")
        view = self.views.view
        for index in (view.primary, view.backup):
            one = None if index is None else self.copies.get(index)
            if (
                one is not None
                and one.alive
                and one.copy.view.number >= 0
                and index in (one.copy.view.primary, one.copy.view.backup)
            ):
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


def failure_of(seed: int, rules: Rules = Rules()) -> str:
    """What is broken in the world of this seed, "" where nothing is."""
    try:
        World(seed, rules).run()
    except Broken as broken:
        return str(broken)
    return ""
