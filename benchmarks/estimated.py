"""Steps that `manyhands estimate` predicts beside steps that were measured: all strategies, on as many workers as were calibrated.

    python benchmarks/estimated.py [TASK] [--workers 2] [--repeats 5] [--steps 80] [--strategies …] [--json FILE]

Calibrates with the strategies that `calibrate` tries by itself, then trains the task with every strategy for real: so many
times each, in an order that is drawn anew each time. A step is a global batch; it is measured over whole epochs where
these are short, as the estimate is, without validation. Other work of the machine only ever slows a run down: beside the
quickest run stand the median and the slowest. `inside` counts the runs between the estimate's low and high.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import machine

from manyhands.data.open_source import open_source
from manyhands.engines.local.engine import Local
from manyhands.evidence.calibrate.calibrate import STRATEGIES, calibrated
from manyhands.evidence.calibrate.observe import WARM, RunSetup, train_observed
from manyhands.evidence.calibrate.report import text
from manyhands.evidence.estimate.estimate import Estimate, estimate
from manyhands.evidence.estimate.model_sizes import reading_plan
from manyhands.evidence.estimate.steady_state import SteadyObserver
from manyhands.strategies import CATALOGUE, spec_of, strategy_of
from manyhands.task import Task
from manyhands.tasks.finding import task_of

NOT_HERE = ("solo", "ensemble", "hogwild")  # one worker; no exchange; shared memory, which the simulator does not have
EVERY = tuple(name for name in CATALOGUE if name not in NOT_HERE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="?", default="digits")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=80, help="that are measured of each run, at least")
    parser.add_argument("--strategies", nargs="*", default=EVERY)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    facts, task, began = machine.facts(), task_of(args.task), time.monotonic()
    chosen = [spec_of(strategy_of(strategy)) for strategy in args.strategies]
    with Local() as engine:
        found = calibrated(task, workers=args.workers, engine=engine)
        print(text(found, args.task, Path("-")), flush=True)
        measured = measure(RunSetup(engine=engine, workers=args.workers), task, chosen, args.repeats, args.steps)
    predicted = estimate(task, profile=found.profile, workers=[args.workers], strategies=chosen)
    rows = [row(one, measured[one.strategy]) for one in predicted.estimates]
    print(f"\n{table(rows)}\n")
    print(
        f"{args.task} on {args.workers} workers, milliseconds a step, {args.repeats} runs each; "
        f"calibrated with {', '.join(STRATEGIES)}; {time.monotonic() - began:.0f} s in all"
    )
    if args.json:
        args.json.write_text(json.dumps({"machine": facts, "task": args.task, "rows": rows}, indent=2))


def measure(place: RunSetup, task: Task, strategies: list[str], repeats: int, least: int) -> dict[str, list[float]]:
    """{strategy: seconds a step of each run}"""
    ticks = reading_plan(task, open_source(task.train_data), place.workers).ticks
    steps = least if ticks is None or ticks > least else -(-least // ticks) * ticks
    found: dict[str, list[float]] = {strategy: [] for strategy in strategies}
    order = random.Random(0)
    for _ in range(repeats):
        for strategy in order.sample(strategies, len(strategies)):
            observer = SteadyObserver(place.workers, ticks, steps)
            train_observed(observer, place, task, strategy_of(strategy), WARM + steps + (ticks or 0))
            seen = observer.measured()
            assert seen is not None, f"{strategy}: no whole block in {steps} steps, give more --steps"
            found[strategy].append(seen.step_s)
    return found


def row(one: Estimate, runs: list[float]) -> dict[str, Any]:
    assert one.step is not None, one.refused
    low, high = one.step.low, one.step.high
    assert low is not None
    assert high is not None
    return {
        "strategy": one.strategy,
        "predicted_s": one.step.seconds,
        "low_s": low,
        "high_s": high,
        "runs_s": runs,
        "inside": sum(low <= seconds <= high for seconds in runs),
        "tried": one.bars is not None and one.bars.tried,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown; milliseconds."""
    lines = [
        "| strategy | estimated (low to high) | quickest run | median | slowest | quickest / estimated | inside |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in rows:
        runs, predicted = one["runs_s"], one["predicted_s"]
        bars = f"{_ms(predicted)} ({_ms(one['low_s'])} to {_ms(one['high_s'])})"
        found = " | ".join(_ms(seconds) for seconds in (min(runs), statistics.median(runs), max(runs)))
        name = f"`{one['strategy']}`{'' if one['tried'] else ' *'}"
        lines.append(f"| {name} | {bars} | {found} | {min(runs) / predicted:.2f} | {one['inside']} of {len(runs)} |")
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"


if __name__ == "__main__":
    main()
