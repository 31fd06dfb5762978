"""data/shards in processes: one writer of a host's block, memory that the data does not set, and runs of one and several workers."""

from __future__ import annotations

import io
import os
import resource
import signal
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
from manyhands.data.feed import Feed
from manyhands.data.open_source import open_source
from manyhands.engines.local.engine import Local
from manyhands.errors import BadInput, ManyhandsError
from manyhands.events import Event
from shard_files import tar_bytes

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


def test_a_disk_that_takes_no_more_is_named_and_nothing_is_left(tmp_path: Path, cache_folder: Path) -> None:
    """Here by a limit of the system on the size of a file: writing fails as it does on a full disk."""
    pq.write_table(pa.table({"x": range(10_000)}), tmp_path / "a.parquet")
    feed = Feed(open_source(mh.shards(tmp_path / "a.parquet", cache="1MB")), batch_size=10)
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(
            ManyhandsError, match=r"cannot be used \(File too large\): give a smaller cache=, or another"
        ):
            list(feed.epoch(0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(cache_folder.iterdir()) == []


# Memory

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
        ("a.parquet", {"row_group_bytes": "64MB"}, "blocks:4"),
        ("a.parquet", {"row_group_bytes": "320MB"}, "blocks:16"),
        ("a.tar", {}, "blocks:4"),
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


# Runs


def parquet_rows(folder: Path) -> None:
    folder.mkdir()
    drawn = torch.Generator().manual_seed(0)
    for i, rows in enumerate([17, 1, 0, 40]):
        x, y = torch.rand(rows, 3, generator=drawn), torch.randint(2, (rows,), generator=drawn)
        schema = pa.schema([("v", pa.list_(pa.float64(), 3)), ("y", pa.int64())])
        table = pa.table([pa.array(x.tolist(), schema.field(0).type), pa.array(y.tolist(), pa.int64())], schema=schema)
        pq.write_table(table, folder / f"{i}.parquet", row_group_size=9)


def tar_rows(folder: Path) -> None:
    parquet_rows(folder)
    for path in sorted(folder.iterdir()):
        members: dict[str, bytes] = {}
        for i, row in enumerate(pq.read_table(path).to_pylist()):
            made = io.BytesIO()
            np.save(made, np.array(row["v"]))
            members |= {f"{i:03}.v.npy": made.getvalue(), f"{i:03}.y.cls": b"%d" % row["y"]}
        path.with_suffix(".tar").write_bytes(tar_bytes(members))
        path.unlink()


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    x, y = (next(column for name, column in batch.items() if name.startswith(letter)) for letter in "vy")
    return nn.functional.cross_entropy(model(x.double()), y)


def task(folder: Path, shuffle: Any, **fields: Any) -> mh.Task:
    return mh.Task(
        model=lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double(),
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        train_data=mh.shards(folder, shuffle=shuffle),
        **{"batch_size": 8, "epochs": 3, "seed": 5, **fields},
    )


def train(given: mh.Task, engine: Any, workers: int, **options: Any) -> mh.Run:
    return mh.train(given, engine=engine, workers=workers, **options)


def test_two_workers_train_as_one_at_their_own_pace_and_after_a_resume(tmp_path: Path, local: Local) -> None:
    """CASE 2, CASE 19: and every row once an epoch, also where another number of workers ends one that was begun."""
    folder = tmp_path / "rows"
    parquet_rows(folder)
    given = task(folder, "blocks:3")
    one, two = train(given, "sim", 1), train(given, local, 2)
    part = train(task(folder, "blocks:3", max_steps=11), "sim", 2, run_dir=tmp_path / "run")
    assert part.steps == 11  # of 8 an epoch
    rest = train(given, "sim", 1, run_dir=tmp_path / "run", resume=True)
    for run in (two, rest):
        assert run.steps == one.steps == 24
        assert float((one.parameters - run.parameters).abs().max()) < 1e-10
        assert run.rows["total"] == one.rows["total"] == 3 * 58
        assert run.rows["unused"] == 0
    assert [row["loss"] for row in two.history] == pytest.approx([row["loss"] for row in one.history], abs=1e-10)
    leased = train(given, local, 2, strategy="downpour")
    assert leased.rows["total"] == sum(leased.rows["workers"]) == 3 * 58


@pytest.mark.parametrize("shuffle", ["blocks:3", True])
def test_two_workers_train_members_of_tars_as_one(tmp_path: Path, shuffle: Any) -> None:
    tar_rows(tmp_path / "rows")
    one, two = (train(task(tmp_path / "rows", shuffle), "sim", workers) for workers in (1, 2))
    assert float((one.parameters - two.parameters).abs().max()) < 1e-10
    assert one.rows["total"] == two.rows["total"] == sum(two.rows["workers"]) == 3 * 58


@pytest.mark.usefixtures("nothing_starts")
def test_files_that_cannot_be_read_are_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    for name, text in (("a.csv", "v,y\n1,2\n"), ("b.csv", "v\n1\n")):
        (tmp_path / "rows" / name).write_text(text)
    for given, message in [
        (task(tmp_path / "rows", None), r"column 'y' is int64 in .*a\.csv, and .*b\.csv has v"),
        (task(tmp_path / "none", None), "no file or folder"),
    ]:
        with pytest.raises(BadInput, match=message) as error:
            mh.train(given, workers=2)
        assert error.value.exit_code == 2


def test_what_two_workers_meet_while_they_train_is_named(tmp_path: Path, local: Local) -> None:
    """A column that the loss asks for, a stream that has too few rows, and a file that is deleted."""
    parquet_rows(folder := tmp_path / "rows")
    directory = tmp_path / "run"
    lacks = task(folder, None).with_fields(
        train_data=mh.shards(folder, columns=["v"]), loss=lambda m, batch: batch["y"]
    )
    with pytest.raises(BadInput, match="column 'y'") as error:
        train(lacks, local, 2, run_dir=directory)
    assert error.value.exit_code == 2
    assert not directory.exists()
    short = task(folder, None, epochs=1, max_steps=100).with_fields(train_data=mh.shards(folder, counted=False))
    with pytest.raises(BadInput, match="max_steps=100 .* steps in 1 epoch") as error:
        train(short, local, 2, run_dir=directory)
    assert error.value.exit_code == 2
    (saved,) = (path.name for path in (directory / "checkpoints").iterdir())
    assert f"{int(saved.removeprefix('step-'))} steps" in str(error.value)

    class Deletes(Callback):
        def on_epoch(self, event: Event) -> None:
            (folder / "3.parquet").unlink()

    with pytest.raises(ManyhandsError, match=r"3\.parquet does not exist on "):
        train(task(folder, "blocks:3"), local, 2, callbacks=[Deletes()])


@pytest.mark.slow
def test_the_command_ends_with_one_message(tmp_path: Path) -> None:
    parquet_rows(tmp_path / "rows")
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "manyhands", "train", "program.py:lacks", "-n", "2", "--run-dir", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    lines = done.stderr.splitlines()
    assert [line for line in lines if "column 'y'" in line] == [one for one in lines if one.startswith("manyhands: ")][
        -1:
    ]
    assert not (tmp_path / "run").exists()


PROGRAM = """
import torch
import manyhands as mh


def lacks():
    return mh.Task(
        model=lambda: torch.nn.Linear(3, 1), loss=lambda model, batch: (model(batch["v"].float()) - batch["y"]).mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        train_data=mh.shards("rows", columns=["v"]), batch_size=4,
    )
"""
