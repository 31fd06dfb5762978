"""The base of all clients, the client of shards behind channels, and its connection to one shard."""

from __future__ import annotations

import os
import select
import socket
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from manyhands.comm.background import Background
from manyhands.comm.checks import MEAN_DTYPES, FirstError, bits_bytes, bits_of, check_mean, slice_of
from manyhands.comm.group import Ledger
from manyhands.errors import BadInput, ManyhandsError, PeerLost, is_whole
from manyhands.server.base import Encoded, Exchanged, Pushed, Server, ServerSpec, ServerState
from manyhands.server.protocol import SMALL_BYTES, Kind, VectorPlace, about, snapshot_of
from manyhands.server.pushes import Applied, Dropped, Held
from manyhands.server.shard_ranges import check_encoded, codec_for, cut, joined, parts_of
from manyhands.server.store import InvalidCall
from manyhands.server.versioned_buffer import BufferReader, map_outbox
from manyhands.transport.channel import Channel, ChannelClosed, ChannelTimeout
from manyhands.transport.frame import Frame, FrameError, from_json, to_json
from manyhands.units import printable

T = TypeVar("T")
_CLOSING_S = 5.0
PushReply = Applied | Held | Dropped
Connect = Callable[[int], Channel]
"""shard -> a channel to its primary, another one than before. For shards of which there are copies: it waits until there
is one, and where there will be none the run ends."""


class ServerClient(Server):
    """What all clients have in common: sequence numbers, the ledger and the journal. Subclasses reach the shards."""

    def __init__(self, spec: ServerSpec, shards: int) -> None:
        self.spec, self.shards, self.ledger = spec, shards, Ledger()
        self.step = 0  # finished ticks, for messages
        self._sequence = 0  # of the last push
        self._journal = PushJournal()
        self._started: OpenExchange | None = None

    @override
    def pull(self, into: Tensor) -> None:
        self._has_pulled(self._read("pull", into), into)

    @override
    def center(self, into: Tensor) -> None:
        self._read("center", into)
        self._has_come("center", into)

    @override
    def push(
        self, update: Tensor | Encoded, weight: float = 1.0, bits: int = 0, *, since: Sequence[int] = ()
    ) -> Pushed:
        replies, answer = self._push(update, self._sequence + 1, weight, bits, since)
        self._sequence += 1
        return self._has_pushed(update, weight, replies, answer)

    @override
    def start_exchange(
        self,
        update: Tensor | Encoded | None = None,
        weight: float = 1.0,
        *,
        into: Tensor | None = None,
        since: Sequence[int] = (),
    ) -> None:
        assert self._started is None, "one exchange at a time: call finish_exchange first"
        assert self.spec.bound != 0, "where all are in step, nobody computes while it exchanges"
        self._started = OpenExchange(update=update, weight=weight, into=into, since=since)

    @override
    def finish_exchange(self) -> Exchanged | None:
        if (started := self._started) is None:
            return None
        self._send(started)
        self._started = None
        assert started.wait is not None
        return started.wait()

    def _send(self, started: OpenExchange, bits: int | None = None) -> None:
        """Now, unless it has left. bits: those of the tick that goes along; None: none does."""
        if started.wait is None:
            started.wait = self._begin(started, bits)

    def _begin(self, exchange: OpenExchange, bits: int | None) -> Callable[[], Exchanged]:
        """Begin it; what waits for its end. Here, where nothing takes time, it is over at once."""
        pushed, versions = None, None
        if exchange.update is not None:
            self._sequence += 1
            pushed = self._push(exchange.update, self._sequence, exchange.weight, 0, exchange.since)
        if exchange.into is not None:
            versions = self._read("pull", exchange.into)
        if bits is not None:
            self._tick(bits)
        return lambda: self._exchanged(exchange, pushed, versions)

    def _exchanged(
        self,
        exchange: OpenExchange,
        pushed: tuple[Sequence[PushReply], Tensor | None] | None,
        versions: list[int] | None,
    ) -> Exchanged:
        """An exchange is over: what came of its push and of its pull is counted, and known from now on."""
        what = None
        if exchange.update is not None and pushed is not None:
            what = self._has_pushed(exchange.update, exchange.weight, *pushed)
        if exchange.into is not None and versions is not None:
            self._has_pulled(versions, exchange.into)
        return Exchanged(what, versions is not None)

    def _has_pulled(self, versions: list[int], into: Tensor) -> None:
        self._has_come("pull", into)
        self._journal.pulled(versions)
        self.pulled = versions

    def _has_pushed(
        self, update: Tensor | Encoded, weight: float, replies: Sequence[PushReply], answer: Tensor | None
    ) -> Pushed:
        self._count("push", update)
        if answer is not None:
            self._has_come("answer", answer)
        self._journal.pushed(replies, weight, answered=answer is not None)
        first = replies[0]
        if isinstance(first, Held):
            return Pushed(applied=True)
        behind = first.behind if isinstance(first, Dropped) else 0
        return Pushed(isinstance(first, Applied), answer, first.weight, first.bits, behind)

    @property
    @override
    def pushes(self) -> int:
        return self._sequence

    @override
    def tick(self, bits: int = 0) -> int:
        self.step += 1
        if self._started is not None and self._started.wait is None:  # an exchange of this step: they go together
            self._send(self._started, None if self.spec.bound is None else bits)
            return bits
        return bits if self.spec.bound is None else self._tick(bits)

    @override
    def drain_journal(self) -> dict[str, Any]:
        return self._journal.take()

    @abstractmethod
    def _read(self, operation: str, into: Tensor) -> list[int]:
        """The center into a vector [D'], for "pull" or "center"; its versions, one of each shard."""

    @abstractmethod
    def _push(
        self, update: Tensor | Encoded, sequence: int, weight: float, bits: int, since: Sequence[int] = ()
    ) -> tuple[Sequence[PushReply], Tensor | None]:
        """The reply of each shard, and the answer [D'] of all, if there is one."""

    @abstractmethod
    def _tick(self, bits: int) -> int:
        """As `tick`, where there is a gate."""

    def _has_come(self, operation: str, vector: Tensor) -> None:
        self._count(operation, vector)
        if self.received is not None:
            self.received(vector)

    def _count(self, operation: str, vector: Tensor | Encoded) -> None:
        self.ledger.add(operation, vector.nbytes, self.shards)


@dataclass
class OpenExchange:
    """A push and a pull that go on beside the caller; see `Server.start_exchange`."""

    update: Tensor | Encoded | None
    weight: float
    into: Tensor | None
    since: Sequence[int]
    wait: Callable[[], Exchanged] | None = None  # once it was sent


class PushJournal:
    """A client's record of its pulls and pushes, until `take`; see `Server.drain_journal` for what the lists mean."""

    def __init__(self) -> None:
        self._lists: dict[str, list[Any]] = {"pulls": [], "pushes": [], "staleness": [], "behind": []}

    def pulled(self, versions: Sequence[int]) -> None:
        self._lists["pulls"].append(list(versions))

    def pushed(self, replies: Sequence[PushReply], weight: float, answered: bool = False) -> None:
        """A push got these replies, one of each shard, and an answer or none.

        One of weight 0 has no staleness; where nothing was answered either, it made no version, and is noted as
        dropped.
        """
        if isinstance(first := replies[0], Dropped):
            self._lists["behind"].append(first.behind)
        if any(isinstance(reply, Dropped) for reply in replies) or not (weight or answered):
            self._lists["pushes"].append(None)
            return
        self._lists["pushes"].append([reply.version for reply in replies])
        if weight:
            self._lists["staleness"].append(max(reply.staleness for reply in replies if not isinstance(reply, Dropped)))

    def take(self) -> dict[str, Any]:
        """What was collected since the last time, without empty lists."""
        drained = {name: values for name, values in self._lists.items() if values}
        self._lists = {name: [] for name in self._lists}
        return drained


class ServedServer(FirstError, ServerClient):
    """What a worker gets as `worker.server`. Raises ShardLost (a PeerLost) as soon as a shard is gone; then it is
    unusable. With `connect` it goes on with the shard's next primary: the open request is sent again, and counts once.
    Every request goes to all shards before the first answer is awaited.

    channels: to each shard, in order; this server's from now on. Where one is a Unix socket, vectors go through memory.
    connect: in place of channels, for so many shards.
    hosts: of the workers, by rank, for messages.
    memory_from: so many bytes of a shard's vector are worth shared memory; -1: never.
    """

    def __init__(
        self,
        spec: ServerSpec,
        channels: Sequence[Channel] = (),
        *,
        connect: Connect | None = None,
        shards: int = 0,
        hosts: Sequence[str] = (),
        memory_from: int = SMALL_BYTES,
    ) -> None:
        first = channels if connect is None else [connect(shard) for shard in range(shards)]
        super().__init__(spec, len(first))
        self._numbers_ticks = connect is not None  # they may be sent again
        self._connections = [
            ShardConnection(shard, channel, hosts, memory_from, connect) for shard, channel in enumerate(first)
        ]
        self._background = Background("manyhands-server")
        self._like: tuple[int, torch.dtype] | None = None  # elements and dtype of the center
        self._answer: Tensor | None = None  # [D'] where the shards' answers are put together

    @override
    def initialize(self, center: Tensor) -> None:
        """As the contract. The first worker at the first shard gives to all: parts of two centers are never mixed."""
        parts = self._parts("initialize", center)
        self._background.drain()
        with self._turn():
            wins = True
            for connection, part in zip(self._connections, parts, strict=True):
                wins = self._offer(connection, part, wins)
        self._like = (center.numel(), center.dtype)

    def _offer(self, connection: ShardConnection, part: Tensor, wins: bool) -> bool:
        """Give one shard its part, if nobody has before; whether it was this worker's that it took."""
        gave = False

        def offer(_: ShardConnection) -> None:
            connection.ask("initialize", self.step, Kind.OFFER if wins else Kind.AWAIT, **about(part))

        def give(_: ShardConnection) -> None:
            nonlocal gave
            if connection.answer(Kind.WANTED, Kind.DONE).kind == Kind.WANTED:
                connection.send(Kind.GIVE, part)
                gave = True
                connection.answer(Kind.DONE)

        connection.begin(offer)
        connection.finish(give)
        if gave:
            self.ledger.add("initialize", part.nbytes)
        return gave

    @override
    def activate(self) -> None:
        self._tell("activate", Kind.ACTIVATE)
        for connection in self._connections:
            connection.active = True

    @override
    def deactivate(self) -> None:
        for connection in self._connections:
            connection.active = False
        self._tell("deactivate", Kind.DEACTIVATE)

    @override
    def capture(self) -> ServerState:
        if self._like is None:
            raise BadInput(
                "call initialize, pull or center before server.capture: they tell this worker the length of the vector"
            )
        lengths = [
            stop - start for start, stop in (slice_of(s, self.shards, self._like[0]) for s in range(self.shards))
        ]
        return joined(
            self._each(
                lambda connection: connection.ask("capture", self.step, Kind.CAPTURE),
                lambda connection: connection.read_snapshot(lengths[connection.shard]),
            )
        )

    @override
    def restore(self, snapshot: ServerState) -> None:
        self.initialize(snapshot.vectors["center"])  # so that the shards know their length; loses where there is one
        pieces = cut(snapshot, self.shards)

        def send(connection: ShardConnection) -> None:
            vectors, numbers = pieces[connection.shard]
            blob = to_json({"names": list(vectors), "numbers": numbers})
            connection.ask("restore", self.step, Kind.RESTORE, blob=blob)
            for vector in vectors.values():
                connection.send(Kind.VECTOR, vector)

        self._each(send, lambda connection: connection.answer(Kind.DONE))

    @override
    def close(self) -> None:
        for connection in self._connections:
            connection.close()  # what is under way fails
        self._background.close(_CLOSING_S)

    # -- all shards ----------------------------------------------------------------------------------------------------

    def _each(self, ask: Callable[[ShardConnection], object], take: Callable[[ShardConnection], T]) -> list[T]:
        """Ask all shards, then take their answers. Both may be called again, for a shard's next primary."""
        self._background.drain()
        return self._each_now(ask, take)

    def _each_now(self, ask: Callable[[ShardConnection], object], take: Callable[[ShardConnection], T]) -> list[T]:
        with self._turn():
            for connection in self._connections:
                connection.begin(ask)
            return [connection.finish(take) for connection in self._connections]

    @override
    def _begin(self, exchange: OpenExchange, bits: int | None) -> Callable[[], Exchanged]:
        """All that it asks is sent before the first answer is awaited, in a thread beside the caller's."""
        update, into = exchange.update, exchange.into
        requests: list[ShardRequest] = []
        if update is not None:
            self._sequence += 1
            requests.append(self._request_to_push(update, self._sequence, exchange.weight, 0, exchange.since))
        if into is not None:
            requests.append(self._request_to_read("pull", into))
        if bits is not None:
            requests.append(self._request_to_tick(bits))

        def ask(connection: ShardConnection) -> None:
            for request in requests:
                request.ask(connection)

        def take(connection: ShardConnection) -> list[Any]:
            return [request.take(connection) for request in requests]

        self._background.drain()
        started = self._background.start(lambda: self._each_now(ask, take))

        def wait() -> Exchanged:
            answers = [list(of_all) for of_all in zip(*started.wait(), strict=True)]  # of each request, by shard
            pushed = None if update is None else self._answers_to_push(answers.pop(0))
            return self._exchanged(exchange, pushed, None if into is None else answers.pop(0))

        return wait

    def _tell(self, operation: str, kind: Kind) -> None:
        """Tell all shards, and wait until it is done."""
        self._each(lambda one: one.ask(operation, self.step, kind), lambda one: self._answer_of(one, Kind.DONE))

    def _answer_of(self, connection: ShardConnection, *kinds: Kind) -> Frame:
        """Of one shard; a shard that is gone is noticed also while another one waits for workers."""
        return connection.answer(*kinds, meanwhile=self._check_shards)

    def _check_shards(self) -> None:
        for connection in self._connections:
            connection.check()

    @override
    def _read(self, operation: str, into: Tensor) -> list[int]:
        request = self._request_to_read(operation, into)
        return self._each(request.ask, request.take)

    def _request_to_read(self, operation: str, into: Tensor) -> ShardRequest:
        parts = self._parts(operation, into)
        kind = Kind.PULL if operation == "pull" else Kind.PEEK

        def ask(connection: ShardConnection) -> None:
            connection.attach(operation, self.step, parts[connection.shard])
            connection.ask(operation, self.step, kind, **about(parts[connection.shard]))

        def take(connection: ShardConnection) -> int:
            frame = connection.answer(Kind.CENTER)
            connection.read_center(frame, parts[connection.shard])
            self._like = (into.numel(), into.dtype)
            return frame.a

        return ShardRequest(ask, take)

    @override
    def _push(
        self, update: Tensor | Encoded, sequence: int, weight: float, bits: int, since: Sequence[int] = ()
    ) -> tuple[Sequence[PushReply], Tensor | None]:
        request = self._request_to_push(update, sequence, weight, bits, since)
        return self._answers_to_push(self._each(request.ask, request.take))

    def _answers_to_push(self, taken: list[tuple[PushReply, bool]]) -> tuple[Sequence[PushReply], Tensor | None]:
        return [reply for reply, _ in taken], self._answer if any(answered for _, answered in taken) else None

    def _request_to_push(
        self, update: Tensor | Encoded, sequence: int, weight: float, bits: int, since: Sequence[int]
    ) -> ShardRequest:
        """An answer is taken before the next shard's reply: should that one be lost, this one's stands."""
        parts, likes = self._of_push(update, weight, bits)
        fields = {"sequence": sequence, "weight": weight, "blob": bits_bytes(bits)}

        def ask(connection: ShardConnection) -> None:
            shard = connection.shard
            counts_from = since[shard] + 1 if since else 0
            connection.attach("push", self.step, likes[shard])
            connection.push(self.step, parts[shard], encoded=isinstance(update, Encoded), a=counts_from, **fields)

        def take(connection: ShardConnection) -> tuple[PushReply, bool]:
            frame = self._answer_of(connection, Kind.APPLIED, Kind.DROPPED, Kind.HELD)
            if frame.kind == Kind.HELD:
                return _reply(frame), False
            return _reply(frame), connection.read_answer(frame, self._place_of_answer(update)[connection.shard])

        return ShardRequest(ask, take)

    @override
    def _tick(self, bits: int) -> int:
        request = self._request_to_tick(bits)
        return bits_of(self._each(request.ask, request.take)[0].blob)

    def _request_to_tick(self, bits: int) -> ShardRequest:
        fields: dict[str, Any] = {"blob": bits_bytes(bits)} | ({"sequence": self.step} if self._numbers_ticks else {})
        return ShardRequest(
            lambda one: one.ask("tick", self.step, Kind.TICK, **fields), lambda one: self._answer_of(one, Kind.GO)
        )

    def _of_push(self, update: Tensor | Encoded, weight: float, bits: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """What each shard is sent of an update (its part, or its payload), and a vector like its part of the center.
        BadInput for what cannot be one."""
        if isinstance(update, Tensor):
            check_mean(update, weight, bits)
            parts = self._parts("push", update)
            return parts, parts
        check_mean(torch.empty(0, dtype=update.dtype), weight, bits)
        check_encoded(codec_for(self.spec), update, self.shards)
        return update.parts, self._parts("push", torch.empty(update.n, dtype=update.dtype, device="meta"))

    def _place_of_answer(self, update: Tensor | Encoded) -> list[Tensor]:
        """Where the shards' answers to such an update are put together, by shard."""
        n, device = (len(update), update.device) if isinstance(update, Tensor) else (update.n, torch.device("cpu"))
        if self._answer is None or len(self._answer) != n:
            self._answer = torch.empty(n, dtype=update.dtype, device=device)
        return parts_of(self._answer, self.shards)

    def _parts(self, operation: str, vector: Tensor) -> list[Tensor]:
        """Views of a flat vector, one a shard. BadInput for one that cannot be the center's like."""
        n, dtype = self._like or (vector.numel(), vector.dtype)
        if vector.dim() != 1 or vector.numel() != n or vector.dtype != dtype:
            raise BadInput(
                f"server.{operation} takes a flat vector of {n} elements of {dtype} here; got the shape {list(vector.shape)} "
                f"of {vector.dtype}"
            )
        return parts_of(vector.detach(), self.shards)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Around every request: after an error the connections are out of step, and only the error is left."""
        self.check()
        try:
            yield
        except ManyhandsError as error:
            self.fail(error)
            raise
        finally:
            self.waited_s = sum(connection.waited_s for connection in self._connections)


class ShardRequest(NamedTuple):
    """What each shard is asked, and how its answer is taken."""

    ask: Callable[[ShardConnection], object]
    take: Callable[[ShardConnection], Any]


def _reply(frame: Frame) -> PushReply:
    """What a shard's store replied; its answer comes apart."""
    if frame.kind == Kind.HELD:
        return Held(frame.a, frame.b)
    weight, bits = frame.weight, bits_of(frame.blob)
    if frame.kind == Kind.APPLIED:
        return Applied(frame.a, frame.b, weight=weight, bits=bits)
    return Dropped(frame.a, weight=weight, bits=bits, behind=frame.b)


class ShardConnection:
    """The channel to shard `shard`. One request at a time: `ask` (or `put`), then `answer`, then what follows it.

    hosts: of the workers, by rank, for messages.
    memory_from: vectors of at least so many bytes go through shared memory, where the channel is a Unix socket.
    """

    waited_s: float = 0.0  # while the shard waited for other workers

    def __init__(
        self,
        shard: int,
        channel: Channel,
        hosts: Sequence[str],
        memory_from: int,
        connect: Connect | None = None,
    ) -> None:
        self.primaries = 0  # which this connection has had after the first
        self.shard, self.active = shard, False  # whether the worker takes part, and a later primary is to know it
        self._hosts, self._memory_from = hosts, memory_from
        self._connect = connect
        self._asked = ("activate", 0, 0.0)  # operation, step, when
        self._ask: Callable[[ShardConnection], object] = lambda _: None  # the open request
        self._stage: Tensor | None = None  # [n], see `_staging`
        self._use(channel)

    def _use(self, channel: Channel) -> None:
        self.channel = channel
        self._peer = channel.peer if "shard" in channel.peer else f"server shard {self.shard}, {channel.peer}"
        self._window: BufferReader | None = None
        self._outbox: Tensor | None = None  # [n]
        with socket.socket(fileno=os.dup(channel.fileno())) as probe:
            self._reaches = self._memory_from >= 0 and probe.family == socket.AF_UNIX  # over which descriptors travel

    # -- a request, and its answer -------------------------------------------------------------------------------------

    def begin(self, ask: Callable[[ShardConnection], object]) -> None:
        """Send a request, by a function that can do it again."""
        self._ask = ask
        if self._connect is None:
            ask(self)
            return
        with suppress(ShardLost):  # `finish` sends it to the next primary
            ask(self)

    def finish(self, take: Callable[[ShardConnection], T]) -> T:
        """Take its answer; of the next primary, where this one is lost and there are copies."""
        while True:
            try:
                if self.channel.fileno() < 0 and self._connect is not None:
                    self._reconnect(self._connect)
                    self._ask(self)
                return take(self)
            except ShardLost:
                if self._connect is None:
                    raise

    def _reconnect(self, connect: Connect) -> None:
        """To the next primary, which knows what this worker's answered requests did, and may know the open one."""
        asked = self._asked
        self._use(connect(self.shard))
        self.primaries += 1
        if self.active:
            self.ask("activate", asked[1], Kind.ACTIVATE)
            self.answer(Kind.DONE)
        self._asked = asked

    def ask(self, operation: str, step: int, kind: Kind, vector: Tensor | None = None, **fields: Any) -> None:
        self._asked = (operation, step, time.perf_counter())
        self.send(kind, vector, **fields)

    def send(self, kind: Kind, vector: Tensor | None = None, **fields: Any) -> None:
        """Send one more frame of the request."""
        if vector is not None and not _is_portable(vector):
            vector = self._staging(vector).copy_(vector)
        with self._watched():
            self.channel.send(Frame(kind=kind, **fields), vector)

    def answer(self, *kinds: Kind, meanwhile: Callable[[], None] = lambda: None) -> Frame:
        """The answer's frame, one of these kinds; `meanwhile` is called twice a second while the shard waits for
        others.

        Raises ShardLost, PeerLost for a worker that was waited for too long, BadInput and Refused where the request was
        refused.
        """
        waiting = 0.0
        with self._watched():
            while (frame := self.channel.receive()).kind == Kind.WAIT:
                waiting = waiting or time.perf_counter()
                meanwhile()
            if waiting:
                self.waited_s += time.perf_counter() - waiting
            if frame.kind in (Kind.REFUSED, Kind.LATE):
                raise self._refusal(frame.kind, from_json(frame.blob))
            if frame.kind not in kinds:
                raise FrameError(f"expected {[kind.name for kind in kinds]}; got {frame}")
            return frame

    def check(self) -> None:
        """Raise ShardLost if the shard is gone, without reading what it sent before."""
        if self._connect is not None:
            return  # its next primary is asked when its turn comes
        poll = select.poll()
        poll.register(self.channel, select.POLLRDHUP)
        if poll.poll(0):
            raise self._lost("is gone")

    # -- vectors -------------------------------------------------------------------------------------------------------

    def attach(self, operation: str, step: int, vector: Tensor) -> None:
        """Map the shard's memory, if vectors [n] like this one are to go through it. Waits for the first center."""
        if self._window is not None or not self._reaches or vector.numel() * vector.element_size() < self._memory_from:
            return
        self.ask(operation, step, Kind.MEMORY, **about(vector))
        frame = self.answer(Kind.MEMORY)
        with self._watched():
            fds = self.channel.receive_fds(2)
            try:
                self._window = BufferReader(fds[0], frame.a, frame.b, vector.numel(), vector.dtype)
                self._outbox = map_outbox(fds[1], vector.numel(), vector.dtype)
            finally:
                for fd in fds:
                    os.close(fd)

    def push(self, step: int, update: Tensor, *, encoded: bool, **fields: Any) -> None:
        """Ask PUSH with an update [n], or with a payload, which always goes through the socket."""
        if encoded or self._outbox is None:
            self.ask("push", step, Kind.ENCODED if encoded else Kind.PUSH, update, **fields)
            return
        self._outbox.copy_(update)
        self.ask("push", step, Kind.PUSH, **fields)

    def read_center(self, frame: Frame, into: Tensor) -> None:
        if self._window is None:
            self.read(frame, into)
            return
        with self._watched():
            into.copy_(self._window.slot(frame.b))
        self.send(Kind.RELEASE)

    def read_answer(self, frame: Frame, into: Tensor) -> bool:
        """What an APPLIED or DROPPED brought; False if no vector."""
        if frame.sequence == VectorPlace.BEHIND:
            self.read(frame, into)
        elif frame.sequence == VectorPlace.OUTBOX and self._outbox is not None:
            into.copy_(self._outbox)
        return frame.sequence != VectorPlace.NOWHERE

    def read(self, frame: Frame, into: Tensor) -> None:
        """The vector that follows the frame."""
        with self._watched():
            if (frame.elements, frame.dtype) != (into.numel(), into.dtype):
                raise FrameError(f"expected {into.numel()} {into.dtype}; got {frame}")
            memory = into if _is_portable(into) else self._staging(into)
            self.channel.receive_into(memory)
            if memory is not into:
                into.copy_(memory)

    def read_snapshot(self, n: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """A SNAPSHOT and its vectors [n], in memory of their own; the numbers."""
        frame = self.answer(Kind.SNAPSHOT)
        vectors = {}
        with self._watched():
            names, numbers = snapshot_of(frame.blob, len(self._hosts))
        for name in names:
            frame = self.answer(Kind.VECTOR)
            with self._watched():
                if frame.elements != n or frame.dtype not in MEAN_DTYPES:
                    raise FrameError(f"expected a vector of {n} floating elements; got {frame}")
                vectors[name] = torch.empty(n, dtype=frame.dtype)
                self.channel.receive_into(vectors[name])
        return vectors, numbers

    def close(self) -> None:
        """Say goodbye; idempotent."""
        if self.channel.fileno() >= 0:
            with suppress(ChannelClosed, ChannelTimeout):  # it is gone: nobody misses the goodbye
                self.channel.send(Frame(kind=Kind.GOODBYE))
        self.channel.close()
        self._window = self._outbox = self._stage = None

    # -- trouble -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Turn the channel's errors into ShardLost."""
        try:
            yield
        except ChannelClosed as error:
            raise self._lost("is gone") from error
        except ChannelTimeout as error:
            raise self._lost(f"did not answer for {self.channel.timeout_s:g} s") from error
        except FrameError as error:
            raise self._lost(f"sent an unexpected frame ({error})") from error

    def _lost(self, why: str) -> ShardLost:
        operation, step, begun = self._asked
        self.channel.close()
        return ShardLost(self.shard, self._peer, f"server.{operation}", step, time.perf_counter() - begun, why)

    def _refusal(self, kind: int, content: dict[str, Any]) -> ManyhandsError:
        if kind == Kind.REFUSED:
            family = BadInput if content.get("error") == "BadInput" else InvalidCall
            return family(printable(content.get("message"), 2000))
        worker, seconds = content.get("worker"), content.get("seconds")
        if not is_whole(worker, -1) or not isinstance(seconds, int | float):
            raise FrameError(f"expected a worker and seconds; got {content!r:.200}")
        operation, step, _ = self._asked
        if worker < 0:
            return ManyhandsError(
                f"{self._peer} waited {seconds:.1f} s in server.{operation} for its first parameters: one worker must "
                "call server.initialize"
            )
        host = self._hosts[worker] if worker < len(self._hosts) else "its host"
        why = f"made no progress for {seconds:.1f} s"
        return PeerLost(worker, host, f"server.{operation}", step, seconds, why)

    def _staging(self, like: Tensor) -> Tensor:
        """Memory for a vector that no socket takes."""
        if self._stage is None or self._stage.numel() != like.numel() or self._stage.dtype != like.dtype:
            self._stage = torch.empty(like.numel(), dtype=like.dtype, pin_memory=like.is_cuda)
        return self._stage


def _is_portable(vector: Tensor) -> bool:
    return vector.device.type == "cpu" and vector.is_contiguous()


class ShardLost(PeerLost):
    """A server shard died, or did not answer for `timeout_s`. `rank` is -1 - shard, as the engines number processes."""

    def __init__(self, shard: int, peer: str, operation: str, step: int, seconds: float, why: str) -> None:
        super().__init__(-1 - shard, peer, operation, step, seconds, why)
        self.shard = shard
        self.args = (
            f"{peer} {why}. This worker waited {seconds:.1f} s for it in {operation} at step {step}. "
            "If it raised an error, that error is the first in the log.",
        )

    def __reduce__(self) -> Any:
        return type(self), (self.shard, self.host, self.operation, self.step, self.seconds, self.why)
