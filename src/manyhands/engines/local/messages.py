"""What driver, fork server and processes of one host hand each other: messages, status pages, and what is inherited.

Messages are JSON frames over a socket pair: four bytes of length, then the JSON object; descriptors travel beside it
(SCM_RIGHTS). The sockets have no name and are inherited or handed over, so nobody else can reach them.
"""

from __future__ import annotations

import array
import contextlib
import json
import math
import mmap
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_LENGTH = struct.Struct("!I")
_ROOM = socket.CMSG_SPACE(16 * 4)  # more descriptors than any of our messages has
_CHUNK = 1 << 18
_MOST_CONNECT_S = 60.0
_STATUS = struct.Struct("q40s")  # step, phase


class ControlMessage(NamedTuple):
    """What came in one frame. Whoever takes it owns the descriptors and closes them."""

    body: dict[str, Any]
    fds: list[int]


class Closed(ConnectionError):
    """The other end is gone; everything it had sent before was received."""


class ControlSocket:
    """One end of a socket pair. `send` may be called by one thread while another receives."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._bytes = bytearray()
        self._fds: deque[int] = deque()

    @classmethod
    def pair(cls) -> tuple[ControlSocket, socket.socket]:
        """(this process's end, the end to hand to another process)."""
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(here), there

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, body: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send one message whole; waits for a slow reader as long as the socket's timeout says."""
        self.send_text(json.dumps({**body, "fds": len(fds)} if fds else body), fds)

    def send_text(self, text: str, fds: Sequence[int] = ()) -> None:
        """As `send`, of an object that is JSON text already."""
        data = text.encode()
        frame = _LENGTH.pack(len(data)) + data
        sent = socket.send_fds(self.sock, [frame], fds) if fds else 0
        if sent < len(frame):  # the reader may close as soon as it has all, and even an empty send fails then
            self.sock.sendall(memoryview(frame)[sent:])

    def receive(self, wait: bool = True) -> list[ControlMessage]:
        """The complete messages after one read, perhaps none; raises `Closed` once the other end is gone."""
        if not wait and not self.readable(0):
            return []
        try:  # not by `socket.recv_fds`, whose descriptors a program's children would inherit
            data, ancillary, _, _ = self.sock.recvmsg(_CHUNK, _ROOM, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            raise Closed("the other end is gone") from None
        if not data:
            raise Closed("the other end is gone")
        self._bytes += data
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
                self._fds.extend(fds)
        messages = []
        while len(self._bytes) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._bytes)[0]
            if len(self._bytes) < end:
                break
            body = json.loads(self._bytes[_LENGTH.size : end])
            del self._bytes[:end]
            messages.append(ControlMessage(body, [self._fds.popleft() for _ in range(body.pop("fds", 0))]))
        return messages

    def readable(self, timeout_s: float) -> bool:
        """Whether something came, or the other end went, within so many seconds."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return bool(poll.poll(max(0, math.ceil(timeout_s * 1000))))

    def hung_up(self) -> bool:
        """Whether the other end is gone, also while unread data is left; never waits."""
        poll = select.poll()
        poll.register(self.sock, select.POLLRDHUP)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Idempotent. Descriptors that came and were not taken are closed too."""
        self.sock.close()
        while self._fds:
            with contextlib.suppress(OSError):
                os.close(self._fds.popleft())


class Status:
    """A process's phase and step in a page that the driver maps too: they survive the process's sudden death.

    Written in a fraction of a microsecond.
    """

    def __init__(self, fd: int) -> None:
        """Maps a page of `create_status_page`; `fd` may be closed afterwards."""
        self._page = mmap.mmap(fd, _STATUS.size)

    def write(self, phase: str, step: int) -> None:
        _STATUS.pack_into(self._page, 0, step, phase.encode())

    def read(self) -> tuple[str, int] | None:
        """(phase, step), or None where nothing was written yet."""
        step, phase = _STATUS.unpack_from(self._page, 0)
        return (phase.rstrip(b"\0").decode(errors="replace"), step) if phase.strip(b"\0") else None

    def close(self) -> None:
        self._page.close()


def create_status_page() -> int:
    """The descriptor of an empty page."""
    fd = os.memfd_create("manyhands-status", os.MFD_CLOEXEC)
    os.ftruncate(fd, _STATUS.size)
    return fd


@dataclass(frozen=True, kw_only=True)
class ProcessPlace:
    """Everything that a process of a run inherits. The descriptors are its own from now on."""

    process_index: int  # a worker's rank, or -1 - s for server shard s
    process_indices: Sequence[int]  # of this host
    size: int  # workers of the run, on all hosts
    path: list[str]  # sys.path, and so on: the driver as it is at the launch, the fork server may be older
    argv: list[str]
    folder: str
    environment: dict[str, str]
    program: int  # what `serialize` wrote; a shard has none (-1)
    streams: Sequence[int]  # standard output and error, where the driver has them
    wire: socket.socket  # to the driver: heartbeats and events
    questions: socket.socket  # to the driver: what waits for an answer
    stacks: int  # a file for Python stacks
    status: int  # a page for phase and step
    memory: Sequence[int]  # shared by this host's workers: a table, then an arena for each
    lifelines: Sequence[tuple[int, int]]  # a pipe per worker of this host: (read end, write end)
    channels: Mapping[int, int]  # sockets within this host: a worker's by shard, a shard's by rank
    threads: int
    device: str
    timeout_s: float
    server: dict[str, Any] | None  # of `own_rules.to_fields`
    servers: int  # shards of it, on all hosts
    faults: str = ""  # of the run's workers, at their steps
    survive: int = 0  # so many workers may take part, and members may change: this one begins alone; 0: they never do
    fixed_members: bool = False  # with `survive`: these workers alone, from the beginning to the end
    replica: int = 1  # with `survive`: how many workers hold one together, for which they make groups of some of them
    arena: int = -1  # memory for this worker's vectors, where members may change
    scratch: str = ""  # a folder for what multiprocessing makes files for; whoever outlives this process removes it
    network: dict[str, Any] | None = None  # how the workers of several hosts find each other

    @property
    def workers_here(self) -> list[int]:
        return [process_index for process_index in self.process_indices if process_index >= 0]


def connect_s(place: ProcessPlace) -> float:
    """How long to try to connect: less than the driver's deadline, whose error would not name the shut port."""
    return min(_MOST_CONNECT_S, place.timeout_s / 2)


def last_resort_s(place: ProcessPlace) -> float:
    """How long peers wait for each other. The driver decides earlier: it shows every stack, and sees compilers."""
    return 20 * place.timeout_s + 600
