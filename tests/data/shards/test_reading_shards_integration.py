"""data/shards in processes: one writer of a host's block, memory that the data does not set, and runs of one and several workers."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from manyhands.data.shards.host_cache import HostCache
from manyhands.engines.local.engine import Local
from manyhands.errors import BadInput, ManyhandsError
from manyhands.events import Event
from shard_files import tar_bytes

WRITER = """
import sys
from pathlib import Path
import pyarrow as pa
from manyhands.data.shards.host_cache import HostCache

folder, log, number = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
cache = HostCache(folder)

def make():
    with log.open("a") as file:
        file.write(f"{number}\\n")
    for i in range(20):
        if i == 10:
            print("half", flush=True)
            if sys.argv[4] == "stops":
                sys.stdin.readline()
        yield pa.record_batch({"x": pa.array([number] * 10_000)})

print("ready", flush=True)
sys.stdin.readline()
batches, was_there = cache.block("k", make)
print(sum(batch.num_rows for batch in batches), batches[0].column("x")[0], batches[-1].column("x")[0], was_there, flush=True)
"""


@contextmanager
def writers(tmp_path: Path, *ends: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that ask for the same block of a cache; each begins with a line from here."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / "cache"), str(tmp_path / "log"), str(number), end],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number, end in enumerate(ends)
    ]
    try:
        for one in started:
            assert one.stdout is not None
            assert one.stdout.readline() == "ready\n"
        yield started
    finally:
        for one in started:
            one.kill()
            one.communicate(timeout=10)


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_processes_that_ask_for_the_same_block_map_what_one_of_them_wrote(tmp_path: Path) -> None:
    with writers(tmp_path, "goes on", "goes on", "goes on") as processes:
        for one in processes:
            go(one)
        said = [one.communicate(timeout=60)[0].splitlines() for one in processes]
    made = (tmp_path / "log").read_text().split()
    assert len(made) == 1
    assert sorted(lines[-1] for lines in said) == [
        f"200000 {made[0]} {made[0]} {there}" for there in (False, True, True)
    ]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["k.arrow"]


def test_who_waits_for_a_writer_that_is_killed_writes_the_block(tmp_path: Path) -> None:
    """What it left half written is taken over, by one of those who wait."""
    with writers(tmp_path, "stops", "goes on", "goes on") as (first, *others):
        go(first)
        assert line(first) == "half"
        for one in others:
            go(one)
        assert (tmp_path / "cache" / "k.part").stat().st_size > 0
        first.send_signal(signal.SIGKILL)
        said = [one.communicate(timeout=60)[0].splitlines() for one in others]
    made = (tmp_path / "log").read_text().split()
    assert made[0] == "0"
    assert len(made) == 2
    assert sorted(lines[-1] for lines in said) == [f"200000 {made[1]} {made[1]} {there}" for there in (False, True)]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["k.arrow"]


def test_a_killed_writer_leaves_a_file_that_a_later_run_takes(tmp_path: Path) -> None:
    with writers(tmp_path, "stops") as (process,):
        go(process)
        assert line(process) == "half"
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["k.part"]
    found, was_there = HostCache(tmp_path / "cache").block("k", lambda: [pa.record_batch({"x": [7]})])
    assert (found[0].to_pydict(), was_there) == ({"x": [7]}, False)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["k.arrow"]


def test_a_disk_that_takes_no_more_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    """Here by a limit of the system on the size of a file: writing fails as it does on a full disk."""
    script = """
import resource, signal, sys
from manyhands.data.shards.source import shards
from manyhands.data.open_source import open_source
from manyhands.data.feed import Feed
from manyhands.errors import ManyhandsError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
feed = Feed(open_source(shards(sys.argv[1], cache="1MB")), batch_size=10)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    list(feed.epoch(0))
except ManyhandsError as error:
    print(error)
"""
    pq.write_table(pa.table({"x": range(10_000)}), tmp_path / "a.parquet")
    environment = {**os.environ, "MANYHANDS_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "a.parquet")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "cannot be used (File too large): give a smaller cache=, or another folder" in done.stdout, done.stderr
    assert list((tmp_path / "cache").iterdir()) == []


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
    total += int(part.batch["cls" if "cls" in part.batch else "x"].sum())
    rows += part.rows
    most = max(most, now("RssAnon"))
print(rows, total, most - before)
"""
MB = 1_000_000
FLOATS = 250_000  # of 1 MB


def parquet_file(folder: Path, size: int, group: int) -> int:
    """Of `size` MB, rows of 10 KB, row groups of `group` MB."""
    schema = pa.schema([("x", pa.int64()), ("v", pa.list_(pa.float32()))])
    drawn = np.random.default_rng(0)
    with pq.ParquetWriter(folder / "a.parquet", schema, compression="none", use_dictionary=False) as writer:
        for first in range(0, size * 100, group * 100):
            rows = min(group, size - first // 100) * 100
            values = drawn.random(rows * 2500, dtype=np.float32)
            lists = pa.ListArray.from_arrays(np.arange(rows + 1, dtype=np.int32) * 2500, pa.array(values))
            writer.write_table(pa.table([pa.array(np.arange(first, first + rows)), lists], schema=schema), group * 100)
    return size * 100


def tar_file(folder: Path, size: int, group: int) -> int:
    """Of `size` MB, rows of 100 KB."""
    drawn = np.random.default_rng(0)
    with tarfile.open(folder / "a.tar", "w") as archive:
        for i in range(size * 10):
            for suffix, data in (("bin", drawn.bytes(98_000)), ("cls", b"%d" % i)):
                info = tarfile.TarInfo(f"{i:07}.{suffix}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return size * 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "group", "shuffle", "limit"),
    [
        (parquet_file, 64, "blocks:4", 200 * MB),
        (parquet_file, 640, "blocks:16", 160 * MB),
        (parquet_file, 8, "blocks:16", 320 * MB),
        (tar_file, 0, "blocks:4", 200 * MB),
    ],
)
def test_an_epoch_of_four_times_the_memory(
    tmp_path: Path, write: Callable[[Path, int, int], int], group: int, shuffle: str, limit: int
) -> None:
    """Whatever the row groups are like; the system refuses a reader more than the limit, stacks of its threads among it."""
    folder = tmp_path / "data"
    folder.mkdir()
    rows = write(folder, 4 * limit // MB, group)
    environment = {
        **os.environ,
        "MANYHANDS_CACHE": str(tmp_path / "cache"),
        "ARROW_DEFAULT_MEMORY_POOL": "system",  # others reserve a gigabyte that they may never touch
        "ARROW_IO_THREADS": "2",  # each has a stack of 8 MB
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", READER, str(folder), shuffle, str(limit)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=110,
        )
    finally:
        for path in folder.iterdir():
            path.unlink()
    assert done.returncode == 0, done.stderr
    seen, total, growth = map(int, done.stdout.split())
    assert (seen, total) == (rows, rows * (rows - 1) // 2)
    assert growth <= min(limit, 256 * MB), growth


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


def train(given: mh.Task, local: Local, workers: int, **options: Any) -> mh.Run:
    return mh.train(given, engine=local, workers=workers, threads_per_worker=1, **options)


def losses(run: mh.Run) -> list[float]:
    return [row["loss"] for row in run.history]


@pytest.mark.parametrize(("write", "shuffle"), [(parquet_rows, "blocks:3"), (tar_rows, "blocks:3"), (tar_rows, True)])
def test_two_workers_train_as_one(tmp_path: Path, write: Callable[[Path], None], shuffle: Any, local: Local) -> None:
    """CASE 2: and every row once an epoch."""
    write(tmp_path / "rows")
    one, two = (train(task(tmp_path / "rows", shuffle), local, workers) for workers in (1, 2))
    assert losses(two) == pytest.approx(losses(one), abs=1e-10)
    assert float((one.parameters - two.parameters).abs().max()) < 1e-10
    assert one.rows["total"] == two.rows["total"] == sum(two.rows["workers"]) == 3 * 58
    assert one.rows["unused"] == two.rows["unused"] == 0


@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2)])
def test_a_run_goes_on_in_the_middle_of_an_epoch_with_another_number_of_workers(
    tmp_path: Path, first: int, then: int, local: Local
) -> None:
    """CASE 19: what remained of the epoch comes once."""
    parquet_rows(tmp_path / "rows")
    given = task(tmp_path / "rows", "blocks:3")
    whole = train(given, local, 1)
    part = train(task(tmp_path / "rows", "blocks:3", max_steps=11), local, first, run_dir=tmp_path / "run")
    assert part.steps == 11  # of 8 an epoch
    rest = train(given, local, then, run_dir=tmp_path / "run", resume=True)
    assert rest.steps == whole.steps == 24
    assert float((rest.parameters - whole.parameters).abs().max()) < 1e-10
    assert rest.rows["total"] == whole.rows["total"]


def test_at_their_own_pace_workers_train_each_row_once(tmp_path: Path, local: Local) -> None:
    parquet_rows(tmp_path / "rows")
    run = train(task(tmp_path / "rows", "blocks:3"), local, 2, strategy="downpour")
    assert run.rows["total"] == sum(run.rows["workers"]) == 3 * 58


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


def test_a_file_that_is_deleted_while_a_run_trains_is_named(tmp_path: Path, local: Local) -> None:
    parquet_rows(tmp_path / "rows")

    class Deletes(Callback):
        def on_epoch(self, event: Event) -> None:
            (tmp_path / "rows" / "3.parquet").unlink()

    with pytest.raises(ManyhandsError, match=r"3\.parquet does not exist on "):
        train(task(tmp_path / "rows", "blocks:3"), local, 2, callbacks=[Deletes()])
