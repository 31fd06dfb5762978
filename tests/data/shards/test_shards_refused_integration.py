"""Data that cannot be trained on ends `manyhands train` with exit status 2 and one message, on several workers too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

PROGRAM = """
import sys

import torch
from torch import nn

import manyhands as mh


def loss(model, batch):
    return (model(batch["a"][:, None])[:, 0] - batch["y"]).square().mean()


def task(data):
    return mh.Task(
        model=lambda: nn.Linear(1, 1), loss=loss, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        train_data=data, batch_size=4, max_steps=MAX_STEPS,
    )


def empty():
    return task(mh.shards("empty"))


def lacks():
    return task(mh.shards("rows", columns=["a"]))


def uncounted():
    return task(mh.shards("rows", counted=False))
"""


def trained(folder: Path, name: str, *, max_steps: int | None = None) -> subprocess.CompletedProcess[str]:
    (folder / "empty").mkdir()
    (folder / "rows").mkdir()
    columns = {name: pa.array(range(20), pa.float32()) for name in "ay"}
    for i in range(2):
        pq.write_table(pa.table(columns), folder / "rows" / f"{i}.parquet")
    (folder / "program.py").write_text(PROGRAM.replace("MAX_STEPS", str(max_steps)))
    command = [sys.executable, "-m", "manyhands", "train", f"program.py:{name}", "-n", "2", "--run-dir", "run"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(("name", "said"), [("empty", "expected .parquet"), ("lacks", "column 'y'")])
def test_nothing_is_trained(name: str, said: str, tmp_path: Path) -> None:
    done = trained(tmp_path, name)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("manyhands: ")][-1:] == [
        line for line in done.stderr.splitlines() if said in line
    ]
    assert not (tmp_path / "run").exists()


def test_a_stream_that_has_too_few_rows_leaves_its_checkpoint(tmp_path: Path) -> None:
    done = trained(tmp_path, "uncounted", max_steps=100)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "max_steps=100" in done.stderr
    assert "10 steps" in done.stderr
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000010"]
