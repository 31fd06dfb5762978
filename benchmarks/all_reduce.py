"""All-reduce through shared memory beside torch.distributed's gloo, in the same processes, in turns.

    python benchmarks/all_reduce.py [--workers 2,4] [--sizes 4KB,1MB] [--json FILE]

Ours is `SharedMemoryGroup.mean_` (weighted, with control bits) of an allocated tensor; gloo is `all_reduce` (a plain sum,
default settings) of a tensor of the same size. Before each call the workers meet; a call's time is that of the slowest
worker. The table shows medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import bytes_of, facts

from manyhands.comm.shared_memory.group import SharedMemory, SharedMemoryGroup

SIZES = "4KB,100KB,1MB,4MB,25MB,100MB"
BLOCKS = 8  # turns of each side
BUDGET_S = 2.0  # about so long for each side at each size
GOAL = {"up to 4 MB": 10, "above": 4}  # with 2 workers on 2 cores


def main() -> None:
    options = _options()
    machine = facts()
    rows = [row for workers in options.workers for row in measure(workers, options.sizes)]
    if options.json:
        options.json.write_text(
            json.dumps({"machine": machine, "goal_ratio_2_workers": GOAL, "rows": rows}, indent=1) + "\n"
        )


def measure(workers: int, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Rows of the table for so many workers, printed as they come in."""
    memory = SharedMemory.create(workers)
    reader, writer = os.pipe()
    print(f"\n{workers} workers   {'size':>6} {'ours ms':>9} {'gloo ms':>9} {'gloo/ours':>10} {'calls':>7}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for rank in range(workers):
            pid = os.fork()
            if pid == 0:
                os.close(reader)
                _live(rank, workers, memory, Path(folder), sizes, writer)
            pids.append(pid)
        os.close(writer)
        for fd in memory:
            os.close(fd)
        rows = [_shown(json.loads(line)) for line in os.fdopen(reader)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(codes):
        sys.exit(f"workers ended with {codes}")
    return rows


def _live(rank: int, workers: int, memory: list[int], folder: Path, sizes: dict[str, int], writer: int) -> None:
    code = 1
    try:
        torch.set_num_threads(1)
        group = SharedMemoryGroup(rank, workers, memory, timeout_s=120)
        dist.init_process_group(
            "gloo", store=dist.FileStore(str(folder / "store"), workers), rank=rank, world_size=workers
        )
        for name, nbytes in sizes.items():
            row = {"workers": workers, "size": name, "bytes": nbytes} | _compare(group, nbytes)
            if rank == 0:
                os.write(writer, (json.dumps(row) + "\n").encode())
        dist.destroy_process_group()
        group.close()
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)


def _compare(group: SharedMemoryGroup, nbytes: int) -> dict[str, Any]:
    ours, theirs = group.allocate(nbytes // 4, torch.float32), torch.empty(nbytes // 4)
    sides: dict[str, Callable[[], object]] = {
        "ours": lambda: group.mean_(ours, 1.0, 3),
        "gloo": lambda: dist.all_reduce(theirs),
    }
    seconds: dict[str, list[float]] = {"ours": [], "gloo": []}
    calls = {name: _calls(group, call, [ours, theirs]) for name, call in sides.items()}
    for _ in range(BLOCKS):
        for name, call in sides.items():
            ours.uniform_()
            theirs.uniform_()
            seconds[name] += [_timed(group, call) for _ in range(calls[name])]
    slowest = {
        name: [max(times) for times in zip(*group.all_gather_json(own), strict=True)] for name, own in seconds.items()
    }
    medians = {name: statistics.median(times) for name, times in slowest.items()}
    ms = {f"{name}_ms": round(1000 * median, 4) for name, median in medians.items()}
    return ms | {
        "ratio": round(medians["gloo"] / medians["ours"], 1),
        "calls": [len(times) for times in slowest.values()],
    }


def _calls(group: SharedMemoryGroup, call: Callable[[], object], tensors: list[torch.Tensor]) -> int:
    """Warm up; so many calls a block, the same on all workers."""
    for tensor in tensors:
        tensor.uniform_()
    for _ in range(3):
        call()
    once = max(group.all_gather_json(min(_timed(group, call) for _ in range(3))))
    return max(3, min(100, int(BUDGET_S / BLOCKS / once)))


def _timed(group: SharedMemoryGroup, call: Callable[[], object]) -> float:
    group.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    calls = "/".join(map(str, row["calls"]))
    print(
        f"{'':>12}{row['size']:>6} {row['ours_ms']:>9.3f} {row['gloo_ms']:>9.3f} {row['ratio']:>9.1f}x {calls:>7}",
        flush=True,
    )
    return row


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="2,4", type=lambda text: [int(count) for count in text.split(",")])
    parser.add_argument("--sizes", default=SIZES, type=lambda text: {name: bytes_of(name) for name in text.split(",")})
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
