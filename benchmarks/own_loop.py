"""What a step costs in a loop of one's own beside the same step of manyhands.train(), strategy by strategy.

    python benchmarks/own_loop.py [--pairs 7] [--steps 1.0] [--models mlp,cnn,transformer] [--strategies …] [--json FILE]

Two workers, one thread each, train the same model on the same DataLoader, in launches that alternate: as a task, and as a
plain loop over `mh.prepare(model, optimizer, loader)`. A step's duration is the distance of two steps of a worker's
optimizer, the mean over a launch without its first tenth, and over the workers (of their rates: at their own pace one may
make more steps than the other). The table has medians over launches, and the median of the ratios of neighbouring launches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import machine
import step
import torch
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh
from manyhands.engines.base import LaunchSpec
from manyhands.engines.local.engine import Local
from manyhands.strategies import strategy_of
from manyhands.training.joining import join
from manyhands.training.plan import WorkerPlan
from manyhands.training.worker_main import make_loop
from manyhands.worker import Worker

WORKERS, GOAL = 2, 1.05
STRATEGIES = (
    *("allreduce", "allreduce:overlap=true", "local-sgd:period=4", "gossip", "diloco:period=4", "quorum"),
    *("downpour:bound=0", "downpour", "agn", "dynsgd", "easgd", "update-sharing", "hogwild"),
)
MODELS = {"mlp": ("MLP 0.67 M", 300), "cnn": ("CNN 1.2 M", 40), "transformer": ("transformer 0.8 M", 40)}
"""{name: (of benchmarks/step.py, global batches of a launch)}"""


def loader_of(model: str, batches: int) -> DataLoader[Any]:
    _, batch_of, rows = step.MODELS[MODELS[model][0]]
    torch.manual_seed(1)
    return DataLoader(TensorDataset(*batch_of(WORKERS * rows * batches)), batch_size=WORKERS * rows)


def noted(optimizer: torch.optim.Optimizer, times: list[float]) -> torch.optim.Optimizer:
    optimizer.register_step_post_hook(lambda *_: times.append(time.perf_counter()))
    return optimizer


def trained(worker: Worker, model: str, strategy: str, batches: int) -> list[float]:
    times: list[float] = []
    task = mh.Task(
        model=step.MODELS[MODELS[model][0]][0],
        loss=step.loss_of,
        optimizer=lambda module: noted(step.optimizer_of(module), times),
        train_data=loader_of(model, batches),
        validation_data=None,
    )
    loop = make_loop(WorkerPlan(task=task, strategy=strategy_of(strategy)), worker)
    join(loop)
    loop.run()
    return times


def prepared(worker: Worker, model: str, strategy: str, batches: int) -> list[float]:
    times: list[float] = []
    torch.manual_seed(0)
    module = step.MODELS[MODELS[model][0]][0]()
    optimizer, loader = noted(step.optimizer_of(module), times), loader_of(model, batches)
    module, optimizer, loader = mh.prepare(module, optimizer, loader, strategy=strategy, batches="slices")
    for batch in loader:
        optimizer.zero_grad()
        loss = step.loss_of(module, batch)
        loss.backward()
        optimizer.step()
        loss.item()  # every loop shows its loss, and train() records it
    return times


def seconds(engine: Local, program: Callable[..., list[float]], model: str, strategy: str, batches: int) -> float:
    """A step, as the workers together make them."""
    spec = LaunchSpec(workers=WORKERS, server=strategy_of(strategy).server(), threads_per_worker=1)
    found = engine.launch(partial(program, model=model, strategy=strategy, batches=batches), spec)
    rate = 0.0
    for times in found:
        kept = times[len(times) // 10 :]
        rate += (len(kept) - 1) / (kept[-1] - kept[0])
    return WORKERS / rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7, help="launches of each")
    parser.add_argument("--steps", type=float, default=1.0, help="times as many steps a launch")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--strategies", nargs="*", default=STRATEGIES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    facts = machine.facts()
    print(f"\n{'':40}{'train':>11}{'prepare':>11}{'ratio':>8}  goal")
    with Local() as engine:
        for model in options.models.split(","):
            batches = max(10, int(MODELS[model][1] * options.steps))
            for strategy in options.strategies:
                pairs = []
                for number in range(options.pairs):
                    order = (trained, prepared) if number % 2 == 0 else (prepared, trained)
                    one = {program.__name__: seconds(engine, program, model, strategy, batches) for program in order}
                    pairs.append(one)
                ours, own = (statistics.median(pair[name] for pair in pairs) for name in ("trained", "prepared"))
                ratio = statistics.median(pair["prepared"] / pair["trained"] for pair in pairs)
                found[f"{model} {strategy}"] = {"train_s": ours, "prepare_s": own, "ratio": ratio}
                line = f"{model + ' ' + strategy:40}{1000 * ours:8.3f} ms{1000 * own:8.3f} ms{ratio:8.3f}  ≤ {GOAL}"
                print(line, flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"facts": facts, "steps": found}, indent=1))


if __name__ == "__main__":
    main()
