"""Field-aware factorization machines: clicks predicted from pairs of features, with a vector for each field of the other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from manyhands.data.csr import Csr
from manyhands.errors import BadInput
from manyhands.kernels.sparse_rows import SparseRowsKernel, log_loss
from manyhands.sparse.compile import compiled, prefetch
from manyhands.sparse.kernel import Arrays, check_at_least_0, check_whole
from manyhands.sparse.rows import Rows

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class FFM(SparseRowsKernel):
    """Logistic loss of a sum over pairs of features, by AdaGrad, row by row.

    Source: Field-aware Factorization Machines for CTR Prediction, Yuchin Juan, Yong Zhuang, Wei-Sheng Chin, Chih-Jen Lin,
    2016, algorithm 1, and its program libffm.

    Feature a has the value x_a and is of the field f_a; w_a,f [k] is its vector for features of the field f. Targets y are
    1 or -1.
    1. r = 1 / (sum of x_a²): rows have the length 1.
    2. phi = r · sum over pairs a < b of (w_a,fb · w_b,fa) x_a x_b.
    3. kappa = -y / (1 + exp(y phi)).
    4. Of each pair: g_a,fb = ridge · w_a,fb + kappa r x_a x_b w_b,fa, and likewise g_b,fa.
    5. sums += g², w -= rate · g / sqrt(sums), number by number; sums begin with 1.

    Vectors begin uniform from 0 to 1 / sqrt(k), as in libffm. It has no bias and no weights of single features.

    Deviation: libffm takes 1 / sqrt from a table of the processor, with 12 bits; here it is exact.
    """

    fields: int
    k: int = 4
    """Numbers of a vector. More fit finer, and take memory: features · fields · k numbers, twice."""
    ridge: float = 2e-5
    """libffm's lambda. Raise it if the validation loss rises while the training loss falls."""
    normalize: bool = True
    """False: rows keep their length."""
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_whole(self, "features", "fields", "k")
        check_at_least_0(self, "ridge")

    @classmethod
    def of(cls, rows: Csr, **options: Any) -> Self:
        """For these training rows: with as many features and fields."""
        return cls(**{"features": rows.features, "fields": rows.field_count, **options})

    @override
    def tables(self) -> dict[str, Rows]:
        shape: dict[str, Any] = {"rows": self.features, "dim": self.fields * self.k, "dtype": self.dtype}
        return {
            "vectors": Rows(fields=("keys",), initial=f"positive:{1 / math.sqrt(self.k)}", **shape),
            "sums": Rows(fields=("keys",), initial="constant:1", **shape),
        }

    @override
    def prepare(self, batch: Any, random: int) -> dict[str, Array]:
        """The arrays of the whole data, and the numbers of the batch's rows."""
        fields = batch.fields if isinstance(batch, Csr) else None
        if fields is None:
            raise BadInput(
                f"kernel FFM takes sparse rows with fields: give train_data as Csr.libffm(path), or as a Csr with fields=, not what gives batches of {type(batch).__name__}"
            )
        arrays = super().prepare(batch, random)
        if batch.field_count > self.fields:
            raise BadInput(f"kernel FFM has {self.fields:,} fields, and its rows have {batch.field_count:,}")
        batch.check_binary()
        return {**arrays, "fields": fields}

    @override
    def step(self, rows: Arrays, batch: Arrays, rate: float) -> float:
        vectors, sums = rows["vectors"].ravel(), rows["sums"].ravel()
        kind = vectors.dtype.type
        loss, _ = _step(
            vectors, sums, *_columns(batch), self.fields, self.k, kind(rate), kind(self.ridge), self.normalize, True
        )
        return float(loss)

    @override
    def measure(self, rows: Arrays, batch: Arrays) -> Mapping[str, tuple[float, float]]:
        """The mean loss, without the ridge, and the share of rows on whose side of 0 phi is."""
        vectors, sums = rows["vectors"].ravel(), rows["sums"].ravel()
        zero = vectors.dtype.type(0)
        loss, right = _step(vectors, sums, *_columns(batch), self.fields, self.k, zero, zero, self.normalize, False)
        n = len(batch["rows"])
        return {"loss": (loss / n, n), "accuracy": (right / n, n)}


def _columns(batch: Arrays) -> list[Array]:
    return [batch[name] for name in ("rows", "offsets", "keys", "fields", "values", "targets")]


@compiled
def _step(
    vectors: Array,
    sums: Array,
    rows: Array,
    offsets: Array,
    keys: Array,
    fields: Array,
    values: Array,
    targets: Array,
    field_count: int,
    k: int,
    rate: float,
    ridge: float,
    normalize: bool,
    trains: bool,
) -> tuple[float, int]:
    """(the sum of the losses, how many rows are right). trains: whether vectors move."""
    zero, one = vectors.dtype.type(0), vectors.dtype.type(1)
    dim, count = np.uint64(field_count * k), np.uint64(len(rows))
    at_field = np.empty(field_count, np.int64)  # by which entry of the row this field was last seen
    by_field = np.zeros(np.int64(dim), vectors.dtype)  # each field's value, k times
    others = np.zeros(
        (field_count, np.int64(dim)), vectors.dtype
    )  # [entry, field, k]: the others' vectors for its field
    a_line = np.uint64(64 // vectors.itemsize)
    losses = 0.0
    right: Any = 0
    for n in range(count):
        if n + np.uint64(4) < count:
            ahead = np.uint64(rows[n + np.uint64(4)])
            for i in range(np.uint64(offsets[ahead]), np.uint64(offsets[ahead + np.uint64(1)]), np.uint64(16)):
                prefetch(keys, np.uint64(i))
                prefetch(values, np.uint64(i))
                prefetch(fields, np.uint64(i))
        if n + np.uint64(1) < count:
            ahead = np.uint64(rows[n + np.uint64(1)])
            for i in range(np.uint64(offsets[ahead]), np.uint64(offsets[ahead + np.uint64(1)])):
                start = np.uint64(keys[np.uint64(i)]) * dim
                for d in range(start, start + dim, a_line):
                    prefetch(vectors, np.uint64(d))
                    if trains:
                        prefetch(sums, np.uint64(d))
        row = np.uint64(rows[n])
        begin, end = np.uint64(offsets[row]), np.uint64(offsets[row + np.uint64(1)])
        at_field[:] = -1
        once, squares = True, zero
        for i in range(begin, end):
            once &= at_field[fields[np.uint64(i)]] < 0
            at_field[fields[np.uint64(i)]] = i
            squares += values[np.uint64(i)] * values[np.uint64(i)]
        scale = one / squares if normalize and squares > 0 else one
        if once:
            _gather(vectors, others, by_field, at_field, begin, end, keys, fields, values, dim, np.uint64(k))
            phi = scale * _output(vectors, others, by_field, begin, end, keys, fields, values, dim, np.uint64(k))
        else:
            phi = scale * _output_of_pairs(vectors, begin, end, keys, fields, values, dim, np.uint64(k))
        target = one if targets[row] > 0 else -one
        margin = np.float64(target * phi)
        losses += log_loss(margin)
        right += margin > 0
        if trains:
            kappa = -target * scale / (one + np.exp(target * phi))
            if once:
                _update(
                    vectors,
                    sums,
                    others,
                    by_field,
                    at_field,
                    begin,
                    end,
                    keys,
                    fields,
                    values,
                    dim,
                    np.uint64(k),
                    kappa,
                    rate,
                    ridge,
                )
            else:
                _update_pairs(vectors, sums, begin, end, keys, fields, values, dim, np.uint64(k), kappa, rate, ridge)
    return losses, right


# Rows in which each field stands once at most: all vectors for an entry's field lie together in `others`, so that inner
# loops run over fields · k neighbours.


@compiled
def _gather(
    vectors: Array,
    others: Array,
    by_field: Array,
    at_field: Array,
    begin: int,
    end: int,
    keys: Array,
    fields: Array,
    values: Array,
    dim: int,
    k: int,
) -> None:
    """others[i, f]: the vector of the row's feature of field f, for the field of entry i; 0 where that is i itself."""
    for field in range(np.uint64(len(at_field))):
        value = by_field.dtype.type(0)
        if at_field[field] >= 0:
            value = values[np.uint64(at_field[field])]
        for d in range(field * k, field * k + k):
            by_field[np.uint64(d)] = value
    for j in range(begin, end):
        start, into = np.uint64(keys[np.uint64(j)]) * dim, np.uint64(fields[np.uint64(j)]) * k
        for i in range(begin, end):
            source, entry = start + np.uint64(fields[np.uint64(i)]) * k, np.uint64(i) - begin
            if k == np.uint64(4):
                first, second = vectors[source], vectors[source + np.uint64(1)]  # all four, then: one instruction each
                third, fourth = vectors[source + np.uint64(2)], vectors[source + np.uint64(3)]
                others[entry, into], others[entry, into + np.uint64(1)] = first, second
                others[entry, into + np.uint64(2)], others[entry, into + np.uint64(3)] = third, fourth
            else:
                for d in range(k):
                    others[entry, into + np.uint64(d)] = vectors[source + np.uint64(d)]
        for d in range(k):
            others[np.uint64(j) - begin, into + np.uint64(d)] = 0


@compiled
def _output(
    vectors: Array,
    others: Array,
    by_field: Array,
    begin: int,
    end: int,
    keys: Array,
    fields: Array,
    values: Array,
    dim: int,
    k: int,
) -> Any:
    total = vectors.dtype.type(0)
    for i in range(begin, end):
        start, entry = np.uint64(keys[np.uint64(i)]) * dim, np.uint64(i) - begin
        inner = vectors.dtype.type(0)
        for d in range((np.uint64(fields[np.uint64(i)]) + np.uint64(1)) * k, dim):  # each pair once
            inner += vectors[start + np.uint64(d)] * others[entry, np.uint64(d)] * by_field[np.uint64(d)]
        total += inner * values[np.uint64(i)]
    return total


@compiled
def _update(
    vectors: Array,
    sums: Array,
    others: Array,
    by_field: Array,
    at_field: Array,
    begin: int,
    end: int,
    keys: Array,
    fields: Array,
    values: Array,
    dim: int,
    k: int,
    kappa: float,
    rate: float,
    ridge: float,
) -> None:
    field_count, first = np.uint64(len(at_field)), np.uint64(0)
    while first < field_count:  # run by run of fields that the row has
        while first < field_count and at_field[first] < 0:
            first += np.uint64(1)
        last = first
        while last < field_count and at_field[last] >= 0:
            last += np.uint64(1)
        for i in range(begin, end):
            start, entry, own = np.uint64(keys[np.uint64(i)]) * dim, np.uint64(i) - begin, fields[np.uint64(i)]
            factor = kappa * values[np.uint64(i)]
            for low, high in ((first, min(last, np.uint64(own))), (max(first, np.uint64(own) + np.uint64(1)), last)):
                for d in range(low * k, high * k):
                    vector = vectors[start + np.uint64(d)]
                    slope = ridge * vector + factor * by_field[np.uint64(d)] * others[entry, np.uint64(d)]
                    total = sums[start + np.uint64(d)] + slope * slope
                    sums[start + np.uint64(d)] = total
                    vectors[start + np.uint64(d)] = vector - rate * slope / np.sqrt(total)
        first = last


# Rows in which a field stands more than once: pair by pair.


@compiled
def _output_of_pairs(
    vectors: Array, begin: int, end: int, keys: Array, fields: Array, values: Array, dim: int, k: int
) -> Any:
    total = vectors.dtype.type(0)
    for i in range(begin, end):
        for j in range(np.uint64(i) + np.uint64(1), end):
            one = np.uint64(keys[np.uint64(i)]) * dim + np.uint64(fields[np.uint64(j)]) * k
            other = np.uint64(keys[np.uint64(j)]) * dim + np.uint64(fields[np.uint64(i)]) * k
            inner = vectors.dtype.type(0)
            for d in range(k):
                inner += vectors[one + np.uint64(d)] * vectors[other + np.uint64(d)]
            total += inner * values[np.uint64(i)] * values[np.uint64(j)]
    return total


@compiled
def _update_pairs(
    vectors: Array,
    sums: Array,
    begin: int,
    end: int,
    keys: Array,
    fields: Array,
    values: Array,
    dim: int,
    k: int,
    kappa: float,
    rate: float,
    ridge: float,
) -> None:
    for i in range(begin, end):
        for j in range(np.uint64(i) + np.uint64(1), end):
            one = np.uint64(keys[np.uint64(i)]) * dim + np.uint64(fields[np.uint64(j)]) * k
            other = np.uint64(keys[np.uint64(j)]) * dim + np.uint64(fields[np.uint64(i)]) * k
            factor = kappa * values[np.uint64(i)] * values[np.uint64(j)]
            for d in range(k):
                a, b = one + np.uint64(d), other + np.uint64(d)
                slope_a = ridge * vectors[a] + factor * vectors[b]
                slope_b = ridge * vectors[b] + factor * vectors[a]
                sums[a] += slope_a * slope_a
                vectors[a] -= rate * slope_a / np.sqrt(sums[a])
                sums[b] += slope_b * slope_b
                vectors[b] -= rate * slope_b / np.sqrt(sums[b])


def reference_step(kernel: FFM, rows: dict[str, Array], batch: Mapping[str, Array], rate: float) -> float:
    """`step`, pair by pair in NumPy."""
    shape = (-1, kernel.fields, kernel.k)
    vectors, sums, losses = rows["vectors"].reshape(shape), rows["sums"].reshape(shape), 0.0
    for row in batch["rows"]:
        span = slice(batch["offsets"][row], batch["offsets"][row + 1])
        entries = list(
            zip(batch["keys"][span], batch["fields"][span], batch["values"][span].astype(float), strict=True)
        )
        pairs = [(one, other) for i, one in enumerate(entries) for other in entries[i + 1 :]]
        squares = sum(value**2 for _, _, value in entries)
        scale = 1 / squares if kernel.normalize and squares else 1.0
        phi = scale * sum(vectors[a, fb] @ vectors[b, fa] * xa * xb for (a, fa, xa), (b, fb, xb) in pairs)
        target = 1.0 if batch["targets"][row] > 0 else -1.0
        losses += np.logaddexp(0, -target * phi)
        kappa = -target / (1 + np.exp(target * phi))
        for (a, fa, xa), (b, fb, xb) in pairs:
            slope_a = kernel.ridge * vectors[a, fb] + kappa * scale * xa * xb * vectors[b, fa]
            slope_b = kernel.ridge * vectors[b, fa] + kappa * scale * xa * xb * vectors[a, fb]
            for key, field, slope in ((a, fb, slope_a), (b, fa, slope_b)):
                sums[key, field] += slope**2
                vectors[key, field] -= rate * slope / np.sqrt(sums[key, field])
    return float(losses)
