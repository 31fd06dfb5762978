"""Messages between the driver and a host that joined its run: JSON with tensors beside it, over a channel.

A thread takes in what comes, so that the owner has one descriptor to wait on and never waits for half a message;
another says every few seconds that this end lives. So both ends notice within the channel's timeout when the other
host, or the network, is gone. Nothing is unpickled here.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from manyhands.comm.codecs.base import as_uint8
from manyhands.errors import BadInput
from manyhands.transport.channel import Channel, ChannelClosed, ChannelTimeout
from manyhands.transport.frame import MAX_BLOB_BYTES, Frame, FrameError
from manyhands.units import size

ALIVE_S = 2.0
SILENCE_S = 60.0
"""A host that sends nothing at all for so long is gone: the timeout of the channels between driver and hosts."""
MAX_LETTER_BYTES = 1 << 28  # of JSON: the events of a quarter of a second are thousands of times less
MAX_TENSORS = 1 << 20
MAX_DIMENSIONS = 64  # torch's own limit
MAX_TENSOR_BYTES = 16 << 30
"""The most bytes of a message's tensors. The program is the largest: training data comes as files."""

_LETTER, _LONG, _TENSOR = 1, 2, 3
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
"""What travels as it is; other dtypes do not."""

Memory = Callable[[dict[str, Any], int], Tensor]
"""(body, bytes) -> uint8 [bytes] for a tensor that is to be received."""


def travels(tensor: Tensor) -> bool:
    """Whether a tensor of this kind can go with a message."""
    return tensor.layout == torch.strided and not tensor.is_quantized and tensor.dtype in _DTYPES.values()


@dataclass(frozen=True)
class HostMessage:
    """What came: an object, and the tensors that it refers to by their place."""

    body: dict[str, Any]
    tensors: list[Tensor] = field(default_factory=list)


class MessageChannel:
    """One end. The channel is its own from now on; any thread may send, one receives.

    memory: where a tensor that comes is put; None: memory of its own.
    local_address: of this host, by which the other end is reached, and reaches us; "" over a Unix socket.
    `lost` says why nothing will come any more, once all that came has been received; "" before.
    """

    def __init__(self, channel: Channel, memory: Memory | None = None) -> None:
        self.channel = channel
        self.lost = ""
        self.local_address = ""
        with socket.socket(fileno=os.dup(channel.fileno())) as sock:
            if sock.family != socket.AF_UNIX:  # without the prefix of IPv4 where the socket is one of both
                self.local_address = str(sock.getsockname()[0]).removeprefix("::ffff:")
        self._memory: Memory = memory or (lambda body, nbytes: torch.empty(nbytes, dtype=torch.uint8))
        self._received: deque[HostMessage | str] = deque()  # a text: the reason of the end
        self._heard_at = time.monotonic()  # when the last message came, one that says "alive" too
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._sending = threading.Lock()
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=work, name="manyhands-post", daemon=True)
            for work in (self._take_in, self._stay_alive)
        ]
        for thread in self._threads:
            thread.start()

    def set_silence(self, silence_s: float) -> None:
        """The other end is gone when it sends nothing for so long, more than ALIVE_S."""
        with contextlib.suppress(OSError):  # it is gone already
            self.channel.set_timeout(silence_s)

    def hang_up(self, why: str) -> None:
        """Nothing goes either way any more; the descriptor stays until `close`. From the thread that receives."""
        self.lost = self.lost or why
        self.channel.close()

    def fileno(self) -> int:
        """Readable while `receive` has something."""
        return self._bell

    def silent_s(self) -> float:
        """For how many seconds no message has come. The other end sends one every ALIVE_S at least."""
        return time.monotonic() - self._heard_at

    def send(self, body: dict[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        """Waits for a slow reader as long as the channel allows; ChannelClosed, ChannelTimeout when the other end is gone.

        BadInput for more than MAX_TENSOR_BYTES: nothing was sent then.
        """
        if (nbytes := sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors)) > MAX_TENSOR_BYTES:
            raise BadInput(
                f"a message to another host has {size(nbytes)} of tensors, and at most {size(MAX_TENSOR_BYTES)} fit: "
                "let the program read its data from files on that host, and return less"
            )
        flat = [as_uint8(tensor) for tensor in tensors]
        if tensors:
            names = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
            body = {**body, "tensors": [[name, list(one.shape)] for name, one in zip(names, tensors, strict=True)]}
        text = json.dumps(body).encode()
        with self._sending:
            if len(text) <= MAX_BLOB_BYTES:
                self.channel.send(Frame(kind=_LETTER, blob=text))
            else:
                data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
                self.channel.send(Frame(kind=_LONG, elements=len(text)), data)
            for data in flat:
                self.channel.send(Frame(kind=_TENSOR, elements=data.numel()), data)

    def receive(self) -> list[HostMessage]:
        """What came, without waiting; see `lost`."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        messages: list[HostMessage] = []
        while self._received:
            one = self._received.popleft()
            if isinstance(one, HostMessage):
                messages.append(one)
            else:
                self.lost = self.lost or one
        return messages

    def wait(self, timeout_s: float) -> list[HostMessage]:
        """What came within so many seconds, as soon as anything did; see `lost`."""
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        messages = self.receive()
        while not messages and not self.lost and (left := deadline - time.monotonic()) > 0:
            poll.poll(left * 1000)
            messages = self.receive()
        return messages

    def close(self) -> None:
        """The other end learns it at once. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self.channel.close()
        for thread in self._threads:
            thread.join(SILENCE_S)
        os.close(self._bell)
        self.lost = self.lost or "this end was closed"

    # -- the threads -------------------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        try:
            while True:
                message = self._next()
                self._heard_at = time.monotonic()
                if message.body["type"] != "alive":
                    self._ring(message)
        except ChannelTimeout:
            self.channel.close()  # should the other end come back, it finds that it was given up
            self._ring(f"nothing came for {self.channel.timeout_s:g} s")
        except ChannelClosed as error:
            self._ring(str(error) or "the connection was closed")
        except Exception as error:  # noqa: BLE001 - else this thread would end, and nobody notice that the other host is gone
            self.channel.close()
            self._ring(f"a message cannot be read, or does not fit into memory ({str(error) or type(error).__name__})")

    def _stay_alive(self) -> None:
        with contextlib.suppress(ChannelClosed, ChannelTimeout, OSError):  # the other thread says that it is gone
            while not self._closing.wait(ALIVE_S):
                self.send({"type": "alive"})

    def _ring(self, one: HostMessage | str) -> None:
        self._received.append(one)
        os.eventfd_write(self._bell, 1)

    def _next(self) -> HostMessage:
        frame = self.channel.receive()
        text = frame.blob
        if frame.kind == _LONG and frame.dtype == torch.uint8 and frame.elements <= MAX_LETTER_BYTES:
            data = torch.empty(frame.elements, dtype=torch.uint8)
            self.channel.receive_into(data)
            text = data.numpy().tobytes()
        elif frame.kind != _LETTER or frame.elements:
            raise FrameError(f"expected a message, not kind {frame.kind} with {frame.elements} elements")
        body = json.loads(text)
        if not isinstance(body, dict) or not isinstance(body.get("type"), str):
            raise FrameError("expected an object with a type")
        listed = body.pop("tensors", [])
        if not isinstance(listed, list) or len(listed) > MAX_TENSORS:
            raise FrameError("expected a list of tensors")
        checked = [_checked(entry) for entry in listed]
        if (nbytes := sum(math.prod(shape) * dtype.itemsize for dtype, shape in checked)) > MAX_TENSOR_BYTES:
            raise FrameError(f"{size(nbytes)} of tensors were announced, of at most {size(MAX_TENSOR_BYTES)}")
        return HostMessage(body, [self._tensor(body, dtype, shape) for dtype, shape in checked])

    def _tensor(self, body: dict[str, Any], dtype: torch.dtype, shape: list[int]) -> Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        frame = self.channel.receive()
        if frame.kind != _TENSOR or frame.dtype != torch.uint8 or frame.elements != nbytes or frame.blob:
            raise FrameError(
                f"expected a tensor of {nbytes} bytes, not kind {frame.kind} with {frame.elements} elements"
            )
        data = self._memory(body, nbytes)
        if nbytes:
            self.channel.receive_into(data)
        return data.view(dtype).view(shape)


def _checked(entry: Any) -> tuple[torch.dtype, list[int]]:
    if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], list)):
        raise FrameError("expected [dtype, shape]")
    name, shape = entry
    if len(shape) > MAX_DIMENSIONS:
        raise FrameError(f"a tensor can have at most {MAX_DIMENSIONS} dimensions, not {len(shape)}")
    if not isinstance(name, str) or name not in _DTYPES or any(not isinstance(n, int) or n < 0 for n in shape):
        raise FrameError(f"no tensor of {name!r} and {shape!r} can come")
    return _DTYPES[name], shape
