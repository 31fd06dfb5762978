"""What whole batches cost beside slices of them and beside torch's DDP: a step, the first step, an evaluation, reading.

    python benchmarks/whole_batches.py [--rounds 7] [--steps 1.0] [--models mlp,cnn,transformer] [--json FILE]

Two workers, one thread each, train the same model on the same rows, in launches in turn: over `mh.prepare(batches="whole")`,
over `mh.prepare(batches="slices")`, and over DistributedDataParallel with a DistributedSampler (gloo). A step's duration is
the distance of two steps of a worker's optimizer, the mean over a launch without its first tenth; every loop shows its loss.

The first step of a loop with whole batches has the proof of how the model's call is cut: how much longer it takes than with
slices, in whole forwards of one worker. An evaluation reads and scores rows without autograd, on two workers with whole
batches and on one. The table has medians over launches, and medians of the ratios of launches of one round.

Below it: an epoch whose rows take 5 ms each to read, with whole batches over slices; and batch normalization over the rows of
two workers over that of each one's own, forward and backward (torch's SyncBatchNorm needs GPUs).
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import machine
import step
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import manyhands as mh
from manyhands.engines.base import LaunchSpec
from manyhands.engines.local.engine import Local
from manyhands.own_loop.prepare import session
from manyhands.replica.sync_batch_norm import Rows, synchronize
from manyhands.worker import Worker

WORKERS, WORDS, LENGTH = 2, 4000, 64


class Transformer(nn.Module):
    """1.3 M parameters; 16 rows have 16 MB of logits."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True)
        self.words, self.encoder = nn.Embedding(WORDS, width), nn.TransformerEncoder(layer, 2)
        self.scores = nn.Linear(width, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.scores(self.encoder(self.words(x)))
        return scores


class Mnist(nn.Module):
    """1.2 M parameters: two convolutions, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.images = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.scores = nn.Sequential(nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.scores(self.images(x))
        return scores


def digits(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 1, 28, 28), torch.randint(10, (rows,))


class SlowRows(Dataset[tuple[Tensor, Tensor]]):
    """Rows of which each takes 5 ms of the processor, as decoding does."""

    def __len__(self) -> int:
        return 192

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        until = time.perf_counter() + 0.005
        while time.perf_counter() < until:
            pass
        return torch.full((16,), float(index)), torch.tensor(index % 4)


def texts(rows: int) -> tuple[Tensor, Tensor]:
    words = torch.randint(WORDS, (rows, LENGTH + 1))
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


Model = tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, Tensor]], int, int, float]
MODELS: dict[str, Model] = {
    "mlp": (*step.MODELS["MLP 0.67 M"], 300, 1.08),
    "cnn": (*step.MODELS["CNN 1.2 M"], 40, 1.02),
    "transformer": (Transformer, texts, 8, 30, 1.03),
    "mnist": (Mnist, digits, 250, 10, 1.02),
}
"""{name: (model, rows of it, rows a worker, global batches a launch, goal of whole over slices)}"""
VARIANTS = ("whole", "slices", "ddp")


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def rows_of(name: str, batches: int) -> tuple[TensorDataset, int]:
    _, make_rows, rows, *_ = MODELS[name]
    torch.manual_seed(1)
    return TensorDataset(*make_rows(WORKERS * rows * batches)), rows


def trained(worker: Worker, name: str, batches: int, variant: str, store: str) -> list[float]:
    """When the loop began, and when each step was over."""
    torch.manual_seed(0)
    model, (data, rows) = MODELS[name][0](), rows_of(name, batches)
    optimizer, loader = step.optimizer_of(model), DataLoader(data, WORKERS * rows)
    if variant == "ddp":
        shared = dist.FileStore(store, WORKERS)
        how: dict[str, Any] = {"store": shared, "rank": worker.rank, "world_size": WORKERS}
        dist.init_process_group("gloo", timeout=timedelta(seconds=60), **how)
        model = DistributedDataParallel(model)
        loader = DataLoader(data, rows, sampler=DistributedSampler(data, WORKERS, worker.rank, shuffle=False))
    else:
        model, optimizer, loader = mh.prepare(model, optimizer, loader, batches=variant)
    worker.group.barrier()
    times = [time.perf_counter()]
    for batch in loader:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        loss.item()
        times.append(time.perf_counter())
    worker.group.barrier()
    if variant == "ddp":
        del model, shared
        dist.destroy_process_group()
    return times


def forward(worker: Worker, name: str) -> float:
    """A whole batch's forward on one worker, while the other one waits."""
    model, (data, rows) = MODELS[name][0](), rows_of(name, 1)
    x = data.tensors[0][: WORKERS * rows]
    with torch.no_grad():
        times = [time.perf_counter()] + [(model(x), time.perf_counter())[1] for _ in range(7)]
    return statistics.median(b - a for a, b in itertools.pairwise(times))


def evaluated(worker: Worker, name: str, batches: int) -> float:
    """Seconds of an evaluation."""
    torch.manual_seed(0)
    model, (data, rows) = MODELS[name][0](), rows_of(name, 2 * batches)
    if worker.size > 1:
        session().run_whole()
    correct = 0
    with torch.no_grad():
        for timed in (False, True):
            began = time.perf_counter()
            for x, y in DataLoader(data, 2 * WORKERS * rows):
                correct += (model(x).argmax(-1) == y).sum().item()
            if timed:
                return time.perf_counter() - began
    raise AssertionError(correct)


def steps_of(launches: list[list[float]]) -> float:
    """Seconds a step, over the workers."""
    kept = [times[1 + len(times) // 10 :] for times in launches]
    return statistics.mean((times[-1] - times[0]) / (len(times) - 1) for times in kept)


def measured(engine: Local, name: str, batches: int, number: int) -> dict[str, float]:
    """One round."""

    def launched(program: Callable[..., Any], workers: int = WORKERS) -> list[Any]:
        return engine.launch(program, LaunchSpec(workers=workers, threads_per_worker=1))

    found: dict[str, float] = {}
    for i in range(len(VARIANTS)):
        variant = VARIANTS[(i + number) % len(VARIANTS)]
        with tempfile.TemporaryDirectory() as folder:
            program = partial(trained, name=name, batches=batches, variant=variant, store=f"{folder}/store")
            times = launched(program)
        found[variant] = steps_of(times)
        found[f"first of {variant}"] = statistics.mean(one[1] - one[0] for one in times)
    found["forward"] = launched(partial(forward, name=name), 1)[0]
    found["evaluation"] = max(launched(partial(evaluated, name=name, batches=batches)))
    found["evaluation alone"] = launched(partial(evaluated, name=name, batches=batches), 1)[0]
    return found


def read(worker: Worker, batches: str) -> float:
    """Seconds of an epoch over `SlowRows`, the second one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer, loader = torch.optim.SGD(model.parameters(), 0.1), DataLoader(SlowRows(), 16, shuffle=True)
    model, optimizer, loader = mh.prepare(model, optimizer, loader, batches=batches)
    for _ in range(2):
        worker.group.barrier()
        began = time.perf_counter()
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        worker.group.barrier()
    return time.perf_counter() - began


def normalized(worker: Worker) -> tuple[float, float]:
    """Seconds of a batch normalization, forward and backward: of all workers' rows, and of this one's."""
    x, found = torch.randn(32, 64, 28, 28, requires_grad=True), []
    for synchronized in (True, False):
        layer, times = nn.BatchNorm2d(64), []
        if synchronized:
            synchronize(layer, Rows(worker.group))
        for _ in range(30):
            worker.group.barrier()
            began = time.perf_counter()
            layer(x).sum().backward()
            times.append(time.perf_counter() - began)
        found.append(statistics.median(times))
    return found[0], found[1]


def print_others(engine: Local, rounds: int) -> dict[str, float]:
    """Reading and batch normalization, which need no model of the table."""
    reading, norm = [], []
    for _ in range(rounds):
        spec = LaunchSpec(workers=WORKERS, threads_per_worker=1)
        whole, slices = (max(engine.launch(partial(read, batches=one), spec)) for one in ("whole", "slices"))
        reading.append(whole / slices)
        norm.append(statistics.mean(one / other for one, other in engine.launch(normalized, spec)))
    found = {"reading": statistics.median(reading), "batch normalization": statistics.median(norm)}
    print(f"reading 5 ms a row, whole / slices: {found['reading']:.3f} (goal ≤ 1.05)")
    print(f"batch normalization of all rows / of a worker's own: {found['batch normalization']:.2f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=float, default=1.0, help="times as many steps a launch")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    facts = machine.facts()
    print(f"\n{'':13}{'whole':>10}{'slices':>10}{'ddp':>10}{'/slices':>9}{'/ddp':>7}{'first':>8}{'evaluation':>12}")
    with Local() as engine:
        for name in options.models.split(","):
            batches, goal = max(10, int(MODELS[name][3] * options.steps)), MODELS[name][4]
            rounds = [measured(engine, name, batches, number) for number in range(options.rounds)]
            found = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
            ratios = {
                "of slices": statistics.median(one["whole"] / one["slices"] for one in rounds),
                "of ddp": statistics.median(one["whole"] / one["ddp"] for one in rounds),
                "first in forwards": statistics.median(
                    (one["first of whole"] - one["first of slices"]) / one["forward"] for one in rounds
                ),
                "evaluation": statistics.median(one["evaluation alone"] / one["evaluation"] for one in rounds),
            }
            results[name] = found | ratios
            steps = "".join(f"{1000 * found[variant]:7.2f} ms" for variant in VARIANTS)
            print(
                f"{name:13}{steps}{ratios['of slices']:9.3f}{ratios['of ddp']:7.2f}{ratios['first in forwards']:7.1f}×"
                f"{ratios['evaluation']:11.2f}×  goals: slices × {goal}, below ddp, first ≤ 2.2, evaluation ≥ 1.6",
                flush=True,
            )
        results["others"] = print_others(engine, options.rounds)
    if options.json:
        options.json.write_text(json.dumps({"machine": facts, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
