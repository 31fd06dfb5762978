"""Serving a shard: the store behind one lock, its center in published memory, and a thread for each worker's connection,
until every worker has left or is gone.

A connection that ends without a goodbye frame is a worker that died: it is lost to the store, and nobody waits for it.
Unauthenticated or malformed connections are closed and logged once; they do not disturb the others.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor

from manyhands.comm.checks import MEAN_DTYPES, bits_bytes, bits_of
from manyhands.errors import BadInput, ManyhandsError
from manyhands.server.base import ServerSpec
from manyhands.server.in_process import captured
from manyhands.server.protocol import Kind, VectorPlace, dtype_of, snapshot_of
from manyhands.server.pushes import Applied, Dropped, Held
from manyhands.server.replication.backup_link import BackupLink
from manyhands.server.replication.log import Call, Copy, Entry, OutOfOrder, ReleasedReplies, make
from manyhands.server.rules import make_rule
from manyhands.server.shard_ranges import codec_for
from manyhands.server.store import Duplicate, Go, InvalidCall, Reply, Store
from manyhands.server.versioned_buffer import VersionedBuffer, make_outbox, map_outbox
from manyhands.transport.channel import Channel, ChannelClosed, ChannelTimeout
from manyhands.transport.frame import Frame, FrameError, to_json
from manyhands.transport.listener import Listener
from manyhands.units import printable

T = TypeVar("T")

_log = logging.getLogger("manyhands")
_BEAT_S = 0.25
_LIFE_SIGN_S = 0.5
_UNSENT = 64
"""At most so many calls the backup gets later."""


def serve(
    spec: ServerSpec,
    *,
    shard: int,
    shards: int,
    workers: int,
    channels: dict[int, Channel],
    listener: Listener | None = None,
    generation: int = 0,
    timeout_s: float = 300.0,
    progress: Callable[[str, int], None] = lambda phase, requests: None,
) -> dict[str, Any]:
    """Serve shard `shard` of `shards` until all of range(workers) came and went; its version, calls and lost workers.

    Where the replicas have several parts (`spec.coordinates`), it is this shard of each part's center. The version is the
    first part's.

    channels: by rank, of the workers whose connections are inherited; from now on this call's. The others come to
    `listener` with the hello that `protocol.hello` makes; it is closed once all are here, or this call ends.
    timeout_s: nobody waits longer for a worker that does nothing; all workers have to come within it.
    progress: called a few times a second with ("serve", requests so far), ("wait", …) when nothing was asked meanwhile.
    Raises ChannelTimeout when workers do not come, and whatever is wrong with the server itself.
    """
    host = _Host(spec, shard, workers, generation, timeout_s)
    try:
        for rank, channel in channels.items():
            host.start(rank, channel)
        host.run(listener, shards, progress)
        return {"shard": shard, "version": host.shards[0].store.version, **host.calls, "lost": sorted(host.lost)}
    finally:
        if listener is not None:
            listener.close()
        host.close()


class _Host:
    def __init__(self, spec: ServerSpec, shard: int, workers: int, generation: int, timeout_s: float) -> None:
        self.number, self.workers, self.generation, self.timeout_s = shard, workers, generation, timeout_s
        ranks_by_part = [range(workers)[part :: spec.coordinates] for part in range(spec.coordinates)]
        self.shards = [
            Shard(spec.of_coordinate(part), len(ranks), timeout_s, ranks=ranks)
            for part, ranks in enumerate(ranks_by_part)
        ]
        self.lock = threading.Lock()
        self.threads: dict[int, threading.Thread] = {}
        self.connections: dict[int, Connection] = {}
        self.gone: set[int] = set()
        self.lost: list[int] = []
        self.error: BaseException | None = None
        self.awake, self.waker = os.pipe()  # a byte whenever a connection ends

    def start(self, rank: int, channel: Channel) -> None:
        channel.generation = max(channel.generation, self.generation)
        replica, part = divmod(rank, len(self.shards))
        connection = Connection(self.shards[part], replica, channel)
        thread = threading.Thread(
            target=self._serve, args=(rank, connection), name=f"manyhands-worker-{rank}", daemon=True
        )
        with self.lock:
            self.connections[rank], self.threads[rank] = connection, thread
        thread.start()

    @property
    def calls(self) -> dict[str, int]:
        """Of all parts together, by kind."""
        return {kind: sum(shard.calls[kind] for shard in self.shards) for kind in self.shards[0].calls}

    def _serve(self, rank: int, connection: Connection) -> None:
        lost, peer = True, connection.channel.peer
        try:
            try:
                connection.serve()
                lost = False
            except (ChannelClosed, ChannelTimeout) as error:
                _log.info("server shard %d lost %s: %s", self.number, peer, error)
            except (FrameError, ManyhandsError) as error:
                _log.warning("server shard %d closed the connection to %s: %s", self.number, peer, error)
            connection.channel.close()
            connection.shard.end(connection.worker, Call.LEAVE if lost else Call.DEACTIVATE)
        except BaseException as error:  # noqa: BLE001 - `run` raises it: the shard itself is broken
            self.error = error
        finally:
            with self.lock:
                self.gone.add(rank)
                self.lost += [rank] if lost else []
            os.write(self.waker, b".")

    def run(self, listener: Listener | None, shards: int, progress: Callable[[str, int], None]) -> None:
        poll = select.poll()
        poll.register(self.awake, select.POLLIN)
        if listener is not None:
            poll.register(listener.fileno(), select.POLLIN)
        begun, before = time.monotonic(), -1
        while self._is_needed(listener, time.monotonic() - begun):
            if listener is not None and len(self.connections) == self.workers:  # nobody else can be expected any more
                poll.unregister(listener.fileno())
                listener.close()
                listener = None
            for fd, _ in poll.poll(_BEAT_S * 1e3):
                if fd == self.awake:
                    os.read(self.awake, 1)
                elif listener is not None:
                    with suppress(ChannelTimeout):  # it was a stranger, or not all of a hello
                        channel, hello = listener.accept(lambda hello: self._name(hello, shards), 0.0)
                        self.start(hello["worker"], channel)
            requests = sum(self.calls.values())
            progress("wait" if requests == before else "serve", requests)
            before = requests

    def _is_needed(self, listener: Listener | None, seconds: float) -> bool:
        with self.lock:
            if self.error is not None:
                raise self.error
            missing = [rank for rank in range(self.workers) if rank not in self.connections]
            if missing and (listener is None or seconds > self.timeout_s):
                raise ChannelTimeout(
                    f"server shard {self.number} waited {self.timeout_s:g} s for the workers {missing}, and they did "
                    "not connect: look for their errors in the log"
                )
            return len(self.gone) < self.workers

    def _name(self, hello: dict[str, Any], shards: int) -> str:
        """Who this is; FrameError when it is nobody that this shard serves."""
        worker, host = hello.get("worker"), hello.get("host")
        if (hello.get("shard"), hello.get("shards")) != (self.number, shards):
            raise FrameError(f"this is server shard {self.number} of {shards}; the hello asks for {hello!r:.200}")
        if not isinstance(worker, int) or not 0 <= worker < self.workers or not isinstance(host, str):
            raise FrameError(f"a worker in range({self.workers}) and its host were expected; got {hello!r:.200}")
        if worker in self.connections:
            raise FrameError(f"worker {worker} is here already, or was and left")
        return f"worker {worker} on {printable(host, 100)}"

    def close(self) -> None:
        for connection in self.connections.values():
            connection.channel.close()
        for thread in self.threads.values():
            thread.join()
        for shard in self.shards:
            shard.close()
        os.close(self.awake)
        os.close(self.waker)


class WorkersLate(Exception):
    """Nothing that a worker waits for has come for timeout_s. worker: whose turn it was, -1 if everybody's."""

    def __init__(self, worker: int, seconds: float) -> None:
        super().__init__(worker, seconds)
        self.worker, self.seconds = worker, seconds


class Shard:
    """What the connections of a shard share. Every method may be called from any thread.

    Where the shard has a backup (`link`), every call is sent there first; what a call gave may leave once `leave`
    returns.
    """

    def __init__(
        self,
        spec: ServerSpec,
        workers: int,
        timeout_s: float,
        copy: Copy | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """ranks: of the workers in the run, for messages; default: their numbers here."""
        self.store, self.workers = Store(make_rule(spec), workers, spec.bound), workers
        self.ranks = range(workers) if ranks is None else ranks
        self.spec = spec
        self.calls = {"pulls": 0, "pushes": 0, "dropped": 0}
        self.published: VersionedBuffer | None = None
        self.copy = copy or Copy()
        self.link: BackupLink | None = None  # to the copy that gets the log
        self.outboxes: dict[int, int] = {}  # worker: the descriptor of its outbox, for the other copy
        self.keeps_outboxes = False
        self._unsent: list[Entry] = []  # newest calls for which no answer waits: the backup gets them with the next
        self._timeout_s = timeout_s
        self.changed = threading.Condition()  # its lock is reentrant
        self._released = ReleasedReplies()
        self._offering = False  # a worker is sending the first center
        self._moved = time.monotonic()  # when a worker last did something that another may wait for

    @property
    def memory(self) -> VersionedBuffer:
        """Where the center lies; Refused before there is one."""
        if self.published is None:
            raise InvalidCall("there is no center yet: a worker offers the first, then the others pull")
        return self.published

    def call(self, function: Callable[[Store], T]) -> T:
        """A call that changes nothing in the store, or of a shard without a backup."""
        with self.changed:
            value = function(self.store)
            self._deliver(self.copy.index)
            return value

    def make(
        self,
        call: Call,
        worker: int = -1,
        number: int = 0,
        *,
        sent: Tensor | None = None,
        later: bool = False,
        **fields: Any,
    ) -> Any:
        """A call of the store, by the log: (what the store replied, its index). sent: the vector that goes to a backup.
        later: it goes there before the next call that does not, or with many others: no answer waits for it."""
        with self.changed:
            entry = Entry(self.copy.append(), call, worker, number, **fields)
            self._released.begin(worker)
            if self.link is not None:
                if later:
                    self._unsent.append(entry)
                    if len(self._unsent) == _UNSENT:
                        self.send_rest()
                else:
                    self._send(self.link, entry, sent)
            try:
                return make(self.store, entry), entry.index
            finally:
                self._deliver(entry.index)

    def use_link(self, link: BackupLink | None) -> None:
        """The other copy gets all further calls over this link."""
        self.link, self._unsent = link, []

    def _send(self, link: BackupLink, entry: Entry, sent: Tensor | None) -> None:
        """A link that breaks is noticed by whoever reads it: until then nothing leaves."""
        self.send_rest()
        if entry.call == Call.PUSH and sent is None and not (link.shares_memory and self.copy.waits):
            sent = entry.vectors[0]  # nobody waits until the backup has read it from the outbox
        with suppress(ChannelClosed, ChannelTimeout):
            link.send(entry, sent)

    @property
    def sent(self) -> int:
        """The index of the newest call that the backup got, or is to get before anything leaves."""
        return self.copy.index - len(self._unsent)

    def send_rest(self) -> None:
        """Send the backup the calls that it is to get later."""
        if not self._unsent:  # as always without a backup
            return
        with self.changed:
            unsent, self._unsent = self._unsent, []
            if self.link is not None:
                with suppress(ChannelClosed, ChannelTimeout):
                    for entry in unsent:
                        self.link.send(entry, None)

    def _deliver(self, index: int) -> None:
        self._moved = time.monotonic()
        if self.store.released:
            self.send_rest()
            self._released.put(self.store.released, index)
            self.store.released.clear()
            self.changed.notify_all()

    def answer(self, worker: int, alive: Callable[[], None]) -> Reply:
        """What the store releases for a worker that was answered Held or Wait, once it may leave. Raises Late."""
        self._wait(lambda: worker in self._released, alive)
        with self.changed:
            reply, index = self._released.take(worker)
        self.leave(index, alive)
        return reply

    def leave(self, index: int, alive: Callable[[], None]) -> None:
        """Return when what the calls up to this one gave may leave. OutOfOrder: this copy is not the primary any more."""

        def decided() -> bool:
            return self.copy.may_leave(index) or not self.copy.is_primary

        with self.changed:
            soon = self.changed.wait_for(decided, _LIFE_SIGN_S)
        if not soon:
            self._wait(decided, alive)
        if not self.copy.is_primary:
            raise OutOfOrder("this copy is not the shard's primary any more")

    def await_center(self, n: int, dtype: torch.dtype, alive: Callable[[], None]) -> None:
        """Return when there is a first center. Raises Late; BadInput for vectors unlike it."""
        self._wait(lambda: self.published is not None, alive)
        self.check(n, dtype, "a vector")

    def _wait(self, ready: Callable[[], bool], alive: Callable[[], None]) -> None:
        """alive: called at once, then twice a second, to report to the waiting worker that this shard lives."""
        begun = time.monotonic()
        while True:
            with self.changed:
                if ready():
                    return
            alive()
            with self.changed:
                if self.changed.wait_for(ready, min(_LIFE_SIGN_S, self._timeout_s / 4)):
                    return
                now = time.monotonic()
                if now - max(begun, self._moved) > self._timeout_s:
                    slowest = self.store.slowest
                    raise WorkersLate(-1 if slowest is None else self.ranks[slowest], now - begun)

    # -- the first center ----------------------------------------------------------------------------------------------

    def offer(self, n: int, dtype: torch.dtype, alive: Callable[[], None]) -> VersionedBuffer | None:
        """Memory for the offered center, then `take` follows; None: there is a center already. Raises Late."""
        if dtype not in MEAN_DTYPES:
            raise BadInput(f"a center of float32, float64, bfloat16 or float16 was expected; got {dtype}")
        while True:
            self._wait(lambda: not self._offering, alive)
            with self.changed:
                if self._offering:
                    continue
                if self.published is None:
                    offered = VersionedBuffer(n, dtype, self.workers)
                    self._offering = True
                    return offered
            self.check(n, dtype, "a center")
            return None

    def use(self, buffer: VersionedBuffer) -> None:
        """The center lies there from now on."""
        self.published = buffer
        store = self.store
        # Nobody reads a backup's center: it is updated where it lies.
        store.next_buffer = lambda: buffer.free(store.center) if self.copy.is_primary else store.center

    def take(self, offered: VersionedBuffer, *, came: bool) -> None:
        """The offered center has come into the first buffer, or never will."""
        with self.changed:
            self._offering = False
            if came:
                self.use(offered)
                self.make(Call.INITIALIZE, vectors=(offered.buffers[0],), sent=offered.buffers[0])
            else:
                offered.close()
            self.changed.notify_all()

    def check(self, n: int, dtype: torch.dtype, what: str) -> None:
        """BadInput unless a vector has the shard's length and dtype; Refused before there is a center."""
        memory = self.memory
        if n != memory.n or dtype != memory.dtype:
            raise BadInput(f"{what} has {memory.n} elements of {memory.dtype} on this shard; got {n} of {dtype}")

    # -- reading and ending --------------------------------------------------------------------------------------------

    def pin(self, worker: int, *, pull: bool) -> tuple[int, int, int]:
        """(version, slot of the memory, index of the call that is to leave) of the center, which stays until `unpin`.

        pull: the store notes it. The backup learns that with the next push, unless the rule looks at what was pulled,
        or a round may be closed by it.
        """
        with self.changed:
            self.calls["pulls"] += pull
            self.check_center()
            rule = self.store.rule
            if pull:
                matters = rule.keeps_pulled or rule.divides_by_staleness or rule.open
                self.make(Call.PULL, worker, later=not matters)
            elif rule.open:
                self.make(Call.READ)
            return self.store.version, self.memory.pin(worker, self.store.center), self.sent

    def check_center(self) -> None:
        """Refused before there is a center."""
        _ = self.memory

    def unpin(self, worker: int) -> None:
        with self.changed:
            if self.published is not None:
                self.published.unpin(worker)

    def push(
        self,
        worker: int,
        sequence: int,
        update: Tensor,
        weight: float,
        bits: int,
        since: int | None = None,
        sent: Tensor | None = None,
    ) -> tuple[Applied | Held | Dropped, int]:
        """(`Store.push`, counted, the index of the call); a duplicate gets the reply of the first. sent: see `make`."""
        with self.changed:
            fields: dict[str, Any] = {"vectors": (update,), "weight": weight, "bits": bits, "numbers": since}
            reply, index = self.make(Call.PUSH, worker, sequence, sent=sent, **fields)
            if isinstance(reply, Duplicate):
                return reply.reply, index
            self.calls["pushes"] += 1
            self.calls["dropped"] += isinstance(reply, Dropped)
            return reply, index

    def end(self, worker: int, call: Call | None) -> None:
        """This worker's connection ended. call: LEAVE of a worker that is lost, DEACTIVATE of one that left: nobody waits
        for it any more. None: it may come again, and is waited for."""
        with self.changed:
            if call is not None and self.copy.is_primary:
                self.make(call, worker)
            if self.published is not None:
                self.published.unpin(worker)
            if worker in self.outboxes:
                os.close(self.outboxes.pop(worker))
            self.changed.notify_all()

    def share_outbox(self, worker: int, elements: int, fd: int) -> None:
        """This worker's updates come in this memory, which the other copy is to map too."""
        with self.changed:
            if not self.keeps_outboxes:
                return
            if worker in self.outboxes:
                os.close(self.outboxes.pop(worker))
            self.outboxes[worker] = os.dup(fd)
            if self.link is not None and self.link.shares_memory:
                with suppress(ChannelClosed, ChannelTimeout):
                    self.link.send_outbox(worker, elements, fd)

    def close(self) -> None:
        for fd in self.outboxes.values():
            os.close(fd)
        self.outboxes.clear()
        if self.published is not None:
            self.published.close()


class Connection:
    """Serves one worker, in a thread of its own, until it says goodbye."""

    def __init__(self, shard: Shard, worker: int, channel: Channel) -> None:
        self.worker, self.channel = worker, channel
        self.shard = shard
        self._inbox: Tensor | None = None  # [n] where updates come in, and answers go out
        self._shared = False  # the inbox is the worker's outbox, in memory of both
        self._handlers: dict[int, Callable[[Frame], None]] = {
            Kind.OFFER: self._offer,
            Kind.AWAIT: self._await,
            Kind.MEMORY: self._memory,
            Kind.ACTIVATE: self._activate,
            Kind.PULL: self._pull,
            Kind.PEEK: self._pull,
            Kind.RELEASE: self._release,
            Kind.PUSH: self._push,
            Kind.ENCODED: self._push,
            Kind.TICK: self._tick,
            Kind.DEACTIVATE: self._deactivate,
            Kind.CAPTURE: self._capture,
            Kind.RESTORE: self._restore,
        }

    def serve(self) -> None:
        """Returns at the goodbye. Raises what ended the connection otherwise; the worker got the reason where possible."""
        while True:
            frame = self._next()
            if frame.kind == Kind.GOODBYE:
                return
            handler = self._handlers.get(frame.kind)
            if handler is None or (frame.elements and frame.kind not in (Kind.PUSH, Kind.ENCODED)):
                raise FrameError(f"no request of kind {frame.kind} with {frame.elements} elements exists")
            try:
                handler(frame)
            except OutOfOrder:
                raise  # nothing is answered: the worker goes to the primary
            except ManyhandsError as error:
                name = "BadInput" if isinstance(error, BadInput) else "Refused"
                self._send(Kind.REFUSED, blob=to_json({"error": name, "message": str(error)}))
                raise
            except WorkersLate as late:
                self._send(Kind.LATE, blob=to_json({"worker": late.worker, "seconds": late.seconds}))

    def _next(self) -> Frame:
        """A worker may compute as long as it likes between two requests; the driver judges that."""
        while True:
            try:
                return self.channel.receive()
            except ChannelTimeout:
                if self.channel.fileno() < 0:  # in the middle of a frame
                    raise

    def _send(self, kind: Kind, tensor: Tensor | None = None, **fields: Any) -> None:
        self.channel.send(Frame(kind=kind, **fields), tensor)

    def _alive(self) -> None:
        self._send(Kind.WAIT)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _offer(self, frame: Frame) -> None:
        offered = self.shard.offer(frame.a, dtype_of(frame), self._alive)
        if offered is not None:
            came = False
            try:
                self._send(Kind.WANTED)
                self.channel.expect(Kind.GIVE, offered.buffers[0])
                came = True
            finally:
                self.shard.take(offered, came=came)
        self._done(self.shard.sent)

    def _await(self, frame: Frame) -> None:
        self.shard.await_center(frame.a, dtype_of(frame), self._alive)
        self._send(Kind.DONE)

    def _memory(self, frame: Frame) -> None:
        """The center's slots, and an outbox for this worker."""
        self.shard.await_center(frame.a, dtype_of(frame), self._alive)
        center = self.shard.memory
        outbox = make_outbox(center.n, center.dtype)
        try:
            self._inbox, self._shared = map_outbox(outbox, center.n, center.dtype), True
            self.shard.share_outbox(self.worker, center.n, outbox)
            self._send(Kind.MEMORY, a=center.slots, b=center.stride)
            self.channel.send_fds([center.fd, outbox])
        finally:
            os.close(outbox)

    def _activate(self, frame: Frame) -> None:
        self._done(self.shard.make(Call.ACTIVATE, self.worker, frame.generation)[1])

    def _done(self, index: int) -> None:
        self.shard.leave(index, self._alive)
        self._send(Kind.DONE)

    def _pull(self, frame: Frame) -> None:
        self.shard.await_center(frame.a, dtype_of(frame), self._alive)
        version, slot, index = self.shard.pin(self.worker, pull=frame.kind == Kind.PULL)
        self.shard.leave(index, self._alive)
        if self._shared:
            self._send(Kind.CENTER, a=version, b=slot)  # RELEASE will follow
        else:
            self._send(Kind.CENTER, self.shard.memory.buffers[slot], a=version)
            self.shard.unpin(self.worker)

    def _release(self, frame: Frame) -> None:
        self.shard.unpin(self.worker)

    def _push(self, frame: Frame) -> None:
        update, sent = self._update(frame)
        reply: object
        since = frame.a - 1 if frame.a else None
        reply, index = self.shard.push(
            self.worker, frame.sequence, update, frame.weight, bits_of(frame.blob), since, sent
        )
        self.shard.leave(index, self._alive)
        if isinstance(reply, Held) and not self.shard.store.rule.answers:
            self._send(Kind.HELD, a=reply.version, b=reply.staleness)
            return
        if isinstance(reply, Held):
            reply = self.shard.answer(self.worker, self._alive)
        assert isinstance(reply, Applied | Dropped)
        self._answer(reply)

    def _update(self, frame: Frame) -> tuple[Tensor, Tensor | None]:
        """[n] what a PUSH brings, an update or a decoded payload; and what of it is to travel to a backup: nothing where it
        came in shared memory."""
        if frame.kind == Kind.ENCODED:
            return self._decoded(frame)
        if self._shared and frame.elements:
            raise FrameError(f"updates of this worker come in shared memory; got {frame.elements} elements")
        if not self._shared:
            self.shard.check(frame.elements, frame.dtype, "a push")
            if self._inbox is None:
                self._inbox = torch.empty(frame.elements, dtype=frame.dtype)
            self.channel.receive_into(self._inbox)
        assert self._inbox is not None
        return self._inbox, None if self._shared else self._inbox

    def _decoded(self, frame: Frame) -> tuple[Tensor, Tensor]:
        """[n] a decoded payload. BadInput for other codecs, before memory is taken where its length shows it."""
        codec, center = codec_for(self.shard.spec), self.shard.memory
        if frame.dtype != torch.uint8:
            raise BadInput(f"a payload must be a number of bytes (uint8); got {frame.elements} of {frame.dtype}")
        codec.check_length(frame.tensor_bytes, center.n, center.dtype)
        payload = torch.empty(frame.elements, dtype=torch.uint8)
        self.channel.receive_into(payload)
        return codec.decode(payload, center.n, center.dtype), payload

    def _answer(self, reply: Applied | Dropped) -> None:
        vector = reply.answer
        place = VectorPlace.NOWHERE if vector is None else VectorPlace.BEHIND
        if vector is not None and self._shared:
            assert self._inbox is not None
            self._inbox.copy_(vector)
            vector, place = None, VectorPlace.OUTBOX
        answer = {"sequence": place, "weight": reply.weight, "blob": bits_bytes(reply.bits)}
        if isinstance(reply, Applied):
            self._send(Kind.APPLIED, vector, a=reply.version, b=reply.staleness, **answer)
        else:
            self._send(Kind.DROPPED, vector, a=reply.version, b=reply.behind, **answer)

    def _tick(self, frame: Frame) -> None:
        reply: object
        reply, index = self.shard.make(Call.TICK, self.worker, frame.sequence, bits=bits_of(frame.blob))
        if isinstance(reply, Go):
            self.shard.leave(index, self._alive)
        else:
            reply = self.shard.answer(self.worker, self._alive)
        assert isinstance(reply, Go)
        self._send(Kind.GO, blob=bits_bytes(reply.bits))

    def _deactivate(self, frame: Frame) -> None:
        self._done(self.shard.make(Call.DEACTIVATE, self.worker)[1])

    def _capture(self, frame: Frame) -> None:
        vectors, numbers = self.shard.call(captured)
        self._send(Kind.SNAPSHOT, blob=to_json({"names": list(vectors), "numbers": numbers}))
        for vector in vectors.values():
            self._send(Kind.VECTOR, vector)

    def _restore(self, frame: Frame) -> None:
        names, numbers = snapshot_of(frame.blob, self.shard.workers)
        vectors, n = {}, self.shard.memory.n
        for name in names:
            frame = self.channel.receive()
            if frame.kind != Kind.VECTOR or frame.elements != n:
                raise FrameError(f"expected a vector of {n} elements; got kind {frame.kind} with {frame.elements}")
            vectors[name] = torch.empty(n, dtype=frame.dtype)
            self.channel.receive_into(vectors[name])
        try:
            restored: dict[str, Any] = {"vectors": tuple(vectors.values()), "names": tuple(vectors), "numbers": numbers}
            index = self.shard.make(Call.RESTORE, **restored)[1]
        except ManyhandsError:
            raise
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise FrameError(f"this shard's rule cannot go on from such a snapshot ({error!r:.200})") from error
        self._done(index)
