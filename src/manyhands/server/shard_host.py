"""Serving a shard: a thread for each worker's connection, until every worker has left or is gone.

A connection that ends without a goodbye frame is a worker that died: it is lost to the store, and nobody waits for it.
Unauthenticated or malformed connections are closed and logged once; they do not disturb the others.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Any

from manyhands.errors import ManyhandsError
from manyhands.server.base import ServerSpec
from manyhands.server.shard import Connection, Shard
from manyhands.transport.channel import Channel, ChannelClosed, ChannelTimeout
from manyhands.transport.frame import FrameError
from manyhands.transport.listener import Listener
from manyhands.units import printable

_log = logging.getLogger("manyhands")
_BEAT_S = 0.25


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
    """Serve shard `shard` of `shards`; returns what was done, when all of range(workers) came and went.

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
        return host.summary()
    finally:
        if listener is not None:
            listener.close()
        host.close()


class _Host:
    def __init__(self, spec: ServerSpec, shard: int, workers: int, generation: int, timeout_s: float) -> None:
        self.number, self.workers, self.generation, self.timeout_s = shard, workers, generation, timeout_s
        self.shard = Shard(spec, workers, timeout_s)
        self.lock = threading.Lock()
        self.threads: dict[int, threading.Thread] = {}
        self.connections: dict[int, Connection] = {}
        self.gone: set[int] = set()
        self.lost: list[int] = []
        self.error: BaseException | None = None
        self.awake, self.waker = os.pipe()  # a byte whenever a connection ends

    def start(self, rank: int, channel: Channel) -> None:
        channel.generation = max(channel.generation, self.generation)
        connection = Connection(self.shard, rank, channel)
        thread = threading.Thread(target=self._serve, args=(connection,), name=f"manyhands-worker-{rank}", daemon=True)
        with self.lock:
            self.connections[rank], self.threads[rank] = connection, thread
        thread.start()

    def _serve(self, connection: Connection) -> None:
        lost = True
        try:
            lost = self._is_lost(connection)
            connection.channel.close()
            self.shard.end(connection.worker, lost=lost)
        except BaseException as error:  # noqa: BLE001 - `run` raises it: the shard itself is broken
            self.error = error
        finally:
            with self.lock:
                self.gone.add(connection.worker)
                self.lost += [connection.worker] if lost else []
            os.write(self.waker, b".")

    def _is_lost(self, connection: Connection) -> bool:
        """Serve a worker to its end; whether it ended without a goodbye."""
        try:
            connection.serve()
        except (ChannelClosed, ChannelTimeout) as error:
            _log.info("server shard %d lost %s: %s", self.number, connection.channel.peer, error)
        except (FrameError, ManyhandsError) as error:
            _log.warning("server shard %d closed the connection to %s: %s", self.number, connection.channel.peer, error)
        else:
            return False
        return True

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
                    self._let_in(listener, shards)
            requests = sum(self.shard.calls.values())
            progress("wait" if requests == before else "serve", requests)
            before = requests

    def _is_needed(self, listener: Listener | None, seconds: float) -> bool:
        with self.lock:
            if self.error is not None:
                raise self.error
            missing = [rank for rank in range(self.workers) if rank not in self.connections]
            if missing and (listener is None or seconds > self.timeout_s):
                raise ChannelTimeout(
                    f"server shard {self.number} waits for workers {missing}, who did not come within {self.timeout_s:g} s"
                )
            return len(self.gone) < self.workers

    def _let_in(self, listener: Listener, shards: int) -> None:
        try:
            channel, hello = listener.accept(lambda hello: self._name(hello, shards), 0.0)
        except ChannelTimeout:  # it was a stranger, or not all of a hello
            return
        self.start(hello["worker"], channel)

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

    def summary(self) -> dict[str, Any]:
        """What this shard did: version, calls by name, lost workers."""
        return {
            "shard": self.number,
            "version": self.shard.store.version,
            **self.shard.calls,
            "lost": sorted(self.lost),
        }

    def close(self) -> None:
        for connection in self.connections.values():
            connection.channel.close()
        for thread in self.threads.values():
            thread.join()
        self.shard.close()
        os.close(self.awake)
        os.close(self.waker)
