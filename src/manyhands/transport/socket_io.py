"""The bytes of a channel: all of some buffers out, exactly so many in, each wait with a deadline.

A plain socket blocks in the kernel, which knows the deadline (SO_RCVTIMEO, SO_SNDTIMEO): one system call a message
where a Python socket with a timeout makes two. A TLS connection is no thread's own: OpenSSL forbids two threads inside
one at a time, so its calls never block and stand behind one lock, and the waiting is done outside it.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import struct
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from typing_extensions import override

_JOINED_BYTES = 1 << 14  # TLS: what fits into one record goes into one
_PIECE_BYTES = 1 << 18  # TLS: between two pieces the other direction gets the lock
_BUFFER_BYTES = 1 << 20  # TCP within one host: what the caches hold; the kernel's own choice moves half as much


class Ended(ConnectionError):
    """End of file, reset, or closed here."""


class Late(TimeoutError):
    """Nothing moved for the deadline. `moved`: whether bytes of the same call had moved before."""

    def __init__(self, moved: bool) -> None:
        super().__init__()
        self.moved = moved


def prepare(sock: socket.socket) -> None:
    """TCP: no delay for small frames; buffers of a good size where both ends are on one host.

    Between hosts the kernel fits them to the path, which it does no more once they are set.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if one_host(sock):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)


def one_host(sock: socket.socket) -> bool:
    """Whether both ends of a TCP connection are on one host; False also if it has ended."""
    try:
        return bool(sock.getsockname()[0] == sock.getpeername()[0])
    except OSError:  # it has ended: the first send or receive says so
        return False


def shut_down(sock: socket.socket, how: int) -> None:
    """Shut down a connection (`socket.SHUT_WR`, `SHUT_RDWR`), also under TLS; nothing if not connected."""
    with suppress(OSError):
        socket.socket.shutdown(sock, how)  # SSLSocket's own would go on in plain text


class Wire(ABC):
    """One connected stream socket. One thread may send while another receives; `shut` wakes both."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self._sock = sock
        self.set_timeout(timeout_s)

    @abstractmethod
    def set_timeout(self, timeout_s: float) -> None:
        """How long a wait that begins from now on may last without a byte moving."""

    @abstractmethod
    def send(self, buffers: Sequence[bytes | memoryview]) -> None:
        """All of the buffers, in order."""

    @abstractmethod
    def receive(self, into: memoryview) -> None:
        """Fill `into`."""

    @abstractmethod
    def readable(self, timeout_s: float) -> bool:
        """Whether bytes, or the end, are here or come within timeout_s."""

    def shut(self) -> None:
        """End both directions at once; a thread that waits gets Ended. The descriptor stays taken until `close`."""
        shut_down(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """When no thread is inside any more."""
        self._sock.close()


class PlainWire(Wire):
    """A Unix or TCP socket."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        sock.settimeout(None)
        super().__init__(sock, timeout_s)

    @override
    def set_timeout(self, timeout_s: float) -> None:
        whole = int(timeout_s)
        limit = struct.pack("ll", whole, max(int((timeout_s - whole) * 1e6), 0 if whole else 1))  # zeros: for ever
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    @override
    def send(self, buffers: Sequence[bytes | memoryview]) -> None:
        left, moved = sum(map(len, buffers)), False
        while left:
            try:
                sent = self._sock.sendmsg(buffers, (), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                raise Late(moved) from None
            except OSError as error:
                raise Ended(str(error)) from error
            left, moved = left - sent, True
            if left:
                buffers = _behind(buffers, sent)

    @override
    def receive(self, into: memoryview) -> None:
        got, size = 0, len(into)
        while got < size:
            try:
                count = self._sock.recv_into(into[got:] if got else into, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                raise Late(got > 0) from None
            except OSError as error:
                raise Ended(str(error)) from error
            if not count:
                raise Ended("the other side closed it")
            got += count

    @override
    def readable(self, timeout_s: float) -> bool:
        return _poll(self._sock, select.POLLIN, timeout_s)


class TlsWire(Wire):
    """A TLS connection whose handshake is done."""

    def __init__(self, sock: ssl.SSLSocket, timeout_s: float) -> None:
        super().__init__(sock, timeout_s)
        self._tls, self._lock, self._shut = sock, threading.Lock(), False
        sock.settimeout(0)

    @override
    def set_timeout(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    @override
    def send(self, buffers: Sequence[bytes | memoryview]) -> None:
        moved = False
        if sum(map(len, buffers)) <= _JOINED_BYTES:
            buffers = (b"".join(buffers),)
        for buffer in buffers:
            view = memoryview(buffer)
            for start in range(0, len(view), _PIECE_BYTES):
                piece = view[start : start + _PIECE_BYTES]
                self._turn(self._tls.send, piece, moved)
                moved = True

    @override
    def receive(self, into: memoryview) -> None:
        got, size = 0, len(into)
        while got < size:
            count = self._turn(self._tls.recv_into, into[got:], got > 0)
            if not count:
                raise Ended("the other side closed it")
            got += count

    def _turn(self, call: Callable[[memoryview], int], data: memoryview, moved: bool) -> int:
        """The call's value as soon as it does not want to wait any more."""
        while True:
            try:
                with self._lock:
                    if self._shut:
                        raise Ended("it was closed here")
                    return call(data)
            except ssl.SSLWantReadError:
                events = select.POLLIN
            except ssl.SSLWantWriteError:
                events = select.POLLOUT
            except (OSError, ValueError) as error:  # an SSLError is an OSError
                raise error if isinstance(error, Ended) else Ended(str(error)) from error
            if not _poll(self._tls, events, self._timeout_s):
                raise Late(moved)

    @override
    def readable(self, timeout_s: float) -> bool:
        with self._lock:
            if self._shut or self._tls.pending():
                return True
        return _poll(self._tls, select.POLLIN, timeout_s)

    @override
    def shut(self) -> None:
        with self._lock:
            self._shut = True
        super().shut()


def _poll(sock: socket.socket, events: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(sock, events)
    return bool(poll.poll(timeout_s * 1e3))


def _behind(buffers: Sequence[bytes | memoryview], sent: int) -> list[bytes | memoryview]:
    """What is left of the buffers after `sent` bytes."""
    left: list[bytes | memoryview] = []
    for buffer in buffers:
        if sent < len(buffer):
            left.append(memoryview(buffer)[sent:])
        sent = max(0, sent - len(buffer))
    return left


class _Closable(Protocol):
    def close(self) -> None: ...


_open: weakref.WeakSet[_Closable] = weakref.WeakSet()


def close_in_forks(thing: _Closable) -> None:
    """Processes that this one forks close it: a data loader's may live longer, and must not keep it open for peers."""
    _open.add(thing)


def _close_all() -> None:
    for thing in list(_open):
        thing.close()


os.register_at_fork(after_in_child=_close_all)
