"""Matrix factorisation beside libmf and surprise's SVD: CPU and wall seconds a rating, and the error of held-out ratings.

    python benchmarks/ratings.py [--peer-python PYTHON] [--libmf-object FILE] [--ratings 10000000] [--users 70000]
                                 [--items 10000] [--rank 32] [--epochs 10] [--blocks 5] [--surprise-ratings 1000000]
                                 [--json FILE]

In alternating blocks, one worker (solo) and each peer on one core, on the same generated ratings with the same rate and
ridge: users by a log-normal law, items by Zipf's, planted factors of rank 20 with biases and noise, rounded to half
stars from 0.5 to 5; a tenth is held out. Seconds are of arranging the ratings and of training; numba compiles before.
`cells` is the order by cells that the task `factors` takes, `random` an order drawn anew for each epoch. surprise takes
two epochs of fewer ratings: its rate alone is compared. `rotate 1` and `rotate 2` are strategy rotate with eight blocks on
one and two workers, in processes of their own; their wall seconds are those of all epochs but the first, which compiles.

Needs the packages libmf and scikit-surprise in the interpreter of --peer-python (default: this one). libmf's package is
built without vector instructions; --libmf-object names its sources' library as its authors build it, an arm of its own:
    pip download --no-deps --no-binary :all: libmf && tar xf libmf-*.tar.gz
    g++ -std=c++11 -O3 -march=native -DUSEAVX -fPIC -shared -pthread libmf-*/src_cpp/*.cpp -o libmf_avx.so
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import machine
import numpy as np

import manyhands as mh
from manyhands.data.cells import by_cells
from manyhands.kernels.factors import Factors

RMSE_GOAL, LIBMF_GOAL, SURPRISE_GOAL, ROTATE_GOAL = 0.005, 0.75, 2.0, 1.7
NOISE, DEVIATION, BIAS = 0.5, 0.6, 0.4  # in stars: of noise, of inner products, of biases
SURPRISE_EPOCHS = 2

Columns = dict[str, np.ndarray[Any, Any]]


def main() -> None:
    args = arguments()
    facts = machine.facts()
    train, test = generated(args)
    print(
        f"{len(train['ratings']):,} ratings, standard deviation {train['ratings'].std():.3f}; {len(test['ratings']):,} held out"
    )
    few = {name: column[:100] for name, column in train.items()}
    ours(args, few, few, "cells", epochs=1)  # what is to be compiled
    blocks: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        for part, columns in (("train", train), ("test", test)):
            for name, column in columns.items():
                np.save(Path(folder) / f"{part}_{name}.npy", column)
        for number in range(args.blocks):
            block = {order: ours(args, train, test, order, args.epochs) for order in ("cells", "random")}
            block["libmf"] = peer(args, "libmf", folder, len(train["ratings"]), args.epochs)
            if args.libmf_object:
                block["libmf, AVX"] = peer(
                    args, "libmf", folder, len(train["ratings"]), args.epochs, LIBMF_OBJ=str(args.libmf_object)
                )
            if args.surprise_ratings:
                count = min(args.surprise_ratings, len(train["ratings"]))
                block["surprise"] = peer(args, "surprise", folder, count, SURPRISE_EPOCHS)
            for workers in (1, 2):
                block[f"rotate {workers}"] = rotated(args, train, test, workers)
            blocks.append(block)
            print(
                f"block {number}  " + "  ".join(f"{arm} {one['cpu_ns']:.1f}" for arm, one in block.items()), flush=True
            )
    found = medians(blocks)
    print("\nmedians: CPU and wall nanoseconds a rating and epoch, root mean squared error of held-out ratings")
    for arm, one in found.items():
        print(
            f"{arm:12} {one['cpu_ns']:8.1f} {one['wall_ns']:8.1f}" + (f" {one['rmse']:9.4f}" if "rmse" in one else "")
        )
    verdicts(found)
    if args.json:
        args.json.write_text(json.dumps({"machine": facts, "blocks": blocks, "medians": found}, indent=1) + "\n")


def verdicts(found: dict[str, dict[str, float]]) -> None:
    cells = found["cells"]
    goals = {"libmf": LIBMF_GOAL, "libmf, AVX": LIBMF_GOAL, "surprise": SURPRISE_GOAL}
    for arm in (arm for arm in goals if arm in found):
        ratio = found[arm]["cpu_ns"] / cells["cpu_ns"]
        print(
            f"{ratio:.2f} times {arm}'s ratings a CPU second (goal {goals[arm]}: {'met' if ratio >= goals[arm] else 'not met'})"
        )
    more = cells["rmse"] - found["libmf"]["rmse"]
    print(f"error {more:+.4f} beside libmf's (goal at most {RMSE_GOAL:+}: {'met' if more <= RMSE_GOAL else 'not met'})")
    gain = found["rotate 1"]["wall_ns"] / found["rotate 2"]["wall_ns"]
    print(
        f"rotate: two workers {gain:.2f} times as fast as one (goal {ROTATE_GOAL}: {'met' if gain >= ROTATE_GOAL else 'not met'})"
    )
    print(f"cells: {found['random']['cpu_ns'] / cells['cpu_ns']:.2f} times the random order's ratings a CPU second")


def medians(blocks: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    return {
        arm: {name: statistics.median(block[arm][name] for block in blocks) for name in blocks[0][arm]}
        for arm in blocks[0]
    }


# -- the arms ----------------------------------------------------------------------------------------------------------


def ours(args: argparse.Namespace, train: Columns, test: Columns, order: str, epochs: int) -> dict[str, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    if order == "cells":
        numbers = by_cells(train["users"], train["items"], row_bytes=4 * args.rank, seed=0)
        train = {name: column[numbers] for name, column in train.items()}
    mean, scale = float(train["ratings"].mean()), float(train["ratings"].std())
    run = mh.train(
        kernel=Factors(users=args.users, items=args.items, rank=args.rank, ridge=args.ridge, mean=mean, scale=scale),
        rate=args.rate,
        train_data=train,
        batch_size_per_worker=max(1, min(300_000, len(train["ratings"]) // 16)),
        epochs=epochs,
        shuffle=order == "random",
        strategy="solo",
        engine="local",
        workers=1,
        threads_per_worker=1,
    )
    seconds = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}
    model: Any = run.model
    rmse = model.kernel.measure(model.tables(), model.kernel.prepare(test, 0))["rmse"]
    return {**a_rating(seconds, len(train["ratings"]), epochs), **rmse.result(rmse.sums)}


def rotated(args: argparse.Namespace, train: Columns, test: Columns, workers: int) -> dict[str, float]:
    mean, scale = float(train["ratings"].mean()), float(train["ratings"].std())
    run = mh.train(
        kernel=Factors(users=args.users, items=args.items, rank=args.rank, ridge=args.ridge, mean=mean, scale=scale),
        rate=args.rate,
        train_data=train,
        epochs=args.epochs,
        strategy="rotate:blocks=8",
        engine="local:apart=true" if workers == 1 else "local",
        workers=workers,
        threads_per_worker=1,
    )
    first = max(row["seconds"] for row in run.history if row["epoch"] == 0)
    seconds = {
        "cpu_s": workers * sum(row["compute_s"] for row in run.history if row["epoch"]),  # compute_s: the workers' mean
        "wall_s": run.history[-1]["seconds"] - first,
    }
    model: Any = run.model
    rmse = model.kernel.measure(model.tables(), model.kernel.prepare(test, 0))["rmse"]
    return {**a_rating(seconds, len(train["ratings"]), args.epochs - 1), **rmse.result(rmse.sums)}


def peer(
    args: argparse.Namespace, name: str, folder: str, ratings: int, epochs: int, **environment: str
) -> dict[str, float]:
    command: list[Any] = [args.peer_python, Path(__file__).with_name("ratings_peer.py"), name, folder]
    command += [
        "--ratings",
        ratings,
        "--rank",
        args.rank,
        "--epochs",
        epochs,
        "--rate",
        args.rate,
        "--ridge",
        args.ridge,
    ]
    done = subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, **environment},
    )
    found = json.loads(done.stdout)
    rmse = {"rmse": found["rmse"]} if "rmse" in found else {}
    return {**a_rating(found, ratings, epochs), **rmse}


def a_rating(seconds: dict[str, float], ratings: int, epochs: int) -> dict[str, float]:
    return {f"{clock}_ns": seconds[f"{clock}_s"] / ratings / epochs * 1e9 for clock in ("cpu", "wall")}


# -- ratings -----------------------------------------------------------------------------------------------------------


def generated(args: argparse.Namespace, rank: int = 20) -> tuple[Columns, Columns]:
    """(train, test)"""
    random = np.random.default_rng(args.seed)
    active = random.lognormal(0, 1.1, args.users)
    popular = random.permutation(1 / np.arange(1, args.items + 1) ** 0.9)
    users, items = (
        np.searchsorted(np.cumsum(share / share.sum())[:-1], random.random(args.ratings)).astype(np.int32)
        for share in (active, popular)
    )
    p, q = (random.normal(size=(count, rank)).astype(np.float32) for count in (args.users, args.items))
    b, c = (random.normal(0, BIAS, count) for count in (args.users, args.items))
    ratings = np.empty(args.ratings, np.float32)
    for start in range(0, args.ratings, 1 << 20):
        part = slice(start, start + (1 << 20))
        u, i = users[part], items[part]
        stars = 3.5 + b[u] + c[i] + (p[u] * q[i]).sum(1) * (DEVIATION / np.sqrt(rank)) + random.normal(0, NOISE, len(u))
        ratings[part] = (np.round(stars * 2) / 2).clip(0.5, 5)
    columns, held_out = {"users": users, "items": items, "ratings": ratings}, args.ratings // 10
    return tuple(
        {name: column[part] for name, column in columns.items()} for part in (slice(held_out, None), slice(held_out))
    )  # type: ignore[return-value]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--libmf-object", type=Path, default=None)
    parser.add_argument("--ratings", type=int, default=10_000_000)
    parser.add_argument("--users", type=int, default=70_000)
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--ridge", type=float, default=0.05)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--surprise-ratings", type=int, default=1_000_000, help="0: leave surprise out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    main()
