"""For how long a checkpoint stops training: with `survive`, which writes it beside training, and without.

    python benchmarks/checkpoint.py [--size 100MB] [--saves 8] [--rounds 3] [--workers 2] [--dir DIR] [--json FILE]

Workers of this machine train with allreduce (float32 parameters, plain SGD), and each rank's part of a checkpoint is as
large as `--size`. A launch saves `--saves` times, a few steps apart; launches with and without `survive` alternate, on
one warm fork server, in run directories on the same disk.

    stall       without: the checkpoint event's `seconds`, in which no worker computes; with: its `stall_s`, the longest
                that a rank stood still. The first of a launch is left out: there new memory is filled, with and
                without.
    written     with: until the last rank's part is on the disk (without, that is the stall)
    steps       the median step while a part is written (with), beside the median of all other steps: on a machine whose
                cores are all in use, hashing takes its share
    first       the stall of a launch's first checkpoint, which is left out above

The table shows medians, and the ratio of the medians of the stalls.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import machine
import torch
from torch import nn

import manyhands as mh
from manyhands.engines.local.engine import Local
from manyhands.recording import event_log

GOAL = "≤ 0.05"
STEPS_BETWEEN = 6  # of a save and the next
ROWS = 8  # of a worker


def main() -> None:
    options = _options()
    facts = machine.facts()
    load = os.getloadavg()[0]
    found: dict[str, list[dict[str, Any]]] = {"without": [], "with": []}
    with Local() as engine:
        for number in range(options.rounds):
            variants = ("without", "with") if number % 2 == 0 else ("with", "without")
            for variant in variants:
                found[variant].append(one_launch(engine, variant, options))
    print(f"load {load:.1f} before, {os.getloadavg()[0]:.1f} after")
    _print(found, options)
    if options.json:
        text = json.dumps({"machine": facts, "load": load, "rows": found}, indent=1)
        options.json.write_text(text + "\n")


def one_launch(engine: Local, variant: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each save, and of steps."""
    width = round((machine.bytes_of(options.size) / 4) ** 0.5)
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        mh.train(
            model=lambda: nn.Linear(width, width, bias=False),
            loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
            train_data=lambda: (torch.randn(ROWS * options.workers, width), torch.randn(ROWS * options.workers, width)),
            batch_size=ROWS * options.workers,
            epochs=STEPS_BETWEEN * options.saves,
            workers=options.workers,
            engine=engine,
            threads_per_worker=1,
            run_dir=Path(folder) / "run",
            checkpoint_every=STEPS_BETWEEN,
            survive="max_losses=1" if variant == "with" else None,
        )
        events = list(event_log.read(Path(folder) / "run" / event_log.FILE))
    saves = [event for event in events if event.type == "checkpoint"]
    name = "stall_s" if variant == "with" else "seconds"
    writing = [(event.time_s - event.values["seconds"], event.time_s) for event in saves]
    beside, others = [], []
    for earlier, later in pairwise(event for event in events if event.type == "step" and event.rank == 0):
        if later.tick % STEPS_BETWEEN == 0:
            continue  # a save is between them
        busy = any(begin < later.time_s and earlier.time_s < end for begin, end in writing)
        (beside if busy else others).append(later.time_s - earlier.time_s)
    return {
        "stall_s": [event.values[name] for event in saves[1:]],
        "first_s": saves[0].values[name],
        "written_s": [event.values["seconds"] for event in saves[1:]],
        "step_beside_s": beside,
        "step_s": others,
    }


def _print(found: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> None:
    def median(variant: str, name: str) -> float:
        values: list[float] = []
        for row in found[variant]:
            values += row[name] if isinstance(row[name], list) else [row[name]]
        return statistics.median(values) if values else float("nan")

    count = sum(len(row["stall_s"]) for row in found["with"])
    print(f"\n{options.size} a rank, {options.workers} workers, {count} checkpoints each (medians)")
    print(f"{'':12}{'stall':>11}{'first':>11}{'written':>11}{'a step':>11}{'while written':>15}")
    for variant in found:
        numbers = [median(variant, name) for name in ("stall_s", "first_s", "written_s", "step_s", "step_beside_s")]
        print(f"{variant:12}" + "".join(f"{n:{w}.3f} s" for n, w in zip(numbers, (9, 9, 9, 9, 13), strict=True)))
    print(f"stall with / without: {median('with', 'stall_s') / median('without', 'stall_s'):.3f}  goal {GOAL}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="100MB", help="of each rank's part")
    parser.add_argument("--saves", type=int, default=8, help="checkpoints of a launch")
    parser.add_argument("--rounds", type=int, default=3, help="launches of each variant")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--dir", type=Path, help="where run directories lie while it runs; default: the temporary folder"
    )
    parser.add_argument("--json", type=Path, help="also write all numbers here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
