"""`partition="fixed"`: each worker keeps its part of the rows, in simulated runs."""

from pathlib import Path
from typing import Any

import numbered_rows
import pytest
import torch

import manyhands as mh
import plain
from manyhands.data.sharding import FixedPartition
from manyhands.engines.sim.engine import Sim
from manyhands.errors import BadInput
from manyhands.recording import event_log

ROWS, BATCH = 39, 12  # the last batch has 3 rows: one of 4 workers has none of it
SLOW = {"compute": "step=10ms,jitter=exponential", "seed": 3}


def run_of(workers: int, **options: Any) -> mh.Run:
    return mh.train(
        plain.task(),
        **{"workers": workers, "engine": Sim(**SLOW), "threads_per_worker": 1, "partition": "fixed", **options},
    )


def test_it_is_one_worker_in_the_order_of_the_parts() -> None:
    for workers in (1, 2, 4):
        order = FixedPartition(rows=ROWS, batch_size=BATCH, parts=workers)
        expected = mh.train(plain.task(order=order), threads_per_worker=1)
        run = run_of(workers)
        assert (run.parameters - expected.parameters).abs().max() < 1e-10, workers
        assert run.rows["total"] == expected.rows["total"]
        other = run_of(workers, partition="none").parameters
        assert workers == 1 or (run.parameters - other).abs().max() > 1e-6, workers


def test_each_worker_trains_its_own_part_alone(tmp_path: Path) -> None:
    """Also where workers are of different speeds, and lease their slices: else the fast take the slow ones' rows."""
    for number, (strategy, partition) in enumerate(
        [("downpour", "fixed"), ("easgd:period=2", "fixed"), ("local-sgd:period=2", "fixed"), ("downpour", "none")]
    ):
        folder = tmp_path / f"{number}"
        options = {"strategy": strategy, "partition": partition, "run_dir": folder, "threads_per_worker": 1}
        run = mh.train(numbered_rows.task(40, 8, epochs=3), workers=4, engine=Sim(**SLOW), **options)
        assert run.rows["total"] == 120
        assert (run.rows["workers"] == [30, 30, 30, 30]) == (partition == "fixed"), strategy
        steps = [event for event, _ in event_log.steps_that_count(event_log.files_in(folder))]
        leased = [(step.rank, step.values["lease"][1]) for step in steps if "lease" in step.values]
        assert bool(leased) == (strategy != "local-sgd:period=2")
        assert all(rank == part for rank, part in leased) or partition == "none", strategy


@pytest.mark.parametrize("strategy", ["allreduce", "downpour"])
def test_it_is_resumed_with_as_many_workers(strategy: str, tmp_path: Path) -> None:
    options = {"strategy": strategy, "run_dir": tmp_path / "run", "checkpoint_every": 3}
    run_of(2, max_steps=3, **options)
    with pytest.raises(BadInput, match="partition was fixed for 2 workers and is fixed for 3 workers"):
        run_of(3, resume=True, **options)
    with pytest.raises(BadInput, match="partition was fixed for 2 workers and is none"):
        run_of(2, resume=True, **{**options, "partition": "none"})
    resumed = run_of(2, resume=True, **options)
    assert resumed.rows["total"] == 2 * ROWS
    if strategy == "allreduce":
        assert torch.equal(resumed.parameters, run_of(2, strategy=strategy).parameters)


def test_an_asynchronous_run_at_a_url_is_replayed(tmp_path: Path) -> None:
    url = f"local://{tmp_path}/run"
    run_of(3, strategy="downpour", run_dir=url)
    assert mh.replay(url, task=plain.task()).identical
