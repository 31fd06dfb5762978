"""Training on Spark beside TorchDistributor: rows/s of the same model on the same rows, on the same cluster.

    python benchmarks/spark.py [--rows 400000] [--features 64] [--epochs 5] [--blocks 3] [--json FILE]
    python benchmarks/spark.py --large             200 MB of model, 4 GB of rows, a heap of 512 MB: whether it fits, and how much the driver takes
    python benchmarks/spark.py --accuracy          every strategy on the digits: test accuracy on Spark beside local, two workers, median of 3 seeds

A cluster of two executors of one core (`local-cluster`), each worker one thread. After one round that is not counted, in every
block, in an order that rotates:

frame         manyhands, engine spark, rows from a DataFrame that reads the Parquet files
files         manyhands, engine spark, the executors read the Parquet files themselves
distributor   pyspark's TorchDistributor runs a plain DistributedDataParallel loop on gloo, each rank reads its half of the files
local         manyhands, engine local, the same files

`rows/s` is of the whole call, from the command to the trained model, start and reading included; `in the loop` of the epochs
alone. pyspark is needed: pip install 'manyhands[spark]'.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from machine import facts
from torch import nn
from torch.nn import functional as F

import manyhands as mh
from manyhands.strategies import CATALOGUE

ROWS, BATCH, WIDTH, WORKERS = 400_000, 512, 256, 2
CLASSES = 10


def net(features: int, width: int = WIDTH) -> nn.Module:
    return nn.Sequential(
        nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)
    )


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def of_frame(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def of_files(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"].float()), batch["y"].long())


def main() -> None:
    options = _options()
    machine = facts()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spark-")))
        spark = stack.enter_context(_session(folder))
        if options.large:
            found = large(spark, options)
        elif options.accuracy:
            found = {"accuracy": accuracy()}
        else:
            found = compared(spark, folder, options)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, **found}, indent=1) + "\n")


# -- the four ways ---------------------------------------------------------------------------------------------------


def compared(spark: Any, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    files = str(folder / "rows.parquet")
    columns = ", ".join(f"rand({i})" for i in range(options.features))
    table = spark.range(0, options.rows, 1, 8).selectExpr(f"array({columns}) as x", f"id % {CLASSES} as y")
    table.selectExpr("transform(x, v -> float(v)) as x", "y").write.parquet(files)
    rows = spark.read.parquet(files)
    ways: dict[str, Callable[[], dict[str, float]]] = {
        "frame": lambda: _ours(options, "spark", mh.spark.frame(rows, features="x", label="y"), of_frame),
        "files": lambda: _ours(options, "spark", mh.spark.frame(files, features="x", label="y"), of_frame),
        "distributor": lambda: _distributor(options, files),
        "local": lambda: _ours(options, "local", files, of_files),
    }
    for way in ways.values():  # JVMs compile what they do often
        way()
    blocks = []
    for block in range(options.blocks):
        order = list(ways)[block % len(ways) :] + list(ways)[: block % len(ways)]
        blocks.append({name: ways[name]() for name in order})
        for name in ways:
            print(
                f"block {block}  {name:<12} {blocks[-1][name]['rows_per_s']:>10,.0f} rows/s, {blocks[-1][name]['loop']:>10,.0f} in the loop",
                flush=True,
            )
    _show(blocks, list(ways))
    return {"rows": options.rows, "epochs": options.epochs, "blocks": blocks}


def _show(blocks: list[dict[str, Any]], ways: list[str]) -> None:
    print("\n| way | rows/s | in the loop | time over the distributor's | over files' |\n|---|---|---|---|---|")
    for name in ways:
        whole, loop = (statistics.median(b[name][key] for b in blocks) for key in ("rows_per_s", "loop"))
        ratios = [
            statistics.median(b[other]["rows_per_s"] / b[name]["rows_per_s"] for b in blocks)
            for other in ("distributor", "files")
        ]
        print(f"| {name} | {whole:,.0f} | {loop:,.0f} | {ratios[0]:.2f} | {ratios[1]:.2f} |")


def _ours(options: argparse.Namespace, engine: str, data: Any, loss: Any) -> dict[str, float]:
    begun = time.perf_counter()
    run = mh.train(
        model=_Made(options.features),
        loss=loss,
        optimizer=sgd,
        train_data=data,
        batch_size=BATCH,
        epochs=options.epochs,
        engine=engine,
        workers=WORKERS,
        threads_per_worker=1,
    )
    seconds = time.perf_counter() - begun
    assert run.rows["total"] == options.rows * options.epochs
    return {"rows_per_s": run.rows["total"] / seconds, "loop": run.rows["total"] / sum(run.timing.values())}


class _Made:
    """What makes the model; this script is not importable elsewhere, so it travels by value."""

    def __init__(self, features: int, width: int = WIDTH) -> None:
        self.features, self.width = features, width

    def __call__(self) -> nn.Module:
        return net(self.features, self.width)


def _distributor(options: argparse.Namespace, files: str) -> dict[str, float]:
    from pyspark.ml.torch.distributor import TorchDistributor

    begun = time.perf_counter()
    runner = TorchDistributor(num_processes=WORKERS, local_mode=False, use_gpu=False)
    rows, loop_s = runner.run(_plain, files, options.features, options.epochs)
    seconds = time.perf_counter() - begun
    assert rows == options.rows * options.epochs
    return {"rows_per_s": rows / seconds, "loop": rows / loop_s}


def _plain(files: str, features: int, epochs: int) -> tuple[int, float]:
    """The usual program: DDP, each rank every other file."""
    import glob
    import time as clock

    import numpy as np
    import pyarrow.parquet as pq
    import torch as t
    import torch.distributed as dist
    from torch import nn as n
    from torch.nn.parallel import DistributedDataParallel

    t.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    tables = [pq.read_table(name) for name in sorted(glob.glob(f"{files}/*.parquet"))[rank::size]]
    x = t.from_numpy(np.concatenate([table["x"].combine_chunks().flatten().to_numpy() for table in tables])).view(
        -1, features
    )
    y = t.from_numpy(np.concatenate([table["y"].to_numpy() for table in tables])).long()
    t.manual_seed(0)
    plain = n.Sequential(n.Linear(features, 256), n.ReLU(), n.Linear(256, 256), n.ReLU(), n.Linear(256, 10))
    model = DistributedDataParallel(plain)
    optimizer = t.optim.SGD(model.parameters(), lr=0.05)
    own = 512 // size
    begun = clock.perf_counter()
    for _ in range(epochs):
        order = t.randperm(len(x))
        for start in range(0, len(x), own):
            rows = order[start : start + own]
            optimizer.zero_grad()
            t.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    loop_s = clock.perf_counter() - begun
    counted = t.tensor([len(x) * epochs])
    dist.all_reduce(counted)
    dist.destroy_process_group()
    return int(counted), loop_s


# -- what fits -------------------------------------------------------------------------------------------------------


FEATURES, HASHED = 1000, 8


class Wide(nn.Module):
    """200 MB: a table of vectors, of which the first features of a row choose a few; the others count as they are."""

    def __init__(self, entries: int = 780_000, width: int = 64) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(entries, width, mode="mean")
        self.last = nn.Linear(width + FEATURES - HASHED, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = (x[:, :HASHED] * (self.table.num_embeddings - 1)).long()
        logits: torch.Tensor = self.last(torch.cat([self.table(chosen), x[:, HASHED:]], dim=1))
        return logits


def large(spark: Any, options: argparse.Namespace) -> dict[str, Any]:
    """An epoch over 4 GB of rows."""
    rows = options.rows if options.rows != ROWS else 1_000_000
    numbers = f"transform(sequence(1, {FEATURES}), i -> float((id * 7919 + i * 104729) % 10007) / 10007)"
    table = spark.range(0, rows, 1, 64).selectExpr(f"{numbers} as x", f"id % {CLASSES} as y")
    begun = time.perf_counter()
    run = mh.train(
        model=Wide,
        loss=of_frame,
        optimizer=sgd,
        train_data=mh.spark.frame(table, features="x", label="y"),
        batch_size=16_384,
        engine="spark",
        workers=WORKERS,
        threads_per_worker=1,
    )
    seconds, resident = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    assert run.rows["total"] == rows
    print(
        f"{4 * run.parameters.numel() / 1e6:,.0f} MB of parameters, {rows * FEATURES * 4 / 1e9:.1f} GB of rows, {run.steps} steps, "
        f"{seconds:.0f} s; the driver's Python held at most {resident:.2f} GB; heaps: {spark.conf.get('spark.driver.memory')} "
        f"and {spark.conf.get('spark.executor.memory')}"
    )
    return {"parameters": run.parameters.numel(), "rows": rows, "seconds": seconds, "resident_gb": resident}


# -- what is learned -------------------------------------------------------------------------------------------------


def accuracy() -> list[dict[str, Any]]:
    """Test accuracy of each strategy, in per cent: medians of three seeds."""
    print("| strategy | local | spark | difference, points |\n|---|---|---|---|")
    rows = []
    for name in (name for name in CATALOGUE if name != "solo"):
        try:
            there, here = ([_percent(name, engine, seed) for seed in range(3)] for engine in ("spark", "local"))
            row = {"strategy": name, "spark": there, "local": here}
        except mh.Unsupported as error:
            print(f"| `{name}` | – | – | {error} |", flush=True)
            continue
        rows.append(row)
        medians = statistics.median(row["local"]), statistics.median(row["spark"])
        print(f"| `{name}` | {medians[0]:.2f} | {medians[1]:.2f} | {medians[1] - medians[0]:+.2f} |", flush=True)
    return rows


def _percent(strategy: str, engine: str, seed: int) -> float:
    run = mh.train("digits", strategy=strategy, engine=engine, workers=WORKERS, seed=seed, threads_per_worker=1)
    return 100 * run.metrics["test_accuracy"]


def _session(folder: Path) -> Any:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "spark_"))
    from sessions import spark_session

    return spark_session("local-cluster[2,1,1024]", folder, java="", **{"spark.driver.memory": "512m"})


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--accuracy", action="store_true")
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    main()
