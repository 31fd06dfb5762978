"""The contract of a strategy: how replicas agree. One algorithm is one file beside this one.

The loop calls, in this order: `start` once; `synchronize` when the group is formed; then for every tick
`before_backward`, the replica's own backward, and `exchange`; `finish` when an epoch's rows are out; `consensus`
whenever the one answer is wanted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import Tensor

from manyhands.comm.group import MeanResult
from manyhands.errors import BadInput, Unsupported
from manyhands.replica.flat_vector import FlatVector
from manyhands.server.base import Server, ServerSpec
from manyhands.worker import Worker

if TYPE_CHECKING:
    from manyhands.replica.replica import Replica


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a strategy needs beyond a replica, and what it can take: `train()` refuses the rest before anything starts.
    Nothing asks for a strategy's name.
    """

    one_worker: bool = False  # it is one worker, and no more

    one_host: bool = False  # all workers on one machine
    one_model: bool = (
        True  # all replicas start equal and there is one answer; False: N models, whose outputs are averaged
    )
    mean_gradient: bool = (
        False  # every step applies the group's mean gradient: `prepare` then averages right after backward
    )
    kernel: bool = False  # it cuts the tables of a kernel, and trains nothing else
    gradients: bool = False  # gradients are exchanged: a step that moves parameters without any is refused
    before_gradient: bool = False  # it acts before each gradient is computed: `before_backward`
    mailbox: bool = False  # workers post to one another at their own pace, in an order that a run records
    elementwise: bool = True  # element i of an update depends on elements i, and on what `Replica.norm` and `dot` give


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What the advice on a run says about a strategy in general: docs/advice.md has the measurements."""

    period: str = ""  # the options that set the steps between exchanges
    exact: bool = False  # N workers compute what one does
    drops: bool = False  # gradients that come too late have no effect
    lock_free: bool = False  # workers write to one memory at once: how rarely they meet there is worth knowing
    adds: bool = False  # windows of several workers add up, and longer ones make the steps larger
    outer_steps: bool = False  # the answer takes steps of its own, along the replicas' means
    follows: bool = False  # the answer follows replicas that are meant to differ from it
    exchanges_next: bool = False  # a whole period's exchange comes with the step after it, not with its last
    behind: tuple[str, str] | None = None  # short runs are: why, and what helps
    behind_at_once: bool = False  # also where every step is exchanged


@dataclass(frozen=True, kw_only=True)
class Leasing:
    """Asynchronous workers: rows are leased slice by slice, and workers meet only at the ends of epochs."""

    rank0_warmup_ticks: int = 0  # worker 0 trains alone for the first so many ticks of the run, then the others start


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What an exchange did on this worker."""

    applied: bool  # the replica made a step
    rows_left: bool = True  # somebody still has rows, as far as this worker can know; True between rounds
    dropped: bool = False  # this worker's own gradient did not enter in this tick, whatever was applied

    @property
    def used(self) -> bool:
        """Whether this worker's rows moved anything in this tick; if not, they count as unused."""
        return self.applied and not self.dropped


@dataclass(frozen=True, kw_only=True)
class Change:
    """Why the group was formed anew; see `Strategy.synchronize`."""

    generation: int = 0  # of the group
    first: bool = True  # nobody has trained yet; else all replicas and states are as the furthest member's already


@dataclass(kw_only=True)
class State:
    """What a strategy remembers between ticks: flat vectors, tensors, numbers. Checkpointed per rank, by field name."""

    own: ClassVar[tuple[str, ...]] = ()  # fields of which each rank's is another, also where all replicas are equal

    def merge(self, others: list[Self], rank: int, size: int) -> Self:
        """This rank's state when a checkpoint of len(others) ranks is resumed with `size` ranks. Default: rank 0's."""
        return others[rank] if len(others) == size else others[0]

    def taken_over(self) -> Self:
        """This state of another worker, as one goes on with it that joins the run, or was behind. Default: as it is."""
        return self

    def left_out(self) -> float | None:
        """The norm of what this worker alone has yet to send, and takes with it when it is lost. None: nothing."""
        return None

    def share_anew(self, before: int, size: int) -> None:
        """The mean of so many ranks becomes that of so many others: what this one has yet to send is to weigh as much."""

    def drain_journal(self) -> dict[str, Any]:
        """What happened since the last call in an order that nothing else decides: goes into the step's event, for replay."""
        return {}

    def weight_of_window(self) -> float:
        """This rank's share of the mean parameters with which a checkpoint is resumed on another number of ranks.

        Strategies whose replicas differ between rounds return what the loss counted since the last round. Where it is
        0 on all ranks, each counts the same.
        """
        return 1.0

    def tensors(self) -> dict[str, Tensor | FlatVector]:
        held = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in held.items() if isinstance(value, Tensor | FlatVector)}

    def numbers(self) -> dict[str, Any]:
        return {f.name: v for f in fields(self) if isinstance(v := getattr(self, f.name), int | float | str | bool)}


class Strategy(ABC):
    """How replicas agree. Subclasses are frozen dataclasses: their fields are the options a spec string can set."""

    name: ClassVar[str] = ""  # default: the class's name in lower case
    source: ClassVar[str] = ""  # title, authors, year
    summary: ClassVar[str] = ""  # what is exchanged, in a line
    consistency: ClassVar[str] = ""  # synchronous | periodic | async | bounded | elastic | …
    needs: ClassVar[Needs] = Needs()
    traits: ClassVar[Traits] = Traits()

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if not cls.name:
            cls.name = cls.__name__.lower()
        if cls.before_backward is not Strategy.before_backward and not cls.needs.before_gradient:
            raise BadInput(
                f"{cls.__name__} overrides before_backward, of which mh.prepare must know: "
                "write needs = Needs(before_gradient=True) in the class"
            )

    def server(self) -> ServerSpec | None:
        """The server this strategy needs, or None."""
        return None

    def check_workers(self, workers: int) -> None:  # noqa: B027
        """BadInput or Unsupported for a number of workers with which it cannot train. Asked before anything starts."""

    def leasing(self) -> Leasing | None:
        """None: all workers make the same ticks. Else `exchange` may neither wait for others nor call the group."""
        return None

    def fixed_members(self) -> str:
        """Why no worker may be lost, leave or join while this trains; "" where they may."""
        return self.fixed_shards()

    def fixed_shards(self) -> str:
        """Why no server shard may be lost while this trains; "" where they may."""
        return "with overlap=true nobody knows what of an exchange under way the server has" if self.overlaps() else ""

    def overlaps(self) -> bool:
        """Whether a worker computes its next gradient while it exchanges with the server."""
        return False

    def fixed_places(self) -> str:
        """Why no more workers may take part than at the start; "" where they may."""
        return ""

    def whole_replicas(self) -> str:
        """Why each worker must hold a whole replica; "" where this acts on parts of a model as on the whole."""
        if self.needs.one_host:
            return "all workers write to one copy of the parameters"
        if self.needs.mailbox:
            return "one threshold decides which numbers of the whole model are posted"
        if (server := self.server()) is not None and server.one_shard:
            return "its server counts pushes of whole models: use one that does not (downpour, dynsgd, agn, easgd)"
        return "" if self.needs.elementwise else "what it does with a number depends on others"

    def blocks_of(self, workers: int) -> int:
        """Into how many blocks it cuts each table of a kernel, of which each worker holds its part; 0: each holds them whole."""
        return 0

    def exchanges_gradients(self) -> str:
        """What it does with gradients, so that a step without any is refused; "" where parameters or updates are exchanged."""
        return "averages gradients" if self.needs.gradients else ""

    def compresses(self) -> bool:
        """Whether less is sent than there is."""
        return False

    def rate_factor(self, workers: int) -> float:
        """How far one global batch moves the answer, in steps of the rate: 1 if workers average, N if they add."""
        return 1.0

    @abstractmethod
    def start(self, replica: Replica, worker: Worker) -> State:
        """What this worker remembers at first; called once, also before loading a checkpoint. No communication.

        Memory that the group works on (`replica.zeros`) is taken here, in the same order on all ranks.
        """

    def synchronize(self, replica: Replica, worker: Worker, state: Any, change: Change) -> None:
        """Agree: called after `start`, and after each further forming of the group. A collective.

        Default, at first: where there is one model, all take rank 0's parameters and buffers; where there is a server,
        its first center is rank 0's parameters. Later: nothing.
        """
        if not change.first:
            return
        server = None if self.server() is None else server_of(worker)
        if self.needs.one_model:
            replica.broadcast_from_rank0(worker.mesh.data)
        if server is not None:
            if worker.mesh.data.rank == 0:
                server.initialize(replica.parameters.joined())
            worker.mesh.data.barrier()

    def before_backward(self, replica: Replica, worker: Worker, state: Any) -> None:  # noqa: B027
        """Prepare the gradient: move to a look-ahead point, begin to overlap. Most strategies do nothing here."""

    def mean_gradients(self, replica: Replica, worker: Worker, state: Any) -> MeanResult:
        """Where `needs.mean_gradient`: make one gradient of the group's, right after a backward of a user's own loop."""
        return replica.mean_gradients(worker.mesh.data)

    @property
    def averages_exactly(self) -> bool:
        """Whether that is the weighted mean itself, so that a mean of before and what a backward adds may go in together."""
        return True

    @abstractmethod
    def exchange(self, replica: Replica, worker: Worker, state: Any) -> StepResult:
        """The gradient is computed: exchange, and call `replica.apply()` at most once, where the paper does."""

    def pushes_until_next(self, replica: Replica, state: Any) -> int:
        """Workers at their own pace: the how manieth push from now on will carry what the next slice moves."""
        return 1

    @property
    def push_has_step(self) -> bool:
        """All in step at a server: whether a tick's push has what that tick's gradient moves, or what was before it."""
        return not self.traits.exchanges_next

    def extras_of(self, pushes: int, dealt: int) -> int:
        """All in step at a server: how many of so many slices of lost workers, dealt to this one, the server has after so many
        pushes since then. Default: they go with one push."""
        return dealt if pushes else 0

    def step_alone(self, replica: Replica, worker: Worker, state: Any, *, extra: bool = False) -> bool:
        """The gradient is computed: step within the open round, without communication. Whether a step was made.

        For strategies whose replicas differ between rounds. extra: the rows were a lost worker's, see `Replica.apply`.
        """
        return replica.apply(extra=extra)

    def step_extra(self, replica: Replica, worker: Worker, state: Any, ago: int) -> bool:
        """`step_alone` on the rows of a lost worker, of its step so many before the newest."""
        return self.step_alone(replica, worker, state, extra=True)

    def open_steps(self, state: Any) -> int:
        """How many of the newest steps are not in a round yet, or not in that of each parameter. Asked after rounds."""
        return 0

    def steps_since_round(self, state: Any) -> int:
        """How many of the newest steps are in no round, or in no push, yet. Asked between steps, where a worker goes on."""
        return 0

    def forget_step(self, replica: Replica, worker: Worker, state: Any) -> None:  # noqa: B027
        """A worker was lost before this tick's step was made: everything as before `before_backward`. No communication."""

    def forget_exchange(self, replica: Replica, worker: Worker, state: Any) -> None:  # noqa: B027
        """Members were lost: what was on its way between them is gone, and the open windows go on with it. No
        communication. Called on all members of the next generation, before they close the open round."""

    def settle(self, replica: Replica, worker: Worker, state: Any) -> None:  # noqa: B027
        """A checkpoint is due, between two ticks: what is under way is to be over, and in replica or state. A collective."""

    def finish(self, replica: Replica, worker: Worker, state: Any) -> None:  # noqa: B027
        """An epoch's rows are out: complete the open round. Idempotent; an empty window changes nothing."""

    def agreed(self, replica: Replica, state: Any) -> FlatVector | None:
        """What all replicas hold alike between this tick and the next; None: nothing is promised now.

        A run compares it at checkpoints, and raises where replicas have drifted apart. All ranks answer None, or none
        does.
        """
        return replica.parameters if self.needs.mean_gradient else None

    def consensus(self, replica: Replica, worker: Worker, state: Any) -> FlatVector:
        """The one answer, shard by shard, the same on every rank: what is validated, kept as best and returned."""
        return replica.parameters


def server_of(worker: Worker) -> Server:
    """The worker's server; Unsupported where its engine gave it none."""
    if worker.server is None:
        raise Unsupported(
            "this strategy needs a parameter server, and this worker has none: run it with mh.train on engine local or hosts"
        )
    return worker.server
