"""`manyhands estimate --engine spark` beside real runs: the memory of workers and of a whole executor.

    python benchmarks/spark_memory.py [--width 2000] [--strategies allreduce,local-sgd:period=2,dynsgd] [--json FILE]

One executor (`local-cluster[1,2,1024]`) has both workers. The task has three layers, the middle one of width² weights, Adam,
and the rows of a DataFrame. `worker` is the largest resident memory of a worker (`Run.memory_of_workers`). `executor` is the
most that all Python processes of the executor held at one time, read every 50 ms: RSS, the sum in which YARN counts
shared pages once for each process, and PSS, in which they count once, as control groups do. The estimate is without
its margin and without the JVM. pyspark is needed: pip install 'manyhands[spark]'.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import threading
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from machine import facts
from torch import nn
from torch.nn import functional as F

import manyhands as mh
from manyhands.evidence.estimate.executor_memory import executor_memory

WORKERS, FEATURES, CLASSES, ROWS, BATCH = 2, 64, 10, 4_000, 128
EXECUTOR = "CoarseGrainedExecutorBackend"


def main() -> None:
    options = _options()
    machine, rows = facts(), []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spark-memory-")))
        spark = stack.enter_context(_session(folder))
        task = task_of(spark, options.width)
        print("strategy, MB: worker estimated / measured; executor estimated / measured RSS / measured PSS")
        for strategy in options.strategies.split(","):
            rows.append(found := one(task, strategy))
            print(
                f"{strategy}: {', '.join(f'{name} {value:,.0f}' for name, value in found.items() if name != 'strategy')}"
            )
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "runs": rows}, indent=1) + "\n")


def one(task: mh.Task, strategy: str) -> dict[str, Any]:
    """MB, estimated and measured."""
    expected = executor_memory(
        task, workers=WORKERS, workers_per_executor=WORKERS, strategy=strategy, engine="spark:memory_mb=4"
    )
    left_out = ("margin", "JVM beyond its heap")
    with tempfile.TemporaryDirectory(prefix="spark-memory-") as folder, Watch() as watch:
        there = {
            "engine": "spark:memory_mb=4",
            "workers": WORKERS,
            "threads_per_worker": 1,
            "run_dir": Path(folder, "run"),
        }
        run = mh.train(task, strategy=strategy, **there)
    return {
        "strategy": strategy,
        "worker estimated": expected.worker_bytes / 1e6,
        "worker measured": max(run.memory_of_workers) / 1e6,
        "executor estimated": sum(part.total for part in expected.parts if part.name not in left_out) / 1e6,
        "executor RSS": watch.most["Rss"] / 1e6,
        "executor PSS": watch.most["Pss"] / 1e6,
    }


def task_of(spark: Any, width: int) -> mh.Task:
    numbers = f"transform(sequence(1, {FEATURES}), i -> float((id * 7919 + i * 104729) % 10007) / 10007)"
    table = spark.range(0, ROWS, 1, 8).selectExpr(f"{numbers} as x", f"id % {CLASSES} as y")
    return mh.Task(
        name="wide",
        model=lambda: nn.Sequential(
            nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)
        ),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.Adam(model.parameters()),
        train_data=mh.spark.frame(table, features="x", label="y"),
        batch_size=BATCH,
        epochs=1,
    )


@dataclass
class Watch:
    """Reads, in a thread, what the Python processes of all executors here hold together."""

    most: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # bytes, by line of smaps_rollup

    def __enter__(self) -> Watch:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.05):
            now = [held(pid) for pid in pythons()]
            for name in ("Rss", "Pss"):
                self.most[name] = max(self.most[name], sum(one.get(name, 0) for one in now))


def pythons() -> list[int]:
    """Every process below an executor's JVM."""
    below, queue = [], []
    children = defaultdict(list)
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                children[int((folder / "stat").read_text().rpartition(")")[2].split()[1])].append(int(folder.name))
                if EXECUTOR in (folder / "cmdline").read_text():
                    queue.append(int(folder.name))
            except (FileNotFoundError, ProcessLookupError):
                continue
    while queue:
        found = children[queue.pop()]
        below += found
        queue += found
    return below


def held(pid: int) -> dict[str, int]:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return {}
    return {name: 1024 * int(kb) for name, kb in re.findall(r"^(Rss|Pss):\s+(\d+) kB", text, re.MULTILINE)}


def _session(folder: Path) -> Any:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "spark_"))
    from sessions import spark_session

    return spark_session(f"local-cluster[1,{WORKERS},1024]", folder, java="", **{"spark.driver.memory": "512m"})


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2000)
    parser.add_argument("--strategies", default="allreduce,local-sgd:period=2,dynsgd")
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    main()
