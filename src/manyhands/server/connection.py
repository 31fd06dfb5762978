"""One worker's connection to a shard, in a thread of its own: takes a request, calls the store, answers."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from manyhands.comm.checks import bits_bytes, bits_of
from manyhands.errors import BadInput, ManyhandsError
from manyhands.server.protocol import Kind, VectorPlace, dtype_of, snapshot_of
from manyhands.server.published import make_outbox, map_outbox
from manyhands.server.shard import Shard, WorkersLate
from manyhands.server.sharding import codec_for
from manyhands.server.store import Applied, Dropped, Go, Held
from manyhands.transport.channel import Channel, ChannelTimeout
from manyhands.transport.frame import Frame, FrameError, to_json


class Connection:
    """Serves one worker until it says goodbye."""

    def __init__(self, shard: Shard, worker: int, channel: Channel) -> None:
        self.worker, self.channel = worker, channel
        self._shard = shard
        self._inbox: Tensor | None = None  # [n] where updates come in, and answers go out
        self._shared = False  # the inbox is the worker's outbox, in memory of both
        self._handlers: dict[int, Callable[[Frame], None]] = {
            Kind.OFFER: self._offer,
            Kind.AWAIT: self._await,
            Kind.MEMORY: self._memory,
            Kind.ACTIVATE: self._activate,
            Kind.PULL: self._pull,
            Kind.PEEK: self._pull,
            Kind.RELEASE: self._release,
            Kind.PUSH: self._push,
            Kind.ENCODED: self._push,
            Kind.TICK: self._tick,
            Kind.DEACTIVATE: self._deactivate,
            Kind.CAPTURE: self._capture,
            Kind.RESTORE: self._restore,
        }

    def serve(self) -> None:
        """Returns at the goodbye. Raises what ended the connection otherwise; the worker was told why if it can be."""
        while True:
            frame = self._next()
            if frame.kind == Kind.GOODBYE:
                return
            handler = self._handlers.get(frame.kind)
            if handler is None or (frame.elements and frame.kind not in (Kind.PUSH, Kind.ENCODED)):
                raise FrameError(f"no request of kind {frame.kind} with {frame.elements} elements exists")
            try:
                handler(frame)
            except ManyhandsError as error:
                name = "BadInput" if isinstance(error, BadInput) else "Refused"
                self._send(Kind.REFUSED, blob=to_json({"error": name, "message": str(error)}))
                raise
            except WorkersLate as late:
                self._send(Kind.LATE, blob=to_json({"worker": late.worker, "seconds": late.seconds}))

    def _next(self) -> Frame:
        """A worker may compute as long as it likes between two requests; the driver judges that."""
        while True:
            try:
                return self.channel.receive()
            except ChannelTimeout:
                if self.channel.fileno() < 0:  # in the middle of a frame
                    raise

    def _send(self, kind: Kind, tensor: Tensor | None = None, **fields: Any) -> None:
        self.channel.send(Frame(kind=kind, **fields), tensor)

    def _alive(self) -> None:
        self._send(Kind.WAIT)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _offer(self, frame: Frame) -> None:
        offered = self._shard.offer(frame.a, dtype_of(frame), self._alive)
        if offered is not None:
            came = False
            try:
                self._send(Kind.WANTED)
                self.channel.expect(Kind.GIVE, offered.buffers[0])
                came = True
            finally:
                self._shard.take(offered, came=came)
        self._send(Kind.DONE)

    def _expect_center(self, frame: Frame) -> None:
        """Wait until there is one, and check that the worker's vectors are alike."""
        self._shard.await_center(self._alive)
        self._shard.check(frame.a, dtype_of(frame), "a vector")

    def _await(self, frame: Frame) -> None:
        self._expect_center(frame)
        self._send(Kind.DONE)

    def _memory(self, frame: Frame) -> None:
        """The center's slots, and an outbox for this worker."""
        self._expect_center(frame)
        center = self._shard.memory
        outbox = make_outbox(center.n, center.dtype)
        try:
            self._inbox, self._shared = map_outbox(outbox, center.n, center.dtype), True
            self._send(Kind.MEMORY, a=center.slots, b=center.stride)
            self.channel.send_fds([center.fd, outbox])
        finally:
            os.close(outbox)

    def _activate(self, frame: Frame) -> None:
        self._shard.call(lambda store: store.activate(self.worker, frame.generation))
        self._send(Kind.DONE)

    def _pull(self, frame: Frame) -> None:
        self._expect_center(frame)
        version, slot = self._shard.pin(self.worker, pull=frame.kind == Kind.PULL)
        if self._shared:
            self._send(Kind.CENTER, a=version, b=slot)  # RELEASE will follow
            return
        self._send(Kind.CENTER, self._shard.memory.buffers[slot], a=version)
        self._shard.unpin(self.worker)

    def _release(self, frame: Frame) -> None:
        self._shard.unpin(self.worker)

    def _push(self, frame: Frame) -> None:
        update = self._update(frame)
        reply: object = self._shard.push(self.worker, frame.sequence, update, frame.weight, bits_of(frame.blob))
        if isinstance(reply, Held) and not self._shard.store.rule.answers:
            self._send(Kind.HELD, a=reply.version, b=reply.staleness)
            return
        if isinstance(reply, Held):
            reply = self._shard.answer(self.worker, self._alive)
        assert isinstance(reply, Applied | Dropped)
        self._answer(reply)

    def _update(self, frame: Frame) -> Tensor:
        """[n] what a PUSH brings: an update, or a payload."""
        if frame.kind == Kind.ENCODED:
            return self._decoded(frame)
        if self._shared and frame.elements:
            raise FrameError(f"updates of this worker come in shared memory; got {frame.elements} elements")
        if not self._shared:
            self._shard.check(frame.elements, frame.dtype, "a push")
            if self._inbox is None:
                self._inbox = torch.empty(frame.elements, dtype=frame.dtype)
            self.channel.receive_into(self._inbox)
        assert self._inbox is not None
        return self._inbox

    def _decoded(self, frame: Frame) -> Tensor:
        """[n] a decoded payload. BadInput for other codecs, before memory is taken where its length tells."""
        codec, center = codec_for(self._shard.spec), self._shard.memory
        if frame.dtype != torch.uint8:
            raise BadInput(f"a payload is a number of bytes (uint8); got {frame.elements} of {frame.dtype}")
        codec.check_length(frame.tensor_bytes, center.n, center.dtype)
        payload = torch.empty(frame.elements, dtype=torch.uint8)
        self.channel.receive_into(payload)
        return codec.decode(payload, center.n, center.dtype)

    def _answer(self, reply: Applied | Dropped) -> None:
        vector = reply.answer
        place = VectorPlace.NOWHERE if vector is None else VectorPlace.BEHIND
        if vector is not None and self._shared:
            assert self._inbox is not None
            self._inbox.copy_(vector)
            vector, place = None, VectorPlace.OUTBOX
        self._send(
            Kind.APPLIED if isinstance(reply, Applied) else Kind.DROPPED,
            vector,
            a=reply.version,
            b=reply.staleness if isinstance(reply, Applied) else reply.behind,
            sequence=place,
            weight=reply.weight,
            blob=bits_bytes(reply.bits),
        )

    def _tick(self, frame: Frame) -> None:
        reply: object = self._shard.call(lambda store: store.tick(self.worker, bits_of(frame.blob)))
        if not isinstance(reply, Go):
            reply = self._shard.answer(self.worker, self._alive)
        assert isinstance(reply, Go)
        self._send(Kind.GO, blob=bits_bytes(reply.bits))

    def _deactivate(self, frame: Frame) -> None:
        self._shard.call(lambda store: store.deactivate(self.worker))
        self._send(Kind.DONE)

    def _capture(self, frame: Frame) -> None:
        vectors, numbers = self._shard.capture()
        self._send(Kind.SNAPSHOT, blob=to_json({"names": list(vectors), "numbers": numbers}))
        for vector in vectors.values():
            self._send(Kind.VECTOR, vector)

    def _restore(self, frame: Frame) -> None:
        names, numbers = snapshot_of(frame.blob, self._shard.workers)
        vectors = {name: self._vector() for name in names}
        try:
            self._shard.call(lambda store: store.restore(vectors, numbers))
        except ManyhandsError:
            raise
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise FrameError(f"this shard's rule cannot go on from such a snapshot ({error!r:.200})") from error
        self._send(Kind.DONE)

    def _vector(self) -> Tensor:
        frame = self.channel.receive()
        n = self._shard.memory.n
        if frame.kind != Kind.VECTOR or frame.elements != n:
            raise FrameError(f"expected a vector of {n} elements; got kind {frame.kind} with {frame.elements}")
        vector = torch.empty(n, dtype=frame.dtype)
        self.channel.receive_into(vector)
        return vector
