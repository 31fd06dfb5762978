"""Kernels over two "hosts" of one machine: what one machine computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from joined_run import Run, joined_by

import manyhands as mh
from manyhands.engines.hosts.engine import Hosts
from manyhands.kernels.factors import Factors

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_CREDENTIALS", str(tmp_path / "run.pem"))


def ratings(n: int = 2000) -> dict[str, Any]:
    random = np.random.default_rng(0)
    users, items = random.integers(0, 50, n), random.integers(0, 40, n)
    return {"users": users, "items": items, "ratings": random.normal(size=n) + users % 3}


def task() -> mh.Task:
    kernel = Factors(users=50, items=40, rank=4)
    return mh.Task(
        kernel=kernel, rate=0.1, train_data=ratings(), validation_data=ratings(300), batch_size=200, epochs=3
    )


def on_hosts(strategy: str, **options: Any) -> mh.Run:
    """One worker here, and one that joins."""
    run = Run(Hosts(local_workers=1), joined_by(1))
    fields = {"engine": run.engine, "strategy": strategy, "workers": 2, "threads_per_worker": 1, **options}
    return run.during(lambda: mh.train(task(), **fields))


def same(one: mh.Run, other: mh.Run) -> bool:
    theirs = other.model.tables()
    return all(np.array_equal(table, theirs[name]) for name, table in one.model.tables().items())


@pytest.mark.parametrize("strategy", ["rotate:blocks=4", "local-sgd:period=3"])
def test_in_step_over_two_hosts_it_has_the_bits_of_one(strategy: str) -> None:
    here = mh.train(task(), engine="local", strategy=strategy, workers=2)
    there = on_hosts(strategy)
    assert same(here, there)
    assert here.metrics == there.metrics


def test_at_their_own_pace_over_two_hosts_it_can_be_replayed(tmp_path: Path) -> None:
    run = on_hosts("downpour", run_dir=tmp_path / "run")
    assert run.rows["total"] == 6000
    assert mh.replay(tmp_path / "run", task=task()).identical
