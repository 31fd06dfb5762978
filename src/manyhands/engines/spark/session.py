"""The Spark session of a run, and what can be known of it before anything starts."""

from __future__ import annotations

import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from manyhands import units
from manyhands.errors import BadInput, Unsupported

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from manyhands.engines.roles import Roles

_SLOTS_S = 8.0  # executors of a session that has just begun register one soon after the other
_FIRST_S = 60.0  # where the first one's JVM has to start on a busy machine


@contextmanager
def session(master: str) -> Iterator[SparkSession]:
    """The active session, else one of this run's alone, which is stopped at the end.

    Raises BadInput without pyspark, and where the active session has another master.
    """
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise BadInput(f"engine spark needs pyspark ({error}): pip install 'manyhands[spark]'") from error
    active = SparkSession.getActiveSession()
    if active is None:
        from pyspark import SparkContext

        if SparkContext._active_spark_context is not None:  # another thread's, as in the threads of a CrossValidator
            active = SparkSession.builder.getOrCreate()
    if active is None and (client := sys.modules.get("pyspark.sql.connect.session")) is not None:
        active = client.SparkSession._get_default_session()
    if active is not None:
        own = active.conf.get("spark.master", "")
        if master and own != master:
            raise BadInput(
                f"master={master} was asked for, and the active Spark session has {own}: leave master out, or stop the session"
            )
        yield active
        return
    builder = SparkSession.builder.appName("manyhands")
    made = (builder.master(master) if master else builder).getOrCreate()
    try:
        yield made
    finally:
        made.stop()


def is_connect(spark: SparkSession) -> bool:
    """Whether the session is a client of Spark Connect: there is no JVM here to ask."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def check(spark: SparkSession, workers: int, roles: Roles | None = None) -> None:
    """Raise where no barrier stage of so many workers can run, in seconds instead of Spark's ten minutes.

    roles: of the workers, where they are another framework's cluster, for the message.
    """
    asked = (
        units.count(workers, "worker")
        if roles is None
        else units.named([f"{n} {role}" for role, n in roles.counts.items()])
    )
    if str(spark.conf.get("spark.dynamicAllocation.enabled", "false")).lower() == "true":
        raise Unsupported(
            "Spark's dynamic allocation may take executors away from a run, and Spark refuses barrier stages with it: set "
            "spark.dynamicAllocation.enabled=false, and spark.executor.instances"
        )
    if is_connect(spark):
        slots = _slots_by_settings(spark.conf.get)
        if slots is not None and slots < workers:
            raise BadInput(_too_few(spark, asked, workers, slots))
        return
    most = _slots_of_master(spark.conf.get)
    if most is not None and most < workers:
        raise BadInput(_too_few(spark, asked, workers, most))
    seen, since = 0, time.monotonic()
    while (slots := _slots(spark)) < workers:
        if slots != seen:
            seen, since = slots, time.monotonic()
        if time.monotonic() - since >= (_SLOTS_S if slots else _FIRST_S):
            raise BadInput(_too_few(spark, asked, workers, slots))
        time.sleep(0.2)


def _too_few(spark: SparkSession, asked: str, workers: int, slots: int) -> str:
    if slots == 0:
        return (
            f"{asked} need {workers} Spark task slots at once, and no executor started within {_FIRST_S:.0f} s: does another job hold the cluster, "
            f"or is spark.executor.memory ({spark.conf.get('spark.executor.memory', '1g')}) more than a node has?"
        )
    return (
        f"{asked} need {workers} Spark task slots at once, and the cluster has {slots}: use fewer workers, more "
        f"executors or cores, or a smaller spark.task.cpus (now {spark.conf.get('spark.task.cpus', '1')})"
    )


def _slots(spark: Any) -> int:
    """How many Spark tasks run at once, on all executors that are there."""
    context = spark.sparkContext._jsc.sc()
    return int(context.maxNumConcurrentTasks(context.resourceProfileManager().defaultResourceProfile()))


def _slots_by_settings(get: Callable[..., Any]) -> int | None:
    """As many as the settings ask for, which is what a client of Spark Connect can know; None where they do not say.

    get: (name, default) -> a setting of Spark's.
    """
    if (slots := _slots_of_master(get)) is not None:
        return slots
    cpus = int(get("spark.task.cpus", "1"))
    executors, cores = get("spark.executor.instances", ""), get("spark.executor.cores", "")
    return int(executors) * (int(cores) // cpus) if executors and cores else None


def _slots_of_master(get: Callable[..., Any]) -> int | None:
    """As many as a master on this host has for good; None for others."""
    master, cpus = str(get("spark.master", "")), int(get("spark.task.cpus", "1"))
    if found := re.fullmatch(r"local\[(\d+)(,\d+)?\]", master):
        return int(found[1]) // cpus
    if found := re.fullmatch(r"local-cluster\[(\d+),(\d+),\d+\]", master):
        return int(found[1]) * (int(found[2]) // cpus)
    return None


def addresses(spark: SparkSession) -> tuple[str, str]:
    """(where this host is to listen, by which address executors reach it): as in Spark's settings, or for a client of
    Spark Connect where it reaches its server."""
    if is_connect(spark):
        own = _own_address(spark.client.host)
        return own, own
    called = str(spark.conf.get("spark.driver.host", "127.0.0.1"))
    return str(spark.conf.get("spark.driver.bindAddress", "") or called), called


def _own_address(peer: str) -> str:
    """Of this host's addresses the one from which it reaches another; nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(peer, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as sock:
        sock.connect(address)
        return str(sock.getsockname()[0])
