"""What a row costs, by how many a worker computes at a time: the advice about few rows a step rests on it.

    python benchmarks/rows.py [--blocks 7] [--seconds 0.3] [--json FILE]

One process with one thread makes plain PyTorch steps (forward, backward, SGD) of step.py's models on 1, 2, 4, … rows, all
sizes in alternating blocks. Printed are the medians over blocks of this block's seconds a row over the same block's at
REFERENCE rows: 2 says that a row costs twice as much as there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from machine import facts
from step import MODELS, optimizer_of, plain_step

ROWS = (1, 2, 4, 8, 16, 32)
REFERENCE = 32


def blocks(name: str, number: int, block_s: float) -> Iterator[dict[int, float]]:
    """One block at a time: {rows: seconds a row}, in an order that rotates."""
    make, batch_of, _ = MODELS[name]
    model = make()
    optimizer = optimizer_of(model)
    steps = {rows: plain_step(model, optimizer, batch_of(rows)) for rows in ROWS}
    counts = {rows: max(3, int(block_s / timed(step, 3))) for rows, step in steps.items()}
    for block in range(number):
        order = [ROWS[(i + block) % len(ROWS)] for i in range(len(ROWS))]
        yield {rows: timed(steps[rows], counts[rows]) / rows for rows in order}


def timed(step: Callable[[], None], count: int) -> float:
    """Seconds a step, after one that does not count."""
    step()
    start = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - start) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=7, help="alternating blocks a model")
    parser.add_argument("--seconds", type=float, default=0.3, help="of each number of rows in a block, about")
    parser.add_argument("--json", type=Path, help="write all blocks here")
    arguments = parser.parse_args()
    machine = facts()
    torch.set_num_threads(1)
    results = {name: list(blocks(name, arguments.blocks, arguments.seconds)) for name in MODELS}
    print(f"\n{'a row over one of ' + str(REFERENCE):20}" + "".join(f"{rows:>8}" for rows in ROWS))
    for name, found in results.items():
        ratios = [statistics.median(block[rows] / block[REFERENCE] for block in found) for rows in ROWS]
        print(f"{name:20}" + "".join(f"{ratio:8.2f}" for ratio in ratios))
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine, "blocks": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
