"""The connection from a shard's primary to its backup, or to a new copy: frames of the log, and acknowledgements.

| frame          | carries                                                                                           |
|----------------|---------------------------------------------------------------------------------------------------|
| a `Call`       | sequence: its index, a: worker id, b: number, weight, bits; and its vector, unless both map the   |
|                | worker's outbox, in which it is; of RESTORE JSON (names, numbers), then a VECTOR for each name    |
| IMAGE          | sequence: its index, JSON: names, numbers; then a VECTOR for each name                            |
| OUTBOX         | a: worker id, b: elements; then a descriptor of the worker's outbox, where that can travel        |
| ACKNOWLEDGE    | sequence: the index of the newest call that was made                                              |

All but the last go from the primary. Frames carry the link's number as their generation: of an older one they are refused.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from manyhands.comm.checks import MEAN_DTYPES, bits_bytes, bits_of
from manyhands.server.protocol import Kind
from manyhands.server.replication.log import Call, Entry
from manyhands.transport.channel import Channel, ChannelTimeout
from manyhands.transport.frame import Frame, FrameError, from_json, to_json


class LinkFrame(IntEnum):
    """Numbers of frames besides those of `Call`."""

    IMAGE = 80
    OUTBOX = 81
    ACKNOWLEDGE = 82


class BackupLink:
    """Either end. number: of the view in which the link was made."""

    def __init__(self, channel: Channel, number: int) -> None:
        self.channel, self.number = channel, number
        channel.generation = number
        with socket.socket(fileno=os.dup(channel.fileno())) as probe:
            self.shares_memory = probe.family == socket.AF_UNIX

    # -- of the primary ------------------------------------------------------------------------------------------------

    def send_image(self, index: int, vectors: dict[str, Tensor], numbers: object) -> None:
        blob = to_json({"names": list(vectors), "numbers": numbers})
        self.channel.send(Frame(kind=LinkFrame.IMAGE, sequence=index, blob=blob))
        for vector in vectors.values():
            self.channel.send(Frame(kind=Kind.VECTOR), vector)

    def send_outbox(self, worker_id: int, elements: int, fd: int) -> None:
        self.channel.send(Frame(kind=LinkFrame.OUTBOX, a=worker_id, b=elements))
        self.channel.send_fds([fd])

    def send(self, entry: Entry, sent: Tensor | None) -> None:
        """sent: the vector that travels with it, decoded or not; None: it has none, or the backup maps it."""
        blob = bits_bytes(entry.bits)
        if entry.call == Call.RESTORE:
            blob = to_json({"names": list(entry.names), "numbers": entry.numbers})
        frame = Frame(
            kind=entry.call,
            sequence=entry.index,
            a=entry.worker_id,
            b=entry.number,
            weight=entry.weight,
            blob=blob,
        )
        self.channel.send(frame, sent)
        if entry.call == Call.RESTORE:
            for vector in entry.vectors:
                self.channel.send(Frame(kind=Kind.VECTOR), vector.contiguous())

    # -- of the other end ----------------------------------------------------------------------------------------------

    def receive(self) -> Frame:
        """The next frame, however long that takes."""
        while True:
            try:
                return self.channel.receive()
            except ChannelTimeout:
                if self.channel.fileno() < 0:  # in the middle of a frame
                    raise

    def receive_vectors(self, names: Sequence[str]) -> dict[str, Tensor]:
        vectors = {}
        for name in names:
            frame = self.receive()
            if frame.kind != Kind.VECTOR or frame.dtype not in MEAN_DTYPES:
                raise FrameError(f"expected the vector {name!r:.100}; got {frame}")
            vectors[name] = self.receive_vector(frame)
        return vectors

    def receive_vector(self, frame: Frame) -> Tensor:
        vector = torch.empty(frame.elements, dtype=frame.dtype)
        self.channel.receive_into(vector)
        return vector

    def entry_of(self, frame: Frame, vectors: dict[str, Tensor]) -> Entry:
        """Of a call's frame. FrameError for a call that there is not."""
        try:
            call = Call(frame.kind)
        except ValueError:
            raise FrameError(f"no call of kind {frame.kind} exists") from None
        numbers = from_json(frame.blob).get("numbers") if call == Call.RESTORE else None
        return Entry(
            frame.sequence,
            call,
            frame.a,
            frame.b,
            weight=frame.weight,
            bits=0 if call == Call.RESTORE else bits_of(frame.blob),
            vectors=tuple(vectors.values()),
            names=tuple(vectors) if call == Call.RESTORE else (),
            numbers=numbers,
        )

    def acknowledge(self, index: int) -> None:
        self.channel.send(Frame(kind=LinkFrame.ACKNOWLEDGE, sequence=index))

    def close(self) -> None:
        self.channel.close()
