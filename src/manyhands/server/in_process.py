"""The server in the workers' process: for one worker, tests, replay and simulation. The stores are the real ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from torch import Tensor
from typing_extensions import override

from manyhands.comm.ledger import Ledger
from manyhands.errors import PeerLost
from manyhands.server.base import Encoded, Pushed, Server, ServerSpec, ServerState
from manyhands.server.journal import PushJournal
from manyhands.server.sharding import (
    check_encoded,
    check_length,
    codec_for,
    cut,
    decoded,
    joined,
    make_stores,
    parts_of,
    pushed_of,
)
from manyhands.server.store import Applied, Dropped, Duplicate, Go, Held, Reply, Store

T = TypeVar("T")


class InProcessServers:
    """The stores of all shards and, in `clients`, a `Server` for each worker, each used by one thread."""

    def __init__(self, spec: ServerSpec, workers: int, shards: int = 1, *, timeout_s: float = 300) -> None:
        self.spec, self.timeout_s = spec, timeout_s
        self.stores: list[Store] = make_stores(spec, workers, shards)
        self.changed = threading.Condition()  # its lock serializes all calls of all stores
        self.mail: dict[tuple[int, int], Reply] = {}  # (worker, shard): what was released for it
        self.clients: list[Server] = [_Client(self, worker) for worker in range(workers)]

    def lose(self, worker: int) -> None:
        """Declare a worker lost: nobody waits for it any more."""
        with self.changed:
            for store in self.stores:
                store.leave(worker)
            self.deliver()

    def deliver(self) -> None:
        """After a call, with the lock: hand out what it released."""
        for shard, store in enumerate(self.stores):
            for worker, reply in store.released:
                self.mail[worker, shard] = reply
            store.released.clear()
        self.changed.notify_all()


class _Client(Server):
    """One worker's view."""

    def __init__(self, servers: InProcessServers, worker: int) -> None:
        self.ledger = Ledger()
        self._servers, self._stores, self._worker = servers, servers.stores, worker
        self.shards, self._sequence = len(self._stores), 0
        self._ticks = 0  # finished ones, for messages
        self._journal = PushJournal()
        self._closed = False

    @override
    def initialize(self, center: Tensor) -> None:
        with self._servers.changed:
            for store, part in zip(self._stores, parts_of(center.detach(), len(self._stores)), strict=True):
                store.initialize(part.clone())
            self._servers.changed.notify_all()
        self._count("initialize", center)

    @override
    def activate(self) -> None:
        with self._servers.changed:
            for store in self._stores:
                store.activate(self._worker, 0)

    @override
    def pull(self, into: Tensor) -> None:
        with self._servers.changed:
            self._await_center("pull")
            self._journal.pulled([store.pull(self._worker) for store in self._stores])
            self._copy_center(into)
        self._count("pull", into)

    @override
    def push(self, update: Tensor | Encoded, weight: float = 1.0, bits: int = 0) -> Pushed:
        with self._servers.changed:
            parts = self._parts(update)
            replies = [store.push(self._worker, self._sequence + 1, p, weight, bits) for store, p in self._with(parts)]
            self._sequence += 1
            self._servers.deliver()
            settled = [self._settled(shard, reply) for shard, reply in enumerate(replies)]
        self._count("push", update)
        pushed = pushed_of(settled)
        if pushed.answer is not None:
            self._count("answer", pushed.answer)
        self._journal.pushed(settled, weight, answered=pushed.answer is not None)
        return pushed

    @override
    def tick(self, bits: int = 0) -> int:
        self._ticks += 1
        if self._servers.spec.bound is None:
            return bits
        with self._servers.changed:
            replies = [store.tick(self._worker, bits) for store in self._stores]
            self._servers.deliver()
            goes = [reply if isinstance(reply, Go) else self._mail(s, "tick") for s, reply in enumerate(replies)]
        go = goes[0]
        assert isinstance(go, Go)
        return go.bits

    @override
    def deactivate(self) -> None:
        with self._servers.changed:
            for store in self._stores:
                store.deactivate(self._worker)
            self._servers.deliver()

    @override
    def center(self, into: Tensor) -> None:
        with self._servers.changed:
            self._await_center("center")
            self._copy_center(into)
        self._count("center", into)

    @override
    def capture(self) -> ServerState:
        with self._servers.changed:
            return joined([store.capture() for store in self._stores])

    @override
    def restore(self, snapshot: ServerState) -> None:
        with self._servers.changed:
            for store, (vectors, numbers) in self._with(cut(snapshot, len(self._stores))):
                store.restore(vectors, numbers)
            self._servers.changed.notify_all()

    @override
    def drain_journal(self) -> dict[str, Any]:
        return self._journal.take()

    @override
    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.deactivate()

    def _with(self, parts: Sequence[T]) -> Iterator[tuple[Store, T]]:
        return zip(self._stores, parts, strict=True)

    def _copy_center(self, into: Tensor) -> None:
        self._check_length(into, "a center")
        for store, part in self._with(parts_of(into.detach(), len(self._stores))):
            part.copy_(store.read())

    def _check_length(self, vector: Tensor, what: str) -> None:
        check_length(vector.shape, sum(len(store.center) for store in self._stores), what)

    def _settled(self, shard: int, reply: Applied | Held | Dropped | Duplicate) -> Applied | Held | Dropped:
        assert not isinstance(reply, Duplicate)  # nothing is sent twice inside a process
        if isinstance(reply, Held) and self._stores[shard].rule.answers:
            answer = self._mail(shard, "push")
            assert isinstance(answer, Applied | Dropped)
            return answer
        return reply

    def _parts(self, update: Tensor | Encoded) -> Sequence[Tensor]:
        """With the lock: what each store gets."""
        if isinstance(update, Tensor):
            self._check_length(update, "a push")
            return parts_of(update.detach(), len(self._stores))
        check_encoded(codec_for(self._servers.spec), update, self.shards)
        return decoded(self._servers.spec, update)

    def _await_center(self, operation: str) -> None:
        self._wait(lambda: all(store.initialized for store in self._stores), self._stores[0], operation)

    def _mail(self, shard: int, operation: str) -> Reply:
        key = (self._worker, shard)
        self._wait(lambda: key in self._servers.mail, self._stores[shard], operation)
        return self._servers.mail.pop(key)

    def _wait(self, ready: Callable[[], bool], store: Store, operation: str) -> None:
        """With the lock; PeerLost, naming whom this worker waits for, after the deadline."""
        if ready():
            return
        begun = time.perf_counter()
        came = self._servers.changed.wait_for(ready, self._servers.timeout_s)
        seconds = time.perf_counter() - begun
        self.waited_s += seconds
        if not came:
            rank = 0 if store.slowest is None else store.slowest
            why = f"did not do its part for {self._servers.timeout_s:g} s"
            raise PeerLost(rank, "localhost", f"server.{operation}", self._ticks, seconds, why)

    def _count(self, operation: str, vector: Tensor | Encoded) -> None:
        self.ledger.add(operation, vector.nbytes, self.shards)
