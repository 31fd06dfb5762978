"""Messages between driver, fork server and workers of one host: JSON frames and descriptors over an inherited socket
pair.

A frame is four bytes of length, then the JSON object; descriptors travel beside it (SCM_RIGHTS). The sockets have no
name and are inherited or handed over, so nobody else can reach them.
"""

from __future__ import annotations

import array
import contextlib
import json
import math
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

_LENGTH = struct.Struct("!I")
_ROOM = socket.CMSG_SPACE(16 * 4)  # more descriptors than any of our messages has
_CHUNK = 1 << 18


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
        try:
            data, fds = self._recv()
        except ConnectionResetError:
            raise Closed("the other end is gone") from None
        if not data:
            raise Closed("the other end is gone")
        self._bytes += data
        self._fds.extend(fds)
        return self._complete()

    def _recv(self) -> tuple[bytes, list[int]]:
        """`socket.recv_fds`, with descriptors that a program's children do not inherit (its `flags` cannot do that)."""
        fds = array.array("i")
        data, ancillary, _, _ = self.sock.recvmsg(_CHUNK, _ROOM, socket.MSG_CMSG_CLOEXEC)
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
        return data, list(fds)

    def _complete(self) -> list[ControlMessage]:
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
