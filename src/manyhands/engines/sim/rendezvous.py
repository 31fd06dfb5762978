"""Where the simulated workers of a group meet: arrivals at collectives, their completion, and lost ranks."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from manyhands.comm.checks import describe, different_operations, itemsize, other_message
from manyhands.comm.group import Ledger
from manyhands.engines.sim.collectives import Cost
from manyhands.engines.sim.costs import Costs
from manyhands.engines.sim.network import NetworkState
from manyhands.engines.sim.timeline import Future, Killed, Timeline
from manyhands.errors import ManyhandsError, PeerLost

_NOTHING = torch.empty(0, dtype=torch.uint8)

Failure = Callable[[int, str, int, float], ManyhandsError]
"""(rank, operation, step, seconds waited) -> the error that this rank gets after which the group is unusable."""


@dataclass(slots=True, eq=False)
class CollectiveCall:
    """One rank's part in a collective."""

    rank: int
    name: str
    number: int  # its signature
    tensor: Tensor
    step: int
    ledger: Ledger
    weight: float = 1.0
    bits: int = 0
    text: str = ""  # JSON
    lost: Tensor | None = None  # of a mean of 16-bit numbers: what rounding took away
    n: int = field(init=False)

    def __post_init__(self) -> None:
        self.n = self.tensor.numel()

    def __str__(self) -> str:
        words = describe(self.number, self.n)
        return words.replace("broadcast_", self.name) if self.name == "share" else words


Run = Callable[[Sequence[CollectiveCall]], tuple[Cost, Any]]
"""All ranks' calls in rank order -> the collective's cost and result; the ranks' tensors are changed in place."""


@dataclass(slots=True, eq=False)
class Round:
    """One collective. `result` is there with the last arrival, and known to the ranks from `done_at` on."""

    first: CollectiveCall | None
    calls: list[CollectiveCall | None]  # by rank
    missing: int  # ranks that have not come
    arrived_at: float | None = None  # when the last one came
    done_at: float = 0.0
    result: Any = None
    cells: list[Future[None]] = field(default_factory=list)  # of the ranks that wait for it

    def wake(self) -> None:
        for cell in self.cells:
            cell.set(None)
        self.cells.clear()


@dataclass(slots=True, eq=False)
class PendingMessage:
    """A tensor on its way from one rank to another, or the place where one is waited for."""

    number: int = 0
    data: Tensor = _NOTHING  # [n]
    sent_at: float | None = None
    arrives_at: float = 0.0


@dataclass(slots=True, eq=False)
class PendingWait:
    """A rank that waits: for a collective's last arrival and its end, or for another rank's message."""

    cell: Future[None]
    name: str
    step: int
    since: float
    source: int  # -1: a collective's
    until: Round | PendingMessage
    box: int = 0  # of messages, see `SimRendezvous.send`

    @property
    def is_for_somebody(self) -> bool:
        """Whether somebody has not done its part: else only the network is waited for."""
        return (self.until.arrived_at if isinstance(self.until, Round) else self.until.sent_at) is None

    def lacks(self) -> list[int]:
        """The ranks that have not come."""
        if isinstance(self.until, PendingMessage):
            return [self.source]
        return [rank for rank, call in enumerate(self.until.calls) if call is None]


class SimRendezvous:
    """What the ranks of one simulated group share.

    The i-th calls of all ranks meet. A collective begins when the last rank has come and the previous one is over; it
    takes what `costs` says. timeout_s: who waits for a rank so long gets PeerLost, the group is unusable; inf: never.
    """

    def __init__(
        self,
        timeline: Timeline,
        costs: Costs,
        wires: NetworkState,
        size: int,
        timeout_s: float,
        nodes: Sequence[int] | None = None,
        begins_at: float = 0.0,
    ) -> None:
        """nodes: of the network, in the order of the ranks, by which messages call them; None: 0 … size - 1. begins_at:
        when all are connected."""
        self.timeline, self.costs, self.wires, self.size = timeline, costs, wires, size
        self._nodes = range(size) if nodes is None else nodes
        self.timeout_s = timeout_s
        self._rounds: dict[int, Round] = {}  # those that somebody has not come to
        self._calls = [0] * size  # how many each rank has made
        self._free_at = begins_at  # when the last collective is over
        self._mail: dict[tuple[int, int, int], deque[PendingMessage]] = {}
        self._waits: dict[int, PendingWait] = {}  # by rank
        self._closed: set[int] = set()
        self._failure: Failure | None = None
        self._watched = False
        self.is_parted = False  # a connection broke, and nobody is dead

    def check(self, rank: int, name: str, step: int) -> None:
        """Raise what made the group unusable, if anything did; Killed for a rank that was killed."""
        if self.timeline.is_dead:
            raise Killed
        if self._failure is not None:
            raise self._failure(rank, name, step, 0.0)

    # -- collectives -------------------------------------------------------------------------------------------------

    def arrive(self, call: CollectiveCall, run: Run) -> Round:
        """A rank comes to its next collective, and does not wait."""
        self.check(call.rank, call.name, call.step)
        index = self._calls[call.rank]
        self._calls[call.rank] += 1
        round_ = self._rounds.get(index)
        if round_ is None:
            round_ = self._rounds[index] = Round(call, [None] * self.size, self.size)
        first = round_.first
        assert first is not None  # until all have come
        if (first.name, first.number, first.n) != (call.name, call.number, call.n):
            error = different_operations(call.step, call.rank, call, first.rank, first)
            raise self._fail(lambda *_: copy.copy(error))(call.rank, call.name, call.step, 0.0)
        round_.calls[call.rank] = call
        round_.missing -= 1
        if round_.missing == 0:
            del self._rounds[index]
            self._complete(round_, run)
        elif gone := [rank for rank in self._closed if round_.calls[rank] is None]:
            raise self._fail(self._lost(min(gone), "left the group"))(call.rank, call.name, call.step, 0.0)
        return round_

    def end(self, round_: Round, rank: int, name: str, step: int) -> float:
        """Return when the collective is over; the seconds until the last rank came."""
        now = self.timeline.now
        if round_.arrived_at is not None and round_.done_at <= now:
            return 0.0
        self.check(rank, name, step)
        wait = PendingWait(self.timeline.cell(), name, step, now, -1, round_)
        if round_.arrived_at is not None and not round_.cells:
            self.timeline.at(round_.done_at, round_.wake)
        round_.cells.append(wait.cell)
        self._wait(rank, wait)
        assert round_.arrived_at is not None
        return max(0.0, round_.arrived_at - now)

    def _complete(self, round_: Round, run: Run) -> None:
        calls = [call for call in round_.calls if call is not None]
        try:
            cost, round_.result = run(calls)
        except Exception as error:
            message = f"{calls[0]} of all workers failed at step {calls[0].step}: {type(error).__name__}: {error}"
            self._fail(lambda *_: ManyhandsError(message))
            raise
        for call, bytes, messages in zip(calls, cost.bytes, cost.messages, strict=False):
            if messages:
                call.ledger.add(call.name, bytes, messages)
        round_.arrived_at = self.timeline.now
        round_.done_at = self._free_at = max(self.timeline.now, self._free_at) + cost.seconds
        round_.calls, round_.first = [], None  # nobody keeps the ranks' tensors
        if round_.cells:
            self.timeline.at(round_.done_at, round_.wake)

    # -- messages -----------------------------------------------------------------------------------------------------

    def send(self, message: PendingMessage, source: int, target: int, step: int, box: int = 0) -> None:
        """box: of those from one rank to another, each with an order of its own; 0 is that of `send` and `receive_`."""
        self.check(source, "send", step)
        now = self.timeline.now
        message.arrives_at = self.wires.send(self._nodes[source], self._nodes[target], message.data.nbytes, now)
        message.sent_at = now
        wait = self._waits.get(target)
        if wait is not None and (wait.source, wait.box) == (source, box) and wait.is_for_somebody:
            wait.until = message
            self.timeline.at(message.arrives_at, lambda: wait.cell.set(None))
        self._mail.setdefault((source, target, box), deque()).append(message)

    def has_arrived(self, source: int, target: int, box: int) -> bool:
        """Whether the next message from a rank is here."""
        mail = self._mail.get((source, target, box))
        return mail is not None and len(mail) > 0 and mail[0].arrives_at <= self.timeline.now

    def take(self, source: int, target: int, step: int, box: int = 0) -> tuple[PendingMessage, float]:
        """The next message from a rank, once it has arrived; and the seconds until it was sent."""
        name = "take" if box else "receive_"
        self.check(target, name, step)
        now = self.timeline.now
        mail = self._mail.setdefault((source, target, box), deque())
        if not mail and source in self._closed:
            raise self._fail(self._lost(source, "left the group"))(target, name, step, 0.0)
        if not mail or mail[0].arrives_at > now:
            until = mail[0] if mail else PendingMessage()
            wait = PendingWait(self.timeline.cell(), name, step, now, source, until, box)
            if mail:
                self.timeline.at(mail[0].arrives_at, lambda: wait.cell.set(None))
            self._wait(target, wait)
        message = mail.popleft()
        assert message.sent_at is not None
        return message, max(0.0, message.sent_at - now)

    def refuse(
        self, message: PendingMessage, number: int, n: int, source: int, target: int, step: int
    ) -> ManyhandsError:
        """The error of a rank that expected another message; the group is unusable."""
        came = describe(message.number, message.data.nbytes // itemsize(message.number))
        error = other_message(step, target, describe(number, n), source, came)
        return self._fail(lambda *_: copy.copy(error))(target, "receive_", step, 0.0)

    # -- those who will not come -------------------------------------------------------------------------------------

    def lose(self, node: int) -> None:
        """A killed worker is declared lost: who waits, or comes later, gets PeerLost. Idempotent."""
        self._fail(self._lost(self._nodes.index(node), "is gone"))

    def part(self, host: int) -> None:
        """The connections between this host and others break. Idempotent.

        Each member finds the first one on the other side gone. Without members on both sides nothing breaks.
        """
        here = [rank for rank in range(self.size) if self.wires.host_of(self._nodes[rank]) == host]
        there = [rank for rank in range(self.size) if rank not in here]
        if here and there and self._failure is None:
            why = "is cut off"
            of_here, of_there = self._lost(here[0], why), self._lost(there[0], why)
            self.is_parted = True
            self._fail(lambda rank, *about: (of_there if rank in here else of_here)(rank, *about))

    def leave(self, rank: int) -> None:
        """A rank closed its group; idempotent. Ranks that wait for it, now or later, get PeerLost."""
        if self.timeline.is_dead:  # a death is not a goodbye
            return
        self._closed.add(rank)
        if any(wait.is_for_somebody and rank in wait.lacks() for wait in self._waits.values()):
            self._fail(self._lost(rank, "left the group"))

    def _lost(self, rank: int, why: str) -> Failure:
        node = self._nodes[rank]
        host = f"host{self.wires.host_of(node)}"
        return lambda _, name, step, seconds: PeerLost(node, host, name, step, seconds, why)

    def _fail(self, failure: Failure) -> Failure:
        """The group is unusable from now on; all who wait get an error. What made it so first counts."""
        if self._failure is None:
            self._failure = failure
            self._rounds.clear()
            self._mail.clear()
            for rank, wait in self._waits.items():
                wait.cell.fail(failure(rank, wait.name, wait.step, self.timeline.now - wait.since))
        return self._failure

    def _wait(self, rank: int, wait: PendingWait) -> None:
        self._waits[rank] = wait
        if wait.is_for_somebody:
            self._watch(self.timeline.now)
        try:
            self.timeline.wait(wait.cell, wait.name)
        finally:
            if self._waits.get(rank) is wait:  # not one of a process that took this one's place
                del self._waits[rank]

    def _watch(self, since: float) -> None:
        """Look at those who wait, at the deadline of who began then. One look is planned at a time."""
        if not self._watched and self.timeout_s < math.inf:
            self._watched = True
            self.timeline.at(since + self.timeout_s, self._look)

    def _look(self) -> None:
        self._watched = False
        waits = [wait for wait in self._waits.values() if wait.is_for_somebody]
        oldest = min(waits, key=lambda wait: wait.since, default=None)
        if oldest is None:
            return
        if oldest.since + self.timeout_s > self.timeline.now:
            self._watch(oldest.since)
            return
        first, *others = oldest.lacks()
        nor = (
            f" (others that did not come: {', '.join(map(str, others[:5]))}{' …' if others[5:] else ''})"
            if others
            else ""
        )
        self._fail(self._lost(first, f"did not come for {self.timeout_s:g} s{nor}"))
