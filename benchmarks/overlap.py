"""A step of a server strategy with and without `overlap`: simulated, and over a real link that is limited by `tc tbf`.

    python benchmarks/overlap.py [--part simulated|link] [--blocks 3] [--rate 100mbit] [--json FILE]

simulated   16 ms of computing a step, 20 ms of latency: seconds of a step, which with `overlap` is to be the longer of
            computing and one round trip.
link        Two hosts (network namespaces) whose cards are limited. The server and one worker are on the first, the other
            worker is on the second and computes for 16 ms a step; its steps are measured. A vector of 250 KB takes 20 ms
            each way at 100 Mbit/s. `exchange` is a step of a worker that computes nothing: one round trip of a push and
            the pull that follows it. In every block the variants in turn.

The link needs root, and `ip`, `tc`, `nsenter`, `unshare` and `hostname`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from machine import facts
from slow_links_network import network
from torch import Tensor, nn

import manyhands as mh
from manyhands.recording import event_log

STRATEGIES = ("downpour", "agn:window=1", "dynsgd", "easgd:period=1")
COMPUTE_S, LATENCY_S, GOAL = 0.016, 0.020, 1.1
NUMBERS = 62_500  # of 4 bytes: 20 ms at 100 Mbit/s
STEPS = 150
SPIN = "MANYHANDS_BENCHMARK_SPIN_S"
MATRIX, PRODUCT = torch.ones(200, 200), torch.empty(200, 200)


class Vector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUMBERS))


def loss(model: Vector, batch: tuple[Tensor]) -> Tensor:
    """Computes for as long as it is told, by the clock; on the server's host it sleeps, since both hosts are one machine."""
    seconds = float(os.environ.get(SPIN, "0"))
    if seconds < 0:
        time.sleep(-seconds)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        torch.mm(MATRIX, MATRIX, out=PRODUCT)
    return (model.weight * batch[0].mean()).sum() * 1e-6


def task() -> mh.Task:
    return mh.Task(
        model=Vector,
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        train_data=(torch.ones(2 * STEPS, 1),),
        batch_size=2,
        epochs=1,
        validation_data=None,
    )


def with_overlap(strategy: str) -> str:
    return strategy + ("," if ":" in strategy else ":") + "overlap=true"


def main() -> None:
    options = _options()
    facts()
    found = {part: PARTS[part](options) for part in ([options.part] if options.part else PARTS)}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def simulated(options: argparse.Namespace) -> list[dict[str, Any]]:
    print(f"\nsimulated: {COMPUTE_S * 1e3:g} ms of computing, {LATENCY_S * 1e3:g} ms of latency; ms a step")
    print(f"{'':<18} {'plain':>8} {'overlap':>8} {'/ longer':>9}   goal ≤ {GOAL}")
    longer, rows = max(COMPUTE_S, 2 * LATENCY_S), []
    engine = f"sim:network='latency={LATENCY_S * 1e3:g}ms',compute='step={COMPUTE_S * 1e3:g}ms,row=0'"
    for strategy in STRATEGIES:
        seconds = []
        for spec in (strategy, with_overlap(strategy)):
            with tempfile.TemporaryDirectory() as folder:
                run = mh.train(task(), strategy=spec, engine=engine, workers=2, run_dir=f"{folder}/run")
                seconds.append(step_of(run.directory, 1))
        rows.append({"strategy": strategy, "plain": seconds[0], "overlap": seconds[1], "longer": longer})
        print(f"{strategy:<18} {seconds[0] * 1e3:8.1f} {seconds[1] * 1e3:8.1f} {seconds[1] / longer:9.3f}")
    return rows


def link(options: argparse.Namespace) -> list[dict[str, Any]]:
    print(f"\nlink of {options.rate}: {COMPUTE_S * 1e3:g} ms of computing, vectors of {NUMBERS * 4:,} bytes; ms a step")
    print(f"{'':<18} {'exchange':>9} {'plain':>8} {'overlap':>8} {'/ longer':>9}   goal ≤ {GOAL}")
    rows = []
    for strategy in STRATEGIES:
        times: dict[str, list[float]] = {"exchange": [], "plain": [], "overlap": []}
        for _ in range(options.blocks):
            times["exchange"].append(over_a_link(with_overlap(strategy), 0.0, options.rate))
            times["plain"].append(over_a_link(strategy, COMPUTE_S, options.rate))
            times["overlap"].append(over_a_link(with_overlap(strategy), COMPUTE_S, options.rate))
        median = {name: statistics.median(values) for name, values in times.items()}
        ratio = median["overlap"] / max(COMPUTE_S, median["exchange"])
        rows.append({"strategy": strategy, **times})
        row = " ".join(
            f"{median[name] * 1e3:{width}.1f}" for name, width in (("exchange", 9), ("plain", 8), ("overlap", 8))
        )
        print(f"{strategy:<18} {row} {ratio:9.3f}", flush=True)
    return rows


def over_a_link(strategy: str, compute_s: float, rate: str) -> float:
    """Seconds of a step of the worker on the second host."""
    here = Path(__file__).resolve()
    with tempfile.TemporaryDirectory() as name, network(2, rate) as hosts:
        folder = Path(name)
        environment = {
            **os.environ,
            "MANYHANDS_CREDENTIALS": f"{folder}/run.pem",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        tool = [sys.executable, "-m", "manyhands"]
        listen = ["--listen", hosts.address(0), "--ports", "7000-7010", "--local-workers", "1"]
        train = [*tool, "train", f"{here}:task", "-n", "2", "-s", strategy, *listen, "--run-dir", f"{folder}/run"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": here.parent}
        driver = hosts.start(0, *train, env={**environment, SPIN: str(-COMPUTE_S)}, **quiet)
        try:
            while not (folder / "run.pem").exists():
                if driver.poll() is not None:
                    sys.exit(f"the driver ended with exit code {driver.returncode}")
                time.sleep(0.05)
            join = [*tool, "join", f"{hosts.address(0)}:7000", "--workers", "1"]
            joined = hosts.start(1, *join, env={**environment, SPIN: str(compute_s)}, **quiet)
            if driver.wait(120) or joined.wait(20):
                sys.exit(f"a run with {strategy} failed")
        finally:
            for process in (driver, joined):
                process.kill()
        return step_of(folder / "run", 1)


def step_of(directory: Any, rank: int) -> float:
    """Seconds of a step of a worker: the median distance of two of its `step` events."""
    steps = [event for event in event_log.read(Path(directory) / event_log.FILE) if event.type == "step"]
    times = [event.time_s for event in steps if event.rank == rank][10:]
    return statistics.median(b - a for a, b in itertools.pairwise(times))


PARTS = {"simulated": simulated, "link": link}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=list(PARTS), help="one alone")
    parser.add_argument("--blocks", type=int, default=3, help="launches of each variant over the link")
    parser.add_argument("--rate", default="100mbit", help="of each card, as tc has it")
    parser.add_argument("--json", type=Path, help="also write all numbers here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
