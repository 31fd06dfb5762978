"""What it saves that worker processes keep the memory of freed tensors.

    python benchmarks/malloc.py [--pairs 10] [--steps 1.0] [--models cnn,transformer,mlp] [--json FILE]

Two workers, one thread each, train a model in a loop over `mh.prepare(model, optimizer, loader)`, in launches that
alternate: as manyhands starts processes, and with a MALLOC_ variable in the environment, which leaves glibc's thresholds
as they are. The table has medians over launches of a step's milliseconds and of its page faults on worker 0, and the median
of the ratios of neighbouring launches.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
from functools import partial
from pathlib import Path

import machine
import observed

from manyhands.engines.base import LaunchSpec
from manyhands.engines.local.engine import Local
from manyhands.worker import Worker

_HARMLESS = "MALLOC_CHECK_"  # which glibc reads under libc_malloc_debug alone


def trained(worker: Worker, model: str, batches: int) -> tuple[float, float]:
    """(seconds, page faults) a step"""
    _, times = observed.trained(worker, model, "allreduce", batches // 10, observed=False)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    _, times = observed.trained(worker, model, "allreduce", batches, observed=False)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    kept = times[len(times) // 10 :]
    return (kept[-1] - kept[0]) / (len(kept) - 1), faults / batches


def measured(engine: Local, model: str, batches: int, *, keeps: bool) -> tuple[float, float]:
    if not keeps:
        os.environ[_HARMLESS] = "0"
    try:
        spec = LaunchSpec(workers=observed.WORKERS, threads_per_worker=1)
        found: list[tuple[float, float]] = engine.launch(partial(trained, model=model, batches=batches), spec)
    finally:
        os.environ.pop(_HARMLESS, None)
    return statistics.mean(seconds for seconds, _ in found), found[0][1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10, help="launches of each")
    parser.add_argument("--steps", type=float, default=1.0, help="times as many steps a launch")
    parser.add_argument("--models", default="cnn,transformer,mlp")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    facts = machine.facts()
    print(f"\n{'':14}{'glibc':>11}{'faults':>8}{'manyhands':>13}{'faults':>8}{'ratio':>8}")
    with Local() as engine:
        for model in options.models.split(","):
            batches = max(20, int(observed.MODELS[model][1] * options.steps))
            pairs = []
            for number in range(options.pairs):
                order = (False, True) if number % 2 == 0 else (True, False)
                pairs.append({keeps: measured(engine, model, batches, keeps=keeps) for keeps in order})
            plain, kept = (
                [statistics.median(pair[keeps][i] for pair in pairs) for i in (0, 1)] for keeps in (False, True)
            )
            ratio = statistics.median(pair[True][0] / pair[False][0] for pair in pairs)
            found[model] = {"glibc_s": plain[0], "manyhands_s": kept[0], "ratio": ratio}
            print(
                f"{model:14}{1000 * plain[0]:8.3f} ms{plain[1]:8.0f}{1000 * kept[0]:10.3f} ms{kept[1]:8.0f}{ratio:8.3f}",
                flush=True,
            )
    if options.json is not None:
        options.json.write_text(json.dumps({"facts": facts, "steps": found}, indent=1))


if __name__ == "__main__":
    main()
