"""Linear models of sparse rows: logistic regression and support vector machines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from manyhands.data.csr import Csr
from manyhands.errors import BadInput, is_whole
from manyhands.sparse.compile import compiled
from manyhands.sparse.kernel import Arrays, Kernel
from manyhands.sparse.rows import Rows


@dataclass(frozen=True, kw_only=True)
class Linear(Kernel):
    """Stochastic gradient descent on one weight for each feature, row by row."""

    features: int
    loss: Literal["logistic", "hinge"] = "logistic"
    ridge: float = 0.0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if not is_whole(self.features):
            raise BadInput(f"kernel Linear: features must be a whole number of at least 1, not {self.features!r}")

    @override
    def tables(self) -> dict[str, Rows]:
        return {
            "weights": Rows(fields=("keys",), rows=self.features, dtype=self.dtype),
            "bias": Rows(rows=1, dtype=self.dtype),
        }

    @override
    def prepare(self, batch: Any, random: int) -> dict[str, NDArray[Any]]:
        if not isinstance(batch, Csr):
            raise BadInput(
                f"kernel Linear takes sparse rows: give train_data as a manyhands.Csr, not what gives batches of {type(batch).__name__}"
            )
        if batch.features > self.features:
            raise BadInput(f"kernel Linear has {self.features:,} features, and its rows have {batch.features:,}")
        return {
            "rows": batch.numbers(),
            "offsets": batch.offsets,
            "keys": batch.keys,
            "values": batch.values,
            "targets": batch.targets,
        }

    @override
    def step(self, rows: Arrays, batch: Arrays, rate: float) -> float:
        weights, bias = rows["weights"], rows["bias"]
        return float(
            _step(weights.ravel(), bias.ravel(), *batch.values(), weights.dtype.type(rate), self.loss == "hinge")
        )

    @override
    def measure(self, rows: Arrays, batch: Arrays) -> Mapping[str, tuple[float, float]]:
        loss, right = _measure(rows["weights"].ravel(), rows["bias"].ravel(), *batch.values(), self.loss == "hinge")
        n = len(batch["rows"])
        return {"loss": (loss / n, n), "accuracy": (right / n, n)}


Array = NDArray[Any]


@compiled
def _output(weights: Array, bias: Array, keys: Array, values: Array, begin: int, end: int) -> Any:
    total = bias[0]
    for i in range(begin, end):
        total += weights[keys[np.uint64(i)]] * values[np.uint64(i)]
    return total


@compiled
def _loss(output: float, target: float, hinge: bool) -> float:
    margin = output * (target if target > 0 else -1.0)
    if hinge:
        return max(0.0, 1.0 - margin)
    return math.log1p(math.exp(-abs(margin))) + max(0.0, -margin)


@compiled
def _step(
    weights: Array,
    bias: Array,
    rows: Array,
    offsets: Array,
    keys: Array,
    values: Array,
    targets: Array,
    rate: float,
    hinge: bool,
) -> float:
    losses = 0.0
    for row in rows:
        begin, end = np.uint64(offsets[row]), np.uint64(offsets[row + 1])
        target = weights.dtype.type(1.0) if targets[row] > 0 else weights.dtype.type(-1.0)
        output = _output(weights, bias, keys, values, begin, end)
        losses += _loss(output, target, hinge)
        if hinge:
            slope = target if output * target < 1 else weights.dtype.type(0)
        else:
            slope = target / (1 + np.exp(output * target))
        move = rate * slope
        for i in range(begin, end):
            weights[keys[np.uint64(i)]] += move * values[np.uint64(i)]
        bias[0] += move
    return losses


@compiled
def _measure(
    weights: Array, bias: Array, rows: Array, offsets: Array, keys: Array, values: Array, targets: Array, hinge: bool
) -> tuple[float, int]:
    losses, right = 0.0, 0
    for row in rows:
        output = _output(weights, bias, keys, values, np.uint64(offsets[row]), np.uint64(offsets[row + 1]))
        target = 1.0 if targets[row] > 0 else -1.0
        losses += _loss(output, target, hinge)
        right += output * target > 0
    return losses, right
