"""Matrix factorisation: the rule by hand, and the reference. That it learns: test_dense_kernels_integration.py."""

import math

import numpy as np
import pytest
import torch
from products import conforms

from manyhands import kernels
from refusals import refused

BATCH = {
    "users": torch.tensor([3, 0, 3, 5, 0, 6, 3], dtype=torch.int32),
    "items": torch.tensor([1, 1, 4, 0, 1, 4, 1]),
    "ratings": torch.tensor([4.0, 2.5, 5.0, 1.0, 3.0, 4.5, 2.0]),
}


def test_it_is_a_kernel() -> None:
    from manyhands.kernels.factors import reference_step

    for options in (
        {"users": 8, "items": 6, "rank": 5, "mean": 3.2, "scale": 1.3, "ridge": 0.07},
        {"users": 8, "items": 6, "rank": 4, "mean": 3.2, "scale": 0.8, "ridge": 0.02, "biases": False},
        {"users": 7, "items": 5, "rank": 1},
    ):
        conforms(kernel=kernels.Factors(dtype="float64", **options), batch=BATCH, reference=reference_step)


def test_one_rating_by_hand() -> None:
    """mean 3, scale 2, ridge .1, rate .5; p = 2, q = .5, b = .2, c = -.1. A rating of 6 is 1.5 in units of the scale;
    1.1 is predicted, so the error is .4."""
    kernel = kernels.Factors(users=1, items=1, rank=1, mean=3, scale=2, ridge=0.1, dtype="float64")
    rows = {
        "users": np.array([[2.0]]),
        "items": np.array([[0.5]]),
        "user_bias": np.array([[0.2]]),
        "item_bias": np.array([[-0.1]]),
        "user_sums": np.array([[4.0, 1.0]]),
        "item_sums": np.array([[1.0, 25.0]]),
    }
    batch = kernel.prepare({"users": [0], "items": [0], "ratings": [6.0]}, 0)
    assert kernel.measure(rows, batch)["loss"] == pytest.approx((0.64, 1))
    assert kernel.step(rows, batch, 0.5) == pytest.approx(0.64)  # (2 · .4)²
    # slopes: .4 · .5 - .1 · 2 = 0; .4 · 2 - .1 · .5 = .75; .4 - .02 = .38; .4 + .01 = .41
    assert rows["users"][0, 0] == pytest.approx(2.0)
    assert rows["items"][0, 0] == pytest.approx(0.5 + 0.5 * 0.75)
    assert rows["user_bias"][0, 0] == pytest.approx(0.2 + 0.5 * 0.38)
    assert rows["item_bias"][0, 0] == pytest.approx(-0.1 + 0.5 / 5 * 0.41)
    assert rows["user_sums"][0] == pytest.approx([4.0, 1 + 0.38**2])
    assert rows["item_sums"][0] == pytest.approx([1 + 0.75**2, 25 + 0.41**2])


def test_the_sum_of_a_row_takes_the_mean_over_its_factors() -> None:
    kernel = kernels.Factors(users=1, items=1, rank=2, ridge=0, biases=False, dtype="float64")
    rows = {"users": np.array([[1.0, 2.0]]), "items": np.array([[3.0, 4.0]])}
    rows |= {"user_sums": np.ones((1, 2)), "item_sums": np.ones((1, 2))}
    kernel.step(rows, kernel.prepare({"users": [0], "items": [0], "ratings": [13.0]}, 0), 0.1)
    assert rows["user_sums"][0] == pytest.approx([1 + (36 + 64) / 2, 1])  # the error is 2
    assert rows["item_sums"][0] == pytest.approx([1 + (4 + 16) / 2, 1])


def test_the_root_is_of_the_mean_over_all_batches() -> None:
    kernel = kernels.Factors(users=1, items=1, rank=1, dtype="float64")
    rows = kernel.module(0).tables()
    for table in rows.values():
        table[:] = 0
    one, other = (
        kernel.measure(rows, kernel.prepare({"users": [0] * len(r), "items": [0] * len(r), "ratings": r}, 0))["rmse"]
        for r in ([3.0], [1.0, 1.0, 1.0])
    )
    assert one.result(one.sums + other.sums) == {"rmse": pytest.approx(math.sqrt(3))}


def test_what_is_refused() -> None:
    kernel = kernels.Factors(users=8, items=6, rank=5)
    for change, words in [
        ({"users": [8]}, "field 'users' must be from 0 to 7"),
        ({"items": [-1]}, "field 'items' must be from 0 to 5.* got -1"),
        ({"users": [1.5]}, "must hold whole numbers"),
        ({"ratings": None}, "no field ratings; it has users, items"),
    ]:
        batch = {"users": [0], "items": [0], "ratings": [1.0]} | change
        given = {name: np.asarray(column) for name, column in batch.items() if column is not None}
        refused(words, kernel.prepare, given, 0)
    wrong = [("users", 0), ("items", 2.5), ("rank", 0), ("scale", 0), ("ridge", -1), ("mean", math.nan), ("mean", "3")]
    for name, value in wrong:
        refused(name, lambda name, value: kernels.Factors(**{"users": 3, "items": 3} | {name: value}), name, value)
