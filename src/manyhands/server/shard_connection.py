"""A worker's connection to one shard: requests, answers, and vectors through the socket or through memory that both map."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from manyhands.comm.checks import MEAN_DTYPES
from manyhands.errors import BadInput, ManyhandsError, PeerLost, is_whole
from manyhands.server.protocol import Kind, VectorPlace, about, snapshot_of
from manyhands.server.store import InvalidCall
from manyhands.server.versioned_buffer import BufferReader, map_outbox
from manyhands.transport.channel import Channel, ChannelClosed, ChannelTimeout
from manyhands.transport.frame import Frame, FrameError, from_json
from manyhands.units import printable


class ShardLost(PeerLost):
    """A server shard died, or did not answer for `timeout_s`. `rank` is -1 - shard, as the engines number processes."""

    def __init__(self, shard: int, peer: str, operation: str, step: int, seconds: float, why: str) -> None:
        super().__init__(-1 - shard, peer, operation, step, seconds, why)
        self.shard = shard
        self.args = (
            f"{peer} {why}: waited {seconds:.1f} s for it in {operation} at step {step}. "
            "Its own error, if it had one, is the first in the log.",
        )

    def __reduce__(self) -> Any:
        return type(self), (self.shard, self.host, self.operation, self.step, self.seconds, self.why)


class ShardConnection:
    """The channel to shard `shard`. One request at a time: `ask` (or `put`), then `answer`, then what follows it.

    hosts: of the workers, by rank, for messages.
    memory_from: vectors of at least so many bytes go through shared memory, where the channel is a Unix socket.
    """

    waited_s: float = 0.0  # while the shard waited for other workers

    def __init__(self, shard: int, channel: Channel, hosts: Sequence[str], memory_from: int) -> None:
        self.channel = channel
        self._shard, self._hosts, self._memory_from = shard, hosts, memory_from
        self._peer = channel.peer if "shard" in channel.peer else f"server shard {shard}, {channel.peer}"
        self._asked = ("activate", 0, 0.0)  # operation, step, when
        self._window: BufferReader | None = None
        self._outbox: Tensor | None = None  # [n]
        self._stage: Tensor | None = None  # [n] for vectors that no socket takes
        self._reaches = memory_from >= 0 and _is_unix(channel)

    def ask(self, operation: str, step: int, kind: Kind, vector: Tensor | None = None, **fields: Any) -> None:
        """Send a request, with a vector behind it."""
        self._asked = (operation, step, time.perf_counter())
        self.send(kind, vector, **fields)

    def send(self, kind: Kind, vector: Tensor | None = None, **fields: Any) -> None:
        """Send one more frame of the request."""
        with self._watched():
            self.channel.send(Frame(kind=kind, **fields), None if vector is None else self._portable(vector))

    def answer(self, *kinds: Kind, meanwhile: Callable[[], None] = lambda: None) -> Frame:
        """The answer's frame, one of these kinds; `meanwhile` is called twice a second while the shard waits for
        others.

        Raises ShardLost, PeerLost for a worker that was waited for too long, BadInput and Refused where the request was
        refused.
        """
        waiting = 0.0
        with self._watched():
            while (frame := self.channel.receive()).kind == Kind.WAIT:
                waiting = waiting or time.perf_counter()
                meanwhile()
            if waiting:
                self.waited_s += time.perf_counter() - waiting
            if frame.kind in (Kind.REFUSED, Kind.LATE):
                raise self._refusal(frame.kind, from_json(frame.blob))
            if frame.kind not in kinds:
                raise FrameError(f"expected {[kind.name for kind in kinds]}; got {frame}")
            return frame

    def check(self) -> None:
        """Raise ShardLost if the shard is gone, without reading what it sent before."""
        poll = select.poll()
        poll.register(self.channel, select.POLLRDHUP)
        if poll.poll(0):
            raise self._lost("is gone")

    # -- vectors -------------------------------------------------------------------------------------------------------

    def attach(self, operation: str, step: int, vector: Tensor) -> None:
        """Map the shard's memory, if vectors [n] like this one are to go through it. Waits for the first center."""
        if self._window is not None or not self._reaches or vector.numel() * vector.element_size() < self._memory_from:
            return
        self.ask(operation, step, Kind.MEMORY, **about(vector))
        frame = self.answer(Kind.MEMORY)
        with self._watched():
            fds = self.channel.receive_fds(2)
            try:
                self._window = BufferReader(fds[0], frame.a, frame.b, vector.numel(), vector.dtype)
                self._outbox = map_outbox(fds[1], vector.numel(), vector.dtype)
            finally:
                for fd in fds:
                    os.close(fd)

    def push(self, operation: str, step: int, update: Tensor, *, encoded: bool = False, **fields: Any) -> None:
        """Ask PUSH with an update [n], or with a payload, which always goes through the socket."""
        if encoded or self._outbox is None:
            self.ask(operation, step, Kind.ENCODED if encoded else Kind.PUSH, update, **fields)
            return
        self._outbox.copy_(update)
        self.ask(operation, step, Kind.PUSH, **fields)

    def read_center(self, frame: Frame, into: Tensor) -> None:
        """What a CENTER brought."""
        if self._window is None:
            self.read(frame, into)
            return
        with self._watched():
            into.copy_(self._window.slot(frame.b))
        self.send(Kind.RELEASE)

    def read_answer(self, frame: Frame, into: Tensor) -> bool:
        """What an APPLIED or DROPPED brought; False if no vector."""
        if frame.sequence == VectorPlace.BEHIND:
            self.read(frame, into)
        elif frame.sequence == VectorPlace.OUTBOX and self._outbox is not None:
            into.copy_(self._outbox)
        return frame.sequence != VectorPlace.NOWHERE

    def read(self, frame: Frame, into: Tensor) -> None:
        """The vector that follows the frame."""
        with self._watched():
            if (frame.elements, frame.dtype) != (into.numel(), into.dtype):
                raise FrameError(f"expected {into.numel()} {into.dtype}; got {frame}")
            direct = _is_portable(into)
            memory = into if direct else self._staging(into)
            self.channel.receive_into(memory)
            if not direct:
                into.copy_(memory)

    def read_snapshot(self, n: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """A SNAPSHOT and its vectors [n], in memory of their own; the numbers."""
        frame = self.answer(Kind.SNAPSHOT)
        with self._watched():
            names, numbers = snapshot_of(frame.blob, len(self._hosts))
        return {name: self._read_vector(n) for name in names}, numbers

    def _read_vector(self, n: int) -> Tensor:
        frame = self.answer(Kind.VECTOR)
        with self._watched():
            if frame.elements != n or frame.dtype not in MEAN_DTYPES:
                raise FrameError(f"expected a vector of {n} floating elements; got {frame}")
            vector = torch.empty(n, dtype=frame.dtype)
            self.channel.receive_into(vector)
        return vector

    def close(self) -> None:
        """Say goodbye; idempotent."""
        if self.channel.fileno() >= 0:
            with suppress(ChannelClosed, ChannelTimeout):  # it is gone: nobody misses the goodbye
                self.channel.send(Frame(kind=Kind.GOODBYE))
        self.channel.close()
        self._window = self._outbox = self._stage = None

    # -- trouble -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Turn the channel's errors into ShardLost."""
        try:
            yield
        except ChannelClosed as error:
            raise self._lost("is gone") from error
        except ChannelTimeout as error:
            raise self._lost(f"did not answer for {self.channel.timeout_s:g} s") from error
        except FrameError as error:
            raise self._lost(f"sent an unexpected frame ({error})") from error

    def _lost(self, why: str) -> ShardLost:
        operation, step, begun = self._asked
        self.channel.close()
        return ShardLost(self._shard, self._peer, f"server.{operation}", step, time.perf_counter() - begun, why)

    def _refusal(self, kind: int, content: dict[str, Any]) -> ManyhandsError:
        if kind == Kind.REFUSED:
            family = BadInput if content.get("error") == "BadInput" else InvalidCall
            return family(printable(content.get("message"), 2000))
        worker, seconds = content.get("worker"), content.get("seconds")
        if not is_whole(worker, -1) or not isinstance(seconds, int | float):
            raise FrameError(f"expected a worker and seconds; got {content!r:.200}")
        operation, step, _ = self._asked
        if worker < 0:
            return ManyhandsError(
                f"{self._peer} waited {seconds:.1f} s for a first center in server.{operation}: one worker has to offer its parameters"
            )
        host = self._hosts[worker] if worker < len(self._hosts) else "its host"
        why = f"did not do its part for {seconds:.1f} s"
        return PeerLost(worker, host, f"server.{operation}", step, seconds, why)

    def _portable(self, vector: Tensor) -> Tensor:
        """The vector itself where a socket takes it, else a copy."""
        return vector if _is_portable(vector) else self._staging(vector).copy_(vector)

    def _staging(self, like: Tensor) -> Tensor:
        if self._stage is None or self._stage.numel() != like.numel() or self._stage.dtype != like.dtype:
            self._stage = torch.empty(like.numel(), dtype=like.dtype, pin_memory=like.is_cuda)
        return self._stage


def _is_portable(vector: Tensor) -> bool:
    return vector.device.type == "cpu" and vector.is_contiguous()


def _is_unix(channel: Channel) -> bool:
    """Whether descriptors travel over this channel."""
    with socket.socket(fileno=os.dup(channel.fileno())) as probe:
        return probe.family == socket.AF_UNIX
