"""What runs in each Spark task of the barrier stage: bring the partition's rows, then give the run the host's workers.

All Spark tasks keep the rows of their partition, or of their part of the files that they read themselves. The first one
of each host is its agent (`manyhands join`'s), whose worker processes share memory and see all of the host's rows. The
others wait, so that their cores stay the run's, until it is over.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.data.dataframe_rows import VARIABLE, WHICH, DistributedFrame
from manyhands.data.readers import shared_files
from manyhands.data.spool import Spool
from manyhands.engines.hosts.join import Join, JoinError, join
from manyhands.engines.hosts.roster import listed, versions
from manyhands.engines.hosts.secret import Secret
from manyhands.engines.local.fork_client import Spawner
from manyhands.errors import BadInput, ManyhandsError

if TYPE_CHECKING:
    import pyarrow as pa

REPORT = "report"
"""The column of a Spark task's report, JSON; its schema."""
SCHEMA = f"{REPORT} string"


@dataclass(frozen=True)
class Stage:
    """What the Spark tasks need of the run. It travels in Spark's own closure, as Spark's own secrets do."""

    address: str  # the driver's, HOST:PORT
    secret: dict[str, str] = field(repr=False)
    tls: bool
    plain_network: bool
    memory_bytes: int  # for each Spark task's rows
    versions: dict[str, str]  # the driver's, which the executors must have
    frames: tuple[DistributedFrame, ...]
    readers: int  # so many of the first Spark tasks bring rows: as many as there are workers that read them
    reach_s: float = 20.0  # in which the driver, which listens already, must be reached

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The function of `mapInArrow`: one row with the reason of a refusal, or with nothing."""
        import pyarrow as pa

        yield pa.RecordBatch.from_pydict({REPORT: [json.dumps(self.run(batches))]})

    def run(self, batches: Iterator[pa.RecordBatch]) -> dict[str, Any]:
        """Give this Spark task's part. {} when the run is over, {"refused": why} where it could not begin.

        Spark may begin the stage again after one of its tasks failed. Once the run has begun nobody can join it any
        more, and the driver cancels the job: nothing is trained twice.
        """
        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        partition = context.partitionId()
        neighbours = Neighbours.of([info.address for info in context.getTaskInfos()])
        with ExitStack() as stack:
            gpu = context.resources().get("gpu")
            gpus = [] if gpu is None else list(gpu.addresses)
            own = {"cpus": context.cpus(), "gpus": gpus, "processes": process_space(), "busy": ""}
            spawner = None
            if partition in neighbours.agents:
                spawner = Spawner()  # it loads torch while the rows come
                stack.callback(spawner.close)
                own["busy"] = stack.enter_context(closing(Busy())).place
            counts = self._counts(context, partition, len(neighbours.hosts))
            memory_bytes = self.memory_bytes // max(1, len(self.frames))
            # the executor's own disk, as Spark has it
            folders = os.environ.get("SPARK_LOCAL_DIRS") or os.environ.get("LOCAL_DIRS") or ""
            disk = next((folder for folder in folders.split(",") if os.access(folder, os.W_OK)), "/tmp")
            spools = [stack.enter_context(closing(Spool(frame.kept, memory_bytes, disk))) for frame in self.frames]
            reports = _gather(context, own | _tried(lambda: self._filled(spools, batches, counts, partition)))
            refused = next((report["refused"] for report in reports if report["refused"]), "")
            if refused := refused or neighbours.apart([report["processes"] for report in reports]):
                return {"refused": refused}
            if spawner is not None:
                self._give(spawner, partition, neighbours, reports)
            else:
                wait_until_over(reports[neighbours.here(partition)[0]]["busy"])
        return {}

    def _counts(self, context: Any, partition: int, tasks: int) -> list[dict[str, Any]]:
        """Every Spark task's share of the files and its rows, which all tasks need; nothing without files."""
        if not any(frame.files for frame in self.frames):
            return []

        def counted() -> dict[str, Any]:
            return {"files": [shared_files.count(frame.files, partition, tasks) for frame in self.frames]}

        return _gather(context, _tried(counted))

    def _filled(
        self, spools: list[Spool], batches: Iterator[pa.RecordBatch], counts: list[dict[str, Any]], partition: int
    ) -> dict[str, Any]:
        """Keep this one's rows; what is held here, for the others."""
        import pyarrow.compute as pc

        check_versions(socket.gethostname(), versions(), self.versions)
        if refused := next((report["refused"] for report in counts if report["refused"]), ""):
            raise BadInput(refused)
        streamed = {i: spool for i, spool in enumerate(spools) if not self.frames[i].files}
        for batch in batches:
            for i, spool in streamed.items():
                spool.add(batch if len(streamed) == 1 else batch.filter(pc.equal(batch.column(WHICH), i)))
        for i, frame in enumerate(self.frames):
            if frame.files and partition < self.readers:
                rows = shared_files.together([report["files"][i] for report in counts])
                for batch in shared_files.read(frame.files, rows, frame.sources, partition, self.readers):
                    spools[i].add(batch)
        return {"parts": [[part.to_json() for part in spool.parts()] for spool in spools]}

    def _give(self, spawner: Spawner, partition: int, neighbours: Neighbours, reports: list[dict[str, Any]]) -> None:
        """Be the host's agent until the run is over. The driver reports how it ended."""
        here = neighbours.here(partition)
        pool = self._pool(partition, neighbours, reports)
        variables = {VARIABLE: f"/proc/{os.getpid()}/fd/{pool}"}
        if gpus := [gpu for i in here for gpu in reports[i]["gpus"]]:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        try:
            offer = Join(
                address=self.address,
                workers=len(here),
                tls=self.tls,
                plain_network=self.plain_network,
                threads=max(1, int(reports[partition]["cpus"])),
                order=partition,
                wait_s=self.reach_s,
                variables=variables,
            )
            join(offer, say=_log, secret=Secret.from_json(self.secret), spawner=spawner)
        except JoinError:
            raise  # the run cannot begin, and only Spark can report that to the driver
        except ManyhandsError as error:
            _log(str(error))  # the driver has raised it, or is gone
        finally:
            os.close(pool)

    def _pool(self, partition: int, neighbours: Neighbours, reports: list[dict[str, Any]]) -> int:
        """A file in memory that says which rows are here, and how many elsewhere; see `open_pool`."""
        hosts = [neighbours.here(agent) for agent in neighbours.agents]
        here = neighbours.here(partition)
        frames = list(enumerate(self.frames))
        pools = {
            "workers": [len(host) for host in hosts],
            "host": hosts.index(here),
            "rows": [
                {frame.key: sum(part["rows"] for i in host for part in reports[i]["parts"][n]) for n, frame in frames}
                for host in hosts
            ],
            "parts": {frame.key: [part for i in here for part in reports[i]["parts"][n]] for n, frame in frames},
        }
        fd = os.memfd_create("manyhands-pool", os.MFD_CLOEXEC)
        with os.fdopen(os.dup(fd), "w") as file:
            json.dump(pools, file)
        return fd


def report_versions(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """A function of `mapInArrow`: one row, [host, versions] as JSON."""
    import pyarrow as pa

    yield pa.RecordBatch.from_pydict({REPORT: [json.dumps([socket.gethostname(), versions()])]})


def check_versions(host: str, found: dict[str, str], wanted: dict[str, str]) -> None:
    """BadInput for an executor that has other versions than the driver."""
    if found != wanted:
        raise BadInput(
            f"the executor on {host} has {listed(found)}, and the driver has {listed(wanted)}: install the same "
            "versions, or set PYSPARK_PYTHON to the right Python"
        )


def _gather(context: Any, value: dict[str, Any]) -> list[dict[str, Any]]:
    """Every Spark task's value, by partition."""
    return [json.loads(text) for text in context.allGather(json.dumps(value))]


def _tried(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the work gives, for the others; or why it cannot be done."""
    try:
        return {"refused": "", **work()}
    except (BadInput, OSError) as error:
        return {"refused": str(error)}


def _log(text: str) -> None:
    print(f"manyhands: {text}", file=sys.stderr, flush=True)  # noqa: T201 - the executor's log


# -- Spark tasks of one host -------------------------------------------------------------------------------------------
# A barrier among Spark tasks lasts a second, as Spark looks once a second whether it is over: so none is used to wait.


@dataclass(frozen=True)
class Neighbours:
    """The hosts of a stage's Spark tasks, by partition. What has memory in common is a host: a machine, or a container
    of YARN's, whose limit of memory is its own."""

    hosts: tuple[str, ...]

    @classmethod
    def of(cls, addresses: Sequence[str]) -> Neighbours:
        """addresses: HOST:PORT of each Spark task's executor, as the barrier context has them."""
        apart = "CONTAINER_ID" in os.environ
        return cls(tuple(address if apart else address.rpartition(":")[0] for address in addresses))

    @property
    def agents(self) -> list[int]:
        """The first partition of every host."""
        return [self.hosts.index(host) for host in dict.fromkeys(self.hosts)]

    def here(self, partition: int) -> list[int]:
        """The partitions on this one's host, in order."""
        return [i for i, host in enumerate(self.hosts) if host == self.hosts[partition]]

    def apart(self, spaces: Sequence[str]) -> str:
        """Why partitions of one host cannot work together, or "": they share an address, and not their processes.

        spaces: of each partition (`process_space`).
        """
        for i, host in enumerate(self.hosts):
            if spaces[i] != spaces[self.hosts.index(host)]:
                return (
                    f"executors share the address {host}, and cannot see each other's processes (they are probably "
                    "containers): give each executor an address of its own"
                )
        return ""


def process_space() -> str:
    """Which machine this is since it started, and which of its processes are seen here."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


class Busy:
    """What an agent holds while its host is at work; its neighbours wait until it lets go, or is dead."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("manyhands-busy", os.MFD_CLOEXEC)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    @property
    def place(self) -> str:
        """Where neighbours find it."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)  # children that have a copy hold it no longer, either
        os.close(self._fd)


def wait_until_over(place: str) -> None:
    """Until whoever holds the `Busy` at that place lets go; Spark ends the Spark task if the run is cancelled."""
    with suppress(FileNotFoundError), open(place) as file:  # its process is gone
        fcntl.flock(file, fcntl.LOCK_SH)
