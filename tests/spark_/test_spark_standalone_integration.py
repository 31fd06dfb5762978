"""A standalone cluster: a master and two workers, processes that pyspark's own `spark-class` starts; a driver beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
from sessions import need_spark, said_by, standalone

SCRIPT = """
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


@pytest.mark.slow
def test_two_hosts_of_a_standalone_master(tmp_path: Path) -> None:
    """No memory in common: the workers are a ring over TLS, and rows stay on their host. A session of a run's own is stopped."""
    need_spark()
    with standalone(tmp_path) as master:
        found = said_by(SCRIPT, tmp_path, master, str(tmp_path / "driver"))
    assert found["places"] == [0, 0]
    assert found["gone"]
    assert found["rows"] == {"total": 64 * 60, "workers": [32 * 60] * 2, "unused": 0}
    assert found["line"] == pytest.approx([2.0, 1.0], abs=0.05)
