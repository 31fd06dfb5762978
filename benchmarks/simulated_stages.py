"""What simulating replicas of several stages costs: 64 workers, 8 replicas of 8 stages, diloco, 50 steps.

    python benchmarks/simulated_stages.py [--models chain,gpt] [--replicas 8] [--stages 8] [--steps 50] [--json FILE]

Real seconds, the process's own CPU seconds beside them, and those for each pass of a stage over a micro-batch. `bare` is a
plain loop over as many micro-batches: forward and backward of the whole model, and nothing else. `chain` is 16 equal layers
of width 16; `gpt` is 8 blocks of width 32 on rows of 8 tokens. A replica has a row in each micro-batch, of which there are
twice as many as stages, and the network is preset `lan`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import machine
import torch
from stages import Block
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import manyhands as mh

GOAL_S, WORDS, LENGTH = 60.0, 64, 8


def gpt() -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, 32), *(Block(32, heads=2) for _ in range(8)), nn.Linear(32, WORDS))


def chain() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(16)))


def tokens(rows: int) -> TensorDataset:
    draws = torch.Generator().manual_seed(0)
    return TensorDataset(*(torch.randint(WORDS, (rows, LENGTH), generator=draws) for _ in range(2)))


def numbers(rows: int) -> TensorDataset:
    draws = torch.Generator().manual_seed(0)
    return TensorDataset(*(torch.randn(rows, 16, generator=draws) for _ in range(2)))


def words_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], Callable[[int], TensorDataset]]] = {
    "chain": (chain, squares, numbers),
    "gpt": (gpt, words_loss, tokens),
}


def measured(name: str, replicas: int, stages: int, steps: int) -> dict[str, float]:
    make, loss, data = MODELS[name]
    micro_batches = 2 * stages
    rows = replicas * micro_batches
    task = mh.Task(
        model=make,
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        train_data=data(rows * steps),
        batch_size=rows,
    )
    began, cpu = time.perf_counter(), time.process_time()
    run = mh.train(
        task,
        workers=replicas * stages,
        engine="sim:network=lan",
        strategy="diloco:period=10",
        model_parallel=f"stages={stages},micro_batches={micro_batches}",
        threads_per_worker=1,
    )
    took = {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu, "simulated_s": run.seconds}
    assert (run.steps, run.rows["total"]) == (steps, rows * steps)
    return took | {"passes": 2 * micro_batches * stages * replicas * steps, "bare_s": bare(task, rows * steps)}


def bare(task: mh.Task, micro_batches: int) -> float:
    """CPU seconds of a plain loop over micro-batches of one row."""
    torch.set_num_threads(1)
    model, batch = task.model(), [column.unsqueeze(0) for column in task.train_data[0]]
    began = time.process_time()
    for _ in range(micro_batches):
        task.loss(model, batch).backward()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="chain,gpt")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    facts, found = machine.facts(), dict[str, dict[str, float]]()
    workers = options.replicas * options.stages
    print(f"\n{workers} workers, {options.replicas} replicas of {options.stages} stages, {options.steps} steps")
    for name in options.models.split(","):
        took = found[name] = measured(name, options.replicas, options.stages, options.steps)
        print(
            f"{name:6}{took['seconds']:8.1f} s{took['cpu_s']:8.1f} s of CPU{took['simulated_s']:8.2f} simulated s"
            f"{1e6 * took['cpu_s'] / took['passes']:6.0f} us of CPU a pass   bare {took['bare_s']:.1f} s of CPU   goal {GOAL_S:g} s",
            flush=True,
        )
    if options.json is not None:
        options.json.write_text(json.dumps({"facts": facts, "runs": found}, indent=1))


if __name__ == "__main__":
    main()
