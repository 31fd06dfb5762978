"""Serving a copy of a shard in a run whose members may change: the driver says which view it is, who comes, who is lost, and
when it is over.

Connections of workers end and come again: the end of one says nothing about its worker, who takes part as long as it has
not said goodbye. The driver judges that, and fences a worker that is lost: nothing of it enters from then on, and the
driver learns what has.

The primary sends every call to the other copy, and reads its acknowledgements in a thread; the other copy makes the
calls in a thread of its own. What that means is decided in log.py. While a new copy is sent its image, workers wait.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manyhands.errors import ManyhandsError, is_whole
from manyhands.server.base import ServerSpec
from manyhands.server.replication.backup_link import BackupLink, LinkFrame
from manyhands.server.replication.log import Call, Copy, OutOfOrder, make
from manyhands.server.replication.views import ShardView
from manyhands.server.shard_host import Connection, Shard
from manyhands.server.shard_ranges import codec_for
from manyhands.server.versioned_buffer import VersionedBuffer, map_outbox
from manyhands.transport.channel import Channel, ChannelClosed, ChannelTimeout
from manyhands.transport.frame import Frame, FrameError, from_json
from manyhands.transport.listener import Listener
from manyhands.units import printable

_log = logging.getLogger("manyhands")
_BEAT_S = 0.25


class Orders:
    """What the driver orders, in order. One thread puts, another waits on `fileno` and takes."""

    def __init__(self) -> None:
        self._orders: deque[tuple[dict[str, Any], Sequence[int]]] = deque()
        self._awake, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._closing, self._closed = threading.Lock(), False

    def put(self, body: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """fds: descriptors, from now on whoever takes them closes them."""
        with self._closing:
            if self._closed:  # what comes after the last order is of no interest
                _close_all(fds)
                return
            self._orders.append((body, fds))
            with suppress(BlockingIOError):  # it is awake
                os.write(self._waker, b".")

    def take(self) -> list[tuple[dict[str, Any], Sequence[int]]]:
        with suppress(BlockingIOError):
            os.read(self._awake, 4096)
        return [self._orders.popleft() for _ in range(len(self._orders))]

    def fileno(self) -> int:
        return self._awake

    def close(self) -> None:
        with self._closing:
            self._closed = True
            for _, fds in self.take():
                _close_all(fds)
            os.close(self._awake)
            os.close(self._waker)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


class _Served(NamedTuple):
    connection: Connection
    thread: threading.Thread


class _Linked(NamedTuple):
    link: BackupLink | None
    thread: threading.Thread | None


def serve_copy(
    spec: ServerSpec,
    *,
    shard: int,
    workers: int,
    process_index: int,
    orders: Orders,
    channel: Callable[[int, int], Channel],
    report: Callable[[dict[str, Any]], None],
    listener: Listener | None = None,
    timeout_s: float = 300.0,
    progress: Callable[[str, int], None] = lambda phase, requests: None,
) -> dict[str, Any]:
    """Serve a copy of shard `shard` until the order `finish`; its version and calls.

    process_index: of this copy's process. channel: (a descriptor that came with an order, the process index at its
    other end) -> the channel. report: send a message to the driver, from any thread. listener: for workers of other
    hosts. See `serve` for the others. Raises what is wrong with the server itself.
    """
    host = _CopyHost(spec, shard, workers, process_index, channel, report, timeout_s)
    try:
        host.run(orders, listener, progress)
        return {"shard": shard, "version": host.shard.store.version, **host.shard.calls}
    finally:
        if listener is not None:
            listener.close()
        host.close()
        orders.close()


class _CopyHost:
    def __init__(
        self,
        spec: ServerSpec,
        number: int,
        workers: int,
        process_index: int,
        channel: Callable[[int, int], Channel],
        report: Callable[[dict[str, Any]], None],
        timeout_s: float,
    ) -> None:
        self.number, self.shard = number, Shard(spec, workers, timeout_s, Copy(process_index, alone=False))
        self.shard.keeps_outboxes = True
        self._spec, self._link = spec, _Linked(None, None)
        self._cores: list[int] = []  # on which calls are made; empty: on any
        self._channel, self._report = channel, report
        self._served: dict[int, _Served] = {}  # by worker id, the newest
        self._error: BaseException | None = None
        self._least: dict[int, int] = {}  # worker id: the number of the oldest of its processes that is let in

    def run(self, orders: Orders, listener: Listener | None, progress: Callable[[str, int], None]) -> None:
        poll = select.poll()
        poll.register(orders, select.POLLIN)
        if listener is not None:
            poll.register(listener, select.POLLIN)
        before, going = -1, True
        while going:
            poll.poll(_BEAT_S * 1e3)
            for body, fds in orders.take():
                going = self._obey(body, fds) and going
            if listener is not None:
                with suppress(ChannelTimeout):  # nobody, or a stranger, or not all of a hello
                    channel, hello = listener.accept(self._name, 0.0)
                    self._start(hello["worker"], hello["process"], channel)
            if self._error is not None:
                raise self._error
            requests = sum(self.shard.calls.values())
            progress("wait" if requests == before else "serve", requests)
            before = requests

    def _obey(self, body: dict[str, Any], fds: Sequence[int]) -> bool:
        """False: it is over."""
        match body["type"]:
            case "view":
                self._take_view(ShardView(**body["view"]), fds)
            case "connection":
                self._start(body["worker_id"], body["process"], self._channel(fds[0], body["worker_id"]))
            case "fence":
                self._fence(body["worker_id"], body["process"])
        return bool(body["type"] != "finish")

    def _name(self, hello: dict[str, Any]) -> str:
        """Who comes to the listener; FrameError when it is nobody that this shard serves."""
        worker, process, host = hello.get("worker"), hello.get("process"), hello.get("host")
        if hello.get("shard") != self.number or not is_whole(process, 0) or not isinstance(host, str):
            raise FrameError(f"this is a copy of server shard {self.number}; the hello asks for {hello!r:.200}")
        if not is_whole(worker, 0) or worker >= self.shard.workers:
            raise FrameError(f"a worker in range({self.shard.workers}) was expected; got {worker!r:.40}")
        if process < self._least.get(worker, 0):
            raise FrameError(f"process {process} of worker {worker} is lost, and another one is in its place")
        return f"worker {worker} on {printable(host, 100)}"

    def _start(self, worker_id: int, process: int, channel: Channel) -> None:
        """Serve a worker over a new connection, and not over an older one any more."""
        self._drop(worker_id)
        self._least[worker_id] = process
        channel.generation = process
        connection = Connection(self.shard, worker_id, channel)
        name = f"manyhands-worker-{worker_id}"
        thread = threading.Thread(target=self._serve, args=(connection,), name=name, daemon=True)
        self._served[worker_id] = _Served(connection, thread)
        thread.start()
        self._place([thread])

    def _serve(self, connection: Connection) -> None:
        peer, left = connection.channel.peer, False
        try:
            try:
                connection.serve()
                left = True
            except (ChannelClosed, ChannelTimeout) as error:
                _log.info("server shard %d: the connection to %s ended: %s", self.number, peer, error)
            except (FrameError, ManyhandsError) as error:
                _log.warning("server shard %d closed the connection to %s: %s", self.number, peer, error)
            connection.channel.close()
            self.shard.end(connection.worker, Call.DEACTIVATE if left else None)
        except BaseException as error:  # noqa: BLE001 - `run` raises it: the shard itself is broken
            self._error = error

    def _drop(self, worker_id: int) -> None:
        served = self._served.pop(worker_id, None)
        if served is not None:
            served.connection.channel.close()
            served.thread.join()

    def _fence(self, worker_id: int, process: int) -> None:
        """The driver has lost this process of the worker's: nothing of it enters any more."""
        self._drop(worker_id)
        self._least[worker_id] = process + 1
        try:
            applied, index = self.shard.make(Call.FENCE, worker_id, process)
        except OutOfOrder:
            return  # the driver asks the primary
        tick = self.shard.call(lambda store: store.pushed_in(worker_id, process))
        message = {"type": "connection_closed", "worker_id": worker_id, "applied": applied, "tick": tick}
        name = f"manyhands-fence-{worker_id}"
        threading.Thread(target=self._report_when_it_may_leave, args=(index, message), name=name, daemon=True).start()

    def _report_when_it_may_leave(self, index: int, message: dict[str, Any]) -> None:
        with suppress(OutOfOrder):
            self.shard.leave(index, lambda: None)
            self._report(message)

    # -- the other copy ------------------------------------------------------------------------------------------------

    def _take_view(self, view: ShardView, fds: Sequence[int]) -> None:
        """Become what the view says; with a descriptor where it has a new copy, and this one is an end of the link to it."""
        shard, before = self.shard, self._link
        with shard.changed:
            if not shard.copy.take_view(view):
                _close_all(fds)
                return
            if before.link is not None and before.link.number != view.link:
                before.link.close()
                self._link = _Linked(None, None)
                shard.use_link(None)
            if fds:
                self._open_link(view, fds[0])
            shard.changed.notify_all()
        if self._link is not before and before.thread is not None:
            before.thread.join()
        if not shard.copy.is_primary:
            for worker_id in list(self._served):
                self._drop(worker_id)

    def _open_link(self, view: ShardView, fd: int) -> None:
        shard, primary = self.shard, self.shard.copy.is_primary
        assert view.recruit is not None
        link = BackupLink(self._channel(fd, view.recruit if primary else view.primary), view.link)
        thread = threading.Thread(target=self._read_link, args=(link,), name="manyhands-copy", daemon=True)
        self._link = _Linked(link, thread)
        if link.shares_memory:
            self._use_half_of_cores(upper=primary)
        if primary:
            with suppress(ChannelClosed, ChannelTimeout):  # the thread notices
                vectors, numbers = shard.store.image()
                link.send_image(shard.copy.index, vectors, numbers)
                for worker_id, outbox in shard.outboxes.items():
                    if link.shares_memory:
                        link.send_outbox(worker_id, shard.memory.n, outbox)
            shard.use_link(link)
        thread.start()
        self._place([thread, *(served.thread for served in self._served.values())])

    def _use_half_of_cores(self, *, upper: bool) -> None:
        """Both copies on this host make each call at the same time. Linux tends to wake the other copy on the core from which
        the call was sent, where it waits until the primary has made it: each copy has cores of its own."""
        if hasattr(os, "sched_getaffinity"):
            cores = sorted(os.sched_getaffinity(0))
            self._cores = cores[len(cores) // 2 :] if upper else cores[: len(cores) // 2]

    def _place(self, threads: Sequence[threading.Thread]) -> None:
        for thread in threads:
            if self._cores and thread.native_id is not None and thread.is_alive():
                with suppress(OSError):  # it has ended, or may not choose
                    os.sched_setaffinity(thread.native_id, self._cores)

    def _read_link(self, link: BackupLink) -> None:
        """Until it breaks, or another view closes it."""
        primary, outboxes = self.shard.copy.is_primary, dict[int, Tensor]()
        try:
            try:
                while True:
                    frame = link.receive()
                    if primary:
                        self._acknowledged(link, frame)
                    else:
                        self._received(link, frame, outboxes)
            except (ChannelClosed, ChannelTimeout, FrameError, OutOfOrder) as error:
                _log.info("server shard %d: the connection to its other copy ended: %s", self.number, error)
            link.close()
            if primary:
                self._report({"type": "backup_lost", "link": link.number})
        except BaseException as error:  # noqa: BLE001 - `run` raises it: the shard itself is broken
            self._error = error

    def _acknowledged(self, link: BackupLink, frame: Frame) -> None:
        if frame.kind != LinkFrame.ACKNOWLEDGE:
            raise FrameError(f"an acknowledgement was expected; got {frame}")
        with self.shard.changed:
            if not self.shard.copy.waits:
                self.shard.send_rest()  # a new copy is a backup once it has all that was answered without it
            copied = self.shard.copy.acknowledge(link.number, frame.sequence)
            self.shard.changed.notify_all()
        if copied:
            self._report({"type": "copied", "link": link.number})

    def _received(self, link: BackupLink, frame: Frame, outboxes: dict[int, Tensor]) -> None:
        """An image, or the next call of the log. Vectors come before the lock is taken."""
        shard = self.shard
        if frame.kind == LinkFrame.OUTBOX:
            (fd,) = link.channel.receive_fds(1)
            try:
                outboxes[frame.a] = map_outbox(fd, frame.b, shard.memory.dtype)
            finally:
                os.close(fd)
            return
        names: list[str] = []
        if frame.kind in (LinkFrame.IMAGE, Call.RESTORE):
            names = from_json(frame.blob)["names"]
        vectors = {"": link.receive_vector(frame)} if frame.elements or frame.kind == Call.INITIALIZE else {}
        vectors |= link.receive_vectors(names)
        with shard.changed:
            if frame.kind == LinkFrame.IMAGE:
                shard.copy.take_image(link.number, frame.sequence)
                if "center" in vectors:
                    vectors["center"] = self._published(vectors["center"])
                shard.store.take_image(vectors, from_json(frame.blob)["numbers"])
            else:
                if frame.kind == Call.INITIALIZE:
                    vectors[""] = self._published(vectors[""]) if shard.published is None else vectors[""]
                if frame.kind == Call.PUSH:
                    vectors = {"": self._update(frame, vectors.get(""), outboxes)}
                entry = link.entry_of(frame, vectors)
                shard.copy.receive(link.number, frame.sequence)
                with suppress(ManyhandsError):  # the primary's store refused the call as well
                    make(shard.store, entry)
                shard.store.released.clear()
        link.acknowledge(frame.sequence)

    def _update(self, frame: Frame, sent: Tensor | None, outboxes: dict[int, Tensor]) -> Tensor:
        center = self.shard.memory
        if sent is None:
            return outboxes[frame.a] if frame.a in outboxes else torch.empty(0, dtype=center.dtype)
        if sent.dtype == torch.uint8:
            return codec_for(self._spec).decode(sent, center.n, center.dtype)
        return sent

    def _published(self, center: Tensor) -> Tensor:
        """The same in the first slot of memory that workers can map, should this copy be the primary."""
        buffer = VersionedBuffer(len(center), center.dtype, self.shard.workers)
        self.shard.use(buffer)
        return buffer.buffers[0].copy_(center)

    def close(self) -> None:
        with self.shard.changed:
            self.shard.use_link(None)
        if self._link.link is not None:
            self._link.link.close()
        for worker_id in list(self._served):
            self._drop(worker_id)
        if self._link.thread is not None:
            self._link.thread.join()
        self.shard.close()
