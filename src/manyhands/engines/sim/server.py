"""The parameter server of simulated workers: the real stores, reached in virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from manyhands.comm.checks import check_mean
from manyhands.comm.codecs import Codec
from manyhands.comm.ledger import Ledger
from manyhands.engines.sim.compute import Compute
from manyhands.engines.sim.faults import Faults, Messages
from manyhands.engines.sim.network import NetworkState
from manyhands.engines.sim.shard import HELD, Act, Read, Request, ShardCall, ShardQueue, SimShard
from manyhands.engines.sim.timeline import Killed, Timeline
from manyhands.errors import BadInput, ManyhandsError, PeerLost
from manyhands.server.base import Encoded, Pushed, Server, ServerSpec, ServerState
from manyhands.server.journal import PushJournal
from manyhands.server.line import ShardLost
from manyhands.server.sharding import (
    check_encoded,
    check_length,
    codec_for,
    cut,
    joined,
    lengths_of,
    make_stores,
    parts_of,
    pushed_of,
)
from manyhands.server.store import Duplicate, Go, Held, InvalidCall, Store


class SimServers:
    """The shards and, in `clients`, each worker's `Server`, which only that worker's program calls, in its turn.

    A call is one request to each shard and one answer of each; the worker waits until it has them all. After
    `compute.request` seconds of its worker's own a request takes its time on the wires, waits until the shard has
    handled what came before, and is handled in `compute.merge` seconds a byte of a push or of the center. An encoded
    push takes its worker the codec's seconds before it leaves, and at the shard those of decoding, at the same time as
    others, before it stands in line. A pull is written into the worker's tensor, and a push read from it, then.
    `waited_s` is what the shards say: how long they held answers back for other workers.

    messages: what happens to each message, None where nothing does. Then a request is sent again `faults.retry_s` after
    its last copy, or the last answer to it, was to arrive; not while it waits at its shard, since that would change
    nothing. Its copies are known by its number, pushes by the store. `initialize` sends the center to a shard only if
    this worker is first.

    timeout_s: a call that waits for other workers for so long, while none of them does anything, gets PeerLost, and one
    of which nothing is heard for so long ShardLost; what is on its way takes the time that it takes. inf: never.

    Ledger: as of served servers, each request once; what is sent again is counted as "resent".
    """

    def __init__(
        self,
        spec: ServerSpec,
        workers: int,
        shards: int,
        timeline: Timeline,
        wires: NetworkState,
        messages: Messages | None,
        compute: Compute,
        faults: Faults,
        timeout_s: float,
    ) -> None:
        self.spec, self.timeline, self.wires, self.timeout_s = spec, timeline, wires, timeout_s
        self.compute = compute
        self.stores = make_stores(spec, workers, shards)
        post = ShardQueue(timeline, wires, messages)
        self.shards = [
            SimShard(number, store, workers, post, compute.merge, self._plan_retry)
            for number, store in enumerate(self.stores)
        ]
        self.clients: list[Server] = [SimServer(self, worker, 0) for worker in range(workers)]
        self.giver: int | None = None  # the worker whose center is the first
        self._retry_s = None if messages is None else faults.retry_s
        self._open: dict[int, ShardCall] = {}  # by worker
        self._generations = [0] * workers
        self._lost: set[int] = set()
        self._watched = False  # whether a look at the open calls is planned

    # -- what befalls workers and shards -----------------------------------------------------------------------------

    def lose(self, worker: int) -> None:
        """Declare a worker lost: nobody waits for it, and its messages under way are ignored. Idempotent."""
        self._lost.add(worker)
        call = self._open.get(worker)
        if call is not None:
            call.cell.fail(self._refused(worker))
        for shard in self.shards:
            shard.tell(partial(shard.lose, worker))
        if worker == self.giver:
            error = PeerLost(worker, self._host(worker), "server.initialize", 0, 0.0, "is gone with the first center")
            for shard in self.shards:
                shard.tell(partial(shard.expect_no_center, error))

    def restart(self, worker: int) -> None:
        """A worker has a new process: `clients[worker]` is a new client, of the next generation."""
        self._lost.discard(worker)
        self._open.pop(worker, None)
        self._generations[worker] += 1
        self.clients[worker] = SimServer(self, worker, self._generations[worker])
        for shard in self.shards:
            shard.tell(partial(shard.restart_worker, worker, self._generations[worker]))
            if worker == self.giver:
                shard.tell(partial(shard.expect_no_center, None))

    def pause_shard(self, shard: int, seconds: float) -> None:
        """It handles nothing for so long; what arrives waits."""
        self.shards[shard].pause(seconds)

    def restart_shard(self, shard: int, seconds: float) -> None:
        """The shard is gone for a while. Messages under way are lost and sent again later; its store is kept."""
        self.shards[shard].restart(seconds, partial(self._is_back, shard))

    def kill_shard(self, shard: int) -> None:
        """It is gone for good: everybody who waits for it, or calls, gets PeerLost."""
        self.shards[shard].kill()
        for call in self._open.values():
            if shard in call.missing:
                call.cell.fail(self._shard_lost(shard, call, "is gone"))

    # -- calls -------------------------------------------------------------------------------------------------------

    def exchange(self, call: ShardCall) -> None:
        """Send a call's requests and wait for all answers, in virtual time."""
        if self.timeline.is_dead:  # the dead say nothing
            raise Killed
        if call.worker in self._lost:
            raise self._refused(call.worker)
        for shard in self.shards:
            if shard.is_killed:
                raise self._shard_lost(shard.number, call, "is gone")
        self._open[call.worker] = call
        for request in call.requests:
            request.quiet_from = self._send(request)
        self._watch(self.timeline.now)
        try:
            self.timeline.wait(call.cell, f"its answer of server.{call.operation}")
        finally:
            if self._open.get(call.worker) is call:
                del self._open[call.worker]
            for request in call.requests:
                if request.due is not None:
                    request.due.cancel()

    def _send(self, request: Request) -> float:
        """When it is to arrive."""
        arrives = self.shards[request.shard].send(request)
        self._plan_retry(request, arrives)
        return arrives

    def _plan_retry(self, request: Request, arrives: float) -> None:
        """After a request, or an answer to it, was sent, that may not arrive."""
        if request.due is not None:
            request.due.cancel()
            request.due = None
        if self._retry_s is not None and self._is_missing(request):
            request.due = self.timeline.at(arrives + self._retry_s, partial(self._resend, request))

    def _is_missing(self, request: Request) -> bool:
        """Whether its answer is waited for."""
        return self._open.get(request.call.worker) is request.call and request.shard in request.call.missing

    def _resend(self, request: Request) -> None:
        """Unless it is at its shard: then the answer will come, and this is planned anew."""
        if self._is_missing(request) and not self.shards[request.shard].has(request):
            self.clients[request.call.worker].ledger.add("resent", request.sends)
            self._send(request)

    def _is_back(self, shard: int) -> None:
        for call in list(self._open.values()):
            for request in call.requests:
                if request.shard == shard:
                    self._resend(request)

    # -- deadlines ---------------------------------------------------------------------------------------------------

    def _watch(self, since: float) -> None:
        """Check the open calls once the oldest silence may exceed the deadline. One check is planned at a time."""
        if not self._watched and self.timeout_s < math.inf:
            self._watched = True
            self.timeline.at(max(self.timeline.now, since + self.timeout_s), self._look)

    def _look(self) -> None:
        self._watched = False
        missing = [r for call in self._open.values() for r in call.requests if r.shard in call.missing]
        for request in missing:
            if self._quiet_since(request) + self.timeout_s <= self.timeline.now:
                request.call.cell.fail(self._late(request))
        since = [self._quiet_since(request) for request in missing if not request.call.cell.is_set]
        if since:
            self._watch(min(since))

    def _quiet_since(self, request: Request) -> float:
        shard = self.shards[request.shard]
        return max(request.quiet_from, shard.moved_at) if shard.has(request) else request.quiet_from

    def _late(self, request: Request) -> ManyhandsError:
        """Nothing was heard of a request for too long: because of another worker, or of the shard."""
        call, shard = request.call, self.shards[request.shard]
        seconds = self.timeline.now - call.since
        if not shard.holds(request):
            return self._shard_lost(shard.number, call, f"did not answer for {self.timeout_s:g} s")
        worker = shard.slowest if shard.store.initialized else self.giver
        if worker is None:
            return ManyhandsError(
                f"worker {call.worker} waited {seconds:g} s for a first center in server.{call.operation}: one worker has to offer its parameters"
            )
        why = f"did not do its part for {self.timeout_s:g} s"
        return PeerLost(worker, self._host(worker), f"server.{call.operation}", call.step, seconds, why)

    # -- words -------------------------------------------------------------------------------------------------------

    def _host(self, node: int) -> str:
        return f"host{self.wires.host_of(node)}"

    def _refused(self, worker: int) -> InvalidCall:
        return InvalidCall(f"worker {worker} was declared lost: it takes no part, unless its process is started again")

    def _shard_lost(self, shard: int, call: ShardCall, why: str) -> ShardLost:
        seconds = self.timeline.now - call.since
        return ShardLost(shard, f"server shard {shard}", f"server.{call.operation}", call.step, seconds, why)


class SimServer(Server):
    """One worker's client: each call is a request to every shard, whose answers it awaits in virtual time."""

    def __init__(self, servers: SimServers, worker: int, generation: int) -> None:
        self.ledger = Ledger()
        self._servers, self._worker, self._generation = servers, worker, generation
        self.shards = len(servers.stores)
        self._calls = 0
        self._sequence = 0
        self._ticks = 0  # finished ones, for messages
        self._journal = PushJournal()
        self._closed = False

    @override
    def initialize(self, center: Tensor) -> None:
        """As the contract. The first worker at the first shard gives to all: parts of two centers are never mixed."""
        (first,) = self._ask("initialize", [Request(0, self._offer)])
        if not first:
            self._ask_all("initialize", [lambda store: None] * self.shards, needs_center=True)
            return
        parts = parts_of(center.detach(), self.shards)
        self._ask_all("initialize", [partial(_give, part) for part in parts], [part.nbytes for part in parts])
        self._add("initialize", center)

    @override
    def activate(self) -> None:
        self._tell("activate", lambda store: store.activate(self._worker, self._generation))

    @override
    def pull(self, into: Tensor) -> None:
        self._journal.pulled(self._read("pull", into, lambda store: store.pull(self._worker)))

    @override
    def push(self, update: Tensor | Encoded, weight: float = 1.0, bits: int = 0) -> Pushed:
        parts = self._parts(update, weight, bits)
        sizes, sequence = [part.nbytes for part in parts], self._sequence + 1

        def act(part: Tensor, store: Store) -> Any:
            given = part if isinstance(update, Tensor) else self._codec().decode(part, len(store.center), update.dtype)
            reply = store.push(self._worker, sequence, given, weight, bits)
            original = reply.reply if isinstance(reply, Duplicate) else reply
            return HELD if isinstance(original, Held) and store.rule.answers else original

        acts: list[Act] = [partial(act, part) for part in parts]
        decode_s = self._coded(update) if isinstance(update, Encoded) else ()
        replies = self._ask_all("push", acts, sizes, work=self._center_sizes(), decode_s=decode_s, again=True)
        self._sequence = sequence
        self._add("push", update)
        pushed = pushed_of(replies)
        if pushed.answer is not None:
            self._add("answer", pushed.answer)
        self._journal.pushed(replies, weight, answered=pushed.answer is not None)
        return pushed

    @override
    def tick(self, bits: int = 0) -> int:
        self._ticks += 1
        if self._servers.spec.bound is None:
            return bits

        def act(store: Store) -> Any:
            reply = store.tick(self._worker, bits)
            return reply if isinstance(reply, Go) else HELD

        go: Go = self._tell("tick", act)
        return go.bits

    @override
    def deactivate(self) -> None:
        self._tell("deactivate", lambda store: store.deactivate(self._worker))

    @override
    def center(self, into: Tensor) -> None:
        self._read("center", into, lambda store: store.version)

    @override
    def capture(self) -> ServerState:
        def act(store: Store) -> Any:
            vectors, numbers = store.capture()
            return {name: vector.clone() for name, vector in vectors.items()}, numbers

        return joined(self._ask_all("capture", [act] * self.shards))

    @override
    def restore(self, snapshot: ServerState) -> None:
        pieces = cut(snapshot, self.shards)
        sizes = [sum(vector.nbytes for vector in vectors.values()) for vectors, _ in pieces]
        acts: list[Act] = [partial(_restore, vectors, numbers) for vectors, numbers in pieces]
        self._ask_all("restore", acts, sizes)

    @override
    def drain_journal(self) -> dict[str, Any]:
        return self._journal.take()

    @override
    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with suppress(PeerLost, InvalidCall):  # there is nobody to say goodbye to
                self.deactivate()

    # -- all shards ----------------------------------------------------------------------------------------------------

    def _tell(self, operation: str, act: Act) -> Any:
        """Ask all shards the same; the first one's answer."""
        return self._ask_all(operation, [act] * self.shards)[0]

    def _read(self, operation: str, into: Tensor, version: Callable[[Store], int]) -> list[int]:
        """The center into a vector [D']; its versions, one of each shard."""
        self._check(into.shape, "a center")

        def act(part: Tensor, store: Store) -> Read:
            if part.shape != store.center.shape:
                check_length(into.shape, sum(len(one.center) for one in self._servers.stores), "a center")
            read = Read(version(store), store.center.nbytes)
            part.copy_(store.read())
            return read

        parts = parts_of(into.detach(), self.shards)
        acts: list[Act] = [partial(act, part) for part in parts]
        reads = self._ask_all(operation, acts, work=[part.nbytes for part in parts], needs_center=True)
        self._add(operation, into)
        return [read.version for read in reads]

    def _ask_all(
        self,
        operation: str,
        acts: Sequence[Act],
        sends: Sequence[int] = (),
        work: Sequence[int] = (),
        decode_s: Sequence[float] = (),
        **options: bool,
    ) -> list[Any]:
        nothing = [0] * self.shards
        each = zip(acts, sends or nothing, work or nothing, decode_s or nothing, strict=True)
        return self._ask(
            operation,
            [
                Request(shard, act, sends=sent, work=bytes, decode_s=seconds, **options)
                for shard, (act, sent, bytes, seconds) in enumerate(each)
            ],
        )

    def _ask(self, operation: str, requests: list[Request]) -> list[Any]:
        """What the shards answer; raises the first error among it."""
        self._calls += 1
        if request_s := self._servers.compute.request:
            self._servers.timeline.sleep(request_s)
        cell = self._servers.timeline.cell()
        call = ShardCall(self._worker, (self._generation, self._calls), operation, self._ticks, requests, cell)
        self._servers.exchange(call)
        self.waited_s += max(request.held_s for request in requests)
        for request in requests:
            if isinstance(request.answer, Exception):
                raise request.answer
        return [request.answer for request in requests]

    def _offer(self, store: Store) -> bool:
        """Whether this worker gives the first center: the first to offer, also after its process was replaced."""
        servers = self._servers
        if servers.giver is None and not store.initialized:
            servers.giver = self._worker
        return servers.giver == self._worker and not all(store.initialized for store in servers.stores)

    def _parts(self, update: Tensor | Encoded, weight: float, bits: int) -> Sequence[Tensor]:
        """What each shard is sent of an update: its part, or its payload. BadInput for what cannot be one."""
        check_mean(torch.empty(0, dtype=update.dtype), weight, bits)
        if isinstance(update, Encoded):
            check_encoded(self._codec(), update, self.shards)
            self._check([update.n], "a push", update.dtype)
            return update.parts
        self._check(update.shape, "a push", update.dtype)
        return parts_of(update.detach(), self.shards)

    def _coded(self, update: Encoded) -> list[float]:
        """Wait for this worker's encoding of an update; the seconds that each shard needs to decode its part."""
        codec, compute = self._codec(), self._servers.compute
        self._servers.timeline.work(compute.coding(codec, self._worker).encoding(update.n, update.nbytes))
        parts = zip(lengths_of(update), update.parts, strict=True)
        return [compute.coding(codec, -1 - shard).decoding(n, part.nbytes, 1) for shard, (n, part) in enumerate(parts)]

    def _codec(self) -> Codec:
        return codec_for(self._servers.spec)

    def _check(self, shape: Sequence[int], what: str, dtype: torch.dtype | None = None) -> None:
        """BadInput, before sending, for a vector unlike the center; without a center yet, the shards check."""
        stores = self._servers.stores
        if not all(store.initialized for store in stores):
            return
        length = sum(len(store.center) for store in stores)
        check_length(shape, length, what)
        if dtype not in (None, stores[0].center.dtype):
            raise BadInput(f"{what} here is of {stores[0].center.dtype}; got {dtype}: convert it first")

    def _center_sizes(self) -> list[int]:
        """Bytes of each shard's center."""
        return [store.center.nbytes if store.initialized else 0 for store in self._servers.stores]

    def _add(self, operation: str, vector: Tensor | Encoded) -> None:
        self.ledger.add(operation, vector.nbytes, self.shards)


def _give(part: Tensor, store: Store) -> None:
    if not store.initialized:
        store.initialize(part.clone())


def _restore(vectors: dict[str, Tensor], numbers: dict[str, Any], store: Store) -> None:
    store.restore(vectors, numbers)
