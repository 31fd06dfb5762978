"""Peers of `ratings.py`: libmf or surprise's SVD on its file of ratings. Prints one line of JSON."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("peer", choices=["libmf", "surprise"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ratings", type=int)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--ridge", type=float)
    args = parser.parse_args()
    train, test = (
        {n: np.load(args.folder / f"{part}_{n}.npy") for n in ("users", "items", "ratings")}
        for part in ("train", "test")
    )
    train = {name: column[: args.ratings] for name, column in train.items()}
    print(json.dumps({"libmf": libmf, "surprise": surprise}[args.peer](args, train, test)))


def libmf(args: argparse.Namespace, train: dict[str, Any], test: dict[str, Any]) -> dict[str, float]:
    with redirect_stdout(sys.stderr):  # it prints which object it loads
        from libmf import mf
    rows = np.stack([train["users"], train["items"], train["ratings"]], 1).astype(np.float32)
    options = {"lambda_p1": 0.0, "lambda_q1": 0.0, "lambda_p2": args.ridge, "lambda_q2": args.ridge}
    model = mf.MF(k=args.rank, nr_threads=1, nr_iters=args.epochs, eta=args.rate, quiet=True, **options)
    cpu, wall = time.process_time(), time.perf_counter()
    model.fit(rows)
    seconds = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}
    users, items = model.p_factors(), model.q_factors()
    predicted = np.concatenate(
        [
            (users[test["users"][i : i + 100_000]] * items[test["items"][i : i + 100_000]]).sum(1)
            for i in range(0, len(test["users"]), 100_000)
        ]
    )
    errors = predicted - test["ratings"]
    errors = errors[np.isfinite(errors)]  # unseen users and items have none
    return {**seconds, "rmse": float(np.sqrt(np.mean(errors.astype(np.float64) ** 2)))}


def surprise(args: argparse.Namespace, train: dict[str, Any], test: dict[str, Any]) -> dict[str, float]:
    from surprise import SVD, Trainset

    by_user, by_item = defaultdict(list), defaultdict(list)
    users, items = {}, {}
    for user, item, rating in zip(*(column.tolist() for column in train.values()), strict=True):
        u, i = users.setdefault(user, len(users)), items.setdefault(item, len(items))
        by_user[u].append((i, rating))
        by_item[i].append((u, rating))
    trainset = Trainset(by_user, by_item, len(users), len(items), len(train["ratings"]), (0.5, 5), users, items)
    model = SVD(n_factors=args.rank, n_epochs=args.epochs, random_state=0)
    cpu, wall = time.process_time(), time.perf_counter()
    model.fit(trainset)
    return {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}


if __name__ == "__main__":
    main()
