"""A copy of a shard in a thread: the test is its driver, its worker, and sometimes its other copy."""

from __future__ import annotations

import os
import queue
import select
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from manyhands.errors import PeerLost
from manyhands.server.base import ServerSpec
from manyhands.server.client import ServedServer
from manyhands.server.replication.backup_link import BackupLink, LinkFrame
from manyhands.server.replication.copy_host import Orders, serve_copy
from manyhands.server.replication.log import Call
from manyhands.server.replication.views import ShardView
from manyhands.testing.server_suite import expect_waits, started
from manyhands.transport.channel import Channel
from manyhands.transport.frame import Frame, from_json

N = 1000


def channel_of(sock: socket.socket) -> Channel:
    return Channel(sock, peer="server shard 0", timeout_s=10)


class Hosted:
    """A copy of shard 0 that is process -1 (or another), and what it reports."""

    def __init__(self, process_index: int = -1, spec: ServerSpec | None = None) -> None:
        self.orders, self.reports = Orders(), queue.SimpleQueue[dict[str, Any]]()
        self.index, self.spec = process_index, spec or ServerSpec(rule="add")
        self.output: list[Any] = []
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        def channel(fd: int, peer: int) -> Channel:
            return channel_of(socket.socket(fileno=fd))

        try:
            served = serve_copy(
                self.spec,
                shard=0,
                workers=2,
                process_index=self.index,
                orders=self.orders,
                channel=channel,
                report=self.reports.put,
                timeout_s=10,
            )
            self.output.append(served)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.output.append(error)

    def view(self, number: int, primary: int, link: int = -1, sock: socket.socket | None = None, **roles: Any) -> None:
        view = ShardView(number=number, primary=primary, link=link, **roles)
        fds = [] if sock is None else [os.dup(sock.fileno())]
        if sock is not None:
            sock.close()
        self.orders.put({"type": "view", "view": view.to_json()}, fds)

    def worker(self, worker_id: int = 0, process: int = 0, memory_from: int = 0) -> ServedServer:
        """A worker's server; where its connection ends it waits for the next one in `connections`."""
        self.connections: queue.SimpleQueue[Channel] = queue.SimpleQueue()
        self.connections.put(self.connect(worker_id, process))
        return ServedServer(
            self.spec, connect=lambda _: self.connections.get(timeout=10), shards=1, memory_from=memory_from
        )

    def connect(self, worker_id: int = 0, process: int = 0) -> Channel:
        mine, its = socket.socketpair()
        order = {"type": "connection", "worker_id": worker_id, "process": process}
        self.orders.put(order, [os.dup(its.fileno())])
        its.close()
        channel = channel_of(mine)
        channel.generation = process
        return channel

    def finish(self) -> Any:
        if self.thread.is_alive():
            self.orders.put({"type": "finish"})
        self.thread.join(10)
        assert not self.thread.is_alive()
        return self.output[0]


@pytest.fixture
def primary() -> Iterator[Hosted]:
    made = Hosted()
    yield made
    assert isinstance(made.finish(), dict)


def begun(host: Hosted, memory_from: int = 0) -> ServedServer:
    """A worker that takes part."""
    server = host.worker(memory_from=memory_from)
    server.initialize(torch.zeros(N))
    server.activate()
    server.push(torch.ones(N))
    return server


def linked(host: Hosted, number: int = 1) -> BackupLink:
    """The test is its new copy from this view on; the image was taken, and not acknowledged yet."""
    mine, its = socket.socketpair()
    host.view(number, host.index, number, its, recruit=-2)
    link = BackupLink(channel_of(mine), number)
    frame = link.receive()
    assert frame.kind == LinkFrame.IMAGE
    link.receive_vectors(from_json(frame.blob)["names"])
    link.image = frame.sequence  # type: ignore[attr-defined]
    return link


def in_step(host: Hosted) -> BackupLink:
    """The test is its backup."""
    link = linked(host)
    link.acknowledge(link.image)  # type: ignore[attr-defined]
    assert host.reports.get(timeout=10) == {"type": "copied", "link": 1}
    host.view(2, host.index, 1, backup=-2)
    return link


def until(link: BackupLink, call: Call) -> int:
    """The index of the next entry of this call; what comes before it is read too."""
    return frame_of(link, call).sequence


def elements(link: BackupLink, call: Call) -> int:
    """Of the vector that travels with the next entry of this call."""
    return frame_of(link, call).elements


def frame_of(link: BackupLink, call: Call) -> Frame:
    while True:
        frame = link.receive()
        if frame.kind == LinkFrame.OUTBOX:
            os.close(link.channel.receive_fds(1)[0])
            continue
        if frame.elements:
            link.receive_vector(frame)
        if frame.kind == call:
            return frame


@pytest.mark.parametrize("memory_from", [0, -1])
def test_a_push_is_answered_once_the_backup_has_it(primary: Hosted, memory_from: int) -> None:
    primary.view(0, -1)
    worker = begun(primary, memory_from)
    link = in_step(primary)
    with started(lambda: worker.push(torch.ones(N))) as waiting:
        index = until(link, Call.PUSH)
        expect_waits(waiting, "a push that the backup has not acknowledged")
        link.acknowledge(index)
        waiting.result(10)
    link.close()
    worker.close()


def test_updates_stay_in_memory_that_both_map_as_long_as_their_worker_waits_for_the_backup(primary: Hosted) -> None:
    primary.view(0, -1)
    worker = begun(primary)
    link = linked(primary)
    worker.push(torch.ones(N))  # answered at once: by then the worker may write the next one
    assert elements(link, Call.PUSH) == N
    link.acknowledge(link.image + 1)  # type: ignore[attr-defined]
    assert primary.reports.get(timeout=10) == {"type": "copied", "link": 1}
    with started(lambda: worker.push(torch.ones(N))) as waiting:
        assert elements(link, Call.PUSH) == 0
        link.acknowledge(link.image + 2)  # type: ignore[attr-defined]
        waiting.result(10)
    link.close()
    primary.reports.get(timeout=10)
    primary.view(2, -1)
    worker.close()


def test_what_a_pull_shows_the_backup_has(primary: Hosted) -> None:
    primary.view(0, -1)
    first = begun(primary)
    link = in_step(primary)
    other = ServedServer(primary.spec, [primary.connect(1)])
    with started(lambda: first.push(torch.ones(N))):
        index = until(link, Call.PUSH)
        with started(lambda: other.center(torch.empty(N))) as looking:
            expect_waits(looking, "a look at a version that the backup lacks")
            link.acknowledge(index)
            looking.result(10)
    link.close()
    other.close()
    first.close()


def test_a_primary_whose_backup_is_gone_waits_for_the_next_view(primary: Hosted) -> None:
    primary.view(0, -1)
    worker = begun(primary)
    link = in_step(primary)
    link.close()
    assert primary.reports.get(timeout=10) == {"type": "backup_lost", "link": 1}
    with started(lambda: worker.push(torch.ones(N))) as waiting:
        expect_waits(waiting, "a push that no backup can have")
        primary.view(3, -1)
        waiting.result(10)
    worker.close()


def test_nothing_of_a_fenced_process_enters_and_the_answer_waits_for_the_backup(primary: Hosted) -> None:
    primary.view(0, -1)
    worker = begun(primary)
    link = in_step(primary)
    primary.orders.put({"type": "fence", "worker_id": 0, "process": 0})
    index = until(link, Call.FENCE)
    with pytest.raises(queue.Empty):
        primary.reports.get(timeout=0.2)
    link.acknowledge(index)
    assert primary.reports.get(timeout=10) == {"type": "connection_closed", "worker_id": 0, "applied": 1, "tick": 0}
    link.close()
    primary.reports.get(timeout=10)
    primary.view(3, -1)
    worker.close()
    late = ServedServer(primary.spec, [primary.connect(0)])
    with pytest.raises(Exception, match="declared lost"):
        late.activate()
    late.close()
    fresh = ServedServer(primary.spec, [primary.connect(0, process=1)])
    fresh.activate()
    fresh.push(torch.ones(N))
    fresh.close()


def test_a_primary_in_whose_place_another_one_is_answers_nothing(primary: Hosted) -> None:
    primary.view(0, -1)
    channel = primary.connect()
    worker = ServedServer(primary.spec, [channel])
    worker.initialize(torch.zeros(N))
    worker.activate()
    primary.view(1, -2)
    assert select.select([channel], [], [], 10)[0]  # it has taken the view: the connection ends
    with pytest.raises(PeerLost):
        worker.push(torch.ones(N))
    worker.close()


@pytest.mark.parametrize("memory_from", [0, -1])
@pytest.mark.parametrize(
    "spec",
    [
        ServerSpec(rule="add", bound=1),
        ServerSpec(rule="elastic", options={"alpha": 0.5}),
        ServerSpec(rule="distance", options={"rate": 0.1}),
        ServerSpec(rule="rounds"),
        ServerSpec(rule="add", compress="topk:0.5"),
    ],
    ids=lambda spec: f"{spec.rule}-{spec.compress}",
)
def test_a_backup_goes_on_where_the_primary_was(spec: ServerSpec, memory_from: int) -> None:
    """It gets the image, then the log; the primary is gone in between two calls, or with the answer to the last one."""
    first, second = Hosted(-1, spec), Hosted(-2, spec)
    first.view(0, -1)
    worker = first.worker(memory_from=memory_from)
    worker.initialize(torch.zeros(N))
    worker.activate()
    center, draw = torch.empty(N), torch.Generator().manual_seed(1)
    alone = _Alone(spec)

    def step() -> None:
        update = torch.randn(N, generator=draw)
        given: Any = update
        if spec.compress != "none":
            given = _encoded(spec, update)
        assert _said(worker.push(given)) == _said(alone.server.push(given))
        worker.tick()
        alone.server.tick()
        worker.pull(center)
        alone.server.pull(alone.center)
        assert torch.equal(center, alone.center)

    step()
    ends = socket.socketpair()
    first.view(1, -1, 1, ends[0], recruit=-2)
    second.view(1, -1, 1, ends[1], recruit=-2)
    assert first.reports.get(timeout=10) == {"type": "copied", "link": 1}
    for host in (first, second):
        host.view(2, -1, 1, backup=-2)
    step()
    second.view(3, -2)
    worker._connections[0].channel.close()  # as if the primary had died with the answer
    first.connections.put(second.connect())
    step()
    step()
    worker.close()
    alone.server.close()
    assert isinstance(first.finish(), dict)
    assert isinstance(second.finish(), dict)


class _Alone:
    """The same without copies."""

    def __init__(self, spec: ServerSpec) -> None:
        from manyhands.server.in_process import InProcessServers

        self.server, self.center = InProcessServers(spec, 2).clients[0], torch.empty(N)
        self.server.initialize(torch.zeros(N))
        self.server.activate()


def _said(pushed: Any) -> Any:
    return pushed.applied, None if pushed.answer is None else pushed.answer.tolist(), pushed.weight


def _encoded(spec: ServerSpec, update: torch.Tensor) -> Any:
    from manyhands.server.base import Encoded
    from manyhands.server.shard_ranges import codec_for

    return Encoded((codec_for(spec).encode(update),), N, update.dtype)


def test_orders_that_come_late_are_dropped_with_their_descriptors() -> None:
    orders, (first, second) = Orders(), os.pipe()
    orders.close()
    orders.put({"type": "view"}, [first, second])
    for fd in (first, second):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
