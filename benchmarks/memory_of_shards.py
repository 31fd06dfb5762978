"""Memory of workers that train on shards of four times the limit of their memory: on one machine, and on two hosts of loopback.

    python benchmarks/memory_of_shards.py [--size 1.2GB] [--limit 300MB | --limit none] [--formats parquet,tar] [--json FILE]

Parquet (rows of 10 KB, row groups of 20 MB) and a tar (rows of 100 KB) of `--size` each train one epoch of a linear model, in the default
order ("blocks:16"), and with shuffle=True from the host's cache. Each run has a driver of its own. The system refuses a worker more than
`--limit` of data beyond what it had before its first batch (RLIMIT_DATA, to which the stacks of threads belong). Arrow then allocates by
the system's malloc, since its own allocator reserves a gigabyte that it may never touch; with `--limit none` it has its own, as users have it.

The table has the growth of resident memory that is not of files (RssAnon, the most after any step), of the worker where it is the highest,
and with shuffle=True the blocks of the data, how many were decoded by all hosts, and the files of the cache that the workers of each host
map: together, and each one. The cache holds one file a block.

A "host" is a `manyhands join` on loopback with a cache folder of its own (MANYHANDS_CACHE). Two hosts of one machine that share a folder
would share its files, too.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import resource
import subprocess
import sys
import tarfile
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

import manyhands as mh
from manyhands import units
from manyhands.engines.hosts.engine import Hosts
from manyhands.evidence.text_table import text_table
from manyhands.process_memory import resident

ADDRESS = re.compile(r"manyhands join (\S+) --workers (\d+)")
PLACES = (("local", 1), ("local", 2), ("local", 4), ("hosts", 2), ("hosts", 4))
OF_A_LIMIT = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "ARROW_IO_THREADS": "2",  # each has a stack of 8 MB
}
MB = 1_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1.2GB", help="of the files of a format")
    parser.add_argument("--limit", help="of a worker's growth, or none; default: a quarter of the size")
    parser.add_argument("--formats", default="parquet,tar")
    parser.add_argument("--json", type=Path, help="write the numbers to this file, too")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.run:
        print(json.dumps(_run(**json.loads(asked.run))))
        return
    size = units.read_bytes(asked.size, "--size")
    limit: int | None = size // 4
    if asked.limit:
        limit = None if asked.limit == "none" else units.read_bytes(asked.limit, "--limit")
    print(f"{units.size(size)} a format, a worker may grow by {'any size' if limit is None else units.size(limit)}")
    found = []
    for kind in asked.formats.split(","):
        with tempfile.TemporaryDirectory(prefix="manyhands-memory-") as folder:
            rows = WRITERS[kind](Path(folder), size)
            for shuffle in ("blocks:16", True):
                for engine, workers in PLACES:
                    given = {"rows": folder, "kind": kind, "shuffle": shuffle, "engine": engine, "workers": workers}
                    one = _of_its_own({**given, "limit": limit})
                    assert one["rows"] == rows, f"{one['rows']} rows were trained, not {rows}"
                    found.append({**given, **one})
                    print(".", end="", flush=True)
    print()
    print(_table(found))
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=2) + "\n")


def _table(found: list[dict[str, Any]]) -> str:
    mapped = [one["shuffle"] is True for one in found]
    columns = {
        "format": [one["kind"] for one in found],
        "shuffle": [str(one["shuffle"]) for one in found],
        "engine": [one["engine"] for one in found],
        "workers": [str(one["workers"]) for one in found],
        "growth": [units.size(max(worker["growth"] for worker in one["reports"])) for one in found],
        "rows/s": [units.number(one["rows_per_s"]) for one in found],
        "blocks": [str(one["blocks"]) if there else "–" for one, there in zip(found, mapped, strict=True)],
        "decoded": [str(one["input"]["misses"]) if there else "–" for one, there in zip(found, mapped, strict=True)],
        "mapped by each host (by its workers)": [
            _mapped(one) if there else "–" for one, there in zip(found, mapped, strict=True)
        ],
    }
    return text_table(columns, 140)


def _mapped(one: dict[str, Any]) -> str:
    """For each host the files that its workers map together, and each alone."""
    hosts: dict[str, list[set[str]]] = {}
    for worker in one["reports"]:
        hosts.setdefault(worker["host"], []).append(set(worker["mapped"]))
    return "   ".join(
        f"{len(set.union(*own))} ({', '.join(str(len(files)) for files in own)})" for _, own in sorted(hosts.items())
    )


# -- one run ---------------------------------------------------------------------------------------------------------------


def _of_its_own(given: dict[str, Any]) -> dict[str, Any]:
    """What a run says that is driven by a process of its own: memory that an earlier one freed is not there for it."""
    done = subprocess.run(
        [sys.executable, __file__, "--run", json.dumps(given)],
        env={**os.environ, **({} if given["limit"] is None else OF_A_LIMIT)},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{given} failed:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _run(rows: str, kind: str, shuffle: Any, engine: str, workers: int, limit: int | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="manyhands-memory-") as folder:
        os.environ |= {"MANYHANDS_CACHE": f"{folder}/cache-0", "MANYHANDS_CREDENTIALS": f"{folder}/run.pem"}
        reports = Path(folder) / "reports"
        reports.mkdir()
        worker = Watched(reports, limit, SHAPES[kind])
        task = mh.Task(
            model=worker.model,
            optimizer=worker.optimizer,
            loss=worker.loss,
            train_data=mh.shards(rows, shuffle=shuffle),
            batch_size=64,
        )
        options = {"workers": workers, "threads_per_worker": 1, "callbacks": []}
        if engine == "local":
            run = mh.train(task, engine="local", **options)
        else:
            run = _on_two_hosts(task, folder, **options)
        blocks = len(list(Path(folder, "cache-0").glob("*.arrow")))
        found = [json.loads(path.read_text()) for path in reports.iterdir()]
        assert len(found) == workers
        assert max(one["seen"] for one in found) > 0
        speed = run.rows["total"] / sum(run.timing.values())
        return {"rows": run.rows["total"], "rows_per_s": speed, "reports": found, "blocks": blocks, "input": run.input}


def _on_two_hosts(task: mh.Task, folder: str, workers: int, **options: Any) -> mh.Run:
    """Half of the workers here, half of them by `manyhands join` in a process beside this one."""
    engine, joined = Hosts(local_workers=workers // 2), []

    def say(text: str) -> None:
        if (found := ADDRESS.search(text)) and not joined:
            command = [sys.executable, "-m", "manyhands", "join", found[1], "--workers", str(workers - workers // 2)]
            environment = {**os.environ, "MANYHANDS_CACHE": f"{folder}/cache-1"}
            joined.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))

    engine.announcer.say = say
    try:
        return mh.train(task, engine=engine, workers=workers, **options)
    finally:
        for one in joined:
            one.wait(60)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of the rows of a format."""

    inputs: str
    target: str
    width: int


class Watched:
    """A program that watches the memory of the worker that it runs in."""

    def __init__(self, folder: Path, limit: int | None, shape: Shape) -> None:
        self._folder, self._limit, self._shape = folder, limit, shape
        self._before = self._most = self._seen = 0
        self._mapped: set[str] = set()

    def model(self) -> nn.Module:
        return nn.Linear(self._shape.width, 1)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """On a worker, before its first batch."""
        made = torch.optim.SGD(model.parameters(), lr=1e-6)  # the first one of a process imports 70 MB of torch
        threading.stack_size(1 << 20)  # stacks count as data
        self._before = resident(name="RssAnon")
        if self._limit is not None:
            _, most = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (resident(name="VmData") + self._limit, most))
        return made

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self._watch()
        return (model(batch[self._shape.inputs])[:, 0] - batch[self._shape.target] % 10).square().mean()

    def _watch(self) -> None:
        self._seen += 1
        self._most = max(self._most, resident(name="RssAnon") - self._before)
        self._mapped |= _mapped_files()
        told = {
            "host": Path(os.environ["MANYHANDS_CACHE"]).name,
            "growth": self._most,
            "mapped": sorted(self._mapped),
            "seen": self._seen,
        }
        (self._folder / f"{os.getpid()}.json").write_text(json.dumps(told))


def _mapped_files() -> set[str]:
    """Device and inode of each file of a host's cache that this process maps."""
    lines = (line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "/cache-" in line)
    return {f"{device} {inode}" for _, _, _, device, inode, *_ in lines}


# -- files -----------------------------------------------------------------------------------------------------------------


def _parquet(folder: Path, size: int) -> int:
    """Rows of 10 KB in row groups of 20 MB, four files."""
    width = SHAPES["parquet"].width
    schema = pa.schema([("x", pa.int64()), ("v", pa.list_(pa.float32(), width))])
    draw, group, rows = np.random.default_rng(0), 2000, 0
    for i in range(4):
        with pq.ParquetWriter(folder / f"{i}.parquet", schema, compression="none", use_dictionary=False) as writer:
            for _ in range(round(size / 4 / (group * 10_008))):
                values = pa.array(draw.random(group * width, dtype=np.float32))
                x = pa.array(np.arange(rows, rows + group))
                table = pa.table([x, pa.FixedSizeListArray.from_arrays(values, width)], schema=schema)
                writer.write_table(table, group)
                rows += group
    return rows


def _tar(folder: Path, size: int) -> int:
    """Rows of 100 KB, four files."""
    draw, number = np.random.default_rng(0), 0
    for i in range(4):
        with tarfile.open(folder / f"{i}.tar", "w") as archive:
            for _ in range(size // (4 * 100_000)):
                file = io.BytesIO()
                np.save(file, draw.random(SHAPES["tar"].width, dtype=np.float32))
                for suffix, data in (("npy", file.getvalue()), ("cls", b"%d" % number)):
                    member = tarfile.TarInfo(f"{number:07}.{suffix}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
                number += 1
    return number


WRITERS = {"parquet": _parquet, "tar": _tar}
SHAPES = {
    "parquet": Shape(inputs="v", target="x", width=2500),
    "tar": Shape(inputs="npy", target="cls", width=24_500),
}

if __name__ == "__main__":
    main()
