"""A simulated worker's server: each call is a request to every shard, for whose answers the worker waits in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from manyhands.comm.checks import check_mean
from manyhands.comm.codecs import Codec
from manyhands.comm.ledger import Ledger
from manyhands.engines.sim.shard import HELD, Act, Read, Request, ShardCall
from manyhands.errors import BadInput, PeerLost
from manyhands.server.base import Encoded, Pushed, Server, ServerState
from manyhands.server.journal import PushJournal
from manyhands.server.sharding import (
    check_encoded,
    check_length,
    codec_for,
    cut,
    joined,
    lengths_of,
    parts_of,
    pushed_of,
)
from manyhands.server.store import Duplicate, Go, Held, InvalidCall, Store

if TYPE_CHECKING:
    from manyhands.engines.sim.server import SimServers


class SimServer(Server):
    """One worker's view of the simulated shards: only its program calls it, in its turn. Made by `SimServers`."""

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
        """As the contract says. Who is first at the first shard gives to all: parts of two workers' centers are never mixed."""
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
        """Whether this worker gives the first center: who is first, also if its process ended meanwhile and is a new one."""
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
        """Let the time pass in which this worker has encoded an update; the seconds that each shard's part takes to decode."""
        codec, compute = self._codec(), self._servers.compute
        self._servers.timeline.work(compute.coding(codec, self._worker).encoding(update.n, update.nbytes))
        parts = zip(lengths_of(update), update.parts, strict=True)
        return [compute.coding(codec, -1 - shard).decoding(n, part.nbytes, 1) for shard, (n, part) in enumerate(parts)]

    def _codec(self) -> Codec:
        return codec_for(self._servers.spec)

    def _check(self, shape: Sequence[int], what: str, dtype: torch.dtype | None = None) -> None:
        """BadInput, before anything travels, for a vector that is not the center's like; where there is no center yet, the shards say so."""
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
