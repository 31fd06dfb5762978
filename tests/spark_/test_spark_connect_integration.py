"""A session of Spark Connect: the driver is a client without a JVM, in a process of its own, as its mode is the whole process's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from sessions import JAVA, need_spark

SCRIPT = """
    import json, sys
    import torch
    import manyhands as mh
    from pyspark.sql import SparkSession

    def build():
        return torch.nn.Linear(1, 1)

    def loss(model, batch):
        return ((model(batch[0]) - batch[1][:, None]) ** 2).mean()

    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.5)

    if __name__ == "__main__":
        spark = SparkSession.builder.remote("local[2]").getOrCreate()
        table = spark.range(64).selectExpr("array(id / 64) as x", "id / 32 + 1 as y")
        task = mh.Task(
            model=build, loss=loss, optimizer=sgd, train_data=mh.spark.frame(table, features="x", label="y"),
            batch_size=16, epochs=60,
        )
        try:
            mh.train(task, engine="spark", workers=3)
        except mh.BadInput as error:
            refused = str(error)
        run = mh.train(task, engine="spark", workers=2)
        print(json.dumps([type(spark).__module__, refused, run.rows, run.parameters.tolist()]))
        spark.stop()
"""


def test_a_client_trains_on_its_servers_executors(tmp_path: Path) -> None:
    need_spark()
    pytest.importorskip("grpc_status")
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {
        **os.environ,
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_TESTING": "1",  # any free port
        "SPARK_LOCAL_DIRS": str(tmp_path / "local"),
        "JAVA_TOOL_OPTIONS": f"{JAVA} -Djava.io.tmpdir={tmp_path}",  # its server does not tidy up when its client ends
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    session, refused, rows, line = json.loads(done.stdout.splitlines()[-1])
    assert session.startswith("pyspark.sql.connect")
    assert refused.startswith("3 workers need 3 Spark task slots at once, and the cluster has 2")
    assert rows == {"total": 64 * 60, "workers": [32 * 60] * 2, "unused": 0}
    assert line == pytest.approx([2.0, 1.0], abs=0.05)
