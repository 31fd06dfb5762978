"""Kernels on the workers of Spark's barrier stage."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import manyhands as mh
from manyhands.kernels.factors import Factors

pytestmark = pytest.mark.slow


def task(n: int = 2000) -> mh.Task:
    random = np.random.default_rng(0)
    users, items = random.integers(0, 50, n), random.integers(0, 40, n)
    data: dict[str, Any] = {"users": users, "items": items, "ratings": random.normal(size=n) + users % 3}
    return mh.Task(kernel=Factors(users=50, items=40, rank=4), rate=0.1, train_data=data, batch_size=200, epochs=3)


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("strategy", ["rotate:blocks=4", "downpour"])
def test_a_kernel_trains_on_spark(strategy: str) -> None:
    run = mh.train(task(), engine="spark", strategy=strategy, workers=2)
    assert run.rows["total"] == 6000
    if strategy.startswith("rotate"):
        expected = mh.train(task(), engine="local", strategy=strategy, workers=1).model.tables()
        assert all(np.array_equal(table, expected[name]) for name, table in run.model.tables().items())
