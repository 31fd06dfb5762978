"""Matrix factorisation: ratings as inner products of a user's and an item's factors, with biases.

The model: rating = mean + scale · (b_u + c_i + p_u · q_i). The steps: stochastic gradient descent on squared error, whose
rate falls by row.

Sources: Matrix Factorization Techniques for Recommender Systems, Yehuda Koren, Robert Bell, Chris Volinsky, 2009
(the model). A Learning-Rate Schedule for Stochastic Gradient Methods to Matrix Factorization, Wei-Sheng Chin, Yong Zhuang,
Yu-Chin Juan, Chih-Jen Lin, 2015 (the rate by row).

Deviations: of the second paper, one sum a row, not two for two parts of its factors of which one rests in the first pass;
biases, which have a sum of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from manyhands.errors import BadInput, is_number
from manyhands.sparse.compile import compiled
from manyhands.sparse.kernel import (
    Arrays,
    Kernel,
    Measures,
    Summed,
    check_above_0,
    check_at_least_0,
    check_keys,
    check_whole,
    columns_of,
)
from manyhands.sparse.rows import Rows

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Factors(Kernel):
    """Data: a dict of the columns `users` and `items` (keys, whole numbers) and `ratings` (numbers), equally long."""

    users: int
    """How many keys of users there are."""
    items: int
    """How many keys of items there are."""
    rank: int = 32
    """Factors a row. Raise it where the training error does not fall far enough."""
    ridge: float = 0.05
    """How strongly rows are drawn to 0, at each of their steps. Raise it where the error of held-out ratings rises while that of
    training falls."""
    mean: float = 0.0
    """Of the training ratings: what an unknown user and item get."""
    scale: float = 1.0
    """The standard deviation of the training ratings: factors fit (rating - mean) / scale, so that rate and ridge mean the
    same for stars and for percents."""
    biases: bool = True
    """Whether each user and each item has a number that is added to its predictions."""
    dtype: str = "float32"

    paired: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_whole(self, "users", "items", "rank")
        check_above_0(self, "scale")
        check_at_least_0(self, "ridge")
        if not (is_number(self.mean) and math.isfinite(self.mean)):
            raise BadInput(f"kernel Factors: mean must be a number, not {self.mean!r}")

    @override
    def tables(self) -> dict[str, Rows]:
        """`user_sums` and `item_sums` hold a row's sums of squared gradients: of its factors (their mean), and of its bias."""
        initial = f"normal:{0.5 / math.sqrt(self.rank)}"
        found = {}
        for one, count in (("user", self.users), ("item", self.items)):
            fields, dtype = (f"{one}s",), self.dtype
            found[f"{one}s"] = Rows(fields=fields, rows=count, dim=self.rank, initial=initial, dtype=dtype)
            found[f"{one}_sums"] = Rows(fields=fields, rows=count, dim=2, initial="constant:1", dtype=dtype)
            if self.biases:
                found[f"{one}_bias"] = Rows(fields=fields, rows=count, dtype=dtype)
        return found

    @override
    def prepare(self, batch: Any, random: int) -> dict[str, Array]:
        found = columns_of(batch, ("users", "items", "ratings"), self)
        check_keys(found["users"], self.users, "users", self)
        check_keys(found["items"], self.items, "items", self)
        found["ratings"] = np.ascontiguousarray(found["ratings"], self.dtype)
        return found

    @override
    def step(self, rows: Arrays, batch: Arrays, rate: float) -> float:
        numbers = map(np.dtype(self.dtype).type, (self.mean, self.scale, rate, self.ridge))
        return float(_step(*self._flat(rows), *batch.values(), *numbers, self.rank, self.biases))

    @override
    def measure(self, rows: Arrays, batch: Arrays) -> Measures:
        """loss: the mean squared error; rmse: its root over all rows, both in the ratings' own unit."""
        numbers = map(np.dtype(self.dtype).type, (self.mean, self.scale))
        total = float(_measure(*self._flat(rows)[:4], *batch.values(), *numbers, self.rank, self.biases))
        n = len(batch["ratings"])
        return {"loss": (total / n, n), "rmse": Summed(torch.tensor([total, n], dtype=torch.float64), _root)}

    def _flat(self, rows: Arrays) -> tuple[Array, ...]:
        users, items = rows["users"], rows["items"]
        nobody = np.zeros(1, self.dtype)  # without biases: what is read, and stays
        bias = [rows.get(name, nobody).reshape(-1) for name in ("user_bias", "item_bias")]
        return users.reshape(-1), items.reshape(-1), *bias, rows["user_sums"].reshape(-1), rows["item_sums"].reshape(-1)


def _root(sums: Tensor) -> dict[str, float]:
    return {"rmse": math.sqrt(float(sums[0] / sums[1]))}


@compiled
def _step(
    user_rows: Array,
    item_rows: Array,
    user_bias: Array,
    item_bias: Array,
    user_sums: Array,
    item_sums: Array,
    users: Array,
    items: Array,
    ratings: Array,
    mean: Any,
    scale: Any,
    rate: Any,
    ridge: Any,
    rank: int,
    biases: bool,
) -> float:
    """Tables flat: factor d of user u is user_rows[u · rank + d]."""
    k, two, one = np.uint64(rank), np.uint64(2), np.uint64(1)
    number = user_rows.dtype.type
    share, per_scale, squared_scale = number(1) / number(rank), number(1) / scale, float(scale) * float(scale)
    losses = 0.0
    for n in range(np.uint64(len(ratings))):
        user, item = np.uint64(users[n]), np.uint64(items[n])
        at_user, at_item = user * k, item * k
        user_one, item_one = user * np.uint64(biases), item * np.uint64(biases)
        inner = number(0)
        for d in range(k):
            inner += user_rows[at_user + d] * item_rows[at_item + d]
        error = (ratings[n] - mean) * per_scale - user_bias[user_one] - item_bias[item_one] - inner
        losses += error * error * squared_scale

        user_rate = rate / math.sqrt(user_sums[user * two])
        item_rate = rate / math.sqrt(item_sums[item * two])
        user_squares, item_squares = number(0), number(0)
        for d in range(k):
            p, q = user_rows[at_user + d], item_rows[at_item + d]
            user_slope, item_slope = error * q - ridge * p, error * p - ridge * q
            user_rows[at_user + d] = p + user_rate * user_slope
            item_rows[at_item + d] = q + item_rate * item_slope
            user_squares += user_slope * user_slope
            item_squares += item_slope * item_slope
        user_sums[user * two] += user_squares * share
        item_sums[item * two] += item_squares * share

        if biases:
            _move_bias(user_bias, user_sums, user, user * two + one, error, rate, ridge)
            _move_bias(item_bias, item_sums, item, item * two + one, error, rate, ridge)
    return losses


@compiled
def _move_bias(bias: Array, sums: Array, row: Any, at: Any, error: Any, rate: Any, ridge: Any) -> None:
    slope = error - ridge * bias[row]
    bias[row] += rate / math.sqrt(sums[at]) * slope
    sums[at] += slope * slope


@compiled
def _measure(
    user_rows: Array,
    item_rows: Array,
    user_bias: Array,
    item_bias: Array,
    users: Array,
    items: Array,
    ratings: Array,
    mean: Any,
    scale: Any,
    rank: int,
    biases: bool,
) -> float:
    """The sum of squared errors."""
    k = np.uint64(rank)
    number = user_rows.dtype.type
    total = 0.0
    for n in range(np.uint64(len(ratings))):
        user, item = np.uint64(users[n]), np.uint64(items[n])
        at_user, at_item = user * k, item * k
        inner = number(0)
        for d in range(k):
            inner += user_rows[at_user + d] * item_rows[at_item + d]
        inner += user_bias[user * np.uint64(biases)] + item_bias[item * np.uint64(biases)]
        error = float(ratings[n] - mean - scale * inner)
        total += error * error
    return total


def reference_step(kernel: Factors, rows: dict[str, Array], batch: Arrays, rate: float) -> float:
    """The same step, number by number, in NumPy."""
    losses = 0.0
    for user, item, rating in zip(batch["users"], batch["items"], batch["ratings"], strict=True):
        p, q = rows["users"][user].copy(), rows["items"][item].copy()  # [rank]
        predicted = p @ q
        if kernel.biases:
            predicted += rows["user_bias"][user, 0] + rows["item_bias"][item, 0]
        error = (rating - kernel.mean) / kernel.scale - predicted
        losses += (error * kernel.scale) ** 2
        for one, row, factors, other in (("user", user, p, q), ("item", item, q, p)):
            sums = rows[f"{one}_sums"][row]  # [2]: of the factors, of the bias
            slope = error * other - kernel.ridge * factors
            rows[f"{one}s"][row] += rate / np.sqrt(sums[0]) * slope
            sums[0] += np.mean(slope**2)
            if kernel.biases:
                bias = rows[f"{one}_bias"][row]  # [1]
                slope = error - kernel.ridge * bias[0]
                bias[0] += rate / np.sqrt(sums[1]) * slope
                sums[1] += slope**2
    return float(losses)
