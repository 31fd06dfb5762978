"""What an observed loop (manyhands run --auto) costs beside the same loop with mh.prepare: a step, and the first step.

    python benchmarks/observed.py [--pairs 20] [--steps 1.0] [--models mlp,cnn,transformer] [--strategy allreduce] [--json FILE]

Two workers, one thread each, train the same model on the same DataLoader, in launches that alternate: as a loop over
`mh.prepare(model, optimizer, loader)`, and as the plain loop under observation. A step's duration is the distance of two
steps of a worker's optimizer, the mean over a launch without its first tenth, and over the workers. The time to the first
step begins with the loop. The table has medians over launches, the median of the ratios of neighbouring launches, and how
much later the first step comes, beside a whole batch on one worker plus 0.3 s.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import machine
import step
import torch

import manyhands as mh
import own_loop
from manyhands.engines.base import LaunchSpec
from manyhands.engines.local.engine import Local
from manyhands.own_loop.observed.hooks import installed
from manyhands.own_loop.observed.loop import ObservedLoop
from manyhands.own_loop.prepare import session
from manyhands.worker import Worker

WORKERS, GOAL, SEARCH_S = 2, 1.02, 0.3
MODELS = own_loop.MODELS


def loop(module: Any, optimizer: Any, loader: Any) -> None:
    for batch in loader:
        optimizer.zero_grad()
        loss = step.loss_of(module, batch)
        loss.backward()
        optimizer.step()
        loss.item()


def trained(worker: Worker, model: str, strategy: str, batches: int, *, observed: bool) -> tuple[float, list[float]]:
    """(when the loop began, when each step was over)"""
    times: list[float] = []
    torch.manual_seed(0)
    if not observed:
        module = step.MODELS[MODELS[model][0]][0]()
        optimizer, loader = own_loop.noted(step.optimizer_of(module), times), own_loop.loader_of(model, batches)
        worker.group.barrier()
        began = time.perf_counter()
        module, optimizer, loader = mh.prepare(module, optimizer, loader, strategy=strategy)
        loop(module, optimizer, loader)
        return began, times
    with installed(ObservedLoop(session(), strategy)):
        module = step.MODELS[MODELS[model][0]][0]()
        optimizer, loader = own_loop.noted(step.optimizer_of(module), times), own_loop.loader_of(model, batches)
        worker.group.barrier()
        began = time.perf_counter()
        loop(module, optimizer, loader)
    return began, times


def measured(engine: Local, model: str, strategy: str, batches: int, *, observed: bool) -> tuple[float, float]:
    """(seconds a step, seconds to the first step)"""
    spec = LaunchSpec(workers=WORKERS, threads_per_worker=1)
    found = engine.launch(partial(trained, model=model, strategy=strategy, batches=batches, observed=observed), spec)
    rates, firsts = [], []
    for began, times in found:
        kept = times[len(times) // 10 :]
        rates.append((len(kept) - 1) / (kept[-1] - kept[0]))
        firsts.append(times[0] - began)
    return WORKERS / sum(rates), max(firsts)


def whole_batch(model: str) -> float:
    """Seconds of a step over the whole batch on one worker with one thread."""
    torch.set_num_threads(1)
    module = step.MODELS[MODELS[model][0]][0]()
    optimizer, times = step.optimizer_of(module), list[float]()
    loop(module, own_loop.noted(optimizer, times), own_loop.loader_of(model, 8))
    return statistics.median(b - a for a, b in itertools.pairwise(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="launches of each")
    parser.add_argument("--steps", type=float, default=1.0, help="times as many steps a launch")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--strategy", default="allreduce")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    facts = machine.facts()
    print(
        f"\n{'':14}{'prepare':>11}{'--auto':>11}{'ratio':>8}  goal    first step: {'prepare':>9}{'--auto':>11}{'later':>11}  at most"
    )
    with Local() as engine:
        for model in options.models.split(","):
            batches = max(20, int(MODELS[model][1] * options.steps))
            pairs = []
            for number in range(options.pairs):
                order = (False, True) if number % 2 == 0 else (True, False)
                one = {kind: measured(engine, model, options.strategy, batches, observed=kind) for kind in order}
                pairs.append(one)
            steps = [statistics.median(pair[kind][0] for pair in pairs) for kind in (False, True)]
            firsts = [statistics.median(pair[kind][1] for pair in pairs) for kind in (False, True)]
            ratio = statistics.median(pair[True][0] / pair[False][0] for pair in pairs)
            later = statistics.median(pair[True][1] - pair[False][1] for pair in pairs)
            most = whole_batch(model) + SEARCH_S
            found[model] = {"prepare_s": steps[0], "auto_s": steps[1], "ratio": ratio, "later_s": later, "most_s": most}
            print(
                f"{model:14}{1000 * steps[0]:8.3f} ms{1000 * steps[1]:8.3f} ms{ratio:8.3f}  ≤ {GOAL}              "
                f"{1000 * firsts[0]:8.1f} ms{1000 * firsts[1]:8.1f} ms{1000 * later:8.1f} ms  {1000 * most:.0f} ms",
                flush=True,
            )
    if options.json is not None:
        options.json.write_text(json.dumps({"facts": facts, "steps": found}, indent=1))


if __name__ == "__main__":
    main()
