"""A step of a model in two stages, beside torch.distributed.pipelining by hand, and one process.

    python benchmarks/stages.py [--repeats 5] [--steps 8] [--models gpt,mlp] [--json FILE]

Two workers, one thread each, hold a half of the same model and train it on the same batch in eight micro-batches, 1F1B: as
`model_parallel="stages=2"` cuts it, and as torch's `PipelineStage` and `Schedule1F1B` over gloo, given the halves.
Launches alternate. One process with one thread computes the same micro-batches. The table has medians over launches of the
milliseconds a step, the first two left out, and the ratio of ours to torch's, the median over neighbouring launches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import machine
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import manyhands as mh
from manyhands.engines.base import LaunchSpec
from manyhands.engines.local.engine import Local
from manyhands.parallel.mesh import mesh_of
from manyhands.parallel.spec import ModelParallel
from manyhands.parallel.staged import staged
from manyhands.replica.replica import Replica
from manyhands.worker import Worker

ROWS, MICRO_BATCHES, WIDTH, LENGTH, WORDS, GOAL = 32, 8, 256, 64, 512, 0.95


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, heads: int = 4) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        own = self.norm1(x)
        x = x + self.attention(own, own, own, need_weights=False)[0]
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


def gpt() -> nn.Sequential:
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *(Block() for _ in range(8)), head)


def mlp() -> nn.Sequential:
    sizes = [256, 1024, 512, 1536, 256, 1024, 768, 64]
    return nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(sizes)))


def rows_of_gpt() -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)
    inputs, targets = (torch.randint(WORDS, (ROWS, LENGTH), generator=draws) for _ in range(2))
    return inputs, targets


def rows_of_mlp() -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)
    return torch.randn(32 * ROWS, 256, generator=draws), torch.randint(64, (32 * ROWS,), generator=draws)


MODELS: dict[str, tuple[Callable[[], nn.Sequential], Callable[[], tuple[Tensor, Tensor]], int]] = {
    "gpt": (gpt, rows_of_gpt, 5),  # the module at which the second half begins
    "mlp": (mlp, rows_of_mlp, 3),
}


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def loss_of_batch(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return loss_of(model(batch[0]), batch[1])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def timed(step: Callable[[], Any], steps: int) -> float:
    """Seconds a step, the median without the first two."""
    took = []
    for _ in range(steps + 2):
        began = time.perf_counter()
        step()
        took.append(time.perf_counter() - began)
    return statistics.median(took[2:])


def ours(worker: Worker, name: str, steps: int) -> float:
    make, rows, cut = MODELS[name]
    torch.manual_seed(0)
    batch, stages = rows(), worker.size
    task = mh.Task(model=make, loss=loss_of_batch, optimizer=adamw, train_data=[torch.zeros(1)])
    spec = ModelParallel(stages=stages, cut="auto" if stages == 1 else f"[{cut}]", micro_batches=MICRO_BATCHES)
    worker.mesh = mesh_of(worker, stages)
    replica = Replica(staged(task, worker, spec, lambda: batch), group=worker.mesh.data)

    def step() -> None:
        replica.begin_tick()
        replica.backward(batch)
        replica.apply()

    return timed(step, steps)


def torchs(worker: Worker, name: str, steps: int, store: str) -> float:
    make, rows, cut = MODELS[name]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=worker.rank, world_size=worker.size)
    torch.manual_seed(0)
    model, (inputs, targets) = make(), rows()
    half = model[cut:] if worker.rank else model[:cut]
    stage = PipelineStage(half, worker.rank, worker.size, torch.device("cpu"))
    schedule, optimizer = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of), adamw(half)

    def step() -> None:
        optimizer.zero_grad()
        schedule.step(inputs) if worker.rank == 0 else schedule.step(target=targets)
        optimizer.step()

    took = timed(step, steps)
    dist.destroy_process_group()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--models", default="gpt,mlp")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    facts, found = machine.facts(), dict[str, dict[str, float]]()
    print(f"\n{'':8}{'one process':>14}{'torch, 2 stages':>18}{'manyhands, 2 stages':>22}{'ratio':>8}   goal")
    with Local() as engine, tempfile.TemporaryDirectory() as folder:
        for name in options.models.split(","):
            runs: list[dict[str, float]] = []
            for number in range(options.repeats):
                store = f"{folder}/{name}-{number}"
                programs: dict[str, tuple[Any, int]] = {
                    "one": (partial(ours, name=name, steps=options.steps), 1),
                    "torch": (partial(torchs, name=name, steps=options.steps, store=store), 2),
                    "manyhands": (partial(ours, name=name, steps=options.steps), 2),
                }
                order = list(programs) if number % 2 == 0 else list(reversed(programs))
                run = {}
                for kind in order:
                    program, workers = programs[kind]
                    run[kind] = max(engine.launch(program, LaunchSpec(workers=workers, threads_per_worker=1)))
                runs.append(run)
            medians = {kind: statistics.median(run[kind] for run in runs) for kind in runs[0]}
            ratio = statistics.median(run["manyhands"] / run["torch"] for run in runs)
            found[name] = medians | {"ratio": ratio}
            one, peer, own = (1000 * medians[kind] for kind in ("one", "torch", "manyhands"))
            print(f"{name:8}{one:11.1f} ms{peer:15.1f} ms{own:19.1f} ms{ratio:8.3f}   ≤ {GOAL}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"facts": facts, "steps": found}, indent=1))


if __name__ == "__main__":
    main()
