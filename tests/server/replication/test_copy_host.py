"""A copy of a shard in a thread: the test is its driver, its worker, and sometimes its other copy."""

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
from manyhands.server.base import Encoded, ServerSpec
from manyhands.server.client import ServedServer
from manyhands.server.in_process import InProcessServers
from manyhands.server.replication.backup_link import BackupLink, LinkFrame
from manyhands.server.replication.copy_host import Orders, serve_copy
from manyhands.server.replication.log import Call
from manyhands.server.replication.views import ShardView
from manyhands.server.shard_ranges import codec_for
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
        self.closing: list[Any] = []  # at the end
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        def channel(fd: int, peer: int) -> Channel:
            return channel_of(socket.socket(fileno=fd))

        try:
            given = {"process_index": self.index, "orders": self.orders, "report": self.reports.put}
            self.output.append(serve_copy(self.spec, shard=0, workers=2, channel=channel, timeout_s=10, **given))
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
        server = ServedServer(
            self.spec, connect=lambda _: self.connections.get(timeout=10), shards=1, memory_from=memory_from
        )
        self.closing.append(server)
        return server

    def connect(self, worker_id: int = 0, process: int = 0) -> Channel:
        mine, its = socket.socketpair()
        order = {"type": "connection", "worker_id": worker_id, "process": process}
        self.orders.put(order, [os.dup(its.fileno())])
        its.close()
        channel = channel_of(mine)
        channel.generation = process
        return channel

    def finish(self) -> Any:
        for one in reversed(self.closing):
            one.close()
        if self.thread.is_alive():
            self.orders.put({"type": "finish"})
        self.thread.join(10)
        assert not self.thread.is_alive()
        return self.output[0]


@pytest.fixture
def primary() -> Iterator[Hosted]:
    made = Hosted()
    made.view(0, -1)
    yield made
    assert isinstance(made.finish(), dict)


def begun(host: Hosted, memory_from: int = 0) -> ServedServer:
    """A worker that takes part, and has pushed."""
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
    host.closing.append(link)
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


def frame_of(link: BackupLink, call: Call) -> Frame:
    """The next entry of this call; what comes before it is read too."""
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
    worker = begun(primary, memory_from)
    link = in_step(primary)
    with started(lambda: worker.push(torch.ones(N))) as waiting:
        index = frame_of(link, Call.PUSH).sequence
        expect_waits(waiting, "a push that the backup has not acknowledged")
        link.acknowledge(index)
        waiting.result(10)


def test_updates_stay_in_memory_that_both_map_as_long_as_their_worker_waits_for_the_backup(primary: Hosted) -> None:
    worker = begun(primary)
    link = linked(primary)
    worker.push(torch.ones(N))  # answered at once: by then the worker may write the next one
    assert frame_of(link, Call.PUSH).elements == N
    link.acknowledge(link.image + 1)  # type: ignore[attr-defined]
    assert primary.reports.get(timeout=10) == {"type": "copied", "link": 1}
    with started(lambda: worker.push(torch.ones(N))) as waiting:
        assert frame_of(link, Call.PUSH).elements == 0
        link.acknowledge(link.image + 2)  # type: ignore[attr-defined]
        waiting.result(10)


def test_what_a_pull_shows_the_backup_has(primary: Hosted) -> None:
    first = begun(primary)
    link = in_step(primary)
    other = ServedServer(primary.spec, [primary.connect(1)])
    with started(lambda: first.push(torch.ones(N))):
        index = frame_of(link, Call.PUSH).sequence
        with started(lambda: other.center(torch.empty(N))) as looking:
            expect_waits(looking, "a look at a version that the backup lacks")
            link.acknowledge(index)
            looking.result(10)
    other.close()


def test_a_primary_whose_backup_is_gone_waits_for_the_next_view(primary: Hosted) -> None:
    worker = begun(primary)
    link = in_step(primary)
    link.close()
    assert primary.reports.get(timeout=10) == {"type": "backup_lost", "link": 1}
    with started(lambda: worker.push(torch.ones(N))) as waiting:
        expect_waits(waiting, "a push that no backup can have")
        primary.view(3, -1)
        waiting.result(10)


def test_nothing_of_a_fenced_process_enters_and_the_answer_waits_for_the_backup(primary: Hosted) -> None:
    worker = begun(primary)
    link = in_step(primary)
    primary.orders.put({"type": "fence", "worker_id": 0, "process": 0})
    index = frame_of(link, Call.FENCE).sequence
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
    channel = primary.connect()
    worker = ServedServer(primary.spec, [channel])
    worker.initialize(torch.zeros(N))
    worker.activate()
    primary.view(1, -2)
    assert select.select([channel], [], [], 10)[0]  # it has taken the view: the connection ends
    with pytest.raises(PeerLost):
        worker.push(torch.ones(N))
    worker.close()


@pytest.mark.parametrize(
    ("memory_from", "spec"),
    [
        (0, ServerSpec(rule="add", bound=1)),
        (-1, ServerSpec(rule="elastic", options={"alpha": 0.5})),
        (0, ServerSpec(rule="distance", options={"rate": 0.1})),
        (-1, ServerSpec(rule="rounds")),
        (0, ServerSpec(rule="add", compress="topk:0.5")),
        (-1, ServerSpec(rule="add", compress="topk:0.5")),
    ],
)
def test_a_backup_goes_on_where_the_primary_was(spec: ServerSpec, memory_from: int) -> None:
    """It gets the image, then the log; the primary is gone in between two calls, or with the answer to the last one."""
    first, second = Hosted(-1, spec), Hosted(-2, spec)
    first.view(0, -1)
    worker, alone = first.worker(memory_from=memory_from), InProcessServers(spec, 2).clients[0]
    for server in (worker, alone):
        server.initialize(torch.zeros(N))
        server.activate()
    draw = torch.Generator().manual_seed(1)

    def step() -> None:
        given: Any = torch.randn(N, generator=draw)
        if spec.compress != "none":
            given = Encoded((codec_for(spec).encode(given),), N, given.dtype)
        assert _said(worker.push(given)) == _said(alone.push(given))
        centers = torch.empty(2, N)
        for server, center in zip((worker, alone), centers, strict=True):
            server.tick()
            server.pull(center)
        assert torch.equal(*centers)

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
    assert isinstance(first.finish(), dict)
    assert isinstance(second.finish(), dict)


def _said(pushed: Any) -> Any:
    return pushed.applied, None if pushed.answer is None else pushed.answer.tolist(), pushed.weight


def test_orders_that_come_late_are_dropped_with_their_descriptors() -> None:
    orders, (first, second) = Orders(), os.pipe()
    orders.close()
    orders.put({"type": "view"}, [first, second])
    for fd in (first, second):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
