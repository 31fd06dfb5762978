"""A standalone cluster: a master and two workers, processes that pyspark's own `spark-class` starts; a driver beside them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from sessions import JAVA, need_spark, standalone

SCRIPT = """
    import json, sys
    import torch
    import manyhands as mh
    from sessions import spark_session
    from pathlib import Path
    from pyspark.sql import SparkSession

    def build():
        return torch.nn.Linear(1, 1)

    def loss(model, batch):
        return ((model(batch[0]) - batch[1][:, None]) ** 2).mean()

    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.5)

    if __name__ == "__main__":
        places = mh.launch(lambda: mh.worker().local_rank, workers=2, engine=f"spark:master={sys.argv[1]}")
        own_is_gone = SparkSession.getActiveSession() is None
        with spark_session(sys.argv[1], Path(sys.argv[2])) as spark:
            table = spark.range(64).selectExpr("array(id / 64) as x", "id / 32 + 1 as y")
            run = mh.train(
                model=build, loss=loss, optimizer=sgd, train_data=mh.spark.frame(table, features="x", label="y"),
                batch_size=16, epochs=60, engine="spark", workers=2, strategy=sys.argv[3],
            )
        print(json.dumps({"rows": run.rows, "line": run.parameters.tolist(), "places": places, "gone": own_is_gone}))
"""


@pytest.mark.parametrize("strategy", ["allreduce"])
def test_two_hosts_of_a_standalone_master(strategy: str, tmp_path: Path) -> None:
    """No memory in common: the workers are a ring over TLS, and rows stay on their host. A session of a run's own is stopped."""
    need_spark()
    import json

    with standalone(tmp_path) as master:
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(SCRIPT))
        environment = {
            **os.environ,
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(tmp_path / "local"),
            "JAVA_TOOL_OPTIONS": JAVA,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]),
        }
        command = [sys.executable, str(script), master, str(tmp_path / "driver"), strategy]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["places"] == [0, 0]
    assert found["gone"]
    assert found["rows"] == {"total": 64 * 60, "workers": [32 * 60] * 2, "unused": 0}
    assert found["line"] == pytest.approx([2.0, 1.0], abs=0.05)
