"""Predictions on real processes: the same bits for any number of workers, what a lost worker, a full disk and a signal leave."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from driver_script import wait_until
from torch import Tensor, nn

import manyhands as mh
import plain
from manyhands.data.row_pieces import RowPiece
from manyhands.engines.driver.row_collector import RowCollector
from manyhands.engines.local.engine import Local
from manyhands.errors import ManyhandsError, Preempted, WorkerFailed
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


def predict_into(folder: Path, local: Local, function: Any, rows: Tensor | None = None, workers: int = 2) -> Any:
    data = torch.arange(1000) if rows is None else rows
    options: dict[str, Any] = {"workers": workers, "engine": local, "batch_size": BATCH}
    return mh.predict(nn.Identity(), data, function=function, output=folder / "out.parquet", **options)


def test_a_worker_that_dies_is_named_and_leaves_no_file(local: Local, tmp_path: Path) -> None:
    def dies(module: nn.Module, batch: Tensor) -> Tensor:
        if batch[0] >= 500:
            os.kill(os.getpid(), signal.SIGKILL)
        return batch

    with pytest.raises(WorkerFailed, match=r"worker [01] on \S+ was killed by signal 9") as found:
        predict_into(tmp_path, local, dies)
    assert found.value.rank in (0, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_ends_all_workers_and_leaves_nothing(local: Local, tmp_path: Path) -> None:
    local.prestart()  # whose files are another matter
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    wide = torch.arange(4000.0)
    options: dict[str, Any] = {"function": lambda m, b: b[:, None].repeat(1, 500) + torch.rand(len(b), 500)}
    resource.setrlimit(resource.RLIMIT_FSIZE, (6 << 20, before[1]))
    try:
        with pytest.raises(ManyhandsError, match="File too large. Make room, or give another output"):
            mh.predict(nn.Identity(), wide, output=tmp_path / "out.arrow", workers=2, engine=local, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_a_slow_worker_holds_the_others_back(local: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker of the first rows goes on when the driver has let another one wait: so much lies in memory, and no more."""
    held, waiting, must_wait = tmp_path / "held", list[int](), RowCollector.must_wait

    def noted(self: RowCollector, piece: RowPiece) -> bool:
        waiting.append(self._order.waiting_bytes)
        if found := must_wait(self, piece):
            held.touch()
        return found

    monkeypatch.setattr(RowCollector, "must_wait", noted)
    monkeypatch.setattr("manyhands.engines.driver.row_collector.WAITING_BYTES", 10_000)

    def slow_at_first(module: nn.Module, batch: Tensor) -> Tensor:
        if batch[0] == 0:
            wait_until(held.exists)
        return batch.repeat(1, 100)

    found = predict_into(tmp_path, local, slow_at_first, torch.arange(800.0).view(800, 1), workers=3)
    assert 10_000 < max(waiting) < 10_000 + 2 * 16 * BATCH * 100 * 4  # and what two have computed: a lease each
    assert [row[0] for row in pq.read_table(found.path)["prediction"].to_pylist()] == list(range(800))


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

    with pytest.raises(error, match=words):
        predict_into(tmp_path, local, stops, workers=workers)
    assert list(tmp_path.iterdir()) == []


TORCHRUN = """
    import json, os, sys
    import torch, manyhands as mh
    import plain

    torch.manual_seed(4)
    model = plain.mlp().eval()
    x, y = plain.rows(203)
    found = mh.predict(model, x, batch_size=8)
    written = mh.predict(model, x, batch_size=8, output="out.parquet")
    with torch.no_grad():
        wanted = model(x)
    stream = mh.predict(torch.nn.Identity(), lambda: iter(range(31)), function=lambda m, b: b, batch_size=4)
    metrics = mh.evaluate(model, (x, y), metrics=lambda m, b: {"mean": m(b[0]).mean()}, of_all=lambda rows: {"median": rows[0].median()})
    with open(f"rank{os.environ['RANK']}.json", "w") as file:
        json.dump(
            {
                "close": torch.allclose(found, wanted, rtol=1e-12),
                "stream": stream.tolist() == list(range(31)),
                "rows": written.rows,
                "mean": abs(metrics["mean"] - float(wanted.mean())) < 1e-12,
                "median": metrics["median"] == float(found.median()),
            },
            file,
        )
"""


@pytest.mark.slow
def test_under_torchrun_every_rank_gets_all_rows_and_the_first_writes(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(dedent(TORCHRUN))
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{root / 'tests'}", "TMPDIR": str(tmp_path)}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "program.py"]
    done = subprocess.run(launcher, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert found == {"close": True, "stream": True, "rows": 203, "mean": True, "median": True}
    assert pq.read_table(tmp_path / "out.parquet").num_rows == 203
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".partial")]
