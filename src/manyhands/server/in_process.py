"""The server in the workers' process: for one worker, tests, replay and simulation. The stores are the real ones."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from manyhands.comm.checks import check_mean
from manyhands.errors import BadInput, PeerLost
from manyhands.server.base import Encoded, Server, ServerSpec, ServerState
from manyhands.server.client import PushReply, ServerClient
from manyhands.server.pushes import Held
from manyhands.server.shard_ranges import check_encoded, codec_for, cut, joined, make_stores, parts_of
from manyhands.server.store import Duplicate, Go, Reply, Store

HELD = object()
"""What an act returns whose answer the store releases later."""

Act = Callable[[Store], Any]
"""What a call does with one shard's store: its answer, or HELD."""


class Load(NamedTuple):
    """What a call needs besides its acts. Each sequence has a number for each shard, and takes simulated time."""

    needs_center: bool = False  # it waits for the first one
    sends: Sequence[int] = ()  # bytes that travel to the shard
    work: Sequence[int] = ()  # bytes that the shard goes through
    decode_s: Sequence[float] = ()  # seconds before that
    again: bool = False  # the store itself knows a request that comes again
    brings: Sequence[int] = ()  # bytes that travel back, where the answer does not show it


NO_LOAD = Load()


class StoreClient(ServerClient):
    """The client of stores in this process. Each call is one act a shard; `_ask` brings them to the stores."""

    def __init__(self, spec: ServerSpec, stores: Sequence[Store], worker: int, generation: int = 0) -> None:
        super().__init__(spec, len(stores))
        self._stores, self._worker, self._generation = stores, worker, generation
        self._numbers_ticks = False  # they may be sent again, to another copy of a store
        self._like: tuple[int, torch.dtype] | None = None  # elements and dtype of the center, once it is there
        self._closed = False

    @abstractmethod
    def _ask(self, operation: str, acts: Sequence[Act], load: Load = NO_LOAD) -> list[Any]:
        """Do one act a shard; their answers."""

    @override
    def initialize(self, center: Tensor) -> None:
        parts = parts_of(center.detach(), self.shards)
        acts = [partial(_initialize, part.clone()) for part in parts]
        self._ask("initialize", acts, Load(sends=[part.nbytes for part in parts]))
        self._count("initialize", center)

    @override
    def activate(self) -> None:
        self._ask_each("activate", lambda store: store.activate(self._worker, self._generation))

    @override
    def deactivate(self) -> None:
        self._ask_each("deactivate", lambda store: store.deactivate(self._worker))

    @override
    def capture(self) -> ServerState:
        return joined(self._ask_each("capture", captured))

    @override
    def restore(self, snapshot: ServerState) -> None:
        pieces = cut(snapshot, self.shards)
        sizes = [sum(vector.nbytes for vector in vectors.values()) for vectors, _ in pieces]
        acts = [partial(_restore, *piece) for piece in pieces]
        self._ask("restore", acts, Load(sends=sizes))

    @override
    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.deactivate()

    @override
    def _read(self, operation: str, into: Tensor) -> list[int]:
        acts, load = self._acts_to_read(operation, into)
        versions: list[int] = self._ask(operation, acts, load)
        return versions

    def _acts_to_read(self, operation: str, into: Tensor) -> tuple[list[Act], Load]:
        self._check(into.shape, "a center")

        def read(part: Tensor, store: Store) -> int:
            if part.shape != store.center.shape:
                self._check_length(into.shape, "a center", sum(len(one.center) for one in self._stores))
            version = store.pull(self._worker) if operation == "pull" else store.version
            part.copy_(store.read())
            return version

        parts = parts_of(into.detach(), self.shards)
        return [partial(read, part) for part in parts], Load(needs_center=True, work=[part.nbytes for part in parts])

    @override
    def _push(
        self, update: Tensor | Encoded, sequence: int, weight: float, bits: int, since: Sequence[int] = ()
    ) -> tuple[Sequence[PushReply], Tensor | None]:
        acts, load = self._acts_to_push(update, sequence, weight, bits, since)
        return answers_to_push(self._ask("push", acts, load))

    def _acts_to_push(
        self, update: Tensor | Encoded, sequence: int, weight: float, bits: int, since: Sequence[int]
    ) -> tuple[list[Act], Load]:
        def push(part: Tensor, version: int | None, store: Store) -> PushReply | object:
            given = part
            if isinstance(update, Encoded):
                given = codec_for(self.spec).decode(part, len(store.center), update.dtype)
            reply = store.push(self._worker, sequence, given, weight, bits, version)
            original = reply.reply if isinstance(reply, Duplicate) else reply
            return HELD if isinstance(original, Held) and store.rule.answers else original

        parts = self._parts(update, weight, bits)
        counts_from: Sequence[int | None] = since or [None] * self.shards
        acts: list[Act] = [partial(push, part, one) for part, one in zip(parts, counts_from, strict=True)]
        return acts, self._load_of_push(update, parts)

    def _load_of_push(self, update: Tensor | Encoded, parts: Sequence[Tensor]) -> Load:
        return NO_LOAD

    @override
    def _tick(self, bits: int) -> int:
        go: Go = self._ask_each("tick", self._act_to_tick(bits))[0]
        return go.bits

    def _act_to_tick(self, bits: int) -> Act:
        def tick(store: Store) -> Go | object:
            reply = store.tick(self._worker, bits, self.step if self._numbers_ticks else 0)
            return reply if isinstance(reply, Go) else HELD

        return tick

    def _ask_each(self, operation: str, act: Act) -> list[Any]:
        return self._ask(operation, [act] * self.shards)

    def _parts(self, update: Tensor | Encoded, weight: float, bits: int) -> Sequence[Tensor]:
        """What each shard gets of an update: its part, or its payload. BadInput for what cannot be one."""
        if isinstance(update, Encoded):
            check_mean(torch.empty(0, dtype=update.dtype), weight, bits)
            check_encoded(codec_for(self.spec), update, self.shards)
            self._check([update.n], "a push", update.dtype)
            return update.parts
        check_mean(update, weight, bits)
        self._check(update.shape, "a push", update.dtype)
        return parts_of(update.detach(), self.shards)

    def _check(self, shape: Sequence[int], what: str, dtype: torch.dtype | None = None) -> None:
        """BadInput for a vector unlike the center; without a center yet, the stores check."""
        if self._like is None:
            if not all(store.initialized for store in self._stores):
                return
            self._like = sum(len(store.center) for store in self._stores), self._stores[0].center.dtype
        self._check_length(shape, what, self._like[0])
        if dtype not in (None, self._like[1]):
            raise BadInput(f"{what} must be of {self._like[1]} here; got {dtype}: convert it first")

    def _check_length(self, shape: Sequence[int], what: str, length: int) -> None:
        if len(shape) != 1 or shape[0] != length:
            raise BadInput(f"{what} must be a flat vector of {length} elements here; got the shape {list(shape)}")


def answers_to_push(replies: list[PushReply]) -> tuple[Sequence[PushReply], Tensor | None]:
    answers = [reply.answer for reply in replies if not isinstance(reply, Held) and reply.answer is not None]
    return replies, torch.cat(answers) if answers else None  # of its own, since a shard's may be everybody's


def _initialize(center: Tensor, store: Store) -> bool:
    return store.initialize(center)


def _restore(vectors: dict[str, Tensor], numbers: dict[str, Any], store: Store) -> None:
    store.restore(vectors, numbers)


def captured(store: Store) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """`Store.capture`, in memory of its own."""
    vectors, numbers = store.capture()
    return {name: vector.clone() for name, vector in vectors.items()}, numbers


class InProcessServers:
    """The stores of all shards and, in `clients`, a `Server` for each worker, each used by one thread."""

    def __init__(self, spec: ServerSpec, workers: int, shards: int = 1, *, timeout_s: float = 300) -> None:
        self.timeout_s = timeout_s
        self.stores: list[Store] = make_stores(spec, workers, shards)
        self.changed = threading.Condition()  # its lock serializes all calls of all stores
        self.mail: dict[tuple[int, int], Reply] = {}  # (worker, shard): what was released for it
        self.clients: list[Server] = [_Client(self, spec, worker) for worker in range(workers)]

    def deliver(self) -> None:
        """After a call, with the lock: hand out what it released."""
        for shard, store in enumerate(self.stores):
            for worker, reply in store.released:
                self.mail[worker, shard] = reply
            store.released.clear()
        self.changed.notify_all()


class _Client(StoreClient):
    """One worker's view. Calls happen at once, under the lock."""

    def __init__(self, servers: InProcessServers, spec: ServerSpec, worker: int) -> None:
        super().__init__(spec, servers.stores, worker)
        self._servers = servers

    @override
    def _ask(self, operation: str, acts: Sequence[Act], load: Load = NO_LOAD) -> list[Any]:
        with self._servers.changed:
            if load.needs_center:
                self._await_center(operation)
            answers = [act(store) for act, store in zip(acts, self._stores, strict=True)]
            self._servers.deliver()
            return [self._mail(shard, operation) if one is HELD else one for shard, one in enumerate(answers)]

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
            why = f"made no progress for {self._servers.timeout_s:g} s"
            raise PeerLost(rank, "localhost", f"server.{operation}", self.step, seconds, why)
