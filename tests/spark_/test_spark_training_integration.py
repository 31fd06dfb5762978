"""Training on Spark: what a local run gives, a Spark run gives."""

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

import manyhands as mh
from manyhands.errors import Unsupported
from manyhands.tasks.digits_task import digits

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("spark")]

RULE = """
import manyhands as mh

class Half(mh.Rule):
    def merge(self, old, new, pushes):
        for push in pushes:
            new.copy_(old + 0.5 * push.update)
            old = new
"""


def test_a_server_rule_of_ones_own_reaches_the_executor_that_holds_the_shard(tmp_path: Path) -> None:
    """Its text travels; the same bits as of simulated workers, where the file is read."""
    file = tmp_path / "half_of_the_spark_test.py"
    file.write_text(RULE)
    options: Any = {"strategy": f"downpour:bound=0,rule={file}:Half", "workers": 2}
    run, here = (mh.train(digits(epochs=1), engine=engine, **options) for engine in ("spark", "sim"))
    assert torch.equal(run.parameters, here.parameters)


def test_what_needs_another_engine(spark: Any) -> None:
    with pytest.raises(Unsupported, match="shares memory between the workers"):
        mh.train(digits(), strategy="hogwild", engine="spark", workers=2)
    with pytest.raises(Unsupported, match="max_restarts alone"):
        mh.train(digits(), engine="spark", workers=2, survive="max_losses=1")
    table = spark.range(4).selectExpr("id as x", "id as y")
    with pytest.raises(Unsupported, match=r"engine local cannot read a Spark DataFrame: give engine='spark'"):
        mh.train(digits(train_data=mh.spark.frame(table, features="x", label="y")), engine="local")


@dataclass
class KilledOnce:
    """A loss that ends its process, worker 1's, in the second epoch, once."""

    mark: Path
    calls: int = 0

    def __call__(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        self.calls += 1
        if self.calls == 60 and mh.worker().rank == 1 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        inputs, targets = batch
        return torch.nn.functional.cross_entropy(model(inputs), targets)


def test_a_run_whose_stage_failed_starts_again(tmp_path: Path) -> None:
    """A barrier stage lives and dies as one: another one goes on from the newest checkpoint, with the bits of engine `local`."""
    given = {"workers": 2, "run_dir": tmp_path / "run", "survive": "max_restarts=1"}
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        run = mh.train(digits(epochs=2, loss=KilledOnce(tmp_path / "mark")), engine="spark", **given)
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert (tmp_path / "mark").exists()
    same = digits(epochs=2, loss=KilledOnce(tmp_path / "mark"))  # which is not killed any more
    here = mh.train(same, engine="local", workers=2, threads_per_worker=1)
    assert torch.equal(run.parameters, here.parameters)
    assert [one["step"] for one in run.restarts] == [41]
    assert run.rows["total"] == here.rows["total"]
    assert run.metrics == pytest.approx(here.metrics, abs=1e-6)
    assert run.info["engine"] == "spark"
    assert (tmp_path / "run" / "result.json").exists()
