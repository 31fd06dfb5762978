"""What a step of all-reduce costs beyond computing: manyhands beside torch's DDP, a floor that never communicates, and one process.

    python benchmarks/step.py [--blocks 7] [--seconds 1.0] [--json FILE]

Two workers, one thread each, compute the same steps on the same batches in alternating blocks:

    floor     a plain PyTorch loop; no worker knows of the other
    ddp       the same loop over torch.nn.parallel.DistributedDataParallel (gloo)
    train     a tick of manyhands.train() with strategy allreduce, records included
    prepare   the plain loop over mh.prepare(model, optimizer)

and one process with both workers' threads computes the global batch meanwhile alone (`solo`). Overheads are medians over
blocks of this block's seconds a step over the same block's floor; `wait` is the part of it in which the worker waited
for its peer to arrive, which is no exchange. Every variant's worker is the slower one of the two.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import manyhands as mh
from manyhands.data.feed import Slice
from manyhands.strategies import strategy_of
from manyhands.training.plan import WorkerPlan
from manyhands.training.worker_main import make_loop

WORKERS = 2
VARIANTS = ("floor", "ddp", "train", "prepare")


class MLP(nn.Sequential):
    """0.67 M parameters."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


class CNN(nn.Sequential):
    """1.2 M parameters."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(
                nn.Conv2d(128, 256, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(256, 354, 3, padding=1),
                nn.ReLU(),
            ),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(354, 10)),
        )


class Transformer(nn.Module):
    """0.8 M parameters."""

    def __init__(self, width: int = 128, layers: int = 4, length: int = 64) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(96, width), nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 96, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(tokens) + self.position, mask=self.mask)).transpose(1, 2)


def images(rows: int, *shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, *shape), torch.randint(0, 10, (rows,))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, Tensor]], int]] = {
    "MLP 0.67 M": (MLP, lambda rows: images(rows, 784), 64),
    "CNN 1.2 M": (CNN, lambda rows: images(rows, 3, 16, 16), 16),
    "transformer 0.8 M": (
        Transformer,
        lambda rows: (torch.randint(0, 96, (rows, 64)), torch.randint(0, 96, (rows, 64))),
        16,
    ),
}  # model, batch of rows, rows a worker


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        loss.item()  # every loop shows its loss, and train() records it

    return step


def steps_of(name: str) -> tuple[dict[str, Callable[[], None]], Callable[[], None], int]:
    """({variant: one step of it}, a solo step on the global batch, parameters)."""
    make, batch_of, rows = MODELS[name]
    torch.manual_seed(1 + mh.worker().rank)
    batch = batch_of(rows)
    torch.manual_seed(0)  # one task for all workers, whose generators differ after a backward
    whole = batch_of(rows * WORKERS)
    floor, ddp, prepared, solo = make(), DistributedDataParallel(make()), make(), make()
    _, optimizer = mh.prepare(prepared, optimizer_of(prepared), strategy="allreduce", batches="slices")
    task = mh.Task(model=make, loss=loss_of, optimizer=optimizer_of, train_data=whole, batch_size=rows * WORKERS)
    worker = mh.worker()
    loop = make_loop(WorkerPlan(task=task, strategy=strategy_of("allreduce")), worker)
    loop.input_s = 0.0
    slice_ = Slice(batch=batch, rows=rows, global_rows=rows * WORKERS, index=0)
    steps = {
        "floor": plain_step(floor, optimizer_of(floor), batch),
        "ddp": plain_step(ddp, optimizer_of(ddp), batch),
        "train": lambda: loop.turn(slice_, loop.position.tick),
        "prepare": plain_step(prepared, optimizer, batch),
    }
    return steps, plain_step(solo, optimizer_of(solo), whole), sum(p.numel() for p in floor.parameters())


def timed(step: Callable[[], None], count: int) -> float:
    """Seconds a step, as the slower worker sees them."""
    group = mh.worker().group
    group.barrier()
    start = time.perf_counter()
    for _ in range(count):
        step()
    seconds = (time.perf_counter() - start) / count
    return max(group.all_gather_json(seconds))


def timed_solo(step: Callable[[], None], count: int) -> float:
    """Seconds a step of rank 0 alone with both workers' threads, while the other sleeps."""
    worker = mh.worker()
    seconds = 0.0
    if worker.rank == 0:
        torch.set_num_threads(WORKERS)
        start = time.perf_counter()
        for _ in range(count):
            step()
        seconds = (time.perf_counter() - start) / count
        torch.set_num_threads(1)
    return max(worker.group.all_gather_json(seconds))


def blocks(name: str, number: int, block_s: float) -> Iterator[dict[str, float]]:
    """One block at a time: seconds a step of each variant, in an order that rotates, and this worker's wait."""
    steps, solo, _ = steps_of(name)
    for step in steps.values():
        timed(step, 5)
    timed_solo(solo, 5)
    count = max(5, int(block_s / timed(steps["floor"], 10)))
    group = mh.worker().group
    for block in range(number):
        seconds: dict[str, float] = {}
        for i in range(len(VARIANTS)):
            variant = VARIANTS[(i + block) % len(VARIANTS)]
            waited = group.waited_s
            seconds[variant] = timed(steps[variant], count)
            seconds[f"{variant} wait"] = statistics.mean(group.all_gather_json((group.waited_s - waited) / count))
        seconds["solo"] = timed_solo(solo, max(3, count // 2))
        yield seconds


def measure(number: int, block_s: float, store: str) -> dict[str, Any]:
    """What every worker runs."""
    worker = mh.worker()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORKERS),
        rank=worker.rank,
        world_size=WORKERS,
        timeout=timedelta(seconds=120),
    )
    try:
        return {name: list(blocks(name, number, block_s)) for name in MODELS}
    finally:
        dist.destroy_process_group()


def report(results: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Print the table; {model: {column: median}}."""
    print(
        f"\n{'':18}{'ms a step':>10}{'overhead over the floor, median of ' + str(len(next(iter(results.values())))) + ' blocks':>62}"
    )
    print(
        f"{'model':18}{'floor':>10}{'solo':>8}{'ddp':>10}{'train':>10}{'(wait)':>9}{'prepare':>10}{'(wait)':>9}{'train/ddp':>11}"
    )
    table = {}
    for name, rows in results.items():
        over = {v: statistics.median(r[v] / r["floor"] - 1 for r in rows) for v in VARIANTS[1:]}
        wait = {v: statistics.median(r[f"{v} wait"] / r["floor"] for r in rows) for v in VARIANTS[2:]}
        floor, solo = (statistics.median(r[v] for r in rows) * 1e3 for v in ("floor", "solo"))
        ratio = statistics.median(r["train"] / r["ddp"] for r in rows)
        print(
            f"{name:18}{floor:10.2f}{solo:8.2f}{over['ddp']:10.1%}{over['train']:10.1%}{wait['train']:9.1%}"
            f"{over['prepare']:10.1%}{wait['prepare']:9.1%}{ratio:11.2f}"
        )
        table[name] = {
            "floor_ms": floor,
            "solo_ms": solo,
            **over,
            **{f"{v}_wait": w for v, w in wait.items()},
            "train_over_ddp": ratio,
        }
    print("\nsolo: ms of one process with both workers' threads, for the rows that both workers compute in one step.")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=7, help="alternating blocks a model")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each variant in a block, about")
    parser.add_argument("--json", type=Path, help="write all blocks here")
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {WORKERS} workers with one thread each")
    with tempfile.TemporaryDirectory() as folder:
        results = mh.launch(measure, arguments.blocks, arguments.seconds, str(Path(folder, "store")), workers=WORKERS)[
            0
        ]
    table = report(results)
    if arguments.json:
        arguments.json.write_text(json.dumps({"medians": table, "blocks": results}, indent=1))


if __name__ == "__main__":
    main()
