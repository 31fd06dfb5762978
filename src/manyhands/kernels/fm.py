"""Factorization machines: a weight for each feature, and a vector, whose inner products weigh pairs of features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from manyhands.data.csr import Csr
from manyhands.errors import UnknownName
from manyhands.kernels.sparse_rows import SparseRowsKernel, log_loss
from manyhands.sparse.compile import compiled, prefetch
from manyhands.sparse.kernel import Arrays, check_above_0, check_at_least_0, check_whole
from manyhands.sparse.rows import Rows

Array = NDArray[Any]

LOSSES = ("logistic", "squared")


@dataclass(frozen=True, kw_only=True)
class FM(SparseRowsKernel):
    """Logistic or squared loss of a sum over features and pairs of them, by AdaGrad, row by row.

    Source: Factorization Machines, Steffen Rendle, 2010, equations 1, 5 (its sum over pairs in one pass) and 4 (the
    derivatives); Adaptive Subgradient Methods, John Duchi, Elad Hazan, Yoram Singer, 2011.

    Feature a has the value x_a, the weight w_a and the vector v_a [k].
    1. x is scaled to the length 1.
    2. s = sum of x_a v_a; phi = w_0 + sum of w_a x_a + (s · s - sum of x_a² v_a · v_a) / 2.
    3. kappa = -y / (1 + exp(y phi)) with targets y of 1 or -1 (logistic), or phi - y (squared: the loss is half the square).
    4. The slopes are kappa for w_0, kappa x_a for w_a, and kappa x_a (s - x_a v_a) for v_a; for the last two ridge times
       the number itself is added.
    5. sums += slope², number -= rate · slope / sqrt(sums); sums begin with 1.

    Deviations: the paper leaves the step open, and its program libFM takes plain SGD. AdaGrad, sums from 1 and rows of
    length 1 are those of libffm, and of xLearn's factorization machines.
    """

    k: int = 8
    """Numbers of a vector. More fit finer, and take memory: features · k numbers, twice."""
    loss: Literal["logistic", "squared"] = "logistic"
    ridge: float = 2e-5
    """Raise it if the validation loss rises while the training loss falls."""
    normalize: bool = True
    """False: rows keep their length."""
    spread: float = 0.1
    """Standard deviation of vectors at the start, libFM's init_stdev. 0 would leave them at 0 for ever."""
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_whole(self, "features", "k")
        if self.loss not in LOSSES:
            raise UnknownName(f"kernel FM: no loss {self.loss!r}: choose one of {', '.join(LOSSES)}")
        check_at_least_0(self, "ridge")
        check_above_0(self, "spread")

    @classmethod
    def of(cls, rows: Csr, **options: Any) -> Self:
        """For these training rows: with as many features."""
        return cls(**{"features": rows.features, **options})

    @override
    def tables(self) -> dict[str, Rows]:
        by_feature: dict[str, Any] = {"fields": ("keys",), "rows": self.features, "dtype": self.dtype}
        return {
            "weights": Rows(**by_feature),
            "vectors": Rows(dim=self.k, initial=f"normal:{self.spread}", **by_feature),
            "sums": Rows(dim=1 + self.k, initial="constant:1", **by_feature),  # of the weight, then of the vector
            "bias": Rows(rows=1, dtype=self.dtype),
            "bias_sum": Rows(rows=1, initial="constant:1", dtype=self.dtype),
        }

    @override
    def prepare(self, batch: Any, random: int) -> dict[str, Array]:
        arrays = super().prepare(batch, random)
        if self.loss == "logistic":
            batch.check_binary()
        return arrays

    @override
    def step(self, rows: Arrays, batch: Arrays, rate: float) -> float:
        return float(self._run(rows, batch, rate, trains=True)[0])

    @override
    def measure(self, rows: Arrays, batch: Arrays) -> Mapping[str, tuple[float, float]]:
        """The mean loss, without the ridge; and the share of rows on whose side of 0 phi is, or the mean squared error."""
        loss, right = self._run(rows, batch, 0.0, trains=False)
        n = len(batch["rows"])
        if self.loss == "squared":
            return {"loss": (loss / n, n), "squared_error": (2 * loss / n, n)}
        return {"loss": (loss / n, n), "accuracy": (right / n, n)}

    def _run(self, rows: Arrays, batch: Arrays, rate: float, trains: bool) -> tuple[float, int]:
        kind = rows["vectors"].dtype.type
        found: tuple[float, int] = _step(
            *(rows[name].ravel() for name in ("weights", "vectors", "sums", "bias", "bias_sum")),
            *(batch[name] for name in ("rows", "offsets", "keys", "values", "targets")),
            self.k,
            kind(rate),
            kind(self.ridge),
            self.loss == "squared",
            self.normalize,
            trains,
        )
        return found


@compiled
def _step(
    weights: Array,
    vectors: Array,
    sums: Array,
    bias: Array,
    bias_sum: Array,
    rows: Array,
    offsets: Array,
    keys: Array,
    values: Array,
    targets: Array,
    k: int,
    rate: float,
    ridge: float,
    squared: bool,
    normalize: bool,
    trains: bool,
) -> tuple[float, int]:
    """(the sum of the losses, how many rows are right). trains: whether numbers move."""
    zero, one, half = vectors.dtype.type(0), vectors.dtype.type(1), vectors.dtype.type(0.5)
    dim, count, next_one = np.uint64(k), np.uint64(len(rows)), np.uint64(1)
    total = np.empty(k, vectors.dtype)
    losses = 0.0
    right: Any = 0
    for n in range(count):
        if n + np.uint64(4) < count:
            ahead = np.uint64(rows[n + np.uint64(4)])
            for i in range(np.uint64(offsets[ahead]), np.uint64(offsets[ahead + next_one]), np.uint64(16)):
                prefetch(keys, np.uint64(i))
                prefetch(values, np.uint64(i))
        if n + next_one < count:
            ahead = np.uint64(rows[n + next_one])
            for i in range(np.uint64(offsets[ahead]), np.uint64(offsets[ahead + next_one])):
                key = np.uint64(keys[np.uint64(i)])
                prefetch(weights, key)
                prefetch(vectors, key * dim)
                prefetch(sums, key * (dim + next_one))
        row = np.uint64(rows[n])
        begin, end = np.uint64(offsets[row]), np.uint64(offsets[row + next_one])
        squares = zero
        for i in range(begin, end):
            squares += values[np.uint64(i)] * values[np.uint64(i)]
        scale = one / np.sqrt(squares) if normalize and squares > 0 else one
        linear, own = zero, zero
        total[:] = zero
        for i in range(begin, end):
            key, value = np.uint64(keys[np.uint64(i)]), values[np.uint64(i)] * scale
            linear += weights[key] * value
            for d in range(dim):
                part = value * vectors[key * dim + np.uint64(d)]
                total[np.uint64(d)] += part
                own += part * part
        pairs = zero
        for d in range(dim):
            pairs += total[np.uint64(d)] * total[np.uint64(d)]
        phi = bias[0] + linear + half * (pairs - own)
        if squared:
            kappa = phi - targets[row]
            losses += 0.5 * np.float64(kappa) * np.float64(kappa)
        else:
            target = one if targets[row] > 0 else -one
            margin = np.float64(target * phi)
            losses += log_loss(margin)
            right += margin > 0
            kappa = -target / (one + np.exp(target * phi))
        if trains:
            bias_sum[0] += kappa * kappa
            bias[0] -= rate * kappa / np.sqrt(bias_sum[0])
            for i in range(begin, end):
                key, value = np.uint64(keys[np.uint64(i)]), values[np.uint64(i)] * scale
                at, factor = key * (dim + next_one), kappa * value
                slope = factor + ridge * weights[key]
                sums[at] += slope * slope
                weights[key] -= rate * slope / np.sqrt(sums[at])
                for d in range(dim):
                    vector = vectors[key * dim + np.uint64(d)]
                    slope = factor * (total[np.uint64(d)] - value * vector) + ridge * vector
                    moved = sums[at + next_one + np.uint64(d)] + slope * slope
                    sums[at + next_one + np.uint64(d)] = moved
                    vectors[key * dim + np.uint64(d)] = vector - rate * slope / np.sqrt(moved)
    return losses, right


def reference_step(kernel: FM, rows: dict[str, Array], batch: Mapping[str, Array], rate: float) -> float:
    """`step`, row by row in NumPy, with the sum over pairs as it is written."""
    losses = 0.0
    for row in batch["rows"]:
        span = slice(batch["offsets"][row], batch["offsets"][row + 1])
        keys, x = batch["keys"][span], batch["values"][span].astype(float)
        if kernel.normalize and x.any():
            x = x / np.linalg.norm(x)
        w, v = rows["weights"][keys, 0], rows["vectors"][keys]
        pairs = sum(x[a] * x[b] * (v[a] @ v[b]) for a in range(len(x)) for b in range(a + 1, len(x)))
        phi = rows["bias"][0, 0] + w @ x + pairs
        if kernel.loss == "squared":
            kappa = phi - batch["targets"][row]
            losses += kappa**2 / 2
        else:
            target = 1.0 if batch["targets"][row] > 0 else -1.0
            kappa = -target / (1 + np.exp(target * phi))
            losses += np.logaddexp(0, -target * phi)
        others = x @ v - x[:, None] * v
        slopes = np.hstack([kappa * x[:, None], kappa * x[:, None] * others]) + kernel.ridge * np.hstack(
            [w[:, None], v]
        )
        rows["sums"][keys] += slopes**2
        moves = rate * slopes / np.sqrt(rows["sums"][keys])
        rows["weights"][keys] -= moves[:, :1]
        rows["vectors"][keys] -= moves[:, 1:]
        rows["bias_sum"] += kappa**2
        rows["bias"] -= rate * kappa / np.sqrt(rows["bias_sum"])
    return float(losses)
