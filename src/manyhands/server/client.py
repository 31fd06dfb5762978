"""The base of all clients, and the client of shards behind channels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from manyhands.comm.checks import FirstError, bits_bytes, bits_of, check_mean, slice_of
from manyhands.comm.group import Ledger
from manyhands.errors import BadInput, ManyhandsError
from manyhands.server.base import Encoded, Pushed, Server, ServerSpec, ServerState
from manyhands.server.protocol import SMALL_BYTES, Kind, about
from manyhands.server.shard_connection import ShardConnection
from manyhands.server.shard_ranges import check_encoded, codec_for, cut, joined, parts_of
from manyhands.server.store import Applied, Dropped, Held
from manyhands.transport.channel import Channel
from manyhands.transport.frame import Frame, to_json

PushReply = Applied | Held | Dropped


class ServerClient(Server):
    """What all clients have in common: sequence numbers, the ledger and the journal. Subclasses reach the shards."""

    def __init__(self, spec: ServerSpec, shards: int) -> None:
        self.spec, self.shards, self.ledger = spec, shards, Ledger()
        self.step = 0  # finished ticks, for messages
        self._sequence = 0  # of the last push
        self._journal = PushJournal()

    @override
    def pull(self, into: Tensor) -> None:
        self._journal.pulled(self._read("pull", into))

    @override
    def center(self, into: Tensor) -> None:
        self._read("center", into)

    @override
    def push(self, update: Tensor | Encoded, weight: float = 1.0, bits: int = 0) -> Pushed:
        replies, answer = self._push(update, self._sequence + 1, weight, bits)
        self._sequence += 1
        self._count("push", update)
        if answer is not None:
            self._count("answer", answer)
        self._journal.pushed(replies, weight, answered=answer is not None)
        first = replies[0]
        if isinstance(first, Held):
            return Pushed(applied=True)
        behind = first.behind if isinstance(first, Dropped) else 0
        return Pushed(isinstance(first, Applied), answer, first.weight, first.bits, behind)

    @override
    def tick(self, bits: int = 0) -> int:
        self.step += 1
        return bits if self.spec.bound is None else self._tick(bits)

    @override
    def drain_journal(self) -> dict[str, Any]:
        return self._journal.take()

    @abstractmethod
    def _read(self, operation: str, into: Tensor) -> list[int]:
        """The center into a vector [D'], for "pull" or "center"; its versions, one of each shard."""

    @abstractmethod
    def _push(
        self, update: Tensor | Encoded, sequence: int, weight: float, bits: int
    ) -> tuple[Sequence[PushReply], Tensor | None]:
        """The reply of each shard, and the answer [D'] of all, if there is one."""

    @abstractmethod
    def _tick(self, bits: int) -> int:
        """As `tick`, where there is a gate."""

    def _count(self, operation: str, vector: Tensor | Encoded) -> None:
        self.ledger.add(operation, vector.nbytes, self.shards)


class ServedServer(FirstError, ServerClient):
    """What a worker gets as `worker.server`. Raises ShardLost (a PeerLost) as soon as a shard is gone; then it is
    unusable. Every request goes to all shards before the first answer is awaited.

    channels: to each shard, in order; this server's from now on. Where one is a Unix socket, vectors go through memory.
    hosts: of the workers, by rank, for messages.
    memory_from: so many bytes of a shard's vector are worth shared memory; -1: never.
    """

    def __init__(
        self,
        spec: ServerSpec,
        channels: Sequence[Channel],
        *,
        hosts: Sequence[str] = (),
        memory_from: int = SMALL_BYTES,
    ) -> None:
        super().__init__(spec, len(channels))
        self._connections = [
            ShardConnection(shard, channel, hosts, memory_from) for shard, channel in enumerate(channels)
        ]
        self._like: tuple[int, torch.dtype] | None = None  # elements and dtype of the center
        self._answer: Tensor | None = None  # [D'] where the shards' answers are put together

    @override
    def initialize(self, center: Tensor) -> None:
        """As the contract. The first worker at the first shard gives to all: parts of two centers are never mixed."""
        parts = self._parts("initialize", center)
        with self._turn():
            wins = True
            for connection, part in zip(self._connections, parts, strict=True):
                connection.ask("initialize", self.step, Kind.OFFER if wins else Kind.AWAIT, **about(part))
                wins = connection.answer(Kind.WANTED, Kind.DONE).kind == Kind.WANTED
                if wins:
                    connection.send(Kind.GIVE, part)
                    connection.answer(Kind.DONE)
                    self.ledger.add("initialize", part.nbytes)
        self._like = (center.numel(), center.dtype)

    @override
    def activate(self) -> None:
        self._tell("activate", Kind.ACTIVATE)

    @override
    def deactivate(self) -> None:
        self._tell("deactivate", Kind.DEACTIVATE)

    @override
    def capture(self) -> ServerState:
        if self._like is None:
            raise BadInput(
                "server.capture comes after a vector: initialize, pull or center gives this worker its length"
            )
        bounds = [slice_of(shard, self.shards, self._like[0]) for shard in range(self.shards)]
        with self._turn():
            for connection in self._connections:
                connection.ask("capture", self.step, Kind.CAPTURE)
            captured = [
                connection.read_snapshot(stop - start)
                for connection, (start, stop) in zip(self._connections, bounds, strict=True)
            ]
        return joined(captured)

    @override
    def restore(self, snapshot: ServerState) -> None:
        self.initialize(snapshot.vectors["center"])  # so that the shards know their length; loses where there is one
        with self._turn():
            for connection, (vectors, numbers) in zip(
                self._connections, cut(snapshot, len(self._connections)), strict=True
            ):
                blob = to_json({"names": list(vectors), "numbers": numbers})
                connection.ask("restore", self.step, Kind.RESTORE, blob=blob)
                for vector in vectors.values():
                    connection.send(Kind.VECTOR, vector)
            for connection in self._connections:
                connection.answer(Kind.DONE)

    @override
    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    # -- all shards ----------------------------------------------------------------------------------------------------

    def _tell(self, operation: str, kind: Kind, answer: Kind = Kind.DONE, **fields: Any) -> Frame:
        """Ask all shards; the first one's answer."""
        with self._turn():
            for connection in self._connections:
                connection.ask(operation, self.step, kind, **fields)
            return self._answers(answer)[0]

    def _answers(self, *kinds: Kind) -> list[Frame]:
        """One of each shard; a shard that is gone is noticed also while another one waits for workers."""
        return [connection.answer(*kinds, meanwhile=self._check_shards) for connection in self._connections]

    def _check_shards(self) -> None:
        for connection in self._connections:
            connection.check()

    @override
    def _read(self, operation: str, into: Tensor) -> list[int]:
        parts = self._attached(operation, into)
        versions = []
        with self._turn():
            for connection, part in zip(self._connections, parts, strict=True):
                connection.ask(operation, self.step, Kind.PULL if operation == "pull" else Kind.PEEK, **about(part))
            for connection, part in zip(self._connections, parts, strict=True):
                frame = connection.answer(Kind.CENTER)
                connection.read_center(frame, part)
                versions.append(frame.a)
        self._like = (into.numel(), into.dtype)
        self._count(operation, into)
        return versions

    @override
    def _push(
        self, update: Tensor | Encoded, sequence: int, weight: float, bits: int
    ) -> tuple[Sequence[PushReply], Tensor | None]:
        parts = self._of_push(update, weight, bits)
        with self._turn():
            fields = {"sequence": sequence, "weight": weight, "blob": bits_bytes(bits)}
            for connection, part in zip(self._connections, parts, strict=True):
                connection.push("push", self.step, part, encoded=isinstance(update, Encoded), **fields)
            frames = self._answers(Kind.APPLIED, Kind.DROPPED, Kind.HELD)
            return [_reply(frame) for frame in frames], self._read_answer(frames, update)

    @override
    def _tick(self, bits: int) -> int:
        return bits_of(self._tell("tick", Kind.TICK, Kind.GO, blob=bits_bytes(bits)).blob)

    def _of_push(self, update: Tensor | Encoded, weight: float, bits: int) -> Sequence[Tensor]:
        """What each shard is sent of an update: its part, or its payload. BadInput for what cannot be one."""
        if isinstance(update, Tensor):
            check_mean(update, weight, bits)
            return self._attached("push", update)
        check_mean(torch.empty(0, dtype=update.dtype), weight, bits)
        check_encoded(codec_for(self.spec), update, self.shards)
        self._attached("push", torch.empty(update.n, dtype=update.dtype, device="meta"))  # for the answer
        return update.parts

    def _read_answer(self, frames: Sequence[Frame], update: Tensor | Encoded) -> Tensor | None:
        """The answer to a push, [D'], or None."""
        if frames[0].kind == Kind.HELD:
            return None
        n, device = (len(update), update.device) if isinstance(update, Tensor) else (update.n, torch.device("cpu"))
        if self._answer is None or len(self._answer) != n:
            self._answer = torch.empty(n, dtype=update.dtype, device=device)
        answer = self._answer
        parts = parts_of(answer, len(self._connections))
        came = [
            connection.read_answer(f, part)
            for connection, f, part in zip(self._connections, frames, parts, strict=True)
        ]
        return answer if any(came) else None

    def _attached(self, operation: str, vector: Tensor) -> list[Tensor]:
        """The parts of a vector to push or to read into, memory for them mapped if they go through it."""
        parts = self._parts(operation, vector)
        with self._turn():
            for connection, part in zip(self._connections, parts, strict=True):
                connection.attach(operation, self.step, part)
        return parts

    def _parts(self, operation: str, vector: Tensor) -> list[Tensor]:
        """Views of a flat vector, one a shard. BadInput for one that cannot be the center's like."""
        n, dtype = self._like or (vector.numel(), vector.dtype)
        if vector.dim() != 1 or vector.numel() != n or vector.dtype != dtype:
            raise BadInput(
                f"server.{operation} takes a flat vector of {n} elements of {dtype} here; got the shape {list(vector.shape)} "
                f"of {vector.dtype}"
            )
        return parts_of(vector.detach(), len(self._connections))

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Around every request: after an error the connections are out of step, and only the error is left."""
        self.check()
        try:
            yield
        except ManyhandsError as error:
            self.fail(error)
            raise
        finally:
            self.waited_s = sum(connection.waited_s for connection in self._connections)


def _reply(frame: Frame) -> PushReply:
    """What a shard's store replied; its answer comes apart."""
    if frame.kind == Kind.HELD:
        return Held(frame.a, frame.b)
    weight, bits = frame.weight, bits_of(frame.blob)
    if frame.kind == Kind.APPLIED:
        return Applied(frame.a, frame.b, weight=weight, bits=bits)
    return Dropped(frame.a, weight=weight, bits=bits, behind=frame.b)


class PushJournal:
    """A client's record of its pulls and pushes, until `take`; see `Server.drain_journal` for what the lists mean."""

    def __init__(self) -> None:
        self._lists: dict[str, list[Any]] = {"pulls": [], "pushes": [], "staleness": [], "behind": []}

    def pulled(self, versions: Sequence[int]) -> None:
        """A pull got these versions, one of each shard."""
        self._lists["pulls"].append(list(versions))

    def pushed(self, replies: Sequence[PushReply], weight: float, answered: bool = False) -> None:
        """A push got these replies, one of each shard, and an answer or none.

        One of weight 0 has no staleness; where nothing was answered either, it made no version, and is noted as
        dropped.
        """
        if isinstance(first := replies[0], Dropped):
            self._lists["behind"].append(first.behind)
        if any(isinstance(reply, Dropped) for reply in replies) or not (weight or answered):
            self._lists["pushes"].append(None)
            return
        self._lists["pushes"].append([reply.version for reply in replies])
        if weight:
            self._lists["staleness"].append(max(reply.staleness for reply in replies if not isinstance(reply, Dropped)))

    def take(self) -> dict[str, Any]:
        """What was collected since the last time, without empty lists."""
        drained = {name: values for name, values in self._lists.items() if values}
        self._lists = {name: [] for name in self._lists}
        return drained
