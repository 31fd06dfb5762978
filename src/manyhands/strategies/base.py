"""The contract of a strategy: how replicas agree. One algorithm is one file beside this one.

The loop calls, in this order: `start` once; then for every tick `before_backward`, the replica's own backward, and
`exchange`; `finish` when an epoch's rows are out; `consensus` whenever the one answer is wanted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import Tensor

from manyhands.server.base import ServerSpec
from manyhands.worker import Worker

if TYPE_CHECKING:
    from manyhands.replica.replica import Replica


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a strategy needs beyond a replica; `train()` refuses engines that cannot give it before anything starts."""

    one_host: bool = False  # all workers on one machine
    one_model: bool = (
        True  # all replicas start equal and there is one answer; False: N models, whose outputs are averaged
    )
    mean_gradient: bool = (
        False  # every step applies the group's mean gradient: `prepare` then averages right after backward
    )


@dataclass(frozen=True, kw_only=True)
class Leasing:
    """Asynchronous workers: rows are leased slice by slice, and workers meet only at the ends of epochs."""

    rank0_warmup_ticks: int = 0  # worker 0 trains alone for the first so many ticks of the run, then the others start


@dataclass(kw_only=True)
class State:
    """What a strategy remembers between ticks: tensors [D'], numbers. Checkpointed per rank, by field name."""

    def merge(self, others: list[Self], rank: int, size: int) -> Self:
        """This rank's state when a checkpoint of len(others) ranks is resumed with `size` ranks. Default: rank 0's."""
        return others[rank] if len(others) == size else others[0]

    def weight_of_window(self) -> float:
        """This rank's share of the mean parameters with which a checkpoint is resumed on another number of ranks.

        Strategies whose replicas differ between rounds return what the loss counted since the last round. Where it is
        0 on all ranks, each counts the same.
        """
        return 1.0

    def tensors(self) -> dict[str, Tensor]:
        return {f.name: v for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)}

    def numbers(self) -> dict[str, Any]:
        return {f.name: v for f in fields(self) if isinstance(v := getattr(self, f.name), int | float | str | bool)}


class Strategy(ABC):
    """How replicas agree. Subclasses are frozen dataclasses: their fields are the options a spec string can set."""

    name: ClassVar[str] = ""  # default: the class's name in lower case
    source: ClassVar[str] = ""  # title, authors, year
    summary: ClassVar[str] = ""  # what is exchanged, in a line
    consistency: ClassVar[str] = ""  # synchronous | periodic | async | bounded | elastic | …
    needs: ClassVar[Needs] = Needs()

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if not cls.name:
            cls.name = cls.__name__.lower()

    def server(self) -> ServerSpec | None:
        """The server this strategy needs, or None."""
        return None

    def leasing(self) -> Leasing | None:
        """None: all workers make the same ticks. Else `exchange` may neither wait for others nor call the group."""
        return None

    def rate_factor(self, workers: int) -> float:
        """How far one global batch moves the answer, in steps of the rate: 1 if workers average, N if they add."""
        return 1.0

    @abstractmethod
    def start(self, replica: Replica, worker: Worker) -> State:
        """Agree on the initial parameters; called once, before the first step, also before loading a checkpoint."""

    def before_backward(self, replica: Replica, worker: Worker, state: Any) -> None:  # noqa: B027
        """Prepare the gradient: move to a look-ahead point, begin to overlap. Most strategies do nothing here."""

    @abstractmethod
    def exchange(self, replica: Replica, worker: Worker, state: Any) -> bool:
        """The gradient is computed: exchange, and call `replica.apply()` at most once, where the paper does.

        Returns whether anybody still has rows, as far as this worker can know; True between rounds.
        """

    def finish(self, replica: Replica, worker: Worker, state: Any) -> None:  # noqa: B027
        """An epoch's rows are out: complete the open round. Idempotent; an empty window changes nothing."""

    def agreed(self, replica: Replica, state: Any) -> Tensor | None:
        """[D'] what all replicas hold alike between this tick and the next; None: nothing is promised now.

        A run compares it at checkpoints, and raises where replicas have drifted apart. All ranks answer None, or none
        does.
        """
        return replica.parameters if self.needs.mean_gradient else None

    def consensus(self, replica: Replica, worker: Worker, state: Any) -> Tensor:
        """The one answer [D'], the same on every rank: what is validated, kept as best and returned."""
        return replica.parameters
