"""A session of Spark Connect: the driver is a client without a JVM, in a process of its own, as its mode is the whole process's."""

from __future__ import annotations

from pathlib import Path

import pytest
from sessions import need_spark, said_by

SCRIPT = """
    import json
    import manyhands as mh
    from pyspark.sql import SparkSession
    from spark_models import slope

    if __name__ == "__main__":
        spark = SparkSession.builder.remote("local[2]").getOrCreate()
        task = slope(spark)
        try:
            mh.train(task, engine="spark", workers=3)
        except mh.BadInput as error:
            refused = str(error)
        run = mh.train(task, engine="spark", workers=2)
        print(json.dumps([type(spark).__module__, refused, run.rows, run.parameters.tolist()]))
        spark.stop()
"""


@pytest.mark.slow
def test_a_client_trains_on_its_servers_executors(tmp_path: Path) -> None:
    need_spark()
    pytest.importorskip("grpc_status")
    session, refused, rows, line = said_by(SCRIPT, tmp_path)
    assert session.startswith("pyspark.sql.connect")
    assert refused.startswith("3 workers need 3 Spark task slots at once, and the cluster has 2")
    assert rows == {"total": 64 * 60, "workers": [32 * 60] * 2, "unused": 0}
    assert line == pytest.approx([2.0, 1.0], abs=0.05)
