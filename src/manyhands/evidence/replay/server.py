"""The server of a replay: real stores, whose pushes and pulls happen at the versions that the journal says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from manyhands.comm.ledger import Ledger
from manyhands.evidence.replay.journal import ReplayJournal
from manyhands.evidence.replay.turns import ThreadTurns
from manyhands.server.base import Encoded, Pushed, Server, ServerSpec, ServerState
from manyhands.server.rules.quorum import QuorumRule
from manyhands.server.sharding import codec_for, lengths_of, parts_of
from manyhands.server.store import Applied, Dropped, Go, Held, Reply, Store, WaitForGate


class Stores:
    """The shards, and the answers that they hold back for workers."""

    def __init__(
        self, spec: ServerSpec, stores: list[Store], journal: ReplayJournal, turns: ThreadTurns, ordered: bool
    ) -> None:
        """ordered: pulls and pushes wait for the version that the journal says; else the rule's own rounds make the order."""
        self.spec, self.stores = spec, stores
        self.journal, self.turns, self.ordered = journal, turns, ordered
        self.answers: dict[tuple[int, int], Reply] = {}  # (shard, worker)

    def call(self, shard: int, operation: Callable[[Store], Any]) -> Any:
        """One call of a store, on one thread as in a shard's own process; what it released is laid out."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            result = operation(self.stores[shard])
        finally:
            torch.set_num_threads(threads)
        for worker, reply in self.stores[shard].released:
            self.answers[shard, worker] = reply
        self.stores[shard].released.clear()
        return result

    def in_order(self, ready: Callable[[int], bool], do: Callable[[int], None]) -> None:
        """`do` every shard, each as soon as it is ready."""
        left = list(range(len(self.stores)))
        while left:
            self.turns.wait_for(lambda: any(ready(shard) for shard in left))
            shard = next(s for s in left if ready(s))
            left.remove(shard)
            do(shard)

    def answer(self, shard: int, worker: int) -> Reply:
        self.turns.wait_for(lambda: (shard, worker) in self.answers)
        return self.answers.pop((shard, worker))


class ReplayServer(Server):
    """One worker's."""

    def __init__(self, stores: Stores, rank: int) -> None:
        self.ledger = Ledger()
        self._all, self._rank = stores, rank
        self._record = stores.journal.records[rank]
        self.shards, self._sequence = len(stores.stores), 0

    @override
    def initialize(self, center: Tensor) -> None:
        parts = [part.detach().clone() for part in self._parts(center)]
        for shard in range(len(parts)):
            self._all.call(shard, lambda store: store.initialize(parts[shard]))  # noqa: B023 - called at once

    @override
    def activate(self) -> None:
        for shard in range(len(self._all.stores)):
            self._all.call(shard, lambda store: store.activate(self._rank, 0))

    @override
    def pull(self, into: Tensor) -> None:
        self._all.turns.wait_for(lambda: all(store.initialized for store in self._all.stores))
        versions = self._record.pulls.popleft() if self._record.pulls else []
        parts = self._parts(into)

        def pull(shard: int) -> None:
            version = self._all.call(shard, lambda store: store.pull(self._rank))
            self._all.journal.pulls[shard, version] -= 1
            parts[shard].copy_(self._all.stores[shard].center)

        self._all.in_order(
            lambda shard: not self._all.ordered or self._all.stores[shard].version == versions[shard], pull
        )

    @override
    def push(self, update: Tensor | Encoded, weight: float = 1.0, bits: int = 0) -> Pushed:
        versions = self._record.pushes.popleft() if self._record.pushes else None
        self._sequence += 1
        part_of, replies = self._part_of(update), {}

        def push(shard: int) -> None:
            reply = self._all.call(
                shard, lambda store: store.push(self._rank, self._sequence, part_of(shard), weight, bits)
            )
            if isinstance(reply, Held) and self._all.stores[shard].rule.answers:
                reply = self._all.answer(shard, self._rank)
            replies[shard] = reply

        self._all.in_order(lambda shard: self._may_push(shard, versions, weight), push)
        pushed = _pushed([replies[shard] for shard in range(self.shards)])
        return (
            pushed
            if pushed.applied or not self._record.behind
            else replace(pushed, behind=self._record.behind.popleft())
        )

    def _may_push(self, shard: int, versions: list[int] | None, weight: float) -> bool:
        """Whether this push now makes the version that it made, and nobody has still to see the one before."""
        store = self._all.stores[shard]
        if isinstance(store.rule, QuorumRule):  # a push is of the step of its number: what came late comes late again
            return versions is not None or store.version >= self._sequence
        if versions is None or not weight or not self._all.ordered:  # it made none, or its round makes the order
            return True
        return store.version == versions[shard] - 1 and self._all.journal.pulls[shard, store.version] == 0

    @override
    def tick(self, bits: int = 0) -> int:
        if self._all.ordered:
            return bits  # the journal is what the gate allowed
        or_of_bits = bits
        for shard in range(len(self._all.stores)):
            reply = self._all.call(shard, lambda store: store.tick(self._rank, bits))
            go = self._all.answer(shard, self._rank) if isinstance(reply, WaitForGate) else reply
            assert isinstance(go, Go)
            or_of_bits = go.bits
        return or_of_bits

    @override
    def deactivate(self) -> None:
        for shard in range(len(self._all.stores)):
            self._all.call(shard, lambda store: store.deactivate(self._rank))

    @override
    def center(self, into: Tensor) -> None:
        for shard, part in enumerate(self._parts(into)):
            part.copy_(self._all.call(shard, Store.read))

    @override
    def capture(self) -> ServerState:
        raise NotImplementedError("a replay writes no checkpoints")

    @override
    def restore(self, snapshot: ServerState) -> None:
        raise NotImplementedError("a replay begins at the beginning")

    @override
    def drain_journal(self) -> dict[str, Any]:
        return {}

    @override
    def close(self) -> None:
        pass

    def _part_of(self, update: Tensor | Encoded) -> Callable[[int], Tensor]:
        """What a shard's store gets, decoded as the shard did: inside its own call."""
        if isinstance(update, Tensor):
            parts = self._parts(update)
            return lambda shard: parts[shard]
        codec, lengths, dtype = codec_for(self._all.spec), lengths_of(update), update.dtype
        return lambda shard: codec.decode(update.parts[shard], lengths[shard], dtype)

    def _parts(self, vector: Tensor) -> list[Tensor]:
        return parts_of(vector, len(self._all.stores))


def _pushed(replies: list[Applied | Dropped | Held]) -> Pushed:
    """One answer of all shards' replies."""
    first = replies[0]
    if isinstance(first, Held) or first.answer is None:
        return Pushed(applied=not isinstance(first, Dropped))
    answer = torch.cat([reply.answer for reply in replies])  # type: ignore[union-attr,misc]
    return Pushed(applied=isinstance(first, Applied), answer=answer, weight=first.weight, bits=first.bits)
