"""What strategies with a server share: start, consensus, and checks of options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from manyhands.errors import BadInput, is_whole
from manyhands.replica.flat_vector import FlatVector
from manyhands.server.base import Pushed
from manyhands.strategies.base import Leasing, server_of
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


def push(replica: Replica, worker: Worker, update: FlatVector, weight: float = 1.0, bits: int = 0) -> Pushed:
    """`Server.push` of a vector; `answer_of` gives its answer."""
    return server_of(worker).push(update.joined(), weight, bits)


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
