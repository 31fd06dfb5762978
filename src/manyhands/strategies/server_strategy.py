"""What strategies with a server share: start, consensus, and checks of options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from manyhands.errors import BadInput, is_whole
from manyhands.replica.flat_vector import FlatVector
from manyhands.server.base import Pushed
from manyhands.strategies.base import Leasing, State, server_of
from manyhands.worker import Worker

if TYPE_CHECKING:
    from manyhands.replica.replica import Replica


# -- options -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AsyncOptions:
    """The options of a strategy whose workers train at their own pace."""

    bound: int | None = None
    """How many steps the fastest may be ahead; `none`: any. Lower it if staleness hurts; 0 is synchronous."""
    warmup: int = 0
    """Steps of worker 0 alone at the start of the run; raise it when training is unstable at its beginning."""

    def leasing(self) -> Leasing | None:
        """In step at bound 0, else every worker at its own pace."""
        return leasing_of(self.bound, self.warmup)


@dataclass(frozen=True, kw_only=True)
class OverlapOptions:
    """The option of a strategy whose workers may compute while they exchange."""

    overlap: bool = False
    """Compute the next gradient while a push and a pull are under way: a step then takes the longer of both, and
    gradients are a step staler. Turn it on where the summary says that exchange takes long."""


def check_overlap(strategy: str, overlap: object, bound: int | None) -> None:
    """Raise BadInput for an overlap that cannot be."""
    if overlap not in (True, False):
        raise BadInput(f"strategy {strategy}: overlap must be true or false, not {overlap!r}")
    if overlap and bound == 0:
        raise BadInput(
            f"strategy {strategy}: overlap=true lets a worker compute while it exchanges, and bound=0 keeps all in step: give "
            "bound=1 or more, or none, or leave overlap out"
        )


def check_whole(strategy: str, least: int = 1, **options: object) -> None:
    """Raise BadInput, by name, for an option that is no whole number of at least `least`."""
    for name, value in options.items():
        if not is_whole(value, least):
            raise BadInput(
                f"strategy {strategy}: {name} must be a whole number of at least {least}, not {value!r}: give {name}={least} or more"
            )


def check_pace(strategy: str, bound: int | None, warmup: int) -> None:
    """Raise BadInput for a bound or warmup that cannot be, or that cannot be together."""
    if bound is not None and not is_whole(bound, 0):
        raise BadInput(
            f"strategy {strategy}: bound must be a whole number of 0 or more, or none; not {bound!r}: 0 is synchronous, none does not wait"
        )
    check_whole(strategy, 0, warmup=warmup)
    if bound == 0 and warmup:
        raise BadInput(
            f"strategy {strategy}: warmup={warmup} lets worker 0 train alone, and bound=0 keeps all in step: give bound=1 or more, or no warmup"
        )


def leasing_of(bound: int | None, warmup: int) -> Leasing | None:
    """In step at bound 0, else every worker at its own pace."""
    return None if bound == 0 else Leasing(rank0_warmup_ticks=warmup)


# -- the run -----------------------------------------------------------------------------------------------------------


class Outgoing:
    """Of a worker that computes while it exchanges: what its next push is based on, and the memory of the one under way."""

    def __init__(self, replica: Replica) -> None:
        self.update = replica.parameters.zeros_like()
        self.since: Sequence[int] = ()  # the center's versions when the next push's first gradient was computed


@dataclass(kw_only=True)
class OverlapState(State):
    """What a worker remembers of the exchange that goes on while it computes; see `Server.start_exchange`."""

    coming: Tensor | None = None  # [D'] the center, or the answer, once it `has_come`; None: without overlap
    has_come: bool = False  # and was not taken over yet
    outgoing: Outgoing | None = None  # None: without overlap

    def note_center(self, worker: Worker) -> None:
        """The next push begins with the gradient at hand."""
        if self.outgoing is not None:
            self.outgoing.since = server_of(worker).pulled

    @property
    def since(self) -> Sequence[int]:
        """What `note_center` noted; (): without overlap."""
        return () if self.outgoing is None else self.outgoing.since

    def arrive(self, worker: Worker) -> None:
        """Wait for the end of what is under way, if something is."""
        exchanged = None if self.coming is None else server_of(worker).finish_exchange()
        if exchanged is None or self.coming is None:
            return
        answer = None if exchanged.pushed is None else exchanged.pushed.answer
        if answer is not None:
            self.coming.copy_(answer)
        self.has_come = exchanged.pulled or answer is not None

    def follow(self, saved: Self) -> Self:
        """A state of a checkpoint, as this worker goes on from it."""
        saved.outgoing = self.outgoing
        return saved


def overlapping(replica: Replica, overlaps: bool) -> dict[str, Any]:
    """The fields of `OverlapState` at the start."""
    if not overlaps:
        return {}
    return {"coming": replica.parameters.zeros_like().joined().clone(), "outgoing": Outgoing(replica)}


def pull(replica: Replica, worker: Worker) -> None:
    """The center into the replica's parameters."""
    pull_into(replica.parameters, worker)
    replica.rounds += 1


def pull_into(vector: FlatVector, worker: Worker) -> None:
    """The center, straight into `vector` where it has one part; a server's vectors are joined ones."""
    _receive(vector, server_of(worker).pull)


def center(replica: Replica, worker: Worker) -> FlatVector:
    """The center in a vector of its own, the same on all ranks: nobody pushes meanwhile. A collective."""
    worker.mesh.data.barrier()
    vector = read_center(replica, worker)
    worker.mesh.data.barrier()
    return vector


def read_center(replica: Replica, worker: Worker) -> FlatVector:
    """The center as it is, in a vector of its own."""
    vector = replica.parameters.empty_like()
    _receive(vector, server_of(worker).center)
    return vector


def push(
    replica: Replica,
    worker: Worker,
    update: FlatVector,
    weight: float = 1.0,
    bits: int = 0,
    since: Sequence[int] = (),
) -> Pushed:
    """`Server.push` of a vector; `answer_of` gives its answer."""
    return server_of(worker).push(update.joined(), weight, bits, since=since)


def answer_of(pushed: Pushed, replica: Replica) -> FlatVector | None:
    """What the server gave back to a push, shard by shard."""
    if pushed.answer is None or len(replica.shards) == 1:
        return None if pushed.answer is None else FlatVector([pushed.answer])
    answer = replica.parameters.empty_like()
    answer.take_joined_(pushed.answer)
    return answer


def _receive(vector: FlatVector, receive: Callable[[Tensor], None]) -> None:
    joined = vector.joined()
    receive(joined)
    vector.take_joined_(joined)
