"""data/shards in processes: memory that the data does not set, and runs of one and several workers."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.engines.local.engine import Local
from refusals import refused
from shard_files import write

READER = """
import resource, sys, threading
import numpy as np
import torch
from manyhands.data.feed import Feed
from manyhands.data.open_source import open_source
from manyhands.data.shards.source import shards

def now(what):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(what))

threading.stack_size(1 << 20)  # stacks count as data
path, shuffle, limit = sys.argv[1], sys.argv[2], int(sys.argv[3])
feed = Feed(open_source(shards(path, shuffle=shuffle)), batch_size=128)
before = now("RssAnon")
resource.setrlimit(resource.RLIMIT_DATA, (now("VmData") + limit,) * 2)
rows = most = total = 0
for part in feed.epoch(0):
    total += int(part.batch["cls"].sum())
    rows += part.rows
    most = max(most, now("RssAnon"))
print(rows, total, most - before)
"""
MB = 1_000_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "shuffle"),
    [
        ("a.parquet", {"row_group_bytes": "320MB"}, "blocks:16"),
        pytest.param("a.parquet", {"row_group_bytes": "64MB"}, "blocks:4", marks=pytest.mark.nightly),
        pytest.param("a.tar", {}, "blocks:4", marks=pytest.mark.nightly),
    ],
)
def test_an_epoch_of_twice_the_memory(tmp_path: Path, name: str, options: dict[str, Any], shuffle: str) -> None:
    """Whatever the row groups are like; the system refuses a reader more than the limit, stacks of its threads among it."""
    (folder := tmp_path / "data").mkdir()
    rows, limit, drawn = 4_000, 200 * MB, np.random.default_rng(0)
    mh.write_shards(({"cls": i, "v": drawn.random(25_000, np.float32)} for i in range(rows)), folder / name, **options)
    environment = {
        **os.environ,
        "ARROW_DEFAULT_MEMORY_POOL": "system",  # others reserve a gigabyte that they may never touch
        "ARROW_IO_THREADS": "2",  # each has a stack of 8 MB
    }
    command = [sys.executable, "-c", READER, str(folder), shuffle, str(limit)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    finally:
        (folder / name).unlink()
    assert done.returncode == 0, done.stderr
    seen, total, growth = map(int, done.stdout.split())
    assert (seen, total) == (rows, rows * (rows - 1) // 2)
    assert growth <= limit, growth


def task(folder: Path, shuffle: Any, **fields: Any) -> mh.Task:
    given = {
        "model": lambda: nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)).double(),
        "loss": lambda model, batch: nn.functional.cross_entropy(model(batch["v"] / 58), batch["x"] % 2),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "train_data": mh.shards(folder, shuffle=shuffle),
    }
    return mh.Task(**{**given, "batch_size": 8, "epochs": 3, "seed": 5, **fields})


def test_two_workers_train_as_one_at_their_own_pace_and_after_a_resume(tmp_path: Path, local: Local) -> None:
    """CASE 2, CASE 19: and every row once an epoch, also where another number of workers ends one that was begun."""
    folder = tmp_path / "rows"
    write(folder, "parquet", [17, 1, 0, 40])
    given = task(folder, "blocks:3")
    one, two = (mh.train(given, engine=engine, workers=size) for engine, size in (("sim", 1), (local, 2)))
    part = mh.train(given.with_fields(max_steps=11), engine="sim", workers=2, run_dir=tmp_path / "run")
    assert part.steps == 11  # of 8 an epoch
    rest = mh.train(given, engine="sim", workers=1, run_dir=tmp_path / "run", resume=True)
    for run in (two, rest):
        assert run.steps == one.steps == 24
        assert float((one.parameters - run.parameters).abs().max()) < 1e-10
        assert run.rows["total"] == one.rows["total"] == 3 * 58
        assert run.rows["unused"] == 0
    assert [row["loss"] for row in two.history] == pytest.approx([row["loss"] for row in one.history], abs=1e-10)
    leased = mh.train(given, engine="sim", workers=2, strategy="downpour")
    assert leased.rows["total"] == sum(leased.rows["workers"]) == 3 * 58


@pytest.mark.usefixtures("nothing_starts")
def test_files_that_cannot_be_read_are_refused_before_anything_starts(tmp_path: Path) -> None:
    refused("no file or folder", lambda: mh.train(task(tmp_path / "none", None), workers=2))
