"""Ways through an epoch: workers in step, and workers at their own pace with leased rows; simulated."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from served_training import leases, steps

import manyhands as mh
import plain
from manyhands.errors import BadInput
from manyhands.events import Event
from manyhands.recording import event_log

TICKS = 4  # of an epoch


def train(strategy: str, compute: str = "row=1e-3", workers: int = 3, **options: Any) -> mh.Run:
    fields = {"strategy": strategy, "engine": f"sim:compute='{compute}'", "workers": workers, "threads_per_worker": 1}
    return mh.train(plain.task(), **{**fields, **options})


def test_every_slice_is_trained_once_whoever_is_slow(tmp_path: Path) -> None:
    """CASE 18 for workers of their own pace: rows are leased, each once an epoch; others take what one has not begun."""
    run = train("downpour", "row=1e-3,0=20x", run_dir=tmp_path / "run")
    assert sorted(leases(tmp_path / "run")) == [(e, b, p) for e in range(2) for b in range(TICKS) for p in range(3)]
    assert run.rows["total"] == sum(run.rows["workers"]) == 2 * 39
    made = Counter(step.rank for step in steps(tmp_path / "run"))
    assert 0 < made[0] < 5 < made[1], made


def test_warmup_lets_worker_0_train_alone_first(tmp_path: Path) -> None:
    train("downpour:warmup=4", epochs=1, run_dir=tmp_path / "run")
    handed = sorted((step.values["lease"][2], step.rank) for step in steps(tmp_path / "run"))
    assert [rank for _, rank in handed[:4]] == [0] * 4
    assert {rank for _, rank in handed[4:]} >= {1, 2}


def test_a_stop_ends_all_and_says_what_is_left(tmp_path: Path) -> None:
    class Stop(mh.Callback):
        seen = 0

        def on_step(self, event: Event) -> str | None:
            self.seen += 1
            return "stop" if self.seen == 5 else None

    run = train("downpour", epochs=50, callbacks=[Stop()], run_dir=tmp_path / "run")
    assert run.info["stopped"] == "callback"
    trained = leases(tmp_path / "run")
    assert 5 <= len(trained) == len(set(trained)) < 50 * TICKS
    (tmp_path / "run/result.json").unlink()
    again = train("downpour", epochs=2, run_dir=tmp_path / "run", resume=True)
    assert again.rows["total"] == 2 * 39


def test_segments_end_where_validations_are_due_and_at_max_steps(tmp_path: Path) -> None:
    options = {"epochs": 3, "validate_every": 2, "max_steps": 5, "validation_data": plain.rows(5, seed=2)}
    run = train("downpour", run_dir=tmp_path / "run", **options)
    assert sorted(leases(tmp_path / "run")) == [(*divmod(t, TICKS), p) for t in range(5) for p in range(3)]
    assert run.info["ticks"] == 5
    assert "validation_loss" in run.metrics
    events = event_log.read(tmp_path / "run" / event_log.FILE)
    assert [e.step for e in events if e.type == "validation"] == [2, 4, 5]  # of the run, not of worker 0


def test_a_stream_has_no_batches_to_count() -> None:
    rows = lambda: zip(*plain.rows(9), strict=True)  # noqa: E731
    for strategy, options, problem in (
        ("downpour", {"validate_every": 2, "validation_data": plain.rows(5)}, "validate_every=2 counts global batches"),
        ("downpour:warmup=3", {}, "warmup=3 needs data with a length"),
    ):
        with pytest.raises(BadInput, match=problem):
            train(strategy, workers=1, train_data=rows, **options)


def test_schedules_follow_the_rows_that_all_workers_were_handed(tmp_path: Path) -> None:
    scheduler = torch.optim.lr_scheduler

    def chained(optimizer: torch.optim.Optimizer, total: int) -> Any:
        return scheduler.ChainedScheduler(
            [scheduler.ExponentialLR(optimizer, 0.9), scheduler.ConstantLR(optimizer, 0.5, total_iters=2)]
        )

    run = train("downpour", workers=1, epochs=1, schedule=chained)
    assert [row["rate"] for row in run.history] == pytest.approx([0.005, 0.0045, 0.0081, 0.00729])
    falling = lambda optimizer, total: scheduler.ExponentialLR(optimizer, 0.9)  # noqa: E731
    train("downpour", epochs=1, schedule=falling, run_dir=tmp_path / "run")
    for step in steps(tmp_path / "run"):
        assert step.values["rate"] == pytest.approx(0.01 * 0.9 ** (step.values["lease"][2] // 3)), step
