"""Linear models of sparse rows: logistic regression and support vector machines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from manyhands.data.csr import Csr
from manyhands.errors import BadInput, UnknownName
from manyhands.kernels.sparse_rows import SparseRowsKernel, log_loss
from manyhands.sparse.compile import compiled, prefetch
from manyhands.sparse.kernel import Arrays, check_at_least_0, check_whole
from manyhands.sparse.rows import Rows

Array = NDArray[Any]

LOSSES = ("logistic", "hinge")
MOST_ROWS = 4096
"""Between two merges. Where more are needed to make the merge cheap, rows are stepped in place."""


@dataclass(frozen=True, kw_only=True)
class Linear(SparseRowsKernel):
    """Stochastic gradient descent on one weight for each feature, row by row.

    Source: Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent, Feng Niu, Benjamin Recht,
    Christopher Ré, Stephen J. Wright, 2011, section 2 (sparse SVM, equations 2 to 4).

    For a row of features u with values z_u and target y, 1 or -1:
    1. output = sum of w_u z_u, and the bias.
    2. slope = y where y · output < 1, else 0 (hinge), or y / (1 + exp(y · output)) (logistic).
    3. w_u += rate · (slope · z_u - 2 · ridge · w_u / d_u), where d_u is the number of rows that have feature u;
       bias += rate · slope.

    The sum of the ridge over all rows is ridge · |w|²: each row carries its features' share of it, and touches no others.

    Deviations: logistic loss beside the paper's hinge; a bias, which has no ridge. With `merge_every` above 1 a worker
    steps on a copy of the weights, and adds what it moved to those that all share every so many rows: the paper's
    workers write each row's move at once.
    """

    loss: Literal["logistic", "hinge"] = "logistic"
    ridge: float = 0.0
    """Weight decay: the factor of the squared weights beside the sum of all rows' losses. Raise it if the validation loss
    rises while the training loss falls. It needs `degrees`."""
    bias: bool = True
    """False: no constant beside the features, as HOGWILD!'s SVM has none."""
    degrees: Array | None = field(default=None, compare=False, repr=False)
    """[features]: how many rows of the training data have each feature; `Csr.degrees()` counts them. For `ridge`."""
    merge_every: int | None = None
    """Rows that a worker steps on a copy of the weights, before it adds its moves to those that all workers share.
    1: in place, row by row, as in the paper; workers that write the same cache lines then wait for each other. Alone, a
    worker gets the same bits with any number. A slice of fewer rows is stepped in place. Default: as many rows as have
    2 · features entries together, so that merging takes about a twentieth of the time of a worker alone; in place where these
    are more than 4,096."""
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_whole(self, "features")
        if self.loss not in LOSSES:
            raise UnknownName(f"kernel Linear: no loss {self.loss!r}: choose one of {', '.join(LOSSES)}")
        check_at_least_0(self, "ridge")
        if self.merge_every is not None:
            check_whole(self, "merge_every")
        if self.ridge and (self.degrees is None or np.shape(self.degrees) != (self.features,)):
            raise BadInput(
                f"kernel Linear: ridge needs the number of rows of each of the {self.features:,} features: give degrees=rows.degrees(), "
                "or build the kernel by Linear.of(rows, ridge=...)"
            )

    @classmethod
    def of(cls, rows: Csr, **options: Any) -> Self:
        """For these training rows: with as many features, and their degrees where there is a ridge."""
        options = {"features": rows.features, **options}
        if options.get("ridge"):
            options.setdefault("degrees", rows.degrees(options["features"]))
        return cls(**options)

    @override
    def tables(self) -> dict[str, Rows]:
        tables = {"weights": Rows(fields=("keys",), rows=self.features, dtype=self.dtype)}
        return tables | ({"bias": Rows(rows=1, dtype=self.dtype)} if self.bias else {})

    @override
    def prepare(self, batch: Any, random: int) -> dict[str, Array]:
        """The arrays of the whole data and the numbers of its rows; with a ridge, `decay` too: 2 · ridge / d_u of each entry
        of the batch, in its order."""
        arrays = super().prepare(batch, random)
        batch.check_binary()
        if self.ridge:
            arrays["decay"] = _entries(self._decay, arrays["rows"], arrays["offsets"], arrays["keys"])
        return arrays

    @override
    def step(self, rows: Arrays, batch: Arrays, rate: float) -> float:
        weights, bias = self._tables(rows)
        decay = batch["decay"] if self.ridge else weights[:0]
        return float(
            _step(
                weights,
                bias,
                batch["rows"],
                batch["offsets"],
                batch["keys"],
                batch["values"],
                batch["targets"],
                decay,
                weights.dtype.type(rate),
                self.loss == "hinge",
                bool(self.ridge),
                self.bias,
                self._merge_every(batch),
            )
        )

    @override
    def measure(self, rows: Arrays, batch: Arrays) -> Mapping[str, tuple[float, float]]:
        """The mean loss, without the ridge, and the share of rows on whose side of 0 their output is."""
        loss, right = _measure(
            *self._tables(rows),
            batch["rows"],
            batch["offsets"],
            batch["keys"],
            batch["values"],
            batch["targets"],
            self.loss == "hinge",
        )
        n = len(batch["rows"])
        return {"loss": (loss / n, n), "accuracy": (right / n, n)}

    @cached_property
    def _decay(self) -> Array:
        """[features]: 2 · ridge / d_u."""
        assert self.degrees is not None
        return (2 * self.ridge / np.maximum(self.degrees, 1)).astype(self.dtype)

    def _tables(self, rows: Arrays) -> tuple[Array, Array]:
        weights = rows["weights"].ravel()
        return weights, rows["bias"].ravel() if self.bias else np.zeros(1, weights.dtype)

    def _merge_every(self, batch: Arrays) -> int:
        if self.merge_every is not None:
            return self.merge_every
        entries_a_row = max(1.0, len(batch["keys"]) / (len(batch["offsets"]) - 1))
        rows = math.ceil(2 * self.features / entries_a_row)
        return rows if rows <= MOST_ROWS else 1


@compiled
def _entries(of_feature: Array, rows: Array, offsets: Array, keys: Array) -> Array:
    """Of each entry of these rows, in their order: the number of its feature."""
    total = 0
    for row in rows:
        total += offsets[row + 1] - offsets[row]
    found = np.empty(total, of_feature.dtype)
    at, count = np.uint64(0), np.uint64(len(rows))
    for n in range(count):
        if n + np.uint64(16) < count:
            prefetch(offsets, np.uint64(rows[n + np.uint64(16)]))
        if n + np.uint64(8) < count:
            ahead = np.uint64(rows[n + np.uint64(8)])
            for i in range(np.uint64(offsets[ahead]), np.uint64(offsets[ahead + np.uint64(1)]), np.uint64(16)):
                prefetch(keys, np.uint64(i))
        row = np.uint64(rows[n])
        for i in range(np.uint64(offsets[row]), np.uint64(offsets[row + np.uint64(1)])):
            found[at] = of_feature[keys[np.uint64(i)]]
            at += np.uint64(1)
    return found


@compiled
def _output(weights: Array, bias: Array, keys: Array, values: Array, begin: int, end: int) -> Any:
    total = weights.dtype.type(0)
    for i in range(begin, end):
        total += weights[keys[np.uint64(i)]] * values[np.uint64(i)]
    return total + bias[0]


@compiled
def _loss(margin: float, hinge: bool) -> float:
    if hinge:
        return 0.0 if margin >= 1 else 1.0 - margin
    return float(log_loss(margin))


@compiled
def _step_rows(
    weights: Array,
    bias: Array,
    rows: Array,
    offsets: Array,
    keys: Array,
    values: Array,
    targets: Array,
    decay: Array,
    decay_at: int,
    rate: float,
    hinge: bool,
    ridge: bool,
    with_bias: bool,
) -> float:
    """In place. decay_at: where the numbers of the first row stand in `decay`."""
    losses, one = 0.0, weights.dtype.type(1)
    count, at = np.uint64(len(rows)), np.uint64(decay_at)
    for n in range(count):
        if n + np.uint64(16) < count:
            prefetch(offsets, np.uint64(rows[n + np.uint64(16)]))
        if n + np.uint64(8) < count:
            ahead = np.uint64(rows[n + np.uint64(8)])
            prefetch(targets, ahead)
            for i in range(np.uint64(offsets[ahead]), np.uint64(offsets[ahead + np.uint64(1)]), np.uint64(16)):
                prefetch(keys, np.uint64(i))
                prefetch(values, np.uint64(i))
        row = np.uint64(rows[n])
        begin, end = np.uint64(offsets[row]), np.uint64(offsets[row + np.uint64(1)])
        target = one if targets[row] > 0 else -one
        margin = target * _output(weights, bias, keys, values, begin, end)
        losses += _loss(margin, hinge)
        if hinge:
            slope = weights.dtype.type(0) if margin >= 1 else target
        else:
            slope = target / (one + np.exp(margin))
        move = rate * slope
        if ridge:
            for i in range(begin, end):
                key = keys[np.uint64(i)]
                weights[key] += move * values[np.uint64(i)] - rate * decay[at] * weights[key]
                at += np.uint64(1)
        elif move != 0:
            for i in range(begin, end):
                weights[keys[np.uint64(i)]] += move * values[np.uint64(i)]
        if with_bias:
            bias[0] += move
    return losses


@compiled
def _merge(shared: Array, own: Array, before: Array, first: int) -> None:
    """Add own - before to what is shared, and make all three that. `first`: where to begin, so that workers that merge at
    the same time are not at the same place.

    Where nobody else wrote since, `own` is taken as it is: a worker alone gets the bits of steps in place. What this
    worker has not moved is not written: another's move there cannot be lost.
    """
    for start, stop in ((np.uint64(first), np.uint64(len(shared))), (np.uint64(0), np.uint64(first))):
        for i in range(start, stop):
            merged, was, mine = shared[np.uint64(i)], before[np.uint64(i)], own[np.uint64(i)]
            if mine != was:
                merged = mine if merged == was else merged + (mine - was)
                shared[np.uint64(i)] = merged
            own[np.uint64(i)] = merged
            before[np.uint64(i)] = merged


@compiled
def _step(
    weights: Array,
    bias: Array,
    rows: Array,
    offsets: Array,
    keys: Array,
    values: Array,
    targets: Array,
    decay: Array,
    rate: float,
    hinge: bool,
    ridge: bool,
    with_bias: bool,
    merge_every: int,
) -> float:
    if merge_every == 1 or len(rows) < merge_every:
        return float(
            _step_rows(weights, bias, rows, offsets, keys, values, targets, decay, 0, rate, hinge, ridge, with_bias)
        )
    own, before = weights.copy(), weights.copy()
    own_bias, bias_before = bias.copy(), bias.copy()
    losses, decay_at = 0.0, 0
    for start in range(0, len(rows), merge_every):
        some = rows[start : start + merge_every]
        losses += _step_rows(
            own, own_bias, some, offsets, keys, values, targets, decay, decay_at, rate, hinge, ridge, with_bias
        )
        _merge(weights, own, before, some[0] * 7919 % len(weights))
        if with_bias:
            _merge(bias, own_bias, bias_before, 0)
        if ridge:
            for row in some:
                decay_at += offsets[row + 1] - offsets[row]
    return losses


@compiled
def _measure(
    weights: Array, bias: Array, rows: Array, offsets: Array, keys: Array, values: Array, targets: Array, hinge: bool
) -> tuple[float, int]:
    losses, right = 0.0, 0
    for row in rows:
        target = 1.0 if targets[row] > 0 else -1.0
        output = _output(weights, bias, keys, values, np.uint64(offsets[row]), np.uint64(offsets[row + 1]))
        losses += _loss(target * output, hinge)
        right += target * output > 0
    return losses, right


def reference_step(kernel: Linear, rows: dict[str, Array], batch: Mapping[str, Array], rate: float) -> float:
    """`step`, row by row in NumPy, without copies of the weights."""
    weights, losses = rows["weights"][:, 0], 0.0
    entry = 0  # of the batch
    for row in batch["rows"]:
        span = slice(batch["offsets"][row], batch["offsets"][row + 1])
        keys, values = batch["keys"][span], batch["values"][span].astype(weights.dtype)
        target = 1.0 if batch["targets"][row] > 0 else -1.0
        margin = target * (weights[keys] @ values + (rows["bias"][0, 0] if kernel.bias else 0.0))
        if kernel.loss == "hinge":
            losses += max(0.0, 1 - margin)
            slope = target if margin < 1 else 0.0
        else:
            losses += np.logaddexp(0, -margin)
            slope = target / (1 + np.exp(margin))
        move = slope * values
        if kernel.ridge:
            move = move - batch["decay"][entry : entry + len(keys)] * weights[keys]
            entry += len(keys)
        weights[keys] += rate * move
        if kernel.bias:
            rows["bias"][0, 0] += rate * slope
    return float(losses)
