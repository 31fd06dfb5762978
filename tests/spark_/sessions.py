"""Spark clusters of the tests: one master in this process with two executors of two cores, each a JVM of its own."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

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
JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"
"""For every JVM of the tests: they live for seconds, and share two cores."""


def need_spark() -> None:
    """Skip the test where there is no pyspark, or no Java for it."""
    pytest.importorskip("pyspark")
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        pytest.skip("Spark needs Java")


def _tidy(folder: Path) -> str:
    """The option by which a JVM that is killed leaves its temporary files here."""
    return f"-Djava.io.tmpdir={folder}"


@contextmanager
def spark_session(master: str, folder: Path, java: str = JAVA, **options: Any) -> Iterator[Any]:
    """A session whose executors run this Python, whose files are in `folder`, and of which nothing is left. java: for its JVMs."""
    import pyspark
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    folder.mkdir(exist_ok=True)
    os.environ["JAVA_TOOL_OPTIONS"] = f"{java} {_tidy(folder)}"
    builder = SparkSession.builder.master(master).appName("tests")
    own = {
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.deploy.appIdPattern": f"app-{os.getpid()}-%s-%04d",  # else clusters of one second share a folder
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


@contextmanager
def standalone(folder: Path, workers: int = 2) -> Iterator[str]:
    """A master and workers of one core each, as pyspark's own `spark-class` starts them; the master's address.

    Each worker's executors are what containers of YARN are: hosts of their own, without memory in common.
    """
    home = Path(pyspark_home())
    environment = {**os.environ, "SPARK_HOME": str(home), "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_LOG_DIR": str(folder)}
    environment |= {"JAVA_TOOL_OPTIONS": f"{JAVA} {_tidy(folder)}"}
    environment |= {"SPARK_LOCAL_DIRS": str(folder / "local"), "SPARK_WORKER_DIR": str(folder / "work")}

    def start(name: str, *options: str, container: str = "") -> subprocess.Popen[str]:
        command = [
            str(home / "bin" / "spark-class"),
            f"org.apache.spark.deploy.{name}",
            "--host",
            "127.0.0.1",
            *options,
        ]
        return subprocess.Popen(
            command,
            env=environment | ({"CONTAINER_ID": container, "LOCAL_DIRS": str(folder)} if container else {}),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )

    processes = [start("master.Master", "--port", "0", "--webui-port", "0")]
    try:
        address = _output(processes[0], r"(spark://127\.0\.0\.1:\d+)")
        options = ("--cores", "1", "--memory", "1g", "--webui-port", "0", address)
        processes += [start("worker.Worker", *options, container=f"container-{i}") for i in range(workers)]
        for worker in processes[1:]:
            _output(worker, r"(Successfully registered with master)")
        yield address
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(20)
            assert process.stderr is not None
            process.stderr.close()


def _output(process: subprocess.Popen[str], pattern: str) -> str:
    """The first line of its log that matches; what follows is read and dropped, so that its pipe never fills."""
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(pattern, line):
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return found[1]
    raise AssertionError(f"ended with {process.wait(20)} before it said {pattern}")


def said_by(script: str, folder: Path, *arguments: str) -> Any:
    """The JSON in the last line that a script prints: a driver in a process of its own, whose files are in `folder`."""
    file = folder / "script.py"
    file.write_text(textwrap.dedent(script))
    environment = {
        **os.environ,
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(folder / "local"),
        "SPARK_TESTING": "1",  # a Connect server takes any free port
        "JAVA_TOOL_OPTIONS": f"{JAVA} {_tidy(folder)}",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]),
    }
    command = [sys.executable, str(file), *arguments]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def pyspark_home() -> str:
    import pyspark

    return os.path.dirname(pyspark.__file__)
