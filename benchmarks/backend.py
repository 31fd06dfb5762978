"""The backend `manyhands` of torch.distributed beside gloo, in programs that were written for torch.distributed.

    python benchmarks/backend.py all-reduce [--ranks 2] [--sizes 0.1MB 1MB 4MB 25MB] [--blocks 20] [--json FILE]
    python benchmarks/backend.py ddp [--ranks 2] [--models mlp cnn transformer wide] [--blocks 20] [--json FILE]
    python benchmarks/backend.py import [--blocks 20] [--json FILE]

**all-reduce** and **ddp.** The ranks have a process group of each backend. Blocks of calls of `dist.all_reduce` (float32), or of steps of
DistributedDataParallel with SGD, alternate between the two. A block's figure is the median of rank 0's calls in it; the
table has the median over blocks, and the median of the ratios of neighbouring blocks. Each rank computes with one
thread. Both models of a row start equal and see the same batches; whether they end with the same bits is in the table.

**import.** `import torch` in new processes, with the entry point of this library and without any
(TORCH_DEVICE_BACKEND_AUTOLOAD=0), alternating. It needs an installed manyhands.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import step
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import manyhands_backend

BACKENDS = ("gloo", "manyhands")
GOALS = {"0.1MB": 10, "1MB": 5, "4MB": 5, "25MB": 3, "mlp": 1.3, "cnn": 1.05, "transformer": 1.0, "wide": 1.3}
CALLS = {"0.1MB": 200, "1MB": 60, "4MB": 20, "25MB": 5}


def wide() -> nn.Module:
    """7.0 M parameters in three layers."""
    return nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 3072), nn.ReLU(), nn.Linear(3072, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], int, int]] = {
    "mlp": (*step.MODELS["MLP 0.67 M"], 10),
    "cnn": (*step.MODELS["CNN 1.2 M"], 4),
    "transformer": (*step.MODELS["transformer 0.8 M"], 4),
    "wide": (wide, lambda rows: (torch.randn(rows, 256), torch.randint(10, (rows,))), 8, 6),
}
"""{name: (model, batch of so many rows, rows, steps a block)}"""


def reducing(size: str, groups: dict[str, Any]) -> dict[str, tuple[Callable[[], None], Callable[[], torch.Tensor]]]:
    tensors = {name: torch.zeros(machine.bytes_of(size) // 4) for name in groups}

    def call(name: str) -> None:
        dist.all_reduce(tensors[name], group=groups[name])

    return {name: (lambda name=name: call(name), lambda name=name: tensors[name]) for name in groups}  # type: ignore[misc]


def training(model: str, groups: dict[str, Any]) -> dict[str, tuple[Callable[[], None], Callable[[], torch.Tensor]]]:
    make, batch_of, rows, _ = MODELS[model]
    torch.manual_seed(0)
    base = make()
    torch.manual_seed(1 + dist.get_rank())
    x, y = batch_of(rows)
    found = {}
    for name, group in groups.items():
        replica = DistributedDataParallel(copy.deepcopy(base), process_group=group)
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.01, momentum=0.9)

        def call(replica: nn.Module = replica, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            step.loss_of(replica, (x, y)).backward()
            optimizer.step()

        def parameters(replica: nn.Module = replica) -> torch.Tensor:
            return torch.cat([p.detach().reshape(-1) for p in replica.parameters()])

        found[name] = call, parameters
    return found


def measured(args: argparse.Namespace) -> list[dict[str, Any]]:
    """On every rank; rank 0's rows count."""
    torch.set_num_threads(1)
    manyhands_backend.register()
    dist.init_process_group("gloo")
    groups = {"gloo": dist.group.WORLD, "manyhands": dist.new_group(backend="manyhands")}
    rows = []
    for what in args.sizes if args.what == "all-reduce" else args.models:
        ways = reducing(what, groups) if args.what == "all-reduce" else training(what, groups)
        calls = CALLS.get(what, 20) if args.what == "all-reduce" else MODELS[what][3]
        times: dict[str, list[float]] = {name: [] for name in BACKENDS}
        for block in range(-1, args.blocks):  # the first one is a warm-up
            for name in BACKENDS if block % 2 else BACKENDS[::-1]:
                dist.barrier(groups["gloo"])
                seconds = []
                for _ in range(calls):
                    start = time.perf_counter()
                    ways[name][0]()
                    seconds.append(time.perf_counter() - start)
                if block >= 0:
                    times[name].append(1e3 * statistics.median(seconds))
        ratios = [theirs / ours for theirs, ours in zip(times["gloo"], times["manyhands"], strict=True)]
        ends = [ways[name][1]() for name in BACKENDS]
        rows.append(
            {
                "what": what,
                **{f"{name}_ms": statistics.median(times[name]) for name in BACKENDS},
                "ratio": statistics.median(ratios),
                "goal": GOALS.get(what),
                "same_bits": bool(torch.equal(*ends)),
            }
        )
    dist.destroy_process_group()
    return rows


def on_ranks(args: argparse.Namespace) -> list[dict[str, Any]]:
    """This script again, on every rank."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port, out = free.getsockname()[1], Path(folder) / "rows.json"
        free.close()
        place = {"WORLD_SIZE": str(args.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ROWS": str(out)}
        running = [
            subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, **place, "RANK": str(rank)})
            for rank in range(args.ranks)
        ]
        codes = [process.wait() for process in running]
        if any(codes):
            raise SystemExit("a rank failed: its error is above")
        found: list[dict[str, Any]] = json.loads(out.read_text())
        return found


def importing(args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of `import torch`."""
    code = "import time; start = time.perf_counter(); import torch; print(time.perf_counter() - start)"
    times: dict[str, list[float]] = {"1": [], "0": []}
    for block in range(-1, args.blocks):
        for autoload in ("1", "0") if block % 2 else ("0", "1"):
            done = subprocess.run(
                [sys.executable, "-c", code],
                env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload},
                capture_output=True,
                text=True,
                check=True,
            )
            if block >= 0:
                times[autoload].append(1e3 * float(done.stdout))
    ratio = statistics.median(a / b for a, b in zip(times["1"], times["0"], strict=True))
    return {"with_ms": statistics.median(times["1"]), "without_ms": statistics.median(times["0"]), "ratio": ratio}


def main() -> None:
    args = arguments()
    if "ROWS" in os.environ:
        rows = measured(args)
        if os.environ["RANK"] == "0":
            Path(os.environ["ROWS"]).write_text(json.dumps(rows))
        return
    facts = machine.facts()
    if args.what == "import":
        found: Any = importing(args)
        print(
            f"\nimport torch: {found['with_ms']:.0f} ms with, {found['without_ms']:.0f} ms without: {found['ratio']:.3f}  ≤ 1.01"
        )
    else:
        found = on_ranks(args)
        print(f"\n{'':<14}{'gloo':>12}{'manyhands':>12}   times as fast   goal   same bits")
        for row in found:
            goal = "" if row["goal"] is None else f"≥ {row['goal']:g}"
            print(
                f"{row['what']:<14}{row['gloo_ms']:>9.3f} ms{row['manyhands_ms']:>9.3f} ms   {row['ratio']:>13.2f}"
                f"   {goal:<6} {'yes' if row['same_bits'] else 'no'}"
            )
    if args.json:
        args.json.write_text(json.dumps({"machine": facts, "found": found}, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("all-reduce", "ddp", "import"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", nargs="+", default=["0.1MB", "1MB", "4MB", "25MB"])
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    main()
