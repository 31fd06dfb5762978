"""The speedup of local SGD over one worker, after its paper: logistic regression, K workers, H steps between averages.

    python benchmarks/local_sgd_speedup.py [--workers 1 2 …] [--periods 1 2 …] [--batch-sizes 4 16] [--seeds 5]
    python benchmarks/local_sgd_speedup.py --quick       # a small problem and grid, in seconds; writes nothing
    python benchmarks/local_sgd_speedup.py --draw        # plot and tables again, from the JSON of an earlier run

Every run is strategy `local-sgd` on engine `sim`: real gradients, and virtual time in which a mean over the workers
takes as long as the gradients of 25 rows. A run ends once f - f* is at most 0.005. For each K, H and batch size the
constant rate is tuned on one seed, in powers of two, and measured on others. Writes docs/local-sgd-figure.json, the
plot in docs/plots/, and the tables between the marks in docs/local-sgd-figure.md.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import takewhile
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import manyhands as mh
from manyhands.replica.replica import Replica
from manyhands.worker import Worker
from manyhands.worker_callback import WorkerCallback, WorkerCallbackFactory

DOCS = Path(__file__).parent.parent / "docs"
DATA, PAGE, PLOT = (
    DOCS / "local-sgd-figure.json",
    DOCS / "local-sgd-figure.md",
    DOCS / "plots" / "local-sgd-speedup.svg",
)
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"

WORKERS, PERIODS, BATCH_SIZES = (1, 2, 4, 8, 16), (1, 2, 4, 8, 16), (4, 16)
TARGET = 0.005
RATIO = 25
"""Gradients of one row that take as long as an exchange."""
ENGINE = f"sim:compute='row=1us',network='workers_per_host=all,local_latency={RATIO / 2}us'"
"""A mean in shared memory takes two latencies, for any number of workers: RATIO us."""
ROW_S = 1e-6
FIRST_RATE, MOST_STEPS = 0.5, 12_000
TUNING_SEED = 0
DECAYS = (2**-12, 2**-10, 2**-8, 2**-6, 2**-4)
"""c in the rate min(32, c·n/(t+1)), which is tried with one worker."""
COSTS: Mapping[str, Callable[[int], float]] = {
    "an average is free": lambda workers: 0,
    f"an average costs {RATIO} gradients": lambda workers: RATIO,
    f"an average costs 2(K - 1)·{RATIO} gradients": lambda workers: 2 * (workers - 1) * RATIO,
}
"""What an exchange costs, in gradients of one row."""
NEARLY = 0.9
"""Of K: a speedup that still counts as linear."""


def main() -> None:
    args = arguments()
    if not args.draw:
        start = time.perf_counter()
        grid = Grid(args.workers, args.periods, args.batch_sizes, args.seeds, args.processes)
        found = measure(QUICK, QUICK_GRID) if args.quick else measure(Spec(), grid)
        print(f"computed in {time.perf_counter() - start:.0f} s")
        if args.quick:
            print(tables(found["results"]))
            return
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    results = json.loads(args.json.read_text())["results"]
    draw(results, PLOT)
    text = PAGE.read_text()
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{tables(results)}\n{END}{after}")
    print(tables(results))


# -- the problem -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Of a data set: sparse binary features, whose frequencies fall as 1/j, and labels of a logistic model."""

    rows: int = 49_749
    features: int = 300
    scale: float = 2.2138  # 11.65 features of a row are 1, on average
    mean: float = -0.4  # of the planted weights: 1.3 % of the rows are positive
    spread: float = 0.3
    seed: int = 0


QUICK = Spec(rows=1000, features=20, scale=2.0)


@dataclass(frozen=True)
class Problem:
    """f(w) = mean over rows of log(1 + exp(-a·w)), + |w|²/(2n). A row `a` is its features times its label, 1 or -1."""

    a: Tensor  # [n, D]
    least: float  # f(w*)
    facts: dict[str, float]

    @cached_property
    def _ones(self) -> tuple[Tensor, Tensor, Tensor]:
        """Which features of each row are not 0, one row after the other; where each row begins; [n, 1] labels."""
        at = self.a.nonzero()  # [ones, 2]
        begins = torch.searchsorted(at[:, 0].contiguous(), torch.arange(len(self.a)))
        return at[:, 1].contiguous(), begins, self.a.sum(1, keepdim=True).sign()

    def gap(self, points: Tensor) -> Tensor:
        """f - f* of each of P points, [D, P] -> [P], float64."""
        features, begins, labels = self._ones
        margins = labels * F.embedding_bag(
            features, points.float(), begins, mode="sum"
        )  # [n, P]: sums over few features
        return objective(margins.double(), points.double()) - self.least


def objective(margins: Tensor, points: Tensor) -> Tensor:
    """[n, P], [D, P] -> [P]"""
    return F.softplus(-margins).mean(0) + points.square().sum(0) / (2 * len(margins))


@lru_cache(maxsize=1)
def problem(spec: Spec) -> Problem:
    random = np.random.default_rng(spec.seed)
    frequencies = np.minimum(0.6, spec.scale / np.arange(1, spec.features + 1))
    x = random.random((spec.rows, spec.features)) < frequencies
    planted = random.normal(spec.mean, spec.spread, spec.features)
    positive = random.random(spec.rows) < 1 / (1 + np.exp(-(x @ planted)))
    a = torch.from_numpy(x * np.where(positive, 1.0, -1.0)[:, None])
    least, error = minimum(a)
    ones, share = float(x.sum(1).mean()), float(positive.mean())
    return Problem(a.float(), least, {"nonzeros_a_row": ones, "positive": share, "f_star": least, "error": error})


def minimum(a: Tensor) -> tuple[float, float]:
    """f* by Newton's method, and a bound of its error: |gradient|²/(2·strong convexity)."""
    n, features = a.shape
    point = a.new_zeros(features)
    for _ in range(50):
        slope = torch.sigmoid(-(a @ point))  # [n]
        gradient = -(a.T @ slope) / n + point / n
        error = float(gradient.square().sum()) * n / 2
        if error < 1e-12:
            return float(objective((a @ point)[:, None], point[:, None])), error
        hessian = (a.T * (slope * (1 - slope))) @ a / n + torch.eye(features, dtype=a.dtype) / n
        point = point - torch.linalg.solve(hessian, gradient)
    raise AssertionError(f"no minimum after 50 steps: {error}")


class Linear(nn.Module):
    """a -> a·w, from w = 0."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(features))

    def forward(self, a: Tensor) -> Tensor:
        return a @ self.w


# -- one run -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run of the grid. rate: constant; or with `decay` c: min(rate, c·n/(t+1))."""

    workers: int
    period: int
    batch_size: int
    rate: float
    decay: float | None = None
    seed: int

    def rate_at(self, step: int, rows: int) -> float:
        return self.rate if self.decay is None else min(self.rate, self.decay * rows / (step + 1))


@dataclass
class Hit(WorkerCallbackFactory):
    """Stops a run at the first average whose model reaches the target, and remembers when that was.

    Reached by the last average, or by the mean of all of them: uniform, or weighted by the step or its square.
    """

    problem: Problem
    period: int
    gap: float = math.inf  # the newest
    steps: int | None = None  # of each worker, until the target was reached
    seconds: float = math.nan  # virtual, until then
    by: str = ""

    def check(self, one_model: bool) -> None:
        assert one_model

    def create(self, worker: Worker, replica: Replica) -> WorkerCallback:
        return _Watch(self, worker, replica)

    def on_result(self, result: Any) -> None:
        pass


class _Watch(WorkerCallback):
    """Worker 0 looks, more often where the target is near."""

    def __init__(self, hit: Hit, worker: Worker, replica: Replica) -> None:
        self.hit, self.worker, self.replica = hit, worker, replica
        self.step = self.next = 0
        self.weights = torch.zeros(3, dtype=torch.float64)
        self.means = torch.zeros(hit.problem.a.shape[1], 3, dtype=torch.float64)  # [D, 3]

    def on_start(self, facts: Mapping[str, Any]) -> None:
        self.began = self.worker.clock()  # what comes before is no step

    def on_epoch_start(self, epoch: int) -> None:
        pass

    def on_step(self, loss: float | None) -> bool:
        self.step += 1
        if self.worker.rank or self.step % self.hit.period or self.hit.steps is not None:
            return False
        w = next(self.replica.model.parameters()).detach().double()[:, None]
        weight = float(self.step) ** torch.arange(3, dtype=torch.float64)
        self.weights += weight
        self.means += (w - self.means) * (weight / self.weights)
        if self.step >= self.next:
            gaps = self.hit.problem.gap(torch.cat([w, self.means], dim=1)).tolist()
            least = self.hit.gap = min(gaps)
            if least <= TARGET:
                self.hit.steps, self.hit.seconds = self.step, self.worker.clock() - self.began
                self.hit.by = ("last", "uniform", "linear", "quadratic")[gaps.index(least)]
            self.next = self.step * (1.05 if least > 4 * TARGET else 1.02 if least > 2 * TARGET else 1.005)
        return self.hit.steps is not None

    def on_epoch_end(self, epoch: int, metrics: Mapping[str, float]) -> bool:
        return False

    def on_end(self) -> None:
        return None


def run(spec: Spec, point: Point, most: int) -> Hit:
    """Train until the target is reached, for `most` steps at most; rows are drawn with replacement."""
    data = problem(spec)
    rows = len(data.a)
    hit = Hit(data, point.period)
    draws = np.random.default_rng(point.seed).integers(0, rows, most * point.workers * point.batch_size)
    mh.train(
        model=partial(Linear, data.a.shape[1]),
        loss=lambda model, batch: F.softplus(-model(batch[0])).mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=1 / rows),
        schedule=lambda optimizer, total: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: point.rate_at(step, rows)
        ),
        train_data=(data.a,),
        order=lambda epoch: draws,
        batch_size_per_worker=point.batch_size,
        worker_callback=hit,
        strategy=f"local-sgd:period={point.period}",
        engine=ENGINE,
        workers=point.workers,
    )
    return hit


# -- the grid ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grid:
    workers: tuple[int, ...] = WORKERS
    periods: tuple[int, ...] = PERIODS
    batch_sizes: tuple[int, ...] = BATCH_SIZES
    seeds: int = 5
    processes: int = 2


QUICK_GRID = Grid((1, 2), (1, 4), (4,), seeds=2, processes=1)


def measure(spec: Spec, grid: Grid) -> dict[str, Any]:
    """One worker first: its best rates are where the search for those of more workers begins."""
    seeds = tuple(range(TUNING_SEED + 1, TUNING_SEED + 1 + grid.seeds))
    several = tuple(workers for workers in sorted(grid.workers) if workers > 1)
    with ProcessPoolExecutor(grid.processes, get_context("spawn")) as pool:
        mapped: Callable[..., Iterator[Any]] = pool.map if grid.processes > 1 else map
        results = []
        for rows in mapped(partial(chain, spec, seeds, (1,)), [(1, b, FIRST_RATE) for b in grid.batch_sizes]):
            results += report(rows)
        starts = [(period, row["batch_size"], row["rate"]) for row in results for period in grid.periods]
        trials = [(row["batch_size"], c, max(row["steps"])) for row in results for c in DECAYS]
        for rows in mapped(partial(chain, spec, seeds, several), starts):
            results += report(rows)
        decaying = list(mapped(partial(decayed, spec), trials))
    results.sort(key=lambda row: (row["batch_size"], row["period"], row["workers"]))
    return {"spec": vars(spec), "facts": problem(spec).facts, "results": results, "decaying": decaying}


def chain(
    spec: Spec, seeds: tuple[int, ...], workers: tuple[int, ...], start: tuple[int, int, float]
) -> list[dict[str, Any]]:
    """Each number of workers: the rate is tuned from that of the number before, and measured on seeds of its own."""
    period, batch_size, rate = start
    rows = []
    for count in workers:
        begun = time.perf_counter()
        point = Point(workers=count, period=period, batch_size=batch_size, rate=rate, seed=TUNING_SEED)
        rate, steps = tuned(spec, point)
        hits = [run(spec, replace(point, rate=rate, seed=seed), 4 * steps) for seed in seeds]
        rows.append(
            {
                "batch_size": batch_size,
                "period": period,
                "workers": count,
                "rate": rate,
                "steps": [hit.steps for hit in hits],
                "seconds": [hit.seconds for hit in hits],
                "by": [hit.by for hit in hits],
                "computed_s": time.perf_counter() - begun,
            }
        )
    return rows


def tuned(spec: Spec, point: Point) -> tuple[float, int]:
    """The rate with the fewest steps, and these: from the point's twice as much while that is better, else half."""
    rate, least = point.rate, run(spec, point, MOST_STEPS).steps or MOST_STEPS
    for factor in (2.0, 0.5):
        while (steps := run(spec, replace(point, rate=rate * factor), least - 1).steps) is not None:
            rate, least = rate * factor, steps
        if rate != point.rate:
            break
    return rate, least


def decayed(spec: Spec, trial: tuple[int, float, int]) -> dict[str, Any]:
    """One worker with a rate that decays from 32, for as many steps as the slowest run at a constant one needed."""
    batch_size, c, most = trial
    hit = run(spec, Point(workers=1, period=1, batch_size=batch_size, rate=32.0, decay=c, seed=TUNING_SEED), most)
    return {"batch_size": batch_size, "c": c, "most": most, "steps": hit.steps, "gap": hit.gap}


def report(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for row in rows:
        print(
            f"b={row['batch_size']:2} H={row['period']:2} K={row['workers']:2}: rate {row['rate']:<6g} "
            f"steps {row['steps']} by {row['by']}, computed in {row['computed_s']:.1f} s",
            flush=True,
        )
    return rows


# -- plot and tables ---------------------------------------------------------------------------------------------------


def times(row: dict[str, Any], exchange: Callable[[int], float]) -> list[float]:
    """Of each seed, until the target was reached, in gradients of one row."""
    return [s * row["batch_size"] + s / row["period"] * exchange(row["workers"]) for s in row["steps"]]


def speedups(
    results: list[dict[str, Any]], exchange: Callable[[int], float]
) -> dict[tuple[int, int, int], list[float]]:
    """(b, H, K) -> of each seed, the time of one worker over that of K workers, who are given the same rows in all."""
    alone = {row["batch_size"]: times(row, lambda workers: 0) for row in results if row["workers"] == 1}
    return {
        (row["batch_size"], row["period"], row["workers"]): [
            one / several for one, several in zip(alone[row["batch_size"]], times(row, exchange), strict=True)
        ]
        for row in results
        if row["workers"] > 1
    }


def draw(results: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "manyhands", "font.size": 9, "svg.fonttype": "none"}
    from matplotlib import pyplot

    batch_sizes = sorted({row["batch_size"] for row in results})
    workers = sorted({row["workers"] for row in results})
    figure, panels = pyplot.subplots(
        len(COSTS), len(batch_sizes), figsize=(9, 10), sharex=True, sharey="row", squeeze=False
    )
    for line, (what, exchange) in zip(panels, COSTS.items(), strict=True):
        found = speedups(results, exchange)
        for panel, batch_size in zip(line, batch_sizes, strict=True):
            panel.plot(workers, workers, color="gray", ls="--", lw=1, label="K")
            for i, period in enumerate(sorted({h for b, h, _ in found if b == batch_size})):
                of = {k: found[batch_size, period, k] for k in workers if (batch_size, period, k) in found}
                middle = [1.0, *map(statistics.median, of.values())]
                below = [0.0, *(statistics.median(v) - min(v) for v in of.values())]
                above = [0.0, *(max(v) - statistics.median(v) for v in of.values())]
                panel.errorbar([1, *of], middle, [below, above], color=f"C{i}", marker="o", ms=3, label=f"H={period}")
            panel.set_xscale("log", base=2)
            panel.set_yscale("log", base=2)
            panel.set_xticks(workers, [str(k) for k in workers])
            panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            panel.set_title(f"b={batch_size}, {what}", fontsize=9)
            panel.grid(alpha=0.3)
        line[0].set_ylabel("speedup over one worker")
    for panel in panels[-1]:
        panel.set_xlabel("workers K")
    panels[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def tables(results: list[dict[str, Any]]) -> str:
    """Steps and rates of each run, then a table of speedups for each cost of an exchange."""
    workers = sorted({row["workers"] for row in results})
    by_key = {(row["batch_size"], row["period"], row["workers"]): row for row in results}

    def table(cell: Callable[[tuple[int, int, int]], str], columns: list[int]) -> list[str]:
        lines = ["| b | H | " + " | ".join(f"K={k}" for k in columns) + " |", "|---|---|" + "---|" * len(columns)]
        for b, h in sorted({key[:2] for key in by_key}):
            cells = [cell((b, h, k)) if (b, h, k) in by_key else "" for k in columns]
            lines.append(f"| {b} | {h} | " + " | ".join(cells) + " |")
        return lines

    def steps(key: tuple[int, int, int]) -> str:
        row = by_key[key]
        return f"{statistics.median(row['steps']):,.0f} ({row['rate']:g})"

    lines = ["Steps of each worker until the target (and the rate):", "", *table(steps, workers)]
    for what, exchange in COSTS.items():
        found = speedups(results, exchange)
        lines += ["", f"Speedup over one worker, {what}:", ""]
        lines += table(
            lambda key, found=found: f"{statistics.median(v := found[key]):.2f} ({min(v):.2f}–{max(v):.2f})",
            workers[1:],
        )
    lines += [
        "",
        f"Largest H up to which the speedup is at least {NEARLY:g}·K, an average is free:",
        "",
        *nearly_linear(results),
    ]
    modelled = COSTS[f"an average costs {RATIO} gradients"]
    more = [
        clock / (ROW_S * time) - 1
        for row in results
        if row["workers"] > 1
        for clock, time in zip(row["seconds"], times(row, modelled), strict=True)
    ]
    lines += [
        "",
        f"The engine's clock is {100 * min(more):.1f} to {100 * max(more):.1f} % above the second cost's times.",
    ]
    return "\n".join(lines)


def nearly_linear(results: list[dict[str, Any]]) -> list[str]:
    """A row for each b and K: the H of NEARLY, beside the order that the paper's theorem gives."""
    free = speedups(results, lambda workers: 0)
    lines = ["| b | K | T: steps with H=1 | √(T/(K·b)) | largest H |", "|---|---|---|---|---|"]
    for b, k in sorted({(b, k) for b, _, k in free}):
        periods = sorted(h for batch_size, h, workers in free if (batch_size, workers) == (b, k))
        good = list(takewhile(lambda h, b=b, k=k: statistics.median(free[b, h, k]) >= NEARLY * k, periods))
        steps = next(
            statistics.median(row["steps"])
            for row in results
            if (row["batch_size"], row["period"], row["workers"]) == (b, periods[0], k)
        )
        largest = "none" if not good else f"{good[-1]}" if good != periods else f"at least {good[-1]}"
        lines.append(f"| {b} | {k} | {steps:,.0f} | {math.sqrt(steps / (k * b)):.1f} | {largest} |")
    return lines


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=list(WORKERS), help="1 is always measured")
    parser.add_argument("--periods", type=int, nargs="+", default=list(PERIODS))
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=list(BATCH_SIZES))
    parser.add_argument("--seeds", type=int, default=5, help="measured, beside the one on which rates are tuned")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a small problem and grid; only prints")
    parser.add_argument("--draw", action="store_true", help="only plot and tables, from the JSON")
    parser.add_argument("--json", type=Path, default=DATA)
    return parser.parse_args()


if __name__ == "__main__":
    main()
