"""The accuracy contract: every server strategy with 4 workers beside one process, for the same number of epochs.

    python benchmarks/accuracy.py [--task digits|chars] [--workers 4] [--seeds 3] [--strategies NAME ...] [--json FILE]

Each strategy runs once a seed, in turn, so that drift of the machine hits all alike. `digits` must end within 1 point of
test accuracy of `solo`, `chars` (about a minute a run) within 2 % of its bits per character: medians over seeds. The
options are those of the table; digits runs with defaults alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import manyhands as mh

STRATEGIES = ("downpour", "agn", "dynsgd", "distance", "easgd", "eamsgd", "quorum", "update-sharing", "hogwild")


@dataclass(frozen=True)
class Contract:
    """What counts, and how near to solo it must be."""

    metric: str
    unit: str
    tolerance: float
    relative: bool
    options: dict[str, str]  # by strategy, where the defaults are not taken
    fields: dict[str, Any]

    def off(self, solo: float, value: float) -> float:
        """How much worse than solo, in units of the tolerance's."""
        worse = value - solo if self.relative else solo - value
        return 100 * worse / (solo if self.relative else 1.0)


CHARS = {"agn": "agn:window=1", "distance": "distance:window=1"}  # a short run: no time for updates that are divided


CONTRACTS = {
    "digits": Contract("test_accuracy", "points", 1.0, False, {}, {}),
    "chars": Contract("test_bits_per_character", "%", 2.0, True, CHARS, {}),
}


def main() -> None:
    args = arguments()
    contract = CONTRACTS[args.task]
    specs = {"solo": "solo"} | {name: contract.options.get(name, name) for name in args.strategies}
    runs: dict[str, list[mh.Run]] = {name: [] for name in specs}
    for seed in range(args.seeds):
        for name, spec in specs.items():
            workers = 1 if name == "solo" else args.workers
            fields = {**contract.fields, **({"epochs": args.epochs} if args.epochs else {})}
            runs[name].append(mh.train(args.task, strategy=spec, engine="local", workers=workers, seed=seed, **fields))
            print(f"seed {seed}  {name:<10} {runs[name][-1].metrics[contract.metric]:.4f}", flush=True)
    rows = [row(name, spec, runs[name], runs["solo"], contract) for name, spec in specs.items()]
    print_table(args, contract, rows)
    if args.json:
        args.json.write_text(json.dumps({"task": args.task, "workers": args.workers, "rows": rows}, indent=1) + "\n")


def row(name: str, spec: str, runs: list[mh.Run], solo: list[mh.Run], contract: Contract) -> dict[str, Any]:
    """One strategy: medians over seeds."""
    values = [run.metrics[contract.metric] for run in runs]
    off = contract.off(statistics.median(run.metrics[contract.metric] for run in solo), statistics.median(values))
    return {
        "strategy": spec,
        contract.metric: statistics.median(values),
        "lowest": min(values),
        "highest": max(values),
        "worse_than_solo": off,
        "within": off <= contract.tolerance,
        "seconds": statistics.median(run.seconds for run in runs),
        "staleness": statistics.median(map(median_of, (r.staleness for r in runs))) if runs[0].staleness else None,
        "name": name,
    }


def median_of(histogram: dict[int, int]) -> float:
    """The median of {versions: pushes}."""
    return float(statistics.median(versions for versions, pushes in histogram.items() for _ in range(pushes)))


def print_table(args: argparse.Namespace, contract: Contract, rows: list[dict[str, Any]]) -> None:
    print(f"\n{args.task}, {args.workers} workers, {args.seeds} seeds: medians (lowest to highest)\n")
    print(
        f"| strategy | {contract.metric} | worse than solo | within {contract.tolerance:g} {contract.unit} | staleness | seconds |"
    )
    print("|---|---|---|---|---|---|")
    for one in rows:
        value = f"{one[contract.metric]:.4f} ({one['lowest']:.4f} to {one['highest']:.4f})"
        print(
            f"| `{one['strategy']}` | {value} | {one['worse_than_solo']:+.2f} {contract.unit} "
            f"| {'yes' if one['within'] else 'no'} | {'–' if one['staleness'] is None else format(one['staleness'], 'g')} | {one['seconds']:.1f} |"
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=sorted(CONTRACTS), default="digits")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=None)
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    main()
