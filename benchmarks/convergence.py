"""Where asynchronous strategies break: test accuracy on digits against the number of workers, 1 to 256, with and without a bound.

    python benchmarks/convergence.py [--workers 1 2 4 …] [--strategies downpour …] [--passes 16] [--processes 2] [--json FILE]
    python benchmarks/convergence.py --draw                       # plots and table again, from the JSON of an earlier run

Every run is `engine="sim"`: real gradients, virtual time, the same bits every time. All runs make the same passes over the
same rows, in slices of 8 rows, with plain SGD at the same rate, so that only the number of workers and how they agree
differ. An epoch holds all passes: nobody meets anybody before the end. Writes docs/convergence.json, the plots in
docs/plots/, and the table between the marks in docs/convergence.md.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

DOCS = Path(__file__).parent.parent / "docs"
DATA, PAGE, PLOTS = DOCS / "convergence.json", DOCS / "convergence.md", DOCS / "plots"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"

WORKERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
STRATEGIES = ("downpour", "agn", "dynsgd", "distance", "easgd", "eamsgd")
BOUNDS = (None, 4)
ROWS_A_SLICE = 8
RATE = 0.05
ENGINE = "sim:compute='row=1ms,jitter=lognormal:0.3',network='datacenter'"
THESIS = {"downpour": (20, None), "easgd": (40, 97.99), "agn": (40, 95.55)}
"""(workers, test accuracy on MNIST; None: diverged), from the figures of the thesis that docs/convergence.md names."""


def main() -> None:
    args = arguments()
    if not args.draw:
        points = [
            (name, bound, workers)
            for name in args.strategies
            for bound in BOUNDS
            for workers in sorted(args.workers)[::-1]
        ]
        results = measure(points, args.passes, args.processes)
        args.json.write_text(json.dumps({"passes": args.passes, "rate": RATE, "results": results}, indent=1) + "\n")
    results = json.loads(args.json.read_text())["results"]
    PLOTS.mkdir(exist_ok=True)
    draw(results, "accuracy", "test accuracy, %", PLOTS / "convergence.svg")
    draw(results, "staleness", "median staleness of a push, versions", PLOTS / "staleness.svg")
    text = PAGE.read_text()
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{table(results)}\n{END}{after}")
    print(table(results))


# -- runs ----------------------------------------------------------------------------------------------------------------


def measure(points: list[tuple[str, int | None, int]], passes: int, processes: int) -> list[dict[str, Any]]:
    results = []
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for result in pool.map(partial(one, passes=passes), points):
            results.append(result)
            print(
                f"{result['strategy']:9} bound {result['bound']!s:5} {result['workers']:4} workers: {result['accuracy']:6.2f} %  "
                f"staleness {result['staleness']}  {result['seconds']:8.1f} simulated s, computed in {result['computed_s']:5.1f} s",
                flush=True,
            )
    return results


def one(point: tuple[str, int | None, int], passes: int) -> dict[str, Any]:
    import torch

    import manyhands as mh
    from manyhands.tasks.digits_task import TRAIN

    name, bound, workers = point
    start = time.perf_counter()
    try:
        run = mh.train(
            "digits",
            strategy=f"{name}:bound={'none' if bound is None else bound}",
            engine=ENGINE,
            workers=workers,
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=RATE),
            schedule=None,
            order=order_of(TRAIN, passes),
            batch_size_per_worker=ROWS_A_SLICE,
            epochs=1,
            validation_data=None,
        )
        accuracy, staleness, seconds = run.metrics["test_accuracy"], median(run.staleness), run.seconds
    except mh.ManyhandsError as error:
        if "not finite" not in str(error):
            raise
        accuracy, staleness, seconds = 0.1, None, math.nan  # it diverged: what a guess gets
    return {
        "strategy": name,
        "bound": bound,
        "workers": workers,
        "accuracy": 100 * accuracy,
        "staleness": staleness,
        "seconds": seconds if math.isfinite(seconds) else None,
        "computed_s": time.perf_counter() - start,
    }


def order_of(rows: int, passes: int) -> Callable[[int], Any]:
    """All passes as one epoch, each a permutation of its own."""
    import manyhands as mh

    return lambda epoch: np.concatenate([mh.epoch_order(rows, 0, number) for number in range(passes)])


def median(histogram: dict[int, int]) -> int:
    pushes = sum(histogram.values())
    seen = 0
    for versions in sorted(histogram):
        seen += histogram[versions]
        if 2 * seen >= pushes:
            return versions
    return 0


# -- plots and table -------------------------------------------------------------------------------------------------------


def draw(results: list[dict[str, Any]], key: str, label: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "manyhands", "font.size": 9, "svg.fonttype": "none"}
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(BOUNDS), figsize=(9, 3.6), sharey=True)
    for panel, bound in zip(panels, BOUNDS, strict=True):
        for i, name in enumerate(dict.fromkeys(r["strategy"] for r in results)):
            line = [r for r in results if r["strategy"] == name and r["bound"] == bound and r[key] is not None]
            line.sort(key=lambda r: r["workers"])
            panel.plot(
                [r["workers"] for r in line], [r[key] for r in line], color=f"C{i}", marker="o", ms=3, label=name
            )
            if key == "accuracy" and bound is None and name in THESIS:
                workers, accuracy = THESIS[name]
                panel.plot(workers, accuracy or 10, color=f"C{i}", marker="x", ms=8, mew=2, ls="")
        panel.set_xscale("log", base=2)
        panel.set_xticks(WORKERS, [str(w) for w in WORKERS])
        panel.set_xlabel("workers")
        panel.set_title("no bound" if bound is None else f"bound={bound}")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel(label)
    panels[-1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def table(results: list[dict[str, Any]]) -> str:
    """A row for each strategy and bound: accuracy by workers, and the largest number within 1 point of one worker."""
    workers = sorted({r["workers"] for r in results})
    lines = [
        "| strategy | bound | " + " | ".join(str(w) for w in workers) + " | within 1 point up to |",
        "|---|---|" + "---|" * (len(workers) + 1),
    ]
    for name in dict.fromkeys(r["strategy"] for r in results):
        for bound in BOUNDS:
            of = {r["workers"]: r["accuracy"] for r in results if (r["strategy"], r["bound"]) == (name, bound)}
            good = 0
            for count in workers:
                if of[count] < of[workers[0]] - 1:
                    break
                good = count
            cells = " | ".join(f"{of[w]:.1f}" for w in workers)
            lines.append(f"| `{name}` | {'none' if bound is None else bound} | {cells} | {good} |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=list(WORKERS))
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--passes", type=int, default=16, help="over the training rows, by all workers together")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--draw", action="store_true", help="only plots and table, from the JSON")
    parser.add_argument("--json", type=Path, default=DATA)
    return parser.parse_args()


if __name__ == "__main__":
    main()
