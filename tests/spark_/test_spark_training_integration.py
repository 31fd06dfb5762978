"""Training on Spark: what a local run gives, a Spark run gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
from manyhands.errors import Unsupported
from manyhands.tasks.digits_task import digits

EPOCHS = 4


@pytest.fixture(scope="module")
def solo() -> mh.Run:
    return mh.train(digits(epochs=EPOCHS), engine="local")


@pytest.mark.slow
@pytest.mark.usefixtures("spark")
def test_allreduce_is_what_two_processes_compute_here(solo: mh.Run, tmp_path: Path) -> None:
    run = mh.train(digits(epochs=EPOCHS), engine="spark", workers=2, run_dir=tmp_path / "run")
    here = mh.train(digits(epochs=EPOCHS), engine="local", workers=2, threads_per_worker=1)
    assert torch.equal(run.parameters, here.parameters)
    assert run.metrics["test_accuracy"] == pytest.approx(solo.metrics["test_accuracy"], abs=0.01)
    assert run.rows["total"] == solo.rows["total"]
    assert run.info["engine"] == "spark"
    assert (tmp_path / "run" / "result.json").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("strategy", ["local-sgd:period=4", "downpour", "ensemble"])
def test_strategies_reach_what_they_reach_locally(strategy: str, solo: mh.Run) -> None:
    run = mh.train(digits(epochs=EPOCHS), strategy=strategy, engine="spark", workers=2)
    assert run.metrics["test_accuracy"] >= solo.metrics["test_accuracy"] - 0.03
    assert run.rows["total"] == solo.rows["total"]


@pytest.mark.usefixtures("spark")
def test_hogwild_needs_one_machine() -> None:
    with pytest.raises(Unsupported, match="shares memory between the workers"):
        mh.train(digits(), strategy="hogwild", engine="spark", workers=2)


def test_a_dataframe_needs_the_engine_that_brings_it(spark: Any) -> None:
    table = spark.range(4).selectExpr("id as x", "id as y")
    with pytest.raises(Unsupported, match=r"engine local cannot read a Spark DataFrame: give engine='spark'"):
        mh.train(digits(train_data=mh.spark.frame(table, features="x", label="y")), engine="local")
