"""Engine `spark`: the workers are in the executors of a Spark cluster, one a Spark task of one barrier stage."""

from __future__ import annotations

import contextlib
import logging
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeVar

from typing_extensions import override

from manyhands.engines.base import Capabilities, Engine, LaunchSpec, check_counts, check_seconds
from manyhands.engines.driver.host_processes import process_indices_of
from manyhands.engines.hosts.join_listener import JoinedHosts, JoinListener, Listening
from manyhands.engines.hosts.message_channel import SILENCE_S
from manyhands.engines.hosts.roster import Roster, versions
from manyhands.engines.hosts.secret import Secret
from manyhands.errors import BadInput, Unsupported, is_whole
from manyhands.transport.address import format_address
from manyhands.transport.listener import Listener

if TYPE_CHECKING:
    from manyhands.engines.spark.stage import Stage
    from manyhands.worker import Worker

T = TypeVar("T")

LOG = logging.getLogger("manyhands")


@dataclass(frozen=True, kw_only=True)
class Spark(Engine):
    """Workers in the executors of a Spark cluster.

    Workers of one host share memory, hosts form a ring. Shards of a server are in the first host. What workers return
    travels as JSON and tensors. The executors need the driver's versions of Python, torch and manyhands.
    """

    name: ClassVar[str] = "spark"
    capabilities: ClassVar[Capabilities] = Capabilities(serves=True, brings_frames=True)
    master: str = ""
    """As Spark has it (spark://host:7077, local-cluster[2,1,1024], local[4], yarn, k8s://…); without it, the active
    session's, else spark-submit's."""
    listen: str = ""
    """An address of this host that the executors reach; without it, spark.driver.host."""
    tls: bool = True
    """As of engine hosts: off only on loopback, unless plain_network says otherwise."""
    plain_network: bool = False
    """With tls off, also on addresses other than loopback."""
    memory_mb: int = 512
    """Rows of a DataFrame that each worker's Spark task keeps in memory, in MB; the others lie on the executor's disk."""
    wait_s: float = 3600.0
    """Seconds to wait until the Spark tasks have begun and have read the rows."""

    def __post_init__(self) -> None:
        check_seconds("wait_s", self.wait_s)
        if not is_whole(self.memory_mb, 0):
            raise BadInput(f"memory_mb must be a whole number of megabytes, 0 or more, not {self.memory_mb!r}")

    @override
    def on_one_host(self, workers: int) -> bool:
        return workers == 1

    @override
    def launch(self, program: Callable[[Worker], T], spec: LaunchSpec) -> list[T]:
        check_counts(spec)
        if sys.platform != "linux":
            raise Unsupported(f"engine spark needs Linux, this is {sys.platform}")
        from manyhands.engines.descriptors import room_for_descriptors
        from manyhands.engines.driver.driver import Driver
        from manyhands.engines.spark import session
        from manyhands.engines.spark.job import Job, check_executors

        with ExitStack() as stack:
            spark = stack.enter_context(session.session(self.master))
            session.check(spark, spec.workers, spec.roles)
            stack.enter_context(room_for_descriptors(2 * spec.workers + 16))
            if any(not frame.files for frame in spec.frames):
                check_executors(spark, spec.workers)
            listener, stage = self._opened(session.addresses(spark), spec)
            with contextlib.closing(listener):
                job = stack.enter_context(Job(spark, stage, spec.workers))
                joined = stack.enter_context(JoinedHosts("see the executor's log in the Spark web UI"))
                roster = Roster(spec.workers)
                late = (
                    "the cluster may be busy with other jobs, or may still read the rows (the Spark web UI shows the "
                    "job manyhands): give a longer wait_s (--wait)"
                )
                entrance = JoinListener(listener, roster, joined, LOG.info, "the executors", lambda: late)
                entrance.wait(spec.observer, self.wait_s, job.check)
                # process indices in the order of the Spark tasks, the shards on the first host
                joined.assign(roster, process_indices_of(0, spec.shards))
            observer = Listening(spec.observer, joined.hosts)
            return Driver([*joined.hosts], replace(spec, observer=observer)).run(program)

    def _opened(self, addresses: tuple[str, str], spec: LaunchSpec) -> tuple[Listener, Stage]:
        """The listener for executors and their settings. addresses: to listen at, and for executors to connect to.

        The run's secret travels in the job's closure, protected as Spark protects closures.
        """
        from manyhands.engines.spark.stage import Stage

        with tempfile.TemporaryDirectory(prefix="manyhands-") as folder:
            secret = Secret.create(Path(folder) / "run.pem", tls=self.tls)
        plain = self.plain_network
        own, called = (self.listen, self.listen) if self.listen else addresses
        listener = Listener(own, **secret.proof, plain_network=plain, timeout_s=SILENCE_S)
        return listener, Stage(
            address=format_address((listener.address[0] if own == called else called, listener.address[1])),
            secret=secret.to_json(),
            tls=self.tls,
            plain_network=plain,
            memory_bytes=self.memory_mb * 1_000_000,
            versions=versions(),
            frames=tuple(spec.frames),
            readers=spec.workers if spec.roles is None else spec.roles.trainers,
        )
