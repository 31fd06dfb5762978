"""The contract of an engine: it starts workers, gives each its Worker, and brings back what they return."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from typing_extensions import override

from manyhands.engines.driver.host_processes import name_of, shard_of
from manyhands.engines.survive import Survive
from manyhands.errors import BadInput, Unsupported, is_number, is_whole
from manyhands.events import Event

if TYPE_CHECKING:  # all import torch; a command starts the fork server before it does
    from manyhands.data.dataframe_rows import DistributedFrame
    from manyhands.data.row_pieces import RowPiece
    from manyhands.engines.roles import Roles
    from manyhands.server.base import ServerSpec
    from manyhands.worker import Worker

T = TypeVar("T")

MOST_SECONDS = 1_000_000  # poll() takes milliseconds below 2^31
MOST_THREADS = 4_096


class Observer:
    """The driver's ear: the engine calls it, always from the thread that called `launch`.

    The engine learns from it whether to stop; `train()` gives one that records, draws progress and asks callbacks.
    """

    def event(self, event: Event) -> None:
        """A worker emitted this."""

    def own_event(self, event: Event) -> None:
        """Where every rank is its own driver (`spmd`): this process's worker, which is not the first, emitted this.
        The first rank's observer gets it as an `event` at the next `collect`."""

    def answer(self, event: Event) -> dict[str, Any]:
        """A worker asks this and waits for the answer (a small JSON dict)."""
        return {}

    def take_rows(self, piece: RowPiece) -> None:
        """A worker delivered these rows. FrameError where they cannot be read."""

    def must_wait(self, piece: RowPiece) -> bool:
        """Whether the worker that delivered this is to wait with further rows; asked again when others have come."""
        return False

    def stopping(self) -> str:
        """Polled about ten times a second: a reason to ask all workers to stop, or "" """
        return ""


class PassingObserver(Observer):
    """Passes everything on to another observer; whoever is derived from it changes some of that."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer

    @override
    def event(self, event: Event) -> None:
        self.observer.event(event)

    @override
    def own_event(self, event: Event) -> None:
        self.observer.own_event(event)

    @override
    def answer(self, event: Event) -> dict[str, Any]:
        return self.observer.answer(event)

    @override
    def take_rows(self, piece: RowPiece) -> None:
        self.observer.take_rows(piece)

    @override
    def must_wait(self, piece: RowPiece) -> bool:
        return self.observer.must_wait(piece)

    @override
    def stopping(self) -> str:
        return self.observer.stopping()


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """What an engine needs to know of a run."""

    workers: int  # how many
    server: ServerSpec | None = None  # what server the strategy wants
    servers: int = 1  # shards of it
    timeout_s: float = 300.0  # without any progress for so long, a worker counts as hung
    threads_per_worker: int | None = None  # None: usable cores / workers, at least 1
    device: str = (
        "auto"  # auto: one visible GPU a worker, else cpu; own: so, and on engine local a worker sees no other GPU
    )
    observer: Observer = field(default_factory=Observer)
    frames: Sequence[DistributedFrame] = ()  # whose rows the engine is to bring to the workers' hosts
    roles: Roles | None = None  # of the workers, where they are another framework's cluster
    survive: Survive | None = None  # what losses the program goes on after: it must join groups, see `Worker.join`
    replica: int = 1  # how many workers hold a replica together: where members change, whole ones take part
    restarts: bool = False  # whether another launch of the same run may follow where this one fails
    generation: int = 0  # the first one, of a run that was started again
    stages: int = 1  # of neighbouring ranks, that hold one replica together
    fired: Collection[str] = ()  # faults that have happened in earlier launches of this run
    rejoins: bool = True  # whether a worker whose process is started again can take part: not in a training

    def __post_init__(self) -> None:
        check_seconds("timeout_s", self.timeout_s)
        check_threads(self.threads_per_worker)
        if self.server is not None:
            from manyhands.engines.own_rules import list_rule

            list_rule(self.server)

    @property
    def shards(self) -> int:
        """How many shards there are: none without a server, one where its rule cannot be split."""
        if self.server is None:
            return 0
        return 1 if self.server.one_shard else self.servers

    @property
    def copies(self) -> int:
        """Of each shard."""
        return 1 if self.survive is None else self.survive.copies

    @property
    def fixed_members(self) -> bool:
        """Whether the run survives lost shards alone: all workers stay from its beginning to its end."""
        return self.survive is not None and self.survive.copies > 1 and self.survive.max_losses == 0

    @property
    def shard_processes(self) -> int:
        """On how many processes the server's shards and their copies are. Copy c of shard s is number s + c * shards."""
        return self.shards * self.copies

    @property
    def awaited(self) -> frozenset[int]:
        """The ranks whose return ends the run: all, unless roles say otherwise."""
        return frozenset(range(self.workers)) if self.roles is None else self.roles.awaited

    def name_of(self, process_index: int) -> str:
        """How messages call a worker, by its role where it has one, or a shard."""
        if process_index < 0 and self.copies > 1:
            copy, shard = divmod(shard_of(process_index), self.shards)
            return f"server shard {shard} (copy {copy})"
        return name_of(process_index) if self.roles is None or process_index < 0 else self.roles.name_of(process_index)


def check_count(name: str, value: object) -> None:
    """BadInput unless it is a whole number of at least 1."""
    if not is_whole(value):
        raise BadInput(f"{name} must be a whole number of at least 1, not {value!r}")


def check_seconds(name: str, value: float) -> None:
    """BadInput unless it is a time that a wait can last: above 0, and no more than the system's calls take."""
    if not (is_number(value) and 0 < value <= MOST_SECONDS):
        raise BadInput(
            f"{name} must be a positive number of seconds, {MOST_SECONDS:,} (11 days) at most, not {value!r}"
        )


def check_threads(threads: int | None) -> None:
    """BadInput for threads_per_worker that are neither None nor a whole number that a process can start."""
    if threads is not None and not (is_whole(threads) and threads <= MOST_THREADS):
        raise BadInput(
            f"threads_per_worker must be a whole number from 1 to {MOST_THREADS:,}, not {threads!r}; leave it out to "
            "share the usable cores among the workers"
        )


def check_counts(spec: LaunchSpec) -> None:
    """BadInput for a run without workers, or with a server without shards."""
    check_count("workers", spec.workers)
    if spec.server is not None:
        check_count("servers", spec.servers)


def check_brings(engine: Engine) -> None:
    """Unsupported unless the engine brings the rows of a DataFrame to the workers."""
    if not engine.capabilities.brings_frames:
        raise Unsupported(
            f"engine {engine.name} cannot read a Spark DataFrame: give engine='spark', or give the data as files"
        )


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What an engine can do, and how its workers live. Nothing asks for an engine's name."""

    spmd: bool = False  # each worker's process makes the same call of `launch`, and gets its own value
    simulated: bool = False  # all workers live in the caller's process, and their clocks are not real
    one_host: bool = False  # workers are processes of this host: they share its cores, and memory is their link
    serves: bool = False  # it can start a parameter server, and its driver leases rows
    survives: bool = False  # a run goes on when a worker is lost, where its program joins groups (`Worker.join`)
    copies: bool = False  # it keeps a backup of each server shard
    brings_frames: bool = False  # it brings the rows of a DataFrame to the workers' hosts


class Engine(ABC):
    """Where workers run: a frozen dataclass whose fields are its options. It does not know strategies."""

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities] = Capabilities()

    def default_workers(self) -> int:
        """As many as there are where a launcher has decided it; else one per visible GPU, at least 1. Touches no GPU."""
        import torch

        return max(1, torch.cuda.device_count())

    def own_rank(self) -> int:
        """This process's rank, where every worker's process makes the same call; else 0, the driver's."""
        return 0

    def on_one_host(self, workers: int) -> bool:
        """Whether so many workers have memory in common."""
        return True

    def facts(self) -> dict[str, Any]:
        """What a run's `info` is to say of this engine beside its name, as JSON."""
        return {}

    def prestart(self) -> Self:
        """Begin to start what the first launch will need, if there is anything; `close` ends it. For a command."""
        return self

    def close(self) -> None:  # noqa: B027
        """End what `prestart` began. Idempotent."""

    def announce(self, say: Callable[[str], None]) -> None:  # noqa: B027
        """From now on, pass to `say` what a user must read before workers are there, as how to join."""

    def check(self, spec: LaunchSpec) -> None:  # noqa: B027
        """Raise BadInput or Unsupported before anything is written or started, as `launch` would."""

    def finish_run(self) -> None:  # noqa: B027
        """After launches with `spec.restarts`: no other one of that run follows. Ends what was kept for it. Idempotent."""

    @abstractmethod
    def launch(self, program: Callable[[Worker], T], spec: LaunchSpec) -> list[T]:
        """Run `program` on every worker; its values in rank order.

        The first error of any worker is raised here: `BadInput`, `Preempted` and manyhands' other own errors as they
        were, anything else as `WorkerFailed` with that worker's traceback, rank, host, phase and step. After it
        returned or raised, no process, socket or memory of the run is left; with `spec.restarts`, after `finish_run`.
        """

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        workers: int | None = None,
        roles: Mapping[str, int] | None = None,
        until: Collection[str] = ("chief", "worker"),
        tensorboard: str | None = None,
        rows: Any = None,
        output: str | Path | None = None,
        threads_per_worker: int | None = None,
        timeout_s: float = 300.0,
    ) -> dict[str, Any]:
        """Call `function(cluster, *args)` in a process for each worker and role of another framework's own cluster.

        The environment is what TensorFlow, torch.distributed and JAX read; `cluster` says the same, see
        `engines.cluster.Cluster`. Returns {role: values by index}, None for a process that was ended; and where rows were
        emitted (`cluster.emit`), {"rows": all of them, in order}.

        roles: who is there besides the workers: {"chief": 1, "ps": 2, "evaluator": 1}.
        until: when all of these roles have returned, the others (parameter servers run for ever) get a second.
            Where workers are servers too, as under TensorFlow 2's ParameterServerStrategy: ("chief",).
        tensorboard: a folder that TensorBoard shows beside the chief, at an address that the log shows.
        rows: what `cluster.rows(batch_size)` deals to those who train: as Task.train_data, `mh.spark.frame` too.
        output: a file, `.parquet` or `.arrow`, into which emitted rows are written as they come; "rows" is then its path.
        workers=None: one per visible GPU, else 1; one process alone is the caller's.

        Raises as `launch`, a process named by its role ("ps 0"); Unsupported where the engine starts no processes.
        """
        from manyhands.engines.cluster import Member, Telling, run
        from manyhands.engines.roles import Roles

        count = self.default_workers() if workers is None else workers
        cast = Roles(workers=count, others=dict(roles or {}), until=until)
        spec = LaunchSpec(workers=count, threads_per_worker=threads_per_worker, timeout_s=timeout_s, observer=Telling())
        return run(self, Member(function, args, cast, tensorboard, rows), spec, output)
