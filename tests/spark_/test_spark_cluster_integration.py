"""Another framework's cluster in the executors: torch.distributed with a role that never returns, and an error."""

from __future__ import annotations

from typing import Any

import pytest

import manyhands as mh
from manyhands.engines.spark.engine import Spark
from manyhands.errors import WorkerFailed

pytestmark = pytest.mark.usefixtures("spark")


@pytest.mark.slow
def test_torch_distributed_beside_a_parameter_server(spark: Any) -> None:
    """Every row of an RDD reaches one of those who train, in each of two epochs."""

    def program(cluster: Any, number: int) -> Any:  # by value: the executors do not have this file
        import threading

        import torch
        import torch.distributed as dist

        if cluster.role == "ps":
            threading.Event().wait(100)
        dist.init_process_group("gloo")
        total = torch.tensor(float(number * (dist.get_rank() + 1)))
        dist.all_reduce(total)
        dist.destroy_process_group()
        labels = [int(label) for _, batch in cluster.rows(8, epochs=2) for label in batch]
        return float(total), cluster.index, labels

    rdd = spark.sparkContext.parallelize([(n, n / 2) for n in range(33)], 3)
    rows = mh.spark.frame(rdd.toDF("row long, x double"), features="x", label="row")
    found = Spark().run(program, 10, workers=2, roles={"ps": 1}, rows=rows)
    assert [value[:2] for value in found["worker"]] == [(30.0, 0), (30.0, 1)]
    assert found["ps"] == [None]
    assert sorted(n for value in found["worker"] for n in value[2]) == sorted([*range(33)] * 2)


@pytest.mark.slow
def test_an_error_names_the_role() -> None:
    def program(cluster: Any) -> None:
        import threading

        if cluster.role == "ps":
            raise KeyError("of the user")
        threading.Event().wait(100)

    with pytest.raises(WorkerFailed, match=r"^ps 0 on \S+ failed in phase user.*KeyError: 'of the user'"):
        Spark().run(program, workers=2, roles={"ps": 1})
