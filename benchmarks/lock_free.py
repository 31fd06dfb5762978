"""HOGWILD!'s three problems on 1, 2 and 4 workers: steps without locks beside locks for each row of a table, and beside turns.

    python benchmarks/lock_free.py [--blocks 5] [--workers 1,2,4] [--scale 1.0] [--json FILE]

The problems of Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent, Niu, Recht, Ré, Wright, 2011:

    svm         a sparse support vector machine: rows of about 75 of 47,000 features
    completion  matrix completion: ratings as products of 32 factors
    cuts        graph cuts into 8 classes

and the three ways to step, which are one compiled function each, with one number that says which way:

    free        every worker steps at once, without a lock (strategy hogwild)
    locks       a worker holds the locks of all rows of tables that an example reads or writes, in ascending order
    turns       round robin (Slow Learners are Fast, Zinkevich, Langford, Smola, 2009): gradients are computed at once,
                and workers take turns to write

In alternating blocks; examples/s are those of all epochs but the first, by wall time, and speed-ups are beside one worker
without locks. With more workers than cores, workers wait for each other's processor: that line says `oversubscribed`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import linear
import machine
import numpy as np
from locks import acquire, give_way, load, release, store
from numpy.typing import NDArray

import manyhands as mh
from manyhands.kernels.cuts import Cuts, cost_of_edge, step_of_edge
from manyhands.sparse.compile import compiled
from manyhands.sparse.rows import Rows

Array = NDArray[Any]
Arrays = Mapping[str, Array]

FREE, LOCKS, TURNS = 0, 1, 2
WAYS = {"free": FREE, "locks": LOCKS, "turns": TURNS}
EPOCHS, BATCHES = 4, 16
_SEATS: dict[int, int] = {}  # of this process: which turn is its own


@dataclass(frozen=True, kw_only=True)
class Waits:
    """What the kernels below share: which way to step, and the memory in which workers wait for each other."""

    way: int = FREE
    workers: int = 1

    def extra(self, rows: int, fields: tuple[str, ...]) -> dict[str, Rows]:
        """`locks`: one for each row of a table. `turns`: whose turn it is; how many seats are taken; the lock of that."""
        return {"locks": Rows(rows=rows, fields=fields), "turns": Rows(rows=3, dim=16)}

    def seat(self, rows: Arrays) -> tuple[Array, Array, int]:
        """(locks, turns, the number of this process among the workers)"""
        locks, turns = rows["locks"].ravel().view(np.int32), rows["turns"].ravel().view(np.int32)
        if os.getpid() not in _SEATS:
            _SEATS[os.getpid()] = take_seat(turns)
        return locks, turns, _SEATS[os.getpid()]


@compiled
def take_seat(turns: Array) -> int:
    acquire(turns, 32)
    seat = load(turns, 16)
    store(turns, 16, seat + 1)
    release(turns, 32)
    return seat


@compiled
def wait_for_turn(turns: Array, seat: int, workers: int) -> None:
    tries = 0
    while load(turns, 0) != seat:
        tries = give_way(tries)


@compiled
def end_turn(turns: Array, seat: int, workers: int) -> None:
    store(turns, 0, (seat + 1) % workers)


@dataclass(frozen=True, kw_only=True)
class Svm(Waits, linear.Linear):
    def tables(self) -> dict[str, Rows]:
        return super().tables() | self.extra(self.features, ("keys",))

    def step(self, rows: Arrays, batch: Arrays, rate: float) -> float:
        columns = [batch[name] for name in ("rows", "offsets", "keys", "values", "targets")]
        seat = self.seat(rows)
        return float(svm(rows["weights"].ravel(), *seat, self.way, self.workers, *columns, np.float32(rate)))


@compiled
def svm(
    weights: Array,
    locks: Array,
    turns: Array,
    seat: int,
    way: int,
    workers: int,
    rows: Array,
    offsets: Array,
    keys: Array,
    values: Array,
    targets: Array,
    rate: Any,
) -> float:
    losses = 0.0
    for row in rows:
        begin, end = np.uint64(offsets[row]), np.uint64(offsets[row + 1])
        target = np.float32(1) if targets[row] > 0 else np.float32(-1)
        if way == LOCKS:
            for i in range(begin, end):
                acquire(locks, keys[np.uint64(i)])
        output = np.float32(0)
        for i in range(begin, end):
            output += weights[keys[np.uint64(i)]] * values[np.uint64(i)]
        if way == TURNS:
            wait_for_turn(turns, seat, workers)
        if target * output < 1:
            losses += 1 - target * output
            for i in range(begin, end):
                weights[keys[np.uint64(i)]] += rate * target * values[np.uint64(i)]
        if way == TURNS:
            end_turn(turns, seat, workers)
        if way == LOCKS:
            for i in range(begin, end):
                release(locks, np.uint64(keys[np.uint64(i)]))
    return losses


@dataclass(frozen=True, kw_only=True)
class Completion(Waits, mh.kernels.Factors):  # type: ignore[name-defined]
    def tables(self) -> dict[str, Rows]:
        tables = super().tables()
        return {name: tables[name] for name in ("users", "items")} | self.extra(self.users + self.items, ())

    def measure(self, rows: Arrays, batch: Arrays) -> dict[str, tuple[float, float]]:  # type: ignore[override]
        off = (rows["users"][batch["users"]] * rows["items"][batch["items"]]).sum(1) - batch["ratings"]
        return {"loss": (float((off * off).mean()), float(len(off)))}

    def step(self, rows: Arrays, batch: Arrays, rate: float) -> float:
        columns = [batch[name] for name in ("users", "items", "ratings")]
        seat = self.seat(rows)
        numbers = np.float32(rate), np.float32(self.ridge), self.rank
        return float(completion(rows["users"], rows["items"], *seat, self.way, self.workers, *columns, *numbers))


@compiled
def completion(
    users: Array,
    items: Array,
    locks: Array,
    turns: Array,
    seat: int,
    way: int,
    workers: int,
    user_keys: Array,
    item_keys: Array,
    ratings: Array,
    rate: Any,
    ridge: Any,
    rank: int,
) -> float:
    losses, k, first_item = 0.0, np.uint64(rank), np.uint64(len(users))
    for n in range(np.uint64(len(ratings))):
        user, item = np.uint64(user_keys[n]), np.uint64(item_keys[n])
        if way == LOCKS:
            acquire(locks, user)
            acquire(locks, first_item + item)
        error = ratings[n]
        for d in range(k):
            error -= users[user, d] * items[item, d]
        losses += error * error
        if way == TURNS:
            wait_for_turn(turns, seat, workers)
        for d in range(k):
            p, q = users[user, d], items[item, d]
            users[user, d] = p + rate * (error * q - ridge * p)
            items[item, d] = q + rate * (error * p - ridge * q)
        if way == TURNS:
            end_turn(turns, seat, workers)
        if way == LOCKS:
            release(locks, first_item + item)
            release(locks, user)
    return losses


@dataclass(frozen=True, kw_only=True, eq=False)
class WaitingCuts(Waits, Cuts):
    def tables(self) -> dict[str, Rows]:
        return super().tables() | self.extra(len(self.known), ("nodes", "others"))

    def initial_rows(self, table: str, keys: Any, seed: int) -> Array:
        tables = self.tables()
        found: Array = (
            super().initial_rows(table, keys, seed)
            if table == "points"
            else np.zeros((len(keys), tables[table].dim), np.float32)
        )
        return found

    def step(self, rows: Arrays, batch: Arrays, rate: float) -> float:
        columns = [batch[name] for name in ("nodes", "others", "weights", "nodes_free", "others_free")]
        scratch = np.empty(self.classes, np.float32)
        seat = self.seat(rows)
        return float(cuts(rows["points"], *seat, self.way, self.workers, *columns, np.float32(rate), scratch))


@compiled
def cuts(
    points: Array,
    locks: Array,
    turns: Array,
    seat: int,
    way: int,
    workers: int,
    nodes: Array,
    others: Array,
    weights: Array,
    nodes_free: Array,
    others_free: Array,
    rate: Any,
    scratch: Array,
) -> float:
    losses = 0.0
    for n in range(np.uint64(len(nodes))):
        u, v = np.uint64(nodes[n]), np.uint64(others[n])
        if way == LOCKS:
            acquire(locks, min(u, v))
            if u != v:
                acquire(locks, max(u, v))
        losses += cost_of_edge(points, u, v, weights[n])
        if way == TURNS:
            wait_for_turn(turns, seat, workers)
        step_of_edge(points, u, v, rate * weights[n], nodes_free[n], others_free[n], scratch)
        if way == TURNS:
            end_turn(turns, seat, workers)
        if way == LOCKS:
            if u != v:
                release(locks, max(u, v))
            release(locks, min(u, v))
    return losses


# -- the problems ----------------------------------------------------------------------------------------------------


def svm_task(scale: float) -> tuple[Callable[..., Any], dict[str, Any]]:
    rows = linear.generated(_even(120_000 * scale))
    fields = {"train_data": rows, "test_data": rows, "rate": 0.05, "batch_size": len(rows) // BATCHES}
    return lambda **way: Svm(features=rows.features, loss="hinge", bias=False, **way), fields


def completion_task(scale: float) -> tuple[Callable[..., Any], dict[str, Any]]:
    count, users, items, random = _even(2_400_000 * scale), 50_000, 10_000, np.random.default_rng(0)
    user, item = random.integers(0, users, count), (items * random.random(count) ** 2).astype(np.int64)
    left, right = random.normal(size=(users, 8)) / 8**0.5, random.normal(size=(items, 8))
    ratings = (left[user] * right[item]).sum(1) + 0.3 * random.normal(size=count)
    data = {"users": user.astype(np.int32), "items": item.astype(np.int32), "ratings": ratings.astype(np.float32)}
    fields = {"train_data": data, "test_data": data, "rate": 0.1, "batch_size": count // BATCHES}
    return lambda **way: Completion(users=users, items=items, rank=32, biases=False, **way), fields


def cuts_task(scale: float) -> tuple[Callable[..., Any], dict[str, Any]]:
    count, nodes, classes, random = _even(800_000 * scale), 100_000, 8, np.random.default_rng(0)
    planted = random.integers(0, classes, nodes)
    u, v = random.integers(0, nodes, (2, count))
    weights = np.where(planted[u] == planted[v], 1.0, 0.05).astype(np.float32)
    known = np.where(np.arange(nodes) < nodes // 10, planted, -1)
    data = {"nodes": u.astype(np.int32), "others": v.astype(np.int32), "weights": weights}
    fields = {"train_data": data, "test_data": data, "rate": 0.05, "batch_size": count // BATCHES}
    return lambda **way: WaitingCuts(known=known, classes=classes, **way), fields


def _even(count: float) -> int:
    """Rows that 4 workers share evenly in each global batch: those who take turns make equally many steps."""
    return max(1, round(count / (4 * BATCHES))) * 4 * BATCHES


PROBLEMS = {"svm": svm_task, "completion": completion_task, "cuts": cuts_task}


def main() -> None:
    args = arguments()
    facts = machine.facts()
    found: dict[str, list[dict[str, dict[str, float]]]] = {}
    for name, problem in PROBLEMS.items():
        if name not in args.problems.split(","):
            continue
        kernel, fields = problem(args.scale)
        found[name] = [one_block(name, number, kernel, fields, args) for number in range(args.blocks)]
    report(found, int(facts["cores"]))
    if args.json:
        args.json.write_text(json.dumps({"machine": facts, "blocks": found}, indent=1) + "\n")


def one_block(
    name: str, number: int, kernel: Callable[..., Any], fields: dict[str, Any], args: argparse.Namespace
) -> dict[str, dict[str, float]]:
    block: dict[str, dict[str, float]] = {}
    for workers in map(int, args.workers.split(",")):
        for way in WAYS:
            run = mh.train(
                kernel=kernel(way=WAYS[way], workers=workers),
                **fields,
                rate_decay=0.9,
                epochs=EPOCHS,
                strategy="hogwild",
                partition="fixed",
                engine="local:apart=true" if workers == 1 else "local",
                workers=workers,
                threads_per_worker=1,
            )
            block[f"{way} {workers}"] = {"rate": examples_per_second(run), "loss": run.metrics["test_loss"]}
    shown = "   ".join(f"{way} {values['rate'] / 1e6:.2f}" for way, values in block.items())
    print(f"{name}, block {number + 1}, million examples/s: {shown}", flush=True)
    return block


def examples_per_second(run: mh.Run) -> float:
    """Of all epochs but the first, by the wall clock."""
    first = max(row["seconds"] for row in run.history if row["epoch"] == 0)
    rows = sum(row["rows"] for row in run.history if row["epoch"] > 0)
    return rows / (max(row["seconds"] for row in run.history) - first)  # type: ignore[no-any-return]


def report(found: dict[str, list[dict[str, dict[str, float]]]], cores: int) -> None:
    print("\nproblem      way     workers   million/s   beside one worker, free   loss")
    for name, blocks in found.items():
        for variant in blocks[0]:
            way, workers = variant.split()
            rate = statistics.median(block[variant]["rate"] for block in blocks)
            ratio = statistics.median(block[variant]["rate"] / block["free 1"]["rate"] for block in blocks)
            loss = statistics.median(block[variant]["loss"] for block in blocks)
            note = "   oversubscribed" if int(workers) > cores else ""
            print(f"{name:12} {way:7} {workers:>7}   {rate / 1e6:9.2f}   {ratio:23.2f}   {loss:.4f}{note}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", default="svm,completion,cuts")
    parser.add_argument("--workers", default="1,2,4")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="how many examples, beside the default's")
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    main()
