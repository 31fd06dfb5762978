"""Other clusters, each with a driver in a process of its own: Spark Connect, where it is a client without a JVM, and a
standalone master with two workers, which pyspark's own `spark-class` starts."""

from pathlib import Path

import pytest
from sessions import need_spark, said_by, standalone

pytestmark = pytest.mark.nightly

CLIENT = """
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


def test_a_client_trains_on_its_servers_executors(tmp_path: Path) -> None:
    need_spark()
    pytest.importorskip("grpc_status")
    session, refused, rows, line = said_by(CLIENT, tmp_path)
    assert session.startswith("pyspark.sql.connect")
    assert refused.startswith("3 workers need 3 Spark task slots at once, and the cluster has 2")
    assert rows == {"total": 64 * 60, "workers": [32 * 60] * 2, "unused": 0}
    assert line == pytest.approx([2.0, 1.0], abs=0.05)


STANDALONE = """
    import json, sys
    from pathlib import Path
    import manyhands as mh
    from pyspark.sql import SparkSession
    from sessions import spark_session
    from spark_models import slope

    if __name__ == "__main__":
        master, folder = sys.argv[1:]
        places = mh.launch(lambda: mh.worker().local_rank, workers=2, engine=f"spark:master={master}")
        own_is_gone = SparkSession.getActiveSession() is None
        with spark_session(master, Path(folder)) as spark:
            run = mh.train(slope(spark), engine="spark", workers=2)
        print(json.dumps({"rows": run.rows, "line": run.parameters.tolist(), "places": places, "gone": own_is_gone}))
"""


def test_two_hosts_of_a_standalone_master(tmp_path: Path) -> None:
    """No memory in common: the workers are a ring over TLS, and rows stay on their host. A session of a run's own is stopped."""
    need_spark()
    with standalone(tmp_path) as master:
        found = said_by(STANDALONE, tmp_path, master, str(tmp_path / "driver"))
    assert found["places"] == [0, 0]
    assert found["gone"]
    assert found["rows"] == {"total": 64 * 60, "workers": [32 * 60] * 2, "unused": 0}
    assert found["line"] == pytest.approx([2.0, 1.0], abs=0.05)
