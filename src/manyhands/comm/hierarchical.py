"""The group of workers on several hosts: shared memory inside each, a ring between their first workers, the leaders.

An operation has three phases: on each host, between the leaders, on each host again. What goes wrong between the
leaders is passed on within each host in the third, and the other way round, so that all name the same cause.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from manyhands.comm.background import Background
from manyhands.comm.checks import (
    FirstError,
    check_mean,
    check_peer,
    check_rank,
    check_sum,
    check_swap,
    closed,
    json_bytes,
    slice_of,
)
from manyhands.comm.group import Group, Ledger, MeanResult, Work
from manyhands.comm.mailbox import Mailbox
from manyhands.comm.ring.group import RingGroup
from manyhands.errors import BadInput, ManyhandsError, PeerLost, Unsupported

_CLOSING_S = 5.0

T = TypeVar("T")


class HierarchicalGroup(FirstError, Group):
    """Workers on several hosts; one thread of a process may use it at a time.

    layout: the ranks of each host, in order: ((0, 1), (2, 3, 4)). local: this host's group, in that order. across: the
    leaders' ring, on each host's first rank only, whose `names` are the leaders' ranks. direct: a group of all ranks
    for `send` and `receive_` between hosts; without it they raise Unsupported. All three are this group's own from now
    on.
    hosts: names by host, for messages. names: the ranks by which messages call the members, where the group is a part
    of a run; those of `local` are its own.

    A mean is taken on each host, weighted by its workers, then between hosts, weighted by their totals; so each share
    is (weight/total of its host)·(total of its host/total), which differs from weight/total by rounding. The leader's
    result is spread in a mean of its own, in which only the leader has weight: x·1 = x. 16-bit numbers are rounded once
    on the host, and once between hosts.

    Means that were started go on in a thread of the group's while the caller computes, in the order of their start.

    Ledger: what goes from rank to rank along the tree, each element counted where it comes from: a mean or sum moves
    2·(size-1)·n over all ranks, of which 2·(hosts-1)·n between hosts (`across.ledger` has those alone). What shared
    memory reads and writes beyond that does not travel.

    waited_s: until all workers of this host had come, and, on its leader, the other leaders; not of means under way.
    """

    def __init__(
        self,
        rank: int,
        layout: Sequence[Sequence[int]],
        local: Group,
        across: RingGroup | None,
        *,
        direct: RingGroup | None = None,
        hosts: Sequence[str] = (),
        names: Sequence[int] = (),
    ) -> None:
        self._layout = [list(ranks) for ranks in layout]
        self.size = sum(map(len, self._layout))
        if [rank for ranks in self._layout for rank in ranks] != list(range(self.size)) or not all(self._layout):
            raise BadInput(f"a layout has each rank once, in order, and no empty host; got {layout}")
        check_rank(rank, self.size, "rank")
        self.rank, self.ledger = rank, Ledger()
        self._host = self._host_of(rank)
        mine = self._layout[self._host]
        if (local.rank, local.size) != (mine.index(rank), len(mine)) or (across is not None) != (local.rank == 0):
            raise BadInput(
                f"rank {rank} of layout {layout} is {mine.index(rank)} of {len(mine)} on its host, and the first of each "
                f"has `across`; got local rank {local.rank} of {local.size}, across {across}"
            )
        self.local, self.across, self._direct = local, across, direct
        self._hosts = list(hosts) or [f"host {number}" for number in range(len(self._layout))]
        self._names = list(names) or list(range(self.size))
        self._background = Background("manyhands-hierarchical")
        self._home = threading.get_ident()

    # -- the contract ------------------------------------------------------------------------------------------------

    @override
    def allocate(self, n: int, dtype: torch.dtype) -> Tensor:
        self._begin()
        return self.local.allocate(n, dtype)

    @override
    def start_mean_(self, tensor: Tensor, weight: float = 1.0, bits: int = 0, lost: Tensor | None = None) -> Work:
        check_mean(tensor, weight, bits, lost)
        self.check()
        return self._background.start(lambda: self._mean(tensor, float(weight), bits, lost))

    @override
    def mean_(self, tensor: Tensor, weight: float = 1.0, bits: int = 0, lost: Tensor | None = None) -> MeanResult:
        """As the contract says; in the caller's thread."""
        check_mean(tensor, weight, bits, lost)
        self._begin()
        return self._mean(tensor, float(weight), bits, lost)

    @override
    def all_reduce_(self, tensor: Tensor) -> None:
        check_sum(tensor)
        self._begin()
        self._sum(tensor, "all_reduce_")

    @override
    def all_gather(self, tensor: Tensor) -> Tensor:
        self._begin()
        rows = self._here(lambda: self.local.all_gather(tensor))
        result = rows.new_empty((self.size, *tensor.shape))
        first, last = self._layout[self._host][0], self._layout[self._host][-1] + 1
        result[first:last] = rows
        with_own = self._sent()
        parts = [result[ranks[0] : ranks[-1] + 1] for ranks in self._layout]
        self._between(lambda across: [across.broadcast_(part, host) for host, part in enumerate(parts)])
        for part in (result[:first], result[last:]):
            if len(part):
                self._here(lambda part=part: self.local.broadcast_(part, 0))  # type: ignore[misc]
        others = self.local.size - 1
        spread = others * (self.size - self.local.size) if self.across else 0
        self._count("all_gather", (others + spread) * tensor.nbytes, with_own)
        return result

    @override
    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """As the contract says; the whole sum is made on the way."""
        check_sum(tensor)
        self._begin()
        low, high = slice_of(self.rank, self.size, tensor.numel())
        whole = tensor.detach().reshape(-1).clone()
        self._sum(whole, "reduce_scatter")
        return whole[low:high].clone()

    @override
    def broadcast_(self, tensor: Tensor, source: int) -> None:
        check_rank(source, self.size, "source")
        self._begin()
        there, before = self._host_of(source), self._sent()
        first = self._layout[there].index(source) if self._host == there else 0
        if self._host == there:
            self._here(lambda: self.local.broadcast_(tensor, first))
        self._between(lambda across: across.broadcast_(tensor, there))
        if self._host != there:
            self._here(lambda: self.local.broadcast_(tensor, 0))
        if self.local.rank == first:
            self._count("broadcast_", (self.local.size - 1) * tensor.nbytes, before)
        elif self.across is not None:
            self._count("broadcast_", 0, before)

    @override
    def send(self, tensor: Tensor, target: int) -> None:
        check_peer(target, self.rank, self.size, "target")
        self._begin()
        group, peer = self._way_to(target)
        self._phase(group, lambda: group.send(tensor, peer))
        self.ledger.add("send", tensor.nbytes)

    @override
    def receive_(self, tensor: Tensor, source: int) -> None:
        check_peer(source, self.rank, self.size, "source")
        self._begin()
        group, peer = self._way_to(source)
        self._phase(group, lambda: group.receive_(tensor, peer))

    @override
    def swap(self, tensor: Tensor, target: int, into: Tensor, source: int) -> None:
        """As the contract says; both at once between hosts."""
        direct, host = self._direct, self._layout[self._host]
        if direct is None or target in host or source in host:
            super().swap(tensor, target, into, source)
            return
        check_swap(tensor, target, into, source, self.rank, self.size)
        self._begin()
        self._phase(direct, lambda: direct.swap(tensor, target, into, source))
        self.ledger.add("send", tensor.nbytes)

    @override
    def barrier(self) -> None:
        self._begin()
        self._here(self.local.barrier)
        self._between(lambda across: across.barrier())

    @override
    def all_gather_json(self, value: Any) -> list[Any]:
        text = json_bytes(value).decode()
        self._begin()
        texts = self._here(lambda: self.local.all_gather_json(text))
        gathered: list[list[str]] = []
        self._between(lambda across: gathered.extend(across.all_gather_json(texts)))
        everything = self._here(lambda: self.local.all_gather_json(gathered))[0]
        return [json.loads(text) for texts in everything for text in texts]

    @override
    def share(self, tensor: Tensor, owner: int) -> Tensor:
        """As the contract says, where there is one host."""
        if len(self._layout) > 1:
            return super().share(tensor, owner)
        self._begin()
        return self.local.share(tensor, owner)

    @override
    def lose(self, name: int, host: str) -> None:
        """As the contract says: leaders tell the workers of their hosts."""
        for group in (self.across, self._direct):
            if group is not None:
                group.lose(name, host)

    @override
    def open_mailbox(self, longest: int) -> Mailbox:
        self._begin()
        return super().open_mailbox(longest) if self._direct is None else self._direct.open_mailbox_of(self, longest)

    @override
    def close(self) -> None:
        """As the contract. A mean that does not end within seconds keeps its sockets until the process ends."""
        self._error = self._error or closed()
        if self._background.close(_CLOSING_S):
            for group in (self.across, self._direct, self.local):
                if group is not None:
                    group.close()

    # -- how ---------------------------------------------------------------------------------------------------------

    def _mean(self, tensor: Tensor, weight: float, bits: int, lost: Tensor | None) -> MeanResult:
        self.check()
        before = self._sent()
        host = self._here(lambda: self.local.mean_(tensor, weight, bits, lost), count_waiting=True)
        lost_across = None if lost is None or self.across is None else torch.zeros_like(lost)
        total, failed = self._across(
            lambda across: across.mean_(tensor, host.weight, host.bits, lost_across), MeanResult(0.0, 0)
        )
        flag = 0 if failed is None else 1
        spread = self._here(lambda: self.local.mean_(tensor, total.weight, total.bits << 1 | flag))
        if spread.bits & 1:
            self._tell(failed)
        if lost is not None and spread.weight:
            lost.mul_(host.weight / spread.weight)  # of the host's mean, which counts so much
            if lost_across is not None:
                lost.add_(lost_across)
        self._count("mean_", self._up_and_down() * tensor.nbytes, before)
        return MeanResult(spread.weight, spread.bits >> 1)

    def _sum(self, tensor: Tensor, operation: str) -> None:
        before = self._sent()
        self._here(lambda: self.local.all_reduce_(tensor), count_waiting=True)
        self._between(lambda across: across.all_reduce_(tensor))
        self._here(lambda: self.local.broadcast_(tensor, 0))
        self._count(operation, self._up_and_down() * tensor.nbytes, before)

    def _up_and_down(self) -> int:
        """How often this rank sends a tensor on its host: to the leader, or from it to all."""
        return 1 if self.across is None else self.local.size - 1

    def _way_to(self, peer: int) -> tuple[Group, int]:
        host = self._layout[self._host]
        if peer in host:
            return self.local, host.index(peer)
        if self._direct is None:
            raise Unsupported(
                f"worker {self.rank} and worker {peer} are on different hosts, and this group was made without a way "
                "from worker to worker between hosts: give it direct=RingGroup(…) of all ranks"
            )
        return self._direct, peer

    def _host_of(self, rank: int) -> int:
        return next(host for host, ranks in enumerate(self._layout) if rank in ranks)

    # -- the phases --------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._background.drain()
        self.check()

    def _phase(self, group: Group, action: Callable[[], T]) -> T:
        """A part of an operation in one of the groups; after its error this group is unusable."""
        group.step, group.line = self.step, self.line
        try:
            return action()
        except BadInput:
            raise
        except ManyhandsError as error:
            raise self.fail(self._named(error) if group is self.local else error) from error

    def _here(self, action: Callable[[], T], count_waiting: bool = False) -> T:
        waited = self.local.waited_s
        value = self._phase(self.local, action)
        if count_waiting and self._at_home():
            self.waited_s += self.local.waited_s - waited
        return value

    def _across(self, action: Callable[[RingGroup], T], other: T) -> tuple[T, ManyhandsError | None]:
        """A phase among the leaders: its value, `other` where there is none, and the error, for `_tell`."""
        if self.across is None:
            return other, None
        self.across.step, waited = self.step, self.across.waited_s
        try:
            return action(self.across), None
        except ManyhandsError as error:
            return other, error
        finally:
            if self._at_home():
                self.waited_s += self.across.waited_s - waited

    def _at_home(self) -> bool:
        """Whether the caller waits itself: not in the thread of the means under way."""
        return threading.get_ident() == self._home

    def _between(self, action: Callable[[RingGroup], object]) -> None:
        """A phase among the leaders, after which all workers of the host know whether it went well."""
        _, lost = self._across(action, None)
        self._tell(lost)

    def _tell(self, lost: ManyhandsError | None) -> None:
        """The leader's error, if it has one, is raised on all workers of the host."""
        notice: dict[str, Any] | None = None
        if isinstance(lost, PeerLost):
            notice = {"lost": [lost.rank, lost.host, lost.operation], "seconds": lost.seconds, "why": lost.why}
        elif lost is not None:
            notice = {"text": str(lost)}
        fields = self._here(lambda: self.local.all_gather_json(notice))[0]
        if lost is not None:
            raise self.fail(lost)
        if fields is None:
            return
        if "text" in fields:
            raise self.fail(ManyhandsError(fields["text"]))
        rank, host, operation = fields["lost"]
        raise self.fail(PeerLost(rank, host, operation, self.step, fields["seconds"], fields["why"]))

    @override
    def _failed(self, error: ManyhandsError) -> None:
        """The other leaders learn why this group is unusable from now on."""
        for group in (self.across, self._direct):
            if group is not None:
                group.abandon(error)

    def _named(self, error: ManyhandsError) -> ManyhandsError:
        """The local group's error, with the worker's name in this one."""
        ranks = self._layout[self._host]
        if not isinstance(error, PeerLost) or not 0 <= error.rank < len(ranks):
            return error
        host = self._hosts[self._host]
        return PeerLost(self._names[ranks[error.rank]], host, error.operation, error.step, error.seconds, error.why)

    # -- what was sent -----------------------------------------------------------------------------------------------

    def _sent(self) -> tuple[int, int]:
        """(bytes, messages) that this rank sent between hosts so far."""
        if self.across is None:
            return 0, 0
        counts = self.across.ledger.as_dict().values()
        return sum(count["bytes"] for count in counts), sum(count["messages"] for count in counts)

    def _count(self, operation: str, nbytes: int, before: tuple[int, int]) -> None:
        if self.size > 1:
            sent, messages = self._sent()
            self.ledger.add(operation, nbytes + sent - before[0], (1 if nbytes else 0) + messages - before[1])
