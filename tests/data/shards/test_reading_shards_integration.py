"""data/shards in processes: one writer of a host's block, memory that the data does not set, and runs of one and several workers."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.callbacks.base import Callback
from manyhands.engines.local.engine import Local
from manyhands.errors import ManyhandsError
from manyhands.events import Event
from refusals import refused

WRITER = """
import sys
from pathlib import Path
import pyarrow as pa
from manyhands.data.shards.host_cache import HostCache

folder, number, stops = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "stops"

def make():
    with (folder / "log").open("a") as file:
        file.write(f"{number}\\n")
    for i in range(20):
        if i == 10 and stops:
            print("half", flush=True)
            sys.stdin.readline()
        yield pa.record_batch({"x": pa.array([number] * 10_000)})

print("ready", flush=True)
sys.stdin.readline()
batches, was_there = HostCache(folder / "cache").block("k", make)
print(sum(batch.num_rows for batch in batches), batches[0].column("x")[0], batches[-1].column("x")[0], was_there)
"""


@pytest.mark.slow
def test_who_waits_for_a_writer_that_is_killed_writes_the_block_and_all_others_map_it(tmp_path: Path) -> None:
    """What it left half written is taken over, by one of those who wait."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(number), end], **pipes)
        for number, end in enumerate(["stops", "goes on", "goes on"])
    ]
    try:
        assert [one.stdout.readline() for one in started] == ["ready\n"] * 3
        for one in started:
            one.stdin.write("\n")
            one.stdin.flush()
            if one is started[0]:
                assert one.stdout.readline() == "half\n"
        assert (tmp_path / "cache" / "k.part").stat().st_size > 0
        started[0].kill()
        said = [one.communicate(timeout=60)[0].strip() for one in started[1:]]
    finally:
        for one in started:
            one.kill()
            one.communicate(timeout=10)
    killed, writer = (tmp_path / "log").read_text().split()
    assert killed == "0"
    assert sorted(said) == [f"200000 {writer} {writer} {there}" for there in (False, True)]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["k.arrow"]


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


def parquet_rows(folder: Path) -> None:
    folder.mkdir()
    drawn = torch.Generator().manual_seed(0)
    for i, rows in enumerate([17, 1, 0, 40]):
        x, y = torch.rand(rows, 3, generator=drawn), torch.randint(2, (rows,), generator=drawn)
        schema = pa.schema([("v", pa.list_(pa.float64(), 3)), ("y", pa.int64())])
        table = pa.table([pa.array(x.tolist(), schema.field(0).type), pa.array(y.tolist(), pa.int64())], schema=schema)
        pq.write_table(table, folder / f"{i}.parquet", row_group_size=9)


def task(folder: Path, shuffle: Any, **fields: Any) -> mh.Task:
    given = {
        "model": lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double(),
        "loss": lambda model, batch: nn.functional.cross_entropy(model(batch["v"].double()), batch["y"]),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "train_data": mh.shards(folder, shuffle=shuffle),
    }
    return mh.Task(**{**given, "batch_size": 8, "epochs": 3, "seed": 5, **fields})


def test_two_workers_train_as_one_at_their_own_pace_and_after_a_resume(tmp_path: Path, local: Local) -> None:
    """CASE 2, CASE 19: and every row once an epoch, also where another number of workers ends one that was begun."""
    folder = tmp_path / "rows"
    parquet_rows(folder)
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


def test_what_two_workers_meet_while_they_train_is_named(tmp_path: Path, local: Local) -> None:
    """A column that the loss asks for, a stream that has too few rows, and a file that is deleted."""
    parquet_rows(folder := tmp_path / "rows")
    lacks = task(folder, None, train_data=mh.shards(folder, columns=["v"]), loss=lambda m, batch: batch["y"])
    kept: dict[str, Any] = {"workers": 2, "run_dir": tmp_path / "run"}
    error = refused("column 'y'", lambda: mh.train(lacks, engine="sim", **kept))
    assert error.exit_code == 2
    assert not (tmp_path / "run").exists()
    short = task(folder, None, epochs=1, max_steps=100, train_data=mh.shards(folder, counted=False))
    error = refused("max_steps=100 .* steps in 1 epoch", lambda: mh.train(short, engine="sim", **kept))
    (saved,) = (path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert f"{int(saved.removeprefix('step-'))} steps" in str(error)

    class Deletes(Callback):
        def on_epoch(self, event: Event) -> None:
            (folder / "3.parquet").unlink()

    with pytest.raises(ManyhandsError, match=r"3\.parquet does not exist on "):
        mh.train(task(folder, "blocks:3"), engine=local, workers=2, callbacks=[Deletes()])
