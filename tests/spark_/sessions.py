"""Spark clusters of the tests: one master in this process with two executors of two cores, each a JVM of its own."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

OPTIONS = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.executor.memory": "512m",
    "spark.driver.memory": "512m",
    "spark.sql.shuffle.partitions": "4",
    "spark.locality.wait": "0s",
    "spark.ui.showConsoleProgress": "false",
}
CLUSTER = "local-cluster[2,2,512]"


@contextmanager
def spark_session(master: str, folder: Path, **options: Any) -> Iterator[Any]:
    """A session whose executors run this Python, whose files are in `folder`, and of which nothing is left."""
    import pyspark
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    builder = SparkSession.builder.master(master).appName("tests")
    own = {
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.executorEnv.PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    for name, value in {**OPTIONS, **own, **options}.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    work = Path(pyspark.__file__).parent / "work" / session.sparkContext.applicationId
    try:
        yield session
    finally:
        session.stop()
        shutil.rmtree(work, ignore_errors=True)  # where a cluster's executors have their folders
