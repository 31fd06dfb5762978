"""A channel: one connection that carries frames, with a deadline on every wait and a count of the tensors' bytes.

`Channel(sock)` wraps any connected stream socket: inherited socket pairs, Unix sockets, TCP, TLS (ssl.SSLSocket). One
thread may send while another receives.
"""

from __future__ import annotations

import array
import os
import socket
import ssl
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor

from manyhands.errors import BadInput
from manyhands.transport.frame import HEADER_BYTES, Frame, FrameError, bytes_of, header, unpack
from manyhands.transport.socket_io import Ended, Late, PlainWire, TlsWire, prepare

_MOST_FDS = 253  # the kernel's SCM_MAX_FD
_FDS_MARK = b"\xfd"


class ChannelClosed(ConnectionError):
    """The other end is gone, or this end was closed."""


class ChannelTimeout(TimeoutError):
    """Nothing moved for `timeout_s`."""


class Channel:
    """Frames over a connected socket, which is the channel's from now on.

    peer: how messages name the other end ("server shard 0", "worker 3 on 10.0.0.2").
    timeout_s: how long a wait may last without a byte moving.
    generation: frames of an older one are refused (FrameError); frames sent carry at least this one.

    After FrameError, ChannelClosed, and ChannelTimeout in the middle of a frame the channel is closed: its place in the
    stream is lost. A `receive` that timed out before a frame began leaves it as it was: call it again.
    """

    peer: str
    generation: int
    sent_bytes: int  # of tensors: blobs and headers apart

    def __init__(self, sock: socket.socket, *, peer: str, timeout_s: float, generation: int = 0) -> None:
        self.peer, self.timeout_s, self.generation, self.sent_bytes = peer, timeout_s, generation, 0
        self._sock, self._closed = sock, False
        prepare(sock)
        self._wire = TlsWire(sock, timeout_s) if isinstance(sock, ssl.SSLSocket) else PlainWire(sock, timeout_s)
        self._sending, self._receiving, self._leaving = threading.RLock(), threading.RLock(), threading.RLock()
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._announced: Frame | None = None  # the frame whose tensor is on its way
        self._following = 0  # bytes of it that are still to be read

    def set_timeout(self, timeout_s: float) -> None:
        """Another timeout, for every wait that begins from now on."""
        self.timeout_s = timeout_s
        self._wire.set_timeout(timeout_s)

    # -- frames ------------------------------------------------------------------------------------------------------

    def send(self, frame: Frame, tensor: Tensor | memoryview | None = None) -> None:
        """Header, blob and tensor in one go; the tensor's own dtype and elements go into the header.

        tensor: contiguous, on the CPU; or its memory as `bytes_of` gave it, `frame` then has its dtype and elements.
        """
        generation = max(frame.generation, self.generation)
        if isinstance(tensor, Tensor):
            head, body = header(frame, tensor.dtype, tensor.numel(), generation), bytes_of(tensor)
        else:
            head, body = header(frame, frame.dtype, frame.elements, generation), tensor or memoryview(b"")
            if len(body) != frame.tensor_bytes:
                raise BadInput(f"this frame announces {frame.tensor_bytes} bytes of a tensor; {len(body)} are given")
        try:
            with self._sending:
                self._wire.send((head + frame.blob, body) if len(body) else (head + frame.blob,))
        except (Ended, Late) as error:
            self._give_up(error, "receiving a message")
        finally:
            self._left()
        self.sent_bytes += len(body)

    def receive(self) -> Frame:
        """The next header and its blob. Raises FrameError, ChannelClosed, ChannelTimeout."""
        try:
            with self._receiving:
                return self._receive()
        finally:
            self._left()

    def receive_into(self, tensor: Tensor | memoryview) -> None:
        """The bytes that follow, straight into contiguous CPU memory, all at once or one part after the other.

        FrameError for another dtype, or for more than follows.
        """
        try:
            with self._receiving:
                self._receive_into(tensor)
        finally:
            self._left()

    def expect(self, kind: int, tensor: Tensor | memoryview | None = None, **fields: Any) -> Frame:
        """`receive`, checked against the kind, the tensor's dtype and elements and the fields given, then its bytes.

        FrameError when another frame came: nothing of it is in `tensor` then.
        """
        try:
            with self._receiving:
                frame = self._receive()
                if not _is(frame, kind, tensor, fields):
                    self._refuse(
                        ", ".join([f"kind {kind}", _shape(tensor), *(f"{n} {fields[n]}" for n in fields)]), frame
                    )
                if tensor is not None:
                    self._receive_into(tensor)
                return frame
        finally:
            self._left()

    def readable(self, timeout_s: float = 0.0) -> bool:
        """Whether a frame, or the end, has begun to come within timeout_s. Of TLS, ask this and not `fileno` alone:

        what was decrypted with the last frame shows on no descriptor."""
        return self._closed or self._wire.readable(timeout_s)

    # -- descriptors: Unix sockets only ------------------------------------------------------------------------------

    def send_fds(self, fds: Sequence[int]) -> None:
        """Give copies of descriptors to the other end, between two frames; it calls `receive_fds` with their number."""
        self._check_unix(len(fds))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        try:
            with self._sending:
                self._sock.sendmsg([_FDS_MARK], rights, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            self._give_up(Late(moved=False), "taking descriptors")
        except OSError as error:
            self._give_up(Ended(str(error)), "taking descriptors")
        finally:
            self._left()

    def receive_fds(self, n: int) -> list[int]:
        """As many descriptors as `send_fds` sent, close-on-exec, the caller's to close. FrameError for another number."""
        self._check_unix(n)
        room = socket.CMSG_SPACE(n * array.array("i").itemsize)
        try:
            with self._receiving:
                mark, rights, flags, _ = self._sock.recvmsg(1, room, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            self._give_up(Late(moved=False), "sending descriptors", keep=True)
        except OSError as error:
            self._give_up(Ended(str(error)), "sending descriptors")
        finally:
            self._left()
        if not mark:
            self._give_up(Ended("the other side closed it"), "sending descriptors")
        fds = array.array("i")
        for level, kind, data in rights:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        if len(fds) != n or mark != _FDS_MARK or flags & socket.MSG_CTRUNC:
            for fd in fds:
                os.close(fd)
            self._refuse(f"{n} descriptors", None)
        return list(fds)

    def _check_unix(self, n: int) -> None:
        if self._sock.family != socket.AF_UNIX or not 1 <= n <= _MOST_FDS:
            raise BadInput(
                f"1 to {_MOST_FDS} descriptors travel over a Unix socket; got {n} over {self._sock.family.name}"
            )

    # -- the end -----------------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """The socket's descriptor, for `select`; -1 when closed. See `readable` for TLS."""
        return -1 if self._closed else self._sock.fileno()

    def detach(self) -> socket.socket:
        """The socket, for another reader of frames; between two frames, and not used here any more."""
        return self._sock

    def close(self) -> None:
        """Idempotent. A thread that sends or receives on it gets ChannelClosed."""
        self._closed = True
        self._wire.shut()
        self._left()

    def _left(self) -> None:
        """After `close`, the last user closes the descriptor: its number may soon be another socket's."""
        if not self._closed:
            return
        with self._leaving:
            if self._sending.acquire(blocking=False):
                if self._receiving.acquire(blocking=False):
                    self._wire.close()
                    self._receiving.release()
                self._sending.release()

    def _receive(self) -> Frame:
        if self._following and not self._closed:
            raise BadInput(f"{self._following} bytes of the last frame's tensor wait: `receive_into` comes first")
        self._read(self._header, beginning=True)
        try:
            frame, size = unpack(self._header)
        except FrameError:
            self.close()
            raise
        if frame.generation < self.generation:
            self._refuse(f"generation {self.generation} or later", frame)
        if size:
            blob = bytearray(size)
            self._read(memoryview(blob))
            frame.blob = bytes(blob)
        self._announced, self._following = frame, frame.tensor_bytes
        return frame

    def _receive_into(self, tensor: Tensor | memoryview) -> None:
        view = bytes_of(tensor) if isinstance(tensor, Tensor) else tensor
        frame = self._announced
        other = isinstance(tensor, Tensor) and frame is not None and tensor.dtype != frame.dtype
        if other or len(view) > self._following:
            self._refuse(_shape(tensor), frame)
        self._read(view)
        self._following -= len(view)

    def _read(self, into: memoryview, beginning: bool = False) -> None:
        try:
            self._wire.receive(into)
        except (Ended, Late) as error:
            self._give_up(error, "sending a message", keep=beginning)

    def _give_up(self, error: Ended | Late, doing: str, keep: bool = False) -> NoReturn:
        """keep: a wait that ended before anything came leaves the channel open."""
        if isinstance(error, Ended):
            self_made = self._closed
            self.close()
            why = "was closed here" if self_made else f"ended ({error})"
            raise ChannelClosed(f"the connection to {self.peer} {why} while it was {doing}") from error
        if not keep or error.moved:
            self.close()
        raise ChannelTimeout(
            f"{self.peer} transferred nothing for {self.timeout_s:g} s while it was {doing}"
        ) from error

    def _refuse(self, expected: str, frame: Frame | None) -> NoReturn:
        self.close()
        raise FrameError(f"expected {expected} from {self.peer}; got {frame or 'none'}")


def _is(frame: Frame, kind: int, tensor: Tensor | memoryview | None, fields: dict[str, Any]) -> bool:
    if isinstance(tensor, Tensor):
        right = frame.elements == tensor.numel() and frame.dtype == tensor.dtype
    else:
        right = frame.tensor_bytes == (0 if tensor is None else len(tensor))
    return right and frame.kind == kind and all(getattr(frame, name) == fields[name] for name in fields)


def _shape(tensor: Tensor | memoryview | None) -> str:
    if isinstance(tensor, Tensor):
        return f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}"
    return f"{0 if tensor is None else len(tensor)} bytes of a tensor"
