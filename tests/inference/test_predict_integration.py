"""Predictions on real processes: the same bits for any number of workers, and what a signal leaves."""

import os
import signal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from driver_script import wait_until
from torch import Tensor, nn

import manyhands as mh
import plain
from manyhands.engines.local.engine import Local
from manyhands.errors import Preempted
from manyhands.worker import current

ROWS, BATCH = 203, 8


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return nn.Sequential(plain.mlp(), nn.Dropout(0.5))


X = plain.rows(ROWS)[0]


def plain_outputs(x: Tensor, batch_size: int = BATCH) -> Tensor:
    own = model().eval()
    with torch.no_grad():
        return torch.cat([own(batch) for batch in x.split(batch_size)])


def test_rows_and_metrics_of_many_workers_are_those_of_a_plain_loop(local: Local) -> None:
    options: dict[str, Any] = {"workers": 3, "engine": local, "threads_per_worker": 1}
    assert torch.equal(mh.predict(model(), X, batch_size=BATCH, **options), plain_outputs(X))
    assert torch.equal(mh.predict(model(), X[:2], batch_size=1, **options), plain_outputs(X[:2], 1))  # fewer rows
    options |= {"function": lambda m, b: (m(b[0]), b[1]), "loader_processes": 1}
    found = mh.predict(model(), [(X[i], i) for i in range(ROWS)], batch_size=BATCH, **options)
    assert found[1].tolist() == list(range(ROWS))
    assert torch.allclose(found[0], plain_outputs(X), rtol=1e-13)
    options: dict[str, Any] = {"task": plain.task(epochs=1), "engine": local, "batch_size": BATCH}
    one, two = (mh.evaluate(model(), plain.rows(ROWS), workers=workers, **options) for workers in (1, 2))
    assert two == pytest.approx(one, rel=1e-12)


def test_inside_of_a_launch_every_rank_gets_all_rows_and_the_first_writes(local: Local, tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"

    def inside() -> tuple[Tensor, Tensor, int, dict[str, float]]:
        found = mh.predict(model(), X, batch_size=BATCH)
        written = mh.predict(model(), X, batch_size=BATCH, output=path)
        stream = mh.predict(nn.Identity(), lambda: iter(range(31)), function=lambda m, b: b, batch_size=4)
        options: dict[str, Any] = {"metrics": lambda m, b: {"mean": m(b[0]).mean()}}
        options["of_all"] = lambda rows: {"median": rows[0].median()}
        return found, stream, written.rows, mh.evaluate(model(), plain.rows(ROWS), **options)

    wanted = plain_outputs(X)
    for found, stream, rows, metrics in mh.launch(inside, workers=2, engine=local):
        assert torch.allclose(found, wanted, rtol=1e-13)
        assert (stream.tolist(), rows) == (list(range(31)), ROWS)
        assert metrics == pytest.approx({"mean": float(wanted.mean()), "median": float(wanted.median())}, rel=1e-12)
    assert pq.read_table(path).num_rows == ROWS
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("workers", "by", "error", "words"),
    [
        (1, signal.SIGTERM, Preempted, "asked to end .SIGTERM.: nothing was written"),
        (2, signal.SIGTERM, Preempted, "asked to end .SIGTERM.: nothing was written"),
        (1, signal.SIGINT, KeyboardInterrupt, None),
    ],
)
def test_a_signal_ends_it_and_leaves_no_file(
    local: Local, tmp_path: Path, workers: int, by: signal.Signals, error: type[BaseException], words: str | None
) -> None:
    driver = os.getpid()

    def stops(module: nn.Module, batch: Tensor) -> Tensor:
        worker = current()
        assert worker is not None
        if batch[0] == 304:
            wait_until(lambda: any(tmp_path.glob(".out.parquet.*.partial")))
            os.kill(driver, by)
        if batch[0] > 300:
            wait_until(worker.driver.should_stop)
        return batch

    options: dict[str, Any] = {"workers": workers, "engine": local, "batch_size": BATCH, "function": stops}
    with pytest.raises(error, match=words):
        mh.predict(nn.Identity(), torch.arange(1000), output=tmp_path / "out.parquet", **options)
    assert list(tmp_path.iterdir()) == []
