"""Another framework's own cluster on an engine's processes: TensorFlow's, torch.distributed's, JAX's programs, unchanged.

Each process binds a free port at the address where the others reach it, and all addresses go round. Then every process
has the variables that the frameworks read, and calls the user's function. What they say to each other is theirs: these
ports are neither encrypted nor authenticated unless the framework does it.

    TF_CONFIG                               TFConfigClusterResolver: the cluster, and this process's place in it
    MASTER_ADDR, MASTER_PORT                torch.distributed's env://, as torchrun sets them: where rank 0 listens
    RANK, WORLD_SIZE, LOCAL_*               of those who train: the chief first, then the workers
    JAX_COORDINATOR_ADDRESS                 jax.distributed.initialize reads it; the two others are for its arguments
    JAX_NUM_PROCESSES, JAX_PROCESS_ID

Sources: https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/TFConfigClusterResolver,
https://docs.pytorch.org/docs/stable/distributed.html#environment-variable-initialization,
https://docs.jax.dev/en/latest/_autosummary/jax.distributed.initialize.html
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from typing_extensions import override

from manyhands.engines.base import Engine, LaunchSpec, Observer, PassingObserver, check_brings
from manyhands.engines.driver.run_monitor import USER
from manyhands.engines.roles import CHIEF, EVALUATOR, TRAINING, WORKER, Roles
from manyhands.errors import BadInput, ManyhandsError, Unsupported
from manyhands.events import Event
from manyhands.transport.address import bound, format_address, parse_address

if TYPE_CHECKING:
    from manyhands.data.row_pieces import RowPiece
    from manyhands.engines.driver.row_collector import RowCollector
    from manyhands.worker import Worker

LOG = logging.getLogger("manyhands")

TENSORBOARD = "tensorboard"  # the type of the event that holds its address
NAMES = (
    "TF_CONFIG",
    *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
)
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST, _SPAN = 10_000, 100


class HandedOut:
    """The rows that a process got by `Cluster.rows`, as far as `Cluster.emit` has not answered them. Pure.

    Batch k of trainer r of N has the number k·N + r: the order in which all trainers together got the rows.
    """

    def __init__(self) -> None:
        self.started = False  # whether any rows were handed out
        self.answered = False  # whether any were answered
        self._open: deque[list[int]] = deque()  # [number, parts so far, rows left], in order
        self._batches = 0
        self._trainers = 1
        self._rank = 0

    def begin(self, rank: int, trainers: int) -> list[tuple[int, int]]:
        """A pass over the rows begins: what is answered from now on is of it. The (number, part) that nobody answers."""
        dropped = [(number, parts) for number, parts, _ in self._open] if self.answered else []
        self._open.clear()
        if not self.answered:
            self._batches = 0  # of a pass that was for training, say
        self.started, self._rank, self._trainers = True, rank, trainers
        return dropped

    def hand(self, rows: int) -> None:
        """The next batch of the pass has so many rows, perhaps none."""
        self._open.append([self._batches * self._trainers + self._rank, 0, rows])
        self._batches += 1

    def answer(self, rows: int) -> list[tuple[int, int, int, bool]]:
        """(number, part, rows, whether it is the last part) of the next rows. BadInput for more than are open."""
        left = sum(rest for _, _, rest in self._open)
        if rows > left:
            raise BadInput(
                f"emit got {rows} rows, and {left} are left of those that cluster.rows gave this process: emit one row for each, in the order in which they came"
            )
        found = []
        while self._open and (rows or not self._open[0][2]):
            first = self._open[0]
            now = min(rows, first[2])
            found.append((first[0], first[1], now, now == first[2]))
            first[1], first[2], rows = first[1] + 1, first[2] - now, rows - now
            if not first[2]:
                self._open.popleft()
        self.answered = True
        return found

    def end(self) -> tuple[int, int, int]:
        """(number, part, trainers): from there on nothing is answered."""
        number, part = self._open[0][:2] if self._open else (self._batches * self._trainers + self._rank, 0)
        return number, part, self._trainers


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The argument of a function of `Engine.run`: its process's position among all."""

    role: str
    index: int  # among those of its role
    addresses: Mapping[str, tuple[str, ...]]  # of all processes, HOST:PORT, by role
    data: Any = field(default=None, repr=False)  # what `Engine.run` was given as rows
    handed_out: HandedOut = field(default_factory=HandedOut, repr=False, compare=False)

    @property
    def address(self) -> str:
        """This process's own, HOST:PORT: nobody listens there before the function does."""
        return self.addresses[self.role][self.index]

    @property
    def is_chief(self) -> bool:
        """Whether this process saves and reports for those who train: the chief, or worker 0 where there is none."""
        return (self.role, self.index) == ((CHIEF if CHIEF in self.addresses else WORKER), 0)

    @property
    def trainers(self) -> tuple[str, ...]:
        """Addresses of those who train, by RANK."""
        return tuple(address for role in TRAINING for address in self.addresses.get(role, ()))

    def rows(
        self, batch_size: int, *, epochs: int = 1, shuffle: bool = True, seed: int = 0, drop_remainder: bool = False
    ) -> Iterator[Any]:
        """This process's batches of `Engine.run`'s rows: numpy arrays [batch_size, …] in the data's own structure.

        All who train together get every row once an epoch, in an order of each epoch's own.

        batch_size: rows of this process. At an epoch's end there are smaller ones, and not as many in every process.
        drop_remainder: only whole batches, equally many in every process, for programs that meet after each batch.

        Raises BadInput where no rows were given, and in a process that does not train.
        """
        import numpy as np

        from manyhands.data.batch import map_columns
        from manyhands.data.feed import Feed
        from manyhands.data.open_source import open_source

        if self.data is None:
            raise BadInput("this cluster was given no rows: run(function, rows=…)")
        if self.role not in TRAINING:
            raise BadInput(
                f"only {', '.join(TRAINING)} can read rows, and this process is {self.role}: read rows in those roles "
                "only"
            )
        rank, size = self.trainers.index(self.address), len(self.trainers)
        whole = batch_size * size
        feed = Feed(open_source(self.data), rank=rank, size=size, batch_size=whole, seed=seed, shuffle=shuffle)
        for number, part in self.handed_out.begin(rank, size):
            self._deliver(None, number=number, part=part, last=True)
        for epoch in range(epochs):
            for one in feed.epoch(epoch):
                given = one.batch is not None and not (drop_remainder and one.global_rows != whole)
                self.handed_out.hand(one.rows if given else 0)
                if given:
                    yield map_columns(one.batch, np.asarray)

    def emit(self, rows: Any) -> None:
        """Give rows back to the caller of `Engine.run`: an array whose first dimension counts rows, or a dict or tuple of
        such; lists of texts too.

        Each row answers one that this process got by `rows`, the first emitted the first that it got, however they are
        batched. The caller has all answers in the order in which all processes together got the rows: with
        `shuffle=False` that is the data's own. What no row answers is left out. A process that got no rows emits what it
        likes, which comes in the order of its arrival.

        Call it in the thread that runs the function. BadInput for more rows than are to be answered.
        """
        from manyhands.data.batch import rows_of, slice_rows

        count = rows_of(rows)
        if not self.handed_out.started:
            self._deliver(rows, number=-1, part=0, last=True)
            return
        done = 0
        for number, part, some, last in self.handed_out.answer(count):
            own = slice_rows(rows, done, done + some) if some else None
            self._deliver(own, number=number, part=part, last=last)
            done += some

    def _deliver(self, rows: Any, *, number: int, part: int, last: bool) -> None:
        """One piece, to the driver. rows=None: an empty one."""
        from manyhands.data.row_batches import pack, to_batch
        from manyhands.data.row_pieces import RowPiece

        batch = None if rows is None else to_batch(rows)
        some, data = (0, b"") if batch is None else (batch.num_rows, pack([batch]))
        worker = _worker()
        piece = RowPiece(rank=worker.rank, number=number, part=part, last=last, rows=some, data=data)
        worker.driver.deliver(piece)

    def _end(self) -> None:
        """The function has returned: this process answers no more."""
        from manyhands.data.row_pieces import RowPiece

        if self.handed_out.started:
            worker = _worker()
            number, part, trainers = self.handed_out.end()
            worker.driver.deliver(RowPiece(rank=worker.rank, number=number, part=part, parts=trainers))


def _worker() -> Worker:
    from manyhands.worker import current

    worker = current()
    if worker is None:
        raise BadInput("emit is for functions of Engine.run: outside of one there is no driver that takes rows")
    return worker


def variables(cluster: Cluster, local_rank: int, local_size: int) -> dict[str, str]:
    """What the frameworks read in this process's environment; local: among those who train on its host."""
    others = {role: list(held) for role, held in cluster.addresses.items() if role != EVALUATOR}
    config = {"cluster": others, "task": {"type": cluster.role, "index": cluster.index}}
    found = {"TF_CONFIG": json.dumps(config)}
    if cluster.role not in TRAINING:
        return found
    first, rank, size = cluster.trainers[0], cluster.trainers.index(cluster.address), len(cluster.trainers)
    host, port = parse_address(first)
    return found | {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "JAX_COORDINATOR_ADDRESS": first,
        "JAX_NUM_PROCESSES": str(size),
        "JAX_PROCESS_ID": str(rank),
    }


def run(engine: Engine, member: Member, spec: LaunchSpec, output: str | Path | None = None) -> dict[str, Any]:
    """{role: values by index}, and "rows" where rows were emitted. What `spec` says of workers and roles gives way to the
    member's; see `Engine.run`."""
    if engine.capabilities.spmd or engine.capabilities.simulated:
        raise Unsupported(
            f"engine {engine.name} starts no processes, and another framework's cluster needs some: use engine local, "
            "hosts or spark"
        )
    from manyhands.data.dataframe_rows import DistributedFrame

    roles = member.roles
    frames = (member.rows,) if isinstance(member.rows, DistributedFrame) else ()
    if frames:
        check_brings(engine)
    from manyhands.engines.driver.row_collector import RowCollector

    found: dict[str, Any] = {role: [] for role in roles.counts}
    with RowCollector(output, holds=False) as collector:
        spec = replace(spec, workers=len(roles.members), roles=roles, device="cpu", frames=frames)
        values = engine.launch(member, replace(spec, observer=Receiving(spec.observer, collector)))
        for (role, _), value in zip(roles.members, values, strict=True):
            found[role].append(value)
        if output is not None or collector.rows:
            collector.finish()
            found["rows"] = collector.values() if output is None else Path(output).expanduser()
    return found


class Receiving(PassingObserver):
    """Another observer, and what takes the rows that are emitted."""

    def __init__(self, observer: Observer, collector: RowCollector) -> None:
        super().__init__(observer)
        self._collector = collector

    @override
    def take_rows(self, piece: RowPiece) -> None:
        self._collector.take_rows(piece)


class Telling(Observer):
    """Tells where TensorBoard is."""

    @override
    def event(self, event: Event) -> None:
        if event.type == TENSORBOARD:
            LOG.warning("TensorBoard: %s", event.values["url"])  # a script's user must see it


@dataclass(frozen=True)
class Member:
    """The program of one process of the cluster."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    roles: Roles
    tensorboard: str | None
    rows: Any = None

    def __call__(self, worker: Worker) -> Any:
        cluster, found = met(worker, self.roles)
        worker.driver.progress(USER, 0)
        with ExitStack() as stack:
            stack.enter_context(_environment(found))
            if self.tensorboard is not None and cluster.is_chief:
                url = stack.enter_context(shown(self.tensorboard, worker.listen))
                worker.emit(TENSORBOARD, url=url)
            cluster = replace(cluster, data=self.rows)
            value = self.function(cluster, *self.args)
            cluster._end()
            return value


def met(worker: Worker, roles: Roles) -> tuple[Cluster, dict[str, str]]:
    """This process's Cluster and variables, once all addresses are known; collective. Ports are free again then."""
    with bound(worker.listen, worker.ports or _quiet_ports()) as sock:
        host, port = sock.getsockname()[:2]
        if worker.address != worker.listen:  # where the others reach this port, which has the same number there
            host = worker.address
        own = [format_address((host, port)), worker.rank - worker.local_rank]
        everyone = worker.group.all_gather_json(own)
    worker.group.barrier()
    addresses: dict[str, tuple[str, ...]] = {}
    for (role, _), (address, _) in zip(roles.members, everyone, strict=True):
        addresses[role] = (*addresses.get(role, ()), address)
    role, index = roles.members[worker.rank]
    cluster = Cluster(role=role, index=index, addresses=addresses)
    hosts = [host for _, host in everyone[: len(cluster.trainers)]]  # each by the first rank that it has
    here = [rank for rank, host in enumerate(hosts) if host == own[1]]
    return cluster, variables(cluster, here.index(worker.rank) if worker.rank in here else 0, len(here))


def _quiet_ports() -> tuple[int, int] | None:
    """A hundred ports, anywhere below those that the system gives to connections and to who asks for any: those would
    be taken in the moment in which nobody holds them. None where there are no such ports."""
    end = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 0
    if end < _LOWEST + _SPAN:
        return None
    first = _LOWEST + secrets.randbelow(end - _LOWEST - _SPAN + 1)
    return first, first + _SPAN - 1


@contextmanager
def _environment(found: Mapping[str, str]) -> Iterator[None]:
    """Within, these variables replace all that `variables` can set: whoever started the driver may have set some."""
    before = {name: os.environ.pop(name) for name in NAMES if name in os.environ}
    os.environ.update(found)
    try:
        yield
    finally:
        for name in NAMES:
            os.environ.pop(name, None)
        os.environ.update(before)


# -- TensorBoard beside the chief, for as long as its function runs ----------------------------------------------------

_START_S = 60.0
_POLL_S = 0.05
_END_S = 5.0
_URL = re.compile(r"TensorBoard \S+ at (http\S+)")


@contextmanager
def shown(logdir: str, host: str) -> Iterator[str]:
    """Within, TensorBoard shows `logdir` at any free port of this address of this host; its URL.

    Whoever reaches the address can look. BadInput where it is not installed; ManyhandsError where it does not start.
    """
    if find_spec("tensorboard") is None:
        raise BadInput("tensorboard= needs the package tensorboard where the chief runs: pip install tensorboard there")
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", logdir, "--port", "0", "--host", host]
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=words)
        try:
            yield _url(process, words)
        finally:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _url(process: subprocess.Popen[bytes], words: IO[bytes]) -> str:
    """Of its output, once it listens."""
    deadline = time.monotonic() + _START_S
    while True:
        ended = process.poll() is not None
        output = os.pread(words.fileno(), 1 << 16, 0).decode(errors="replace")
        if found := _URL.search(output):
            return found[1]
        if ended or time.monotonic() >= deadline:
            how = f"ended with exit code {process.returncode}" if ended else f"did not listen within {_START_S:.0f} s"
            raise ManyhandsError(f"TensorBoard {how}; its output:\n{output.strip() or '(nothing)'}")
        time.sleep(_POLL_S)
