"""A link: one peer's connection in a group of sockets. It never blocks: what is enqueued leaves when it can, what came is
pulled.

On a link travel frames (transport/frame.py) of these kinds, each complete before the next begins, so that a notice can
follow any of them:

- ARRIVE opens an operation: sequence, weight, a = signature, b = n, and as its payload bits or JSON;
- CHUNK carries a piece of a tensor, SEND a whole one, point to point;
- WAITING, GAVE_UP and LEFT are notices, all of one size, so that the last one can be read behind whatever came before.
"""

from __future__ import annotations

import json
import select
import socket
import ssl
from collections import deque
from dataclasses import replace
from typing import Any

from manyhands.transport.frame import HEADER_BYTES, Frame, FrameError, from_json, pack, unpack
from manyhands.transport.socket_io import close_in_forks, one_host, shut_down

ARRIVE, CHUNK, SEND, WAITING, GAVE_UP, LEFT = range(1, 7)

NOTICES = (WAITING, GAVE_UP, LEFT)
_NOTICE_BLOB = 1024  # bytes: a few sentences; longer texts are cut
_STAGE = 1 << 14  # bytes read ahead at a header: a small operation comes in one system call
_VIEWS = 16  # buffers a sendmsg
_PIECE = 1 << 16  # bytes a TLS write; OpenSSL wants the very same ones again when it could not write them
_LOCAL_BUFFER = 1 << 17
_HOARD = 1 << 26  # bytes kept at most of a peer that ended, or that everybody waits for

_NOTHING = memoryview(b"")
_LATER = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class LinkEnded(Exception):
    """The peer is gone, or this end was closed; nothing more comes."""


class Link:
    """The connection to worker `rank`. One thread at a time."""

    def __init__(self, rank: int, sock: socket.socket) -> None:
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if one_host(sock):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_BUFFER)
        self.rank, self._sock, self._tls = rank, sock, isinstance(sock, ssl.SSLSocket)
        self._out: deque[memoryview] = deque()
        self._stage, self._start, self._stop = memoryview(bytearray(_STAGE)), 0, 0
        self.enqueued = self.sent = 0  # bytes, headers included
        close_in_forks(self)

    def fileno(self) -> int:
        return self._sock.fileno()

    # -- out ---------------------------------------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Whether something enqueued has not left yet. Its memory must not change before it has."""
        return bool(self._out)

    def enqueue(self, frame: Frame, payload: memoryview = _NOTHING, text: bytes = b"") -> None:
        """Queue a frame and what follows its header; `push` sends it."""
        head = memoryview(pack(frame) + frame.blob + text)
        self._out.append(head)
        if payload:
            self._out.append(payload)
        self.enqueued += len(head) + len(payload)

    def push(self) -> bool:
        """Send what can leave now; whether anything did. LinkEnded."""
        moved = False
        try:
            while self._out:
                self._take(self._send())
                moved = True
        except _LATER:
            return moved
        except OSError as error:
            raise LinkEnded(str(error)) from error
        return moved

    def drop(self) -> None:
        """Forget what was enqueued: nobody reads any more."""
        self._out.clear()

    def _send(self) -> int:
        if self._tls:
            return self._sock.send(self._out[0][:_PIECE])
        if len(self._out) == 1:
            return self._sock.send(self._out[0], socket.MSG_NOSIGNAL)
        views = [self._out[i] for i in range(min(_VIEWS, len(self._out)))]
        return self._sock.sendmsg(views, (), socket.MSG_NOSIGNAL)

    def _take(self, sent: int) -> None:
        self.sent += sent
        while sent:
            first = self._out[0]
            if sent < len(first):
                self._out[0] = first[sent:]
                return
            sent -= len(first)
            self._out.popleft()

    # -- in ----------------------------------------------------------------------------------------------------------

    @property
    def unread(self) -> bool:
        return self._start < self._stop

    def pull(self, into: memoryview) -> int:
        """So many bytes of what came are now at the start of `into` (not empty); 0 if nothing is here. LinkEnded."""
        staged = self._stop - self._start
        if staged:
            count = min(staged, len(into))
            into[:count] = self._stage[self._start : self._start + count]
            self._start += count
            return count
        return self._receive(into)

    def header(self) -> Frame | None:
        """The next frame's header, with its blob if it is a notice; None if it is not all here. LinkEnded, FrameError."""
        if not self._staged(HEADER_BYTES):
            return None
        frame, length = unpack(self._stage[self._start : self._start + HEADER_BYTES])
        if length != (_NOTICE_BLOB if frame.kind in NOTICES else 0):
            raise FrameError(f"a frame of kind {frame.kind} came with a blob of {length} bytes")
        if not self._staged(HEADER_BYTES + length):
            return None
        self._start += HEADER_BYTES + length
        if length:
            frame = replace(frame, blob=bytes(self._stage[self._start - length : self._start]))
        return frame

    def _staged(self, count: int) -> bool:
        """Whether the next `count` bytes are here, at most those of a notice."""
        while self._stop - self._start < count:
            if not self._read_ahead():
                return False
        return True

    def last_notice(self) -> tuple[int, dict[str, Any]]:
        """(kind, what it says) if a notice is the last that came, whatever lies before it; else (0, {}).

        All that is here moves into the stage.
        """
        kept = [bytes(self._stage[self._start : self._stop])]
        try:
            while sum(map(len, kept)) < _HOARD:
                piece = bytearray(1 << 18)
                count = self._receive(memoryview(piece))
                if not count:
                    break
                kept.append(bytes(piece[:count]))
        except LinkEnded:
            pass  # what came before is what counts; a further pull reports the end again
        data = b"".join(kept)
        self._stage = memoryview(bytearray(data.ljust(_STAGE, b"\0")))
        self._start, self._stop = 0, len(data)
        size = HEADER_BYTES + _NOTICE_BLOB
        if len(data) < size:
            return 0, {}
        last = self._stage[len(data) - size : len(data)]
        try:
            frame, length = unpack(last[:HEADER_BYTES])
            if frame.kind in NOTICES and length == _NOTICE_BLOB:
                return frame.kind, from_json(last[HEADER_BYTES:])
        except FrameError:
            pass  # data that looks like nothing
        return 0, {}

    def _read_ahead(self) -> int:
        """Bytes that were added to the stage."""
        if len(self._stage) - self._start < HEADER_BYTES + _NOTICE_BLOB or self._start == self._stop:
            left = bytes(self._stage[self._start : self._stop])
            self._stage[: len(left)] = left
            self._start, self._stop = 0, len(left)
        count = self._receive(self._stage[self._stop :])
        self._stop += count
        return count

    def _receive(self, into: memoryview) -> int:
        try:
            count = self._sock.recv_into(into)
        except _LATER:
            return 0
        except OSError as error:
            raise LinkEnded(str(error)) from error
        if not count:
            raise LinkEnded("the end of the connection")
        return count

    # -- the end -----------------------------------------------------------------------------------------------------

    def end_sending(self) -> None:
        """The peer reads the end behind what left; its poll reports it at once."""
        shut_down(self._sock, socket.SHUT_WR)

    def shut(self) -> None:
        """Both directions, from any thread: whoever waits on this link wakes."""
        shut_down(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        self._out.clear()
        self._sock.close()


def notice(kind: int, fields: dict[str, Any]) -> Frame:
    """A notice that says this; its texts are cut so that it fits."""
    blob = json.dumps(fields).encode()
    while len(blob) > _NOTICE_BLOB:
        texts = {name: value for name, value in fields.items() if isinstance(value, str)}
        fields = fields | {name: text[: len(text) * 3 // 4] for name, text in texts.items()}
        blob = json.dumps(fields).encode()
    return Frame(kind=kind, blob=blob.ljust(_NOTICE_BLOB))


RDHUP = getattr(select, "POLLRDHUP", 0)  # Linux: reports a peer's end without reading up to it
