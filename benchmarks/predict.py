"""Predictions of many rows by several workers, beside one plain PyTorch process that makes the same batches.

    python benchmarks/predict.py [--rows 1000000] [--workers 1 2 4] [--threads 1 2] [--hidden 512] [--batch-size 256] [--blocks 5] [--json FILE]

An MLP (64 → H → H → 10, float32) on rows of a .npy file. In each block every variant runs once, in an order that
rotates, each in a process of its own: the plain loop with one thread and with one for each core, once with its outputs in
memory and once written into a Parquet file, and `mh.predict` likewise, with one thread a worker and its fork server warm.
Printed are medians of seconds, of the ratio of the block's plain loop to them, of the ratio of their CPU time (all
processes together: what is left of the workers' speed when other programs use the cores, too), and the driver's peak of
memory beyond what it had before; a plain loop's has the pages of the mapped .npy file in it. All outputs are compared with
the plain loop's, row by row.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import facts
from torch import Tensor, nn

WIDTH, OUTPUTS = 64, 10


@dataclass(frozen=True)
class Variant:
    """One way to predict: workers=0 is the plain loop, with so many threads."""

    workers: int
    threads: int
    to_file: bool

    @property
    def name(self) -> str:
        who = f"{self.workers} workers" if self.workers else f"plain, {self.threads} threads"
        return f"{who.replace('1 workers', '1 worker').replace('1 threads', '1 thread')}, {'file' if self.to_file else 'memory'}"


def model(hidden: int = 512) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(WIDTH, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, OUTPUTS))
    ).eval()


def plain(own: nn.Module, path: Path, batch_size: int, output: Path | None) -> Tensor | None:
    """The loop that anybody writes."""
    rows, found = np.load(path, mmap_mode="r"), list[Tensor]()
    writer = None
    with torch.no_grad():
        for start in range(0, len(rows), batch_size):
            found.append(own(torch.from_numpy(np.array(rows[start : start + batch_size]))))
            if output is not None and (len(found) * batch_size >= 1 << 17 or start + batch_size >= len(rows)):
                writer = written(torch.cat(found), output, writer)
                found = []
    if writer is not None:
        writer.close()
    return torch.cat(found) if output is None else None


def written(rows: Tensor, output: Path, writer: Any) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    column = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1).numpy()), OUTPUTS)
    table = pa.table({"prediction": column})
    writer = writer or pq.ParquetWriter(output, table.schema, use_dictionary=False)
    writer.write_table(table)
    return writer


@dataclass
class Counted:
    """The model, and how much CPU time each worker has had, in a file of its own."""

    folder: Path

    def __call__(self, own: nn.Module, batch: Tensor) -> Tensor:
        outputs: Tensor = own(batch)
        if os.getpid() not in _files:
            _files[os.getpid()] = os.open(self.folder / str(os.getpid()), os.O_CREAT | os.O_WRONLY)
        os.pwrite(_files[os.getpid()], f"{time.process_time():20.6f}".encode(), 0)
        return outputs

    def seconds(self) -> float:
        return sum(float(path.read_text()) for path in self.folder.iterdir())


_files: dict[int, int] = {}


def one(variant: Variant, path: Path, batch_size: int, reference: Path, hidden: int) -> dict[str, float]:
    """In a process of its own: seconds and peak memory; the outputs are compared with the reference, or become it."""
    own = model(hidden)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        output = Path(folder) / "out.parquet" if variant.to_file else None
        if variant.workers == 0:
            torch.set_num_threads(variant.threads)
            with torch.no_grad():
                own(torch.zeros(batch_size, WIDTH))
            before, start, cpu = reset_peak(), time.perf_counter(), time.process_time()
            found: Any = plain(own, path, batch_size, output)
            seconds, cpu, after = time.perf_counter() - start, time.process_time() - cpu, peak()
        else:
            import manyhands as mh

            counted = Path(folder) / "cpu"
            counted.mkdir()
            function = Counted(counted)
            with mh.Local(apart=True) as engine:
                options = {"workers": variant.workers, "engine": engine, "threads_per_worker": variant.threads}
                mh.predict(own, torch.zeros(1000, WIDTH), output=output, **options)
                before, start, cpu = reset_peak(), time.perf_counter(), time.process_time()
                found = mh.predict(own, path, function=function, batch_size=batch_size, output=output, **options)
                seconds, after = time.perf_counter() - start, peak()
                cpu = time.process_time() - cpu + function.seconds()
        if output is not None:
            import pyarrow.parquet as pq

            column = pq.read_table(output)["prediction"].combine_chunks()
            found = torch.from_numpy(column.flatten().to_numpy().copy()).view(-1, OUTPUTS)
        if reference.exists():
            same = float(torch.equal(found, torch.from_numpy(np.load(reference))))
        else:
            np.save(reference, found.numpy())
            same = 1.0
    return {"seconds": seconds, "cpu": cpu, "memory": after - before, "same": same}


def reset_peak() -> int:
    """From now on `peak` counts; the bytes that this process has."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    """The most bytes that this process had."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--threads", type=int, nargs="+", help="of the plain loop, 1 first; default: 1 and all cores")
    parser.add_argument("--hidden", type=int, default=512, help="width of the model")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=5, help="in which each variant runs once")
    parser.add_argument("--json", type=Path, help="write all blocks here")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a variant, in a process of its own
    arguments = parser.parse_args()
    if arguments.one:
        given = json.loads(arguments.one)
        variant, paths = Variant(**given["variant"]), (Path(given["path"]), Path(given["reference"]))
        print(json.dumps(one(variant, paths[0], arguments.batch_size, paths[1], arguments.hidden)))
        return
    machine, cores = facts(), len(os.sched_getaffinity(0))
    threads = arguments.threads or ([1] if cores == 1 else [1, cores])
    variants = [Variant(0, count, to_file) for to_file in (False, True) for count in threads]
    variants += [Variant(workers, 1, to_file) for to_file in (False, True) for workers in arguments.workers]
    blocks: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.npy"
        np.save(path, np.random.default_rng(0).standard_normal((arguments.rows, WIDTH), dtype=np.float32))
        reference = Path(folder) / "reference.npy"
        run(Variant(0, 1, False), path, arguments, reference)  # which writes it
        for block in range(arguments.blocks):
            order = [variants[(i + block) % len(variants)] for i in range(len(variants))]
            blocks.append({v.name: run(v, path, arguments, reference) for v in order})
            print(f"block {block + 1}: load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    print(
        f"\n{'':26}{'seconds':>9}{'plain, 1 thread /':>19}{'plain, all /':>14}{'CPU, plain /':>14}{'memory':>10}  rows equal"
    )
    for variant in variants:
        own = [block[variant.name] for block in blocks]
        ratios = [
            statistics.median(
                block[Variant(0, count, variant.to_file).name]["seconds"] / block[variant.name]["seconds"]
                for block in blocks
            )
            for count in (1, threads[-1])
        ]
        seconds = statistics.median(run["seconds"] for run in own)
        alone = Variant(0, 1, variant.to_file).name
        cpu = statistics.median(block[alone]["cpu"] / block[variant.name]["cpu"] for block in blocks)
        memory = max(run["memory"] for run in own) / 1e6
        same = "all" if all(run["same"] for run in own) else "as far as threads allow" if not variant.workers else "NO"
        numbers = f"{seconds:9.2f}{ratios[0]:19.2f}{ratios[1]:14.2f}{cpu:14.2f}{memory:7.0f} MB"
        print(f"{variant.name:26}{numbers}  {same}")
    if arguments.json:
        written_blocks = {"machine": machine, "variants": [asdict(one) for one in variants], "blocks": blocks}
        arguments.json.write_text(json.dumps(written_blocks, indent=1) + "\n")


def run(variant: Variant, path: Path, arguments: argparse.Namespace, reference: Path) -> dict[str, float]:
    given = {"variant": asdict(variant), "path": str(path), "reference": str(reference)}
    sizes = ["--batch-size", str(arguments.batch_size), "--hidden", str(arguments.hidden)]
    command = [sys.executable, __file__, *sizes, "--one", json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{variant.name} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
