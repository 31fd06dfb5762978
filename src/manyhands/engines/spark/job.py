"""The Spark job of a run: in a thread of its own, since it takes as long as the run."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import threading
import time
import uuid
from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

from manyhands.data.dataframe_rows import ORDER, WHICH, DistributedFrame
from manyhands.engines.hosts.roster import versions
from manyhands.engines.spark.session import is_connect
from manyhands.engines.spark.stage import REPORT, SCHEMA, Stage, check_versions, report_versions
from manyhands.errors import BadInput, ManyhandsError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LOG = logging.getLogger("manyhands")

_SAYS_WHY = re.compile(r"[\w.]*(Error|Exception|BadInput)\b: .|.*ExecutorLostFailure")
_KEYS: dict[int, list[int]] = {}  # by the number of partitions: the hash is the same in all sessions
_END_S = 20.0
_AGAIN_S = 0.5
_OWN_WORD_S = 2.0  # in which Spark itself finds that an executor is gone


class Job:
    """One barrier stage of `workers` Spark tasks."""

    def __init__(self, spark: SparkSession, stage: Stage, workers: int) -> None:
        self._spark = spark
        self._tag = f"manyhands-{uuid.uuid4().hex[:12]}"
        self._error: BaseException | None = None
        self._reports: list[dict[str, Any]] = []
        table = rows_of(spark, stage.frames, workers, stage.readers)
        self._thread = threading.Thread(target=self._run, args=(table, stage), name=self._tag, daemon=True)

    def __enter__(self) -> Job:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """On return no Spark task of the run is left. Spark's description of its own failure is added to the error."""
        self._thread.join(_END_S if error is None else _OWN_WORD_S)
        reason = "" if self._error is None else why(self._error)
        deadline = time.monotonic() + _END_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            with contextlib.suppress(Exception):  # of a session that is gone: nothing of it runs then
                self._cancel()  # what is still being planned begins only now, and is cancelled the next time
            self._thread.join(_AGAIN_S)
        if self._thread.is_alive():
            LOG.warning("the Spark job %s has not ended: cancel it in the Spark web UI", self._tag)
        if error is not None and reason:
            error.add_note(f"Spark says: {reason}")

    def _run(self, table: DataFrame, stage: Stage) -> None:
        try:
            if is_connect(self._spark):
                self._spark.addTag(self._tag)
            else:
                self._spark.sparkContext.setJobGroup(self._tag, "manyhands", interruptOnCancel=True)
            answers = table.mapInArrow(stage, SCHEMA, barrier=True).collect()
            self._reports = [json.loads(row[REPORT]) for row in answers]
        except BaseException as error:  # noqa: BLE001 - the driver's thread asks for it
            self._error = error

    def check(self) -> None:
        """Raise what ended the job before all workers were there."""
        if self._thread.is_alive():
            return
        if self._error is not None:
            raise ManyhandsError(
                f"the Spark job of the run failed before it began: {why(self._error)}"
            ) from self._error
        if not self._reports:
            raise BadInput("the DataFrame has no rows: expected at least one. Is the filter or split the right one?")
        reasons = [report["refused"] for report in self._reports if report.get("refused")]
        raise BadInput(
            reasons[0]
            if reasons
            else "the Spark job ended before the run began: look for its error in the Spark web UI"
        )

    def _cancel(self) -> None:
        if is_connect(self._spark):
            self._spark.interruptTag(self._tag)
        else:
            self._spark.sparkContext.cancelJobGroup(self._tag)


def check_executors(spark: SparkSession, workers: int) -> None:
    """Raise BadInput for executors of other versions, before Spark computes any row for them."""
    table = spark.range(0, workers, 1, workers)
    try:
        reason = [json.loads(row[REPORT]) for row in table.mapInArrow(report_versions, SCHEMA).collect()]
    except Exception as error:
        raise ManyhandsError(f"the Spark executors cannot run manyhands: {why(error)}") from error
    for host, found in reason:
        check_versions(host, found, versions())


def why(error: BaseException) -> str:
    """The line of a Spark error that says what happened."""
    text = str(error)
    if missing := re.search("No module named '(manyhands|torch)'", text):
        return (
            f"the executors' Python has no {missing[1]}: install the same version there, or set PYSPARK_PYTHON to a "
            "Python that has it"
        )
    if "PYTHON_VERSION_MISMATCH" in text:
        return "the executors have another version of Python: set PYSPARK_PYTHON to a Python of this process's version"
    lines = [line.strip() for line in text.splitlines()]
    reason = [line for line in lines if _SAYS_WHY.match(line)]
    own = [line for line in reason if not line.startswith(("org.apache.", "py4j.", "java."))]
    chosen = own[-1:] or reason[:1] or [line for line in lines if line][:1] or [type(error).__name__]
    return chosen[0][:500]


def rows_of(spark: SparkSession, frames: Sequence[DistributedFrame], workers: int, readers: int) -> DataFrame:
    """All rows of all frames with a table and the place of each, in one partition a worker; without any, nothing of use.

    Every partition's rows go in turn to the first `readers`, beginning anywhere: by a key, as `repartition(workers)`
    sorts all rows first, so that a shuffle that is read again deals them as before; this stage is never read in part.
    """
    tables = {i: frame.table for i, frame in enumerate(frames) if not frame.files}
    if not tables:
        return spark.range(0, workers, 1, workers)
    from pyspark.sql import functions as F

    if len(tables) > 1:
        tables = {i: t if WHICH in t.columns else t.withColumn(WHICH, F.lit(i)) for i, t in tables.items()}
    once = {id(table): table for table in tables.values()}.values()  # one may hold the rows of several frames
    together = reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), once)
    table: DataFrame = together.withColumn(ORDER, F.monotonically_increasing_id())
    if workers == 1:
        return table.repartition(1)
    turn = F.pmod(F.hash(F.spark_partition_id()) + F.col(ORDER), F.lit(readers))
    keys = F.array(*(F.lit(key).cast("long") for key in _keys(spark, workers)[:readers]))
    return table.repartition(workers, F.element_at(keys, (turn + 1).cast("int")))


def _keys(spark: SparkSession, partitions: int) -> list[int]:
    """For each partition a number of which Spark's own hash makes that partition."""
    if partitions in _KEYS:
        return _KEYS[partitions]
    tried = spark.range(0, 32 * partitions, 1, 1).selectExpr("id", f"pmod(hash(id), {partitions}) as place").collect()
    found = {int(row["place"]): int(row["id"]) for row in tried}
    return _KEYS.setdefault(partitions, [found[place] for place in range(partitions)])
