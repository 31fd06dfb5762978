"""A served shard: the store behind one lock, its center in published memory, and what waits to be told to workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from manyhands.comm.checks import MEAN_DTYPES
from manyhands.errors import BadInput
from manyhands.server.base import ServerSpec
from manyhands.server.published import VersionedBuffer
from manyhands.server.rules import make_rule
from manyhands.server.store import Applied, Dropped, Duplicate, Held, InvalidCall, Reply, Store

T = TypeVar("T")
_LIFE_SIGN_S = 0.5


class WorkersLate(Exception):
    """Nothing that a worker waits for has come for timeout_s. worker: whose turn it was, -1 if everybody's."""

    def __init__(self, worker: int, seconds: float) -> None:
        super().__init__(worker, seconds)
        self.worker, self.seconds = worker, seconds


class Shard:
    """What the connections of a shard share. Every method may be called from any thread."""

    def __init__(self, spec: ServerSpec, workers: int, timeout_s: float) -> None:
        self.store, self.workers = Store(make_rule(spec), workers, spec.bound), workers
        self.spec = spec
        self.calls = {"pulls": 0, "pushes": 0, "dropped": 0}
        self.published: VersionedBuffer | None = None
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._mail: dict[int, Reply] = {}  # by worker, who has one call at a time
        self._offering = False  # a worker is sending the first center
        self._moved = time.monotonic()  # when a worker last did something that another may wait for

    @property
    def memory(self) -> VersionedBuffer:
        """Where the center lies; Refused before there is one."""
        if self.published is None:
            raise InvalidCall("there is no center yet: a worker offers the first, then the others pull")
        return self.published

    def call(self, function: Callable[[Store], T]) -> T:
        """A call of the store, and hand out what it released."""
        with self._changed:
            value = function(self.store)
            self._deliver()
            return value

    def _deliver(self) -> None:
        self._moved = time.monotonic()
        if self.store.released:
            self._mail.update(self.store.released)
            self.store.released.clear()
            self._changed.notify_all()

    def answer(self, worker: int, alive: Callable[[], None]) -> Reply:
        """What the store releases for a worker that was answered Held or Wait. Raises Late."""
        self._wait(lambda: worker in self._mail, alive)
        with self._changed:
            return self._mail.pop(worker)

    def await_center(self, alive: Callable[[], None]) -> None:
        """Return when there is a first center. Raises Late."""
        self._wait(lambda: self.published is not None, alive)

    def _wait(self, ready: Callable[[], bool], alive: Callable[[], None]) -> None:
        """alive: called at once, then twice a second, to tell the waiting worker that this shard lives."""
        begun = time.monotonic()
        while True:
            with self._changed:
                if ready():
                    return
            alive()
            with self._changed:
                if self._changed.wait_for(ready, min(_LIFE_SIGN_S, self._timeout_s / 4)):
                    return
                now = time.monotonic()
                if now - max(begun, self._moved) > self._timeout_s:
                    slowest = self.store.slowest
                    raise WorkersLate(-1 if slowest is None else slowest, now - begun)

    # -- the first center ----------------------------------------------------------------------------------------------

    def offer(self, n: int, dtype: torch.dtype, alive: Callable[[], None]) -> VersionedBuffer | None:
        """Memory for the offered center, then `take` follows; None: there is a center already. Raises Late."""
        if dtype not in MEAN_DTYPES:
            raise BadInput(f"a center of float32, float64, bfloat16 or float16 was expected; got {dtype}")
        while True:
            self._wait(lambda: not self._offering, alive)
            with self._changed:
                if self._offering:
                    continue
                if self.published is None:
                    offered = VersionedBuffer(n, dtype, self.workers)
                    self._offering = True
                    return offered
            self.check(n, dtype, "a center")
            return None

    def take(self, offered: VersionedBuffer, *, came: bool) -> None:
        """The offered center has come into the first buffer, or never will."""
        with self._changed:
            self._offering = False
            if came:
                self.published = offered
                self.store.next_buffer = lambda: offered.free(self.store.center)
                self.store.initialize(offered.buffers[0])
            else:
                offered.close()
            self._changed.notify_all()

    def check(self, n: int, dtype: torch.dtype, what: str) -> None:
        """BadInput unless a vector has the shard's length and dtype; Refused before there is a center."""
        memory = self.memory
        if n != memory.n or dtype != memory.dtype:
            raise BadInput(f"{what} has {memory.n} elements of {memory.dtype} on this shard; got {n} of {dtype}")

    # -- reading and ending --------------------------------------------------------------------------------------------

    def pin(self, worker: int, *, pull: bool) -> tuple[int, int]:
        """(version, slot of the memory) of the center, which stays until `unpin`; pull: the store notes it."""
        with self._changed:
            self.calls["pulls"] += pull
            version = self.store.pull(worker) if pull else self.store.version
            return version, self.memory.pin(worker, self.store.read())

    def unpin(self, worker: int) -> None:
        with self._changed:
            if self.published is not None:
                self.published.unpin(worker)

    def push(self, worker: int, sequence: int, update: Tensor, weight: float, bits: int) -> Applied | Held | Dropped:
        """`Store.push`, counted; what was said to a duplicate's first is said again."""
        with self._changed:
            reply = self.store.push(worker, sequence, update, weight, bits)
            self._deliver()
            if isinstance(reply, Duplicate):
                return reply.reply
            self.calls["pushes"] += 1
            self.calls["dropped"] += isinstance(reply, Dropped)
            return reply

    def capture(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """`Store.capture`, in memory of its own."""
        with self._changed:
            vectors, numbers = self.store.capture()
            return {name: vector.clone() for name, vector in vectors.items()}, numbers

    def end(self, worker: int, *, lost: bool) -> None:
        """This worker's connection ended. Nobody waits for it any more."""
        with self._changed:
            (self.store.leave if lost else self.store.deactivate)(worker)
            self._mail.pop(worker, None)
            if self.published is not None:
                self.published.unpin(worker)
            self._deliver()
            self._changed.notify_all()

    def close(self) -> None:
        if self.published is not None:
            self.published.close()
