"""What simulating costs: wall seconds, seconds a simulated step, memory a simulated worker; beside the bare gradients it computes.

    python benchmarks/simulate.py [--workers 10 100 1000] [--steps 100] [--optimizers sgd adamw] [--blocks 1] [--json FILE]

Every measurement is a process of its own on one core: local-sgd:period=4 on a model of 10,000 parameters, a row a
worker and step, with `engine="sim"`. `bare` is a plain loop over as many models: forward, backward, optimizer step, and
nothing else; it is what no simulator of real gradients can go below. Memory is what the process grew by, less the
replicas' own tensors (parameters, gradients, the optimizer's), divided by the workers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import machine

LAYERS = (64, 120, 16)  # 9,736 weights and biases
KINDS = ("simulated", "bare")


def main() -> None:
    args = arguments()
    if args.one:
        print(json.dumps(one(*args.one)))
        return
    facts = machine.facts()
    rows = [row(args, optimizer, workers) for optimizer in args.optimizers for workers in args.workers]
    for optimizer in args.optimizers:
        flat = [r["ms_a_step"] for r in rows if r["optimizer"] == optimizer]
        print(f"{optimizer}: seconds a simulated step, the most over the least: {max(flat) / min(flat):.2f}")
    longer = [row(args, args.optimizers[0], max(args.workers), steps=args.steps * factor) for factor in (3,)]
    if args.json:
        args.json.write_text(json.dumps({"machine": facts, "rows": rows, "longer": longer}, indent=1) + "\n")


def row(args: argparse.Namespace, optimizer: str, workers: int, steps: int | None = None) -> dict[str, Any]:
    """Medians of alternating blocks, printed."""
    steps = steps or args.steps
    blocks = [{kind: measured(kind, optimizer, workers, steps) for kind in KINDS} for _ in range(args.blocks)]
    seconds = {kind: statistics.median(block[kind]["seconds"] for block in blocks) for kind in KINDS}
    memory = statistics.median(block["simulated"]["bytes_a_worker"] for block in blocks)
    found = {
        "optimizer": optimizer,
        "workers": workers,
        "steps": steps,
        **seconds,
        "ratio": seconds["simulated"] / seconds["bare"],
        "ms_a_step": 1000 * seconds["simulated"] / (workers * steps),
        "kb_a_worker": memory / 1000,
    }
    print(
        f"{optimizer:6} {workers:5} workers x {steps} steps: {seconds['simulated']:7.2f} s, bare {seconds['bare']:7.2f} s, "
        f"ratio {found['ratio']:.2f}   {found['ms_a_step']:.3f} ms a worker's step   {found['kb_a_worker']:6.0f} KB a worker",
        flush=True,
    )
    return found


def measured(kind: str, optimizer: str, workers: int, steps: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", kind, optimizer, str(workers), str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return dict(json.loads(done.stdout.splitlines()[-1]))


# -- in a process of its own ---------------------------------------------------------------------------------------------


def one(kind: str, optimizer: str, workers_text: str, steps_text: str) -> dict[str, float]:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    workers, steps = int(workers_text), int(steps_text)
    run = simulated if kind == "simulated" else bare
    run(optimizer, 2, 2)  # imports, and whatever torch sets up the first time
    before = resident()
    start = time.perf_counter()
    tensors = run(optimizer, workers, steps)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "bytes_a_worker": (peak() - before - tensors) / workers}


def simulated(optimizer: str, workers: int, steps: int) -> int:
    import manyhands as mh

    x, y = data(workers * steps)
    run = mh.train(
        mh.Task.supervised(
            model=model, optimizer=lambda m: make(optimizer, m), train_data=(x, y), batch_size=workers, epochs=1
        ),
        strategy="local-sgd:period=4",
        engine="sim",
        workers=workers,
        checkpoint_every="epoch",
    )
    assert run.rows["total"] == workers * steps
    return workers * own_bytes(optimizer)


def bare(optimizer: str, workers: int, steps: int) -> int:
    import torch
    from torch.nn import functional

    x, y = data(workers * steps)
    models = [model() for _ in range(workers)]
    optimizers = [make(optimizer, m) for m in models]
    for step in range(steps):
        for rank in range(workers):
            row = step * workers + rank
            optimizers[rank].zero_grad()
            functional.cross_entropy(models[rank](x[row : row + 1]), y[row : row + 1]).backward()
            optimizers[rank].step()
    assert torch.isfinite(models[0][0].weight).all()
    return workers * own_bytes(optimizer)


def data(rows: int) -> tuple[Any, Any]:
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, LAYERS[0], generator=generator), torch.randint(0, LAYERS[-1], (rows,), generator=generator)


def model() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(LAYERS[0], LAYERS[1]), nn.ReLU(), nn.Linear(LAYERS[1], LAYERS[2]))


def make(optimizer: str, model: Any) -> Any:
    import torch

    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer]
    return kind(model.parameters(), lr=1e-2)


def own_bytes(optimizer: str) -> int:
    """Of one replica's tensors: parameters and gradients, and the moments of AdamW."""
    return 4 * sum(p.numel() for p in model().parameters()) * {"sgd": 2, "adamw": 4}[optimizer]


def resident() -> int:
    return status("VmRSS")


def peak() -> int:
    return status("VmHWM")


def status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--optimizers", nargs="+", choices=("sgd", "adamw"), default=["sgd", "adamw"])
    parser.add_argument("--blocks", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
