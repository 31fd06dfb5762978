"""One simulated shard: a real store behind a queue; messages to it take time and can be lost."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from manyhands.engines.sim.timeline import Due, Future, Timeline
from manyhands.errors import ManyhandsError, PeerLost
from manyhands.server.in_process import HELD, NO_LOAD, Act, Load
from manyhands.server.pushes import Applied, Dropped
from manyhands.server.replication.log import Copy
from manyhands.server.store import Store


@dataclass(slots=True, eq=False)
class Request:
    """What a worker asks one shard, the same however often it is sent; and the answer, once there is one."""

    shard: int
    act: Act
    load: Load = NO_LOAD
    call: ShardCall = field(init=False)
    sends: int = field(init=False)  # bytes to the shard
    answer: Any = None
    is_answered: bool = False
    handled_at: float | None = None
    held_s: float = 0.0
    due: Due | None = None  # when it is sent again
    quiet_from: float = 0.0  # when its first copy, or its first answer, was to arrive: its last sign of life

    def __post_init__(self) -> None:
        self.sends = self.load.sends[self.shard] if self.load.sends else 0

    @property
    def work(self) -> int:
        """Bytes that the shard goes through."""
        return self.load.work[self.shard] if self.load.work else 0

    @property
    def decode_s(self) -> float:
        """Seconds before that."""
        return self.load.decode_s[self.shard] if self.load.decode_s else 0.0


@dataclass(slots=True, eq=False)
class ShardCall:
    """A worker's call of its server, until all shards have answered."""

    worker: int
    key: tuple[int, float]  # (generation, how many calls before this one): shards distinguish old from new by it
    operation: str
    step: int
    requests: list[Request]
    cell: Future[None]
    missing: set[int] = field(init=False)  # shards
    since: float = field(init=False)

    def __post_init__(self) -> None:
        self.missing, self.since = set(range(len(self.requests))), self.cell.timeline.now
        for request in self.requests:
            request.call = self


Carry = Callable[[int, int, int, Callable[[], None]], float]
"""(source, target, bytes, what to do for each copy that arrives) -> when the message is to arrive."""


class SimShard:
    """Handles requests one at a time, in the order in which they arrive, or were decoded where they bring a payload.

    Each worker's payloads are decoded at the same time as those of others, as by the thread of a connection.

    Copies of a request that was handled get the same answer; for pushes the store says so itself. Copies of a worker's
    older requests are ignored. merge_s: seconds a byte. on_answer: (request, when its answer, now sent, is to arrive).
    """

    def __init__(
        self,
        number: int,
        store: Store,
        workers: int,
        timeline: Timeline,
        carry: Carry,
        merge_s: float,
        on_answer: Callable[[Request, float], None],
        copy: Copy | None = None,
        node: int | None = None,
    ) -> None:
        """copy: of a shard of which there are copies; it serves once `serve` is called. node: of the network."""
        self.number, self.store, self.copy = number, store, copy
        self.node = -1 - number if node is None else node
        self.is_killed = False
        self.moved_at = 0.0  # when it last handled something
        self._timeline, self._carry, self._merge_s, self._on_answer = timeline, carry, merge_s, on_answer
        self._life = 0  # grows when it breaks down and when it is back: what was sent in another life is lost
        self._is_down = copy is not None
        self._leaving: deque[tuple[int, Callable[[], None]]] = deque()
        """(index in the log, what is done once the backup has the calls up to there)"""
        self._free_at = 0.0  # down or paused until then
        self._decoding: list[Request] = []
        self._queue: deque[Request | Callable[[], None]] = deque()
        self._working: Due | None = None  # on the head of the queue
        self._newest: list[tuple[int, float]] = [(-1, 0.0)] * workers  # the key of each worker's newest call here
        self._held: dict[int, Request] = {}  # by worker
        self._early: list[Request] = []  # that wait for the first center
        self._no_center: PeerLost | None = None  # why there will be none

    # -- messages ----------------------------------------------------------------------------------------------------

    def send(self, request: Request) -> float:
        """From its worker to this shard; when it is to arrive."""
        deliver = partial(self._in_this_life, self._life, partial(self._arrive, request))
        return self._carry(request.call.worker, self.node, request.sends, deliver)

    def queue(self, item: Request | Callable[[], None]) -> None:
        """Handle a request, or do what the driver asks for, which is never lost, in turn."""
        self._queue.append(item)
        self._work()

    def holds(self, request: Request) -> bool:
        """Whether it is here, and its answer has to wait for others."""
        return request.handled_at is not None and not request.is_answered

    def has(self, request: Request) -> bool:
        """Whether sending it again is in vain: it is here, and its answer is still to come."""
        return self.holds(request) or request in self._queue or request in self._decoding

    @property
    def slowest(self) -> int | None:
        """The worker that those whose answers are held wait for; None if for anybody."""
        return self.store.slowest_but(self._held)

    def _in_this_life(self, life: int, deliver: Callable[[], None]) -> None:
        if life == self._life:
            deliver()

    def _arrive(self, request: Request) -> None:
        if self._is_down:
            return
        if not request.decode_s:
            self.queue(request)
            return
        self._decoding.append(request)
        done = max(self._timeline.now, self._free_at) + request.decode_s
        self._timeline.at(done, partial(self._in_this_life, self._life, partial(self._decoded, request)))

    def _decoded(self, request: Request) -> None:
        self._decoding.remove(request)
        self.queue(request)

    def _reply(self, request: Request, answer: Any) -> None:
        self.once_copied(partial(self._let_leave, request, answer))

    def once_copied(self, action: Callable[[], None]) -> None:
        """Do this when a backup has all calls until now: at once without copies."""
        if self.copy is None:
            action()
        else:
            self._leaving.append((self.copy.index, action))
            self.let_go()

    def let_go(self) -> None:
        """Do what the backup has the calls for."""
        while self._leaving and self.copy is not None and self.copy.may_leave(self._leaving[0][0]):
            self._leaving.popleft()[1]()

    def _let_leave(self, request: Request, answer: Any) -> None:
        assert request.handled_at is not None
        is_first = not request.is_answered
        request.answer, request.is_answered = answer, True
        arrives = self._send_answer(request)
        if is_first:
            request.held_s, request.quiet_from = self._timeline.now - request.handled_at, arrives

    def _send_answer(self, request: Request) -> float:
        deliver = partial(self._in_this_life, self._life, partial(_answered, request))
        arrives = self._carry(self.node, request.call.worker, _payload(request), deliver)
        self._on_answer(request, arrives)
        return arrives

    # -- the queue ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Go on with the queue, unless something is being worked on."""
        while self._queue and self._working is None and not self.is_killed:
            head, now = self._queue[0], self._timeline.now
            if self._free_at > now:
                self._working = self._timeline.at(self._free_at, self._wake)
                return
            seconds = 0.0
            if isinstance(head, Request) and head.call.key > self._newest[head.call.worker]:
                seconds = self._merge_s * head.work
            if seconds:
                self._working = self._timeline.at(now + seconds, self._finish)
                return
            self._take_head()

    def _wake(self) -> None:
        self._working = None
        self._work()

    def _finish(self) -> None:
        """The head of the queue has been worked on for as long as it takes; a pause meanwhile comes on top."""
        self._working = None
        if self._free_at > self._timeline.now:
            self._working = self._timeline.at(self._free_at, self._finish)
            return
        self._take_head()
        self._work()

    def _take_head(self) -> None:
        head, self.moved_at = self._queue.popleft(), self._timeline.now
        if isinstance(head, Request):
            self._handle(head)
        else:
            head()

    # -- the store ---------------------------------------------------------------------------------------------------

    def _handle(self, request: Request) -> None:
        worker, key = request.call.worker, request.call.key
        if key < self._newest[worker]:
            return
        is_copy, self._newest[worker] = key == self._newest[worker], key
        if is_copy and not request.load.again:
            if request.is_answered:
                self._send_answer(request)
            return
        if request.handled_at is None:
            request.handled_at = self._timeline.now
        if request.load.needs_center and not self.store.initialized:
            if self._no_center is not None:
                self._reply(request, self._no_center)
            else:
                self._early.append(request)
            return
        self._act(request)

    def _act(self, request: Request) -> None:
        try:
            answer = request.act(self.store)
        except ManyhandsError as error:
            answer = error
        if answer is HELD:
            self._held[request.call.worker] = request
        else:
            self._reply(request, answer)
        self._deliver()
        if self._early and self.store.initialized:
            early, self._early = self._early, []
            for one in early:
                self._act(one)

    def _deliver(self) -> None:
        for worker, reply in self.store.released:
            if (request := self._held.pop(worker, None)) is not None:
                self._reply(request, reply)
        self.store.released.clear()

    def serve(self, newest: Sequence[tuple[int, float]]) -> None:
        """This copy is the primary. newest: by worker, what comes of it before is ignored."""
        self._newest, self._is_down = list(newest), False

    # -- what befalls ------------------------------------------------------------------------------------------------

    def lose(self, worker: int) -> None:
        """A worker is lost: what is still under way from it is ignored."""
        self._forget(worker, (self._newest[worker][0], math.inf))
        self.store.leave(worker)
        self._deliver()

    def fence(self, worker: int, generation: int) -> tuple[int, int]:
        """The same, of a worker that may have another process later: (this one's last push that is here, in which tick), as
        in `LastPushes`."""
        self._forget(worker, (generation, math.inf))
        tick = self.store.pushed_in(worker, generation)
        last = self.store.fence(worker, generation)
        self._deliver()
        return last, tick

    def restart_worker(self, worker: int, generation: int) -> None:
        """A worker's process is a new one: what is still under way from the old one is ignored; it begins anew."""
        self._forget(worker, (generation, 0))
        self.store.deactivate(worker)
        self._deliver()

    def _forget(self, worker: int, key: tuple[int, float]) -> None:
        self._newest[worker] = key
        self._held.pop(worker, None)
        self._early = [request for request in self._early if request.call.worker != worker]

    def expect_no_center(self, error: PeerLost | None) -> None:
        """Who waits for a first center, or comes to wait, gets this error; None: there may be one after all."""
        self._no_center = error
        if error is None:
            return
        early, self._early = self._early, []
        for request in early:
            self._reply(request, error)

    def pause(self, seconds: float) -> None:
        """Nothing is handled for so long; what arrives meanwhile waits."""
        self._free_at = max(self._free_at, self._timeline.now + seconds)

    def kill(self) -> None:
        """For good."""
        self.is_killed = True
        self._break_down()

    def restart(self, seconds: float, back: Callable[[], None]) -> None:
        """Messages under way to and from this shard are lost; its store is kept. `back` is called when it is back."""
        self._break_down()
        self._is_down = True
        self._free_at = max(self._free_at, self._timeline.now + seconds)
        self._timeline.at(self._free_at, partial(self._in_this_life, self._life, partial(self._be_back, back)))

    def _break_down(self) -> None:
        self._life += 1
        self._queue = deque(item for item in self._queue if not isinstance(item, Request))
        self._decoding.clear()
        self._leaving.clear()
        if self._working is not None:
            self._working.cancel()
            self._working = None

    def _be_back(self, back: Callable[[], None]) -> None:
        self._life += 1
        self._is_down = False
        self._work()
        back()


def _answered(request: Request) -> None:
    """An answer has reached its worker; one that it does not wait for any more is ignored."""
    call = request.call
    call.missing.discard(request.shard)
    if not call.missing:
        call.cell.set(None)


def _payload(request: Request) -> int:
    """Bytes of what travels back, headers apart."""
    if request.load.brings and not isinstance(request.answer, Exception):
        return request.load.brings[request.shard]
    match request.answer:
        case int():  # a version of the center, which was read
            return request.work
        case Applied(answer=Tensor() as vector) | Dropped(answer=Tensor() as vector):
            return vector.nbytes
        case (dict() as vectors, dict()):
            return sum(vector.nbytes for vector in vectors.values())
    return 0
