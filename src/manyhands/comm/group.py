"""The contract of a group: the collectives through which the workers of a run agree.

All ranks call the same operations in the same order. A group never waits for ever: when a peer is gone, or there was
no progress for `timeout_s`, every waiting rank raises `PeerLost`, and the group is unusable from then on. When a rank
calls another operation than the others, or with another n, dtype or source, all ranks raise ManyhandsError, and the
group is unusable as well; `TorchGroup` and `ThreadGroup` do not compare calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from manyhands.comm.checks import check_swap
from manyhands.comm.mailbox import Mailbox
from manyhands.errors import Unsupported


class Ledger:
    """Payload bytes and messages that one rank sent, by operation, without headers.

    A message is one step of an algorithm, however many frames carry it.
    """

    def __init__(self) -> None:
        self._bytes: defaultdict[str, int] = defaultdict(int)
        self._messages: defaultdict[str, int] = defaultdict(int)

    def add(self, operation: str, bytes: int, messages: int = 1) -> None:
        self._bytes[operation] += bytes
        self._messages[operation] += messages

    def include(self, other: Ledger) -> None:
        """Count what another ledger has as well."""
        for name, counts in other.as_dict().items():
            self.add(name, **counts)

    def as_dict(self) -> dict[str, dict[str, int]]:
        """{operation: {"bytes", "messages"}}"""
        return {name: {"bytes": self._bytes[name], "messages": self._messages[name]} for name in sorted(self._bytes)}

    @property
    def total_bytes(self) -> int:
        return sum(self._bytes.values())


@dataclass(frozen=True, slots=True)
class MeanResult:
    """What came back beside a mean: the float64 sum of all weights, and the OR of all bits."""

    weight: float
    bits: int

    @classmethod
    def of(cls, weights: Iterable[float], bits: Iterable[int]) -> MeanResult:
        """Of what each rank gave, added up in rank order."""
        total, union = 0.0, 0
        for weight in weights:
            total += weight
        for own in bits:
            union |= own
        return cls(total, union)


class Work(Protocol):
    """A mean under way. Do not touch the tensor before `wait()` returned; wait in the order of starting."""

    def wait(self) -> MeanResult: ...


class Done(Work):
    """Of a mean that was over as it began."""

    def __init__(self, total: MeanResult) -> None:
        self._total = total

    @override
    def wait(self) -> MeanResult:
        return self._total


class Group(ABC):
    """`size` workers, of which this is `rank`. See the module's docstring for what holds of every operation."""

    rank: int
    size: int
    ledger: Ledger
    waited_s: float = 0.0  # seconds this rank waited for its peers to arrive, summed over all operations
    step: int = 0  # the caller's step, for error messages; the loop sets it
    line: int = 0  # of the program that calls, for error messages; 0: not known

    @abstractmethod
    def allocate(self, n: int, dtype: torch.dtype) -> Tensor:
        """Zeros [n] in memory the group works on without copies. Same order and arguments on all ranks.

        It is given back once no tensor lies in it any more.
        """

    @abstractmethod
    def start_mean_(self, tensor: Tensor, weight: float = 1.0, bits: int = 0, lost: Tensor | None = None) -> Work:
        """Begin `mean_`; communication may overlap with what the caller does until `Work.wait()`."""

    def mean_(self, tensor: Tensor, weight: float = 1.0, bits: int = 0, lost: Tensor | None = None) -> MeanResult:
        """Replace `tensor` [n] on every rank by the weighted mean over ranks: sum of tensor·(weight/total).

        The result has the same bits on every rank. Total weight 0 leaves every rank's tensor as it was. A rank of
        weight 0 receives the others' mean, and what it held does not count, NaN included. With one rank nothing is
        multiplied. `bits` is any non-negative int; the OR of all comes back. n may be 0 (then only words travel).

        `lost` [n], of a wider dtype, is given on all ranks or on none, for a tensor of 16-bit numbers. It gets what
        rounding the mean took away, every part of it on one rank and zeros on the others: the mean and all ranks'
        `lost` add up to the mean in the dtype of `lost`.
        """
        return self.start_mean_(tensor, weight, bits, lost).wait()

    @abstractmethod
    def all_reduce_(self, tensor: Tensor) -> None:
        """Sum over ranks, in place, the same bits on every rank."""

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> Tensor:
        """[n] on every rank -> [size, n]."""

    @abstractmethod
    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """[n] on every rank -> this rank's [r·n//size, (r+1)·n//size) of the sum."""

    @abstractmethod
    def broadcast_(self, tensor: Tensor, source: int) -> None:
        """Every rank gets `source`'s tensor, in place."""

    @abstractmethod
    def send(self, tensor: Tensor, target: int) -> None:
        """Point to point; `target` calls `receive_` with a tensor of the same shape and dtype."""

    @abstractmethod
    def receive_(self, tensor: Tensor, source: int) -> None:
        """Fill `tensor` with what `source` sends."""

    def lose(self, name: int, host: str) -> None:  # noqa: B027
        """From another thread: the member that messages call so is gone, though its connection may not show it.

        Whoever waits here, and every later operation, raises PeerLost of it. Nothing, where a peer's end always shows.
        """

    def swap(self, tensor: Tensor, target: int, into: Tensor, source: int) -> None:
        """`send` to `target` and `receive_` from `source`, both at once where the group can; of one shape and dtype.

        The two may be one rank. Ranks that swap with one another, in pairs, circles or lines (at whose ends one only
        sends, and one only receives), never wait in a circle, also where a `send` waits for its target: here the lower
        of the two ranks sends first.
        """
        check_swap(tensor, target, into, source, self.rank, self.size)
        if self.rank < target:
            self.send(tensor, target)
            self.receive_(into, source)
        else:
            self.receive_(into, source)
            self.send(tensor, target)

    @abstractmethod
    def barrier(self) -> None:
        """Return once all ranks are here."""

    @abstractmethod
    def all_gather_json(self, value: Any) -> list[Any]:
        """Every rank's JSON value (of any length), in rank order."""

    def share(self, tensor: Tensor, owner: int) -> Tensor:
        """`owner`'s memory for `tensor` [n], which is one that `allocate` gave: the same memory on all ranks, without
        locks.

        Same order and arguments on all ranks. Raises Unsupported where ranks have no memory in common.
        """
        raise Unsupported(
            "the workers of this run have no memory in common: run them on one machine, with engine local"
        )

    def open_mailbox(self, longest: int) -> Mailbox:
        """For messages of at most so many bytes that go to all others, who take them when they want to; a collective.

        Raises Unsupported where this group has no way for them.
        """
        raise Unsupported(
            "these workers have no connections for messages at their own pace: use engine local, hosts, or spark"
        )

    def encoded(self, codec: str, n: int, nbytes: int) -> None:  # noqa: B027
        """An [n] has become a payload of so many bytes: for groups that time what codecs compute, or simulate it.

        What a rank does besides, such as adding residuals and decoding its own payload, goes with the encoding.
        """

    def decoded(self, codec: str, n: int, nbytes: int, payloads: int = 1) -> None:  # noqa: B027
        """Payloads of so many bytes together became the mean [n]. Linear codecs decode one payload, the mean's."""

    @abstractmethod
    def close(self) -> None:
        """Give memory, descriptors and sockets back; idempotent."""
