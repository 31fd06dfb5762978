"""The contract of the server: what a strategy wants of it, and how a worker reaches it as `worker.server`.

A worker calls `activate`, then in every step any of `pull` and `push` followed by `tick`, and `deactivate` when it has
no rows left. It may compute while both are under way: `start_exchange`, in place of them, and `finish_exchange` in a
later step. `center`, `capture` and `restore` are called while no worker trains. Only one thread of a worker calls
them. None waits for ever: a server that is gone, or does not answer for `timeout_s`, raises PeerLost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from manyhands.comm.group import Ledger


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """The server that a strategy wants, as plain data (JSON). Its first center is the first worker's parameters."""

    rule: str  # how a push is merged: a name of `rules.RULES`, or a rule of the user's own, `file.py:Name`
    bound: int | None = None  # stale-synchronous parallel's bound; None: fully asynchronous
    options: dict[str, Any] = field(default_factory=dict)  # the rule's own
    compress: str = "none"  # the codec of pushes that come encoded (comm/codecs); pulls and answers travel as they are
    one_shard: bool = False  # the rule looks at whole pushes (quorum counts them): it cannot be split over shards
    coordinates: int = 1  # parts of a replica, each with a center of its own: worker r holds part r % coordinates

    def of_coordinate(self, coordinate: int) -> ServerSpec:
        """Of the center of one part. The first worker of a replica passes the gate for all of them, so that the other parts
        have none; where all are in step, each part completes its own steps."""
        gate = coordinate == 0 or self.bound == 0
        return replace(self, bound=self.bound if gate else None, coordinates=1)


@dataclass(frozen=True, slots=True)
class Encoded:
    """An update [D'] as payloads of the codec that `ServerSpec.compress` names."""

    parts: tuple[Tensor, ...]  # uint8, one a shard: of the ranges that `sharding.parts_of` gives
    n: int  # D'
    dtype: torch.dtype  # of the center

    @property
    def nbytes(self) -> int:
        """Of all payloads."""
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Pushed:
    """What the server says to a push. `answer`, `weight` and `bits` are set by rules that give something back."""

    applied: bool  # False: dropped (too late), its rows count as unused
    answer: Tensor | None = (
        None  # [D'], this worker's until its next push: quorum's mean gradient, elastic's difference
    )
    weight: float = 0.0  # behind the answer
    bits: int = 0  # OR of all that the answer is made of
    behind: int = (
        0  # steps that a quorum decided after the one of this push: a gradient for them can only come too late
    )


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What a push and a pull gave that went on beside the caller."""

    pushed: Pushed | None  # None: nothing was pushed
    pulled: bool  # the center has come


@dataclass(frozen=True, slots=True)
class ServerState:
    """All that a server must remember: full vectors [D'] by name ("center", and the rule's own), and numbers (JSON)."""

    vectors: dict[str, Tensor]
    numbers: dict[str, Any]


class Server(ABC):
    """A worker's view of the shared parameters; sequence numbers, versions and shards live behind it."""

    spec: ServerSpec
    ledger: Ledger
    shards: int = 1  # over which a vector is cut
    waited_s: float = 0.0  # seconds at the gate, or for an answer that was held back
    pulled: Sequence[int] = ()  # by shard, the version of the newest center that has come; (): none yet
    received: Callable[[Tensor], None] | None = None
    """Called with each center and each answer [D'] that has come, before the caller has it, and may change it: where
    workers of a replica hold the same parameter, they take one value of it."""

    @abstractmethod
    def initialize(self, center: Tensor) -> None:
        """Offer the first center [D']; the first offer wins. Whoever pulls before waits for it."""

    @abstractmethod
    def activate(self) -> None:
        """The gate counts this worker from now on, with the finished ticks of the slowest active one (0 alone)."""

    @abstractmethod
    def pull(self, into: Tensor) -> None:
        """Copy the center, one consistent version of each shard, into `into` [D']."""

    @abstractmethod
    def push(
        self, update: Tensor | Encoded, weight: float = 1.0, bits: int = 0, *, since: Sequence[int] = ()
    ) -> Pushed:
        """Give an update [D'] to the server's rule; applied exactly once. The caller may reuse `update` afterwards.

        since: by shard, the version from which its staleness counts, as `pulled` said when its first gradient was
        computed; (): the last pull's.
        An encoded one is decoded by each shard, and is to the rule what was decoded. BadInput for payloads that the
        codec cannot have made.

        Rules that answer, under bound 0, do so when all who take part have pushed in this tick, or finished it.
        """

    @abstractmethod
    def start_exchange(
        self,
        update: Tensor | Encoded | None = None,
        weight: float = 1.0,
        *,
        into: Tensor | None = None,
        since: Sequence[int] = (),
    ) -> None:
        """A push, a pull `into` [D'] that sees it, or both, which the caller does not wait for.

        They leave with the step's `tick`, or with `finish_exchange`. Until that returns, neither vector may be touched.
        One at a time, and under another bound than 0. Any other call waits until what has left is over.
        """

    @abstractmethod
    def finish_exchange(self) -> Exchanged | None:
        """Wait for what was started, and say what came of it; None: nothing was."""

    @property
    @abstractmethod
    def pushes(self) -> int:
        """The number of the last push; they count from 1."""

    @abstractmethod
    def tick(self, bits: int = 0) -> int:
        """A tick is finished: waits until the gate of `bound` lets this worker begin its next.

        Under bound 0 the pushes of the tick are now one new version, and the OR of all workers' `bits` of this tick
        comes back; else this worker's own.
        """

    @abstractmethod
    def deactivate(self) -> None:
        """The gate does not wait for this worker until it calls `activate` again. Idempotent."""

    @abstractmethod
    def center(self, into: Tensor) -> None:
        """As `pull`, between two ticks of training: staleness, gate and journal do not see it."""

    @abstractmethod
    def capture(self) -> ServerState:
        """For a checkpoint; one worker asks, while nobody trains."""

    @abstractmethod
    def restore(self, snapshot: ServerState) -> None:
        """Go on from `capture`'s; one worker does it, while nobody trains. Any number of shards."""

    @abstractmethod
    def drain_journal(self) -> dict[str, Any]:
        """What this worker did since it was last asked, for the journal:

        pulls: for each, [version of each shard]
        pushes: for each, [version that it made of each shard], or None where it was dropped
        staleness: for each push that was applied, how many versions others made since this worker's pull; the
            largest of the shards
        behind: for each push that was dropped, its `Pushed.behind`

        Empty lists are left out.
        """

    @abstractmethod
    def close(self) -> None:
        """Say goodbye, and give sockets and memory back; idempotent."""
