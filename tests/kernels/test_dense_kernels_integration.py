"""Factors, Glove and KMeans on two workers, under strategies that share, average and add what they change."""

from typing import Any

import numpy as np
import pytest

import manyhands as mh
from manyhands.data.ragged import Ragged


def factors(random: np.random.Generator) -> dict[str, Any]:
    p, q = random.normal(size=(60, 2)), random.normal(size=(40, 2))
    users, items = random.integers(60, size=8000), random.integers(40, size=8000)
    data = {"users": users, "items": items, "ratings": (p[users] * q[items]).sum(1)}
    train, test = ({name: column[part] for name, column in data.items()} for part in (slice(7000), slice(7000, None)))
    kernel = mh.kernels.Factors(users=60, items=40, rank=4, ridge=0.01)
    return {"kernel": kernel, "rate": 0.2, "train_data": train, "test_data": test, "epochs": 30}


def glove(random: np.random.Generator) -> dict[str, Any]:
    from manyhands.data.cooccurrence import count_cooccurrences

    words = random.zipf(1.5, 20_000) % 50
    pairs = count_cooccurrences(Ragged(np.arange(401) * 50, {"words": words.astype(np.uint32)}), window=5).data()
    kernel = mh.kernels.Glove(words=50, dim=8, x_max=10)
    return {"kernel": kernel, "rate": 0.05, "train_data": pairs, "test_data": pairs, "epochs": 40}


def kmeans(random: np.random.Generator) -> dict[str, Any]:
    centres = np.array([[0, 0], [30, 0], [0, 30], [30, 30]])
    points = (centres[np.arange(8000) % 4] + random.normal(size=(8000, 2))).astype(np.float32)
    kernel = mh.kernels.KMeans(initial=points[:4], minibatch=50)
    return {"kernel": kernel, "rate": 1.0, "train_data": points, "test_data": points, "epochs": 1}


@pytest.mark.slow
@pytest.mark.parametrize(  # bound=1: a worker that is held up would else push moves from where the centres began
    ("make", "strategy"),
    [(factors, "hogwild"), (glove, "local-sgd:period=4"), (kmeans, "downpour:bound=1"), (kmeans, "local-sgd:period=4")],
)
def test_two_workers_learn_what_one_does(make: Any, strategy: str) -> None:
    """Averaging two workers' steps goes half as far: as one worker in half the epochs."""
    task, averages = make(np.random.default_rng(0)), strategy.startswith("local-sgd")
    columns = task["train_data"]
    rows = len(columns["ratings" if make is factors else "counts"] if isinstance(columns, dict) else columns)
    task["batch_size"] = rows // (16 if make is kmeans else 8)
    one = mh.train(**task | {"epochs": max(1, task["epochs"] // (2 if averages else 1))}, strategy="solo")
    two = mh.train(**task, strategy=strategy, workers=2, threads_per_worker=1)
    assert two.metrics["test_loss"] < 1.15 * one.metrics["test_loss"] + 0.002, (one.metrics, two.metrics)
    if make is kmeans:  # averaged counts are those of a worker's share
        model: Any = two.model
        assert model.tables()["counts"].sum() == pytest.approx(rows / (2 if averages else 1), rel=0.01)
