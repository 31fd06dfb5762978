"""powersgd: matrices as products of two thin ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from manyhands.comm.codecs.base import (
    NO_HINTS,
    Hints,
    LinearCodec,
    Matrix,
    as_uint8,
    check_number,
    check_places_fit,
    computed,
    numbers_of,
)
from manyhands.comm.group import Group, MeanResult
from manyhands.errors import BadInput

_HEAD = 4  # bytes of a number of the payload's table
_SMALLEST = 6  # elements of a matrix that can become smaller: 2 x 3


@dataclass(frozen=True)
class PowerSGD(LinearCodec):
    """A matrix M [rows, columns] as P·Qᵀ, P [rows, rank] and Q [columns, rank]; all that is no matrix as it is.

    Source: PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization, Thijs Vogels, Sai Praneeth
    Karimireddy, Martin Jaggi, 2019.

    1. P = M·Q, with the Q of the step before (warm start; at first random, the same on all workers).
    2. P becomes the mean over the workers, and its columns orthonormal (Gram-Schmidt).
    3. Q = Mᵀ·P becomes the mean over the workers, and P·Qᵀ stands for the mean of M.

    Error feedback takes P·Qᵀ with the worker's own Q, as in the paper. Over a server there is no mean: each worker has
    factors of its own. Deviations: a column of Q that became 0, or not finite, stays what it was; matrices that would
    not become smaller, rows·columns ≤ rank·(rows + columns), are sent as they are.

    Payload: 32-bit numbers: how many matrices there are, then start, rows, columns of each; then, in the vector's
    dtype, each P and Q, then the rest of the vector. Without `Hints.matrices` all is rest.
    """

    rank: int
    """Columns of P and Q. Lower it where the link is slow, raise it when the loss falls too slowly."""

    form: ClassVar[str] = "powersgd:RANK"
    source: ClassVar[str] = "PowerSGD, Vogels, Karimireddy, Jaggi, 2019"

    def __post_init__(self) -> None:
        check_number(self.form, self.rank, "a whole number of at least 1", self.rank >= 1 and self.rank % 1 == 0)

    @override
    def encode(self, vector: Tensor, hints: Hints = NO_HINTS) -> Tensor:
        check_places_fit(self.form, len(vector))
        matrices = self._smaller(hints)
        table = [len(matrices), *(number for m in matrices for number in (m.start, m.rows, m.columns))]
        pieces = [torch.tensor(table, dtype=torch.int32)]
        for matrix in matrices:
            values = computed(_view(vector, matrix))
            p = orthonormal(values @ matrix.guess.to(values))
            q = values.T @ p
            pieces += [p.reshape(-1).to(vector.dtype), q.reshape(-1).to(vector.dtype)]
            _keep(matrix, q)
        pieces += [vector[start:stop] for start, stop in _gaps(matrices, len(vector))]
        return torch.cat([as_uint8(piece) for piece in pieces])

    @override
    def decode(self, payload: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        self.check_length(len(payload), n, dtype)
        matrices, at = self._table(payload, n)
        numbers = self._numbers(matrices, n)
        if len(payload) - at != numbers * dtype.itemsize:
            raise BadInput(
                f"{self.form}: {len(matrices)} matrices in {n} elements of {dtype} make {numbers * dtype.itemsize} bytes; "
                f"got {len(payload) - at}"
            )
        values = numbers_of(payload, at, numbers, dtype)
        vector, used = torch.empty(n, dtype=dtype), 0
        for m in matrices:
            split = used + self.rank * m.rows
            end = split + self.rank * m.columns
            p, q = values[used:split].view(m.rows, -1), values[split:end].view(m.columns, -1)
            _view(vector, m).copy_(_product(computed(p), computed(q)))
            used = end
        for start, stop in _gaps(matrices, n):
            vector[start:stop] = values[used : used + stop - start]
            used += stop - start
        return vector

    @override
    def lengths(self, n: int, dtype: torch.dtype) -> range:
        return range(_HEAD, _HEAD * (1 + 3 * (n // _SMALLEST)) + n * dtype.itemsize + 1)

    @override
    def mean_(
        self, group: Group, vector: Tensor, weight: float, bits: int, hints: Hints = NO_HINTS, own: Tensor | None = None
    ) -> MeanResult:
        matrices, gaps = self._smaller(hints), list(_gaps(self._smaller(hints), len(vector)))
        views = [computed(_view(vector, matrix)) for matrix in matrices]
        ps = [values @ matrix.guess.to(values) for values, matrix in zip(views, matrices, strict=True)]
        rest = [vector[start:stop] for start, stop in gaps]
        if own is not None:
            own.copy_(vector if weight else torch.zeros_like(vector))  # what is no matrix is sent as it is
        nbytes = self._numbers(matrices, len(vector)) * vector.itemsize
        group.encoded(self.name, len(vector), nbytes)
        ps, means, total = _mean_of(group, ps, rest, vector, weight, bits)
        if not total.weight:
            return total
        ps = [orthonormal(p) for p in ps]
        qs = [values.T @ p for values, p in zip(views, ps, strict=True)]
        if own is not None and weight:
            for matrix, p, q in zip(matrices, ps, qs, strict=True):
                _view(own, matrix).copy_(_product(p, q))
        qs, _, _ = _mean_of(group, qs, [], vector, weight, 0)
        for matrix, p, q in zip(matrices, ps, qs, strict=True):
            _view(vector, matrix).copy_(_product(p, q))
            _keep(matrix, q)
        for (start, stop), mean in zip(gaps, means, strict=True):
            vector[start:stop] = mean
        group.decoded(self.name, len(vector), nbytes)
        return total

    def _smaller(self, hints: Hints) -> list[Matrix]:
        return [m for m in hints.matrices if self.rank * (m.rows + m.columns) < m.rows * m.columns]

    def _numbers(self, matrices: Sequence[Matrix], n: int) -> int:
        """That are sent of [n]: all factors, and the rest."""
        return sum(self.rank * (m.rows + m.columns) - m.rows * m.columns for m in matrices) + n

    def _table(self, payload: Tensor, n: int) -> tuple[list[Matrix], int]:
        """The matrices of a payload, and the offset of the factors. BadInput unless they lie in range(n), in order."""
        count = int(numbers_of(payload, 0, 1, torch.int32))
        if not 0 <= count <= n // _SMALLEST or len(payload) < _HEAD * (1 + 3 * count):
            raise BadInput(
                f"{self.form}: {n} elements hold at most {n // _SMALLEST} matrices; the payload says {count}"
            )
        rows = numbers_of(payload, _HEAD, 3 * count, torch.int32).view(count, 3).tolist()
        end, matrices, none = 0, [], torch.empty(0)
        for start, height, width in rows:
            if start < end or min(height, width) < 1 or start + height * width > n:
                raise BadInput(
                    f"{self.form}: matrices lie in range({n}) one after the other; got {height} x {width} at {start} after {end}"
                )
            if self.rank * (height + width) >= height * width:
                raise BadInput(f"{self.form}: a matrix of {height} x {width} is sent as it is; got factors of it")
            matrices.append(Matrix(start, height, width, none))
            end = start + height * width
        return matrices, _HEAD * (1 + 3 * count)


def orthonormal(p: Tensor) -> Tensor:
    """[rows, rank] -> columns of length 1, at right angles, in the same order; 0 for one that depends on those before
    it.

    Gram-Schmidt, each column projected twice: once leaves what rounding makes of nearly dependent columns.
    """
    columns: list[Tensor] = []
    for column in p.unbind(1):
        length = column.norm()
        for _ in range(2):
            for other in columns:
                column = column - other * (other * column).sum()
        left = column.norm()
        dependent = left <= length * torch.finfo(p.dtype).eps ** 0.5
        columns.append(torch.where(dependent, torch.zeros_like(column), column / left))
    return torch.stack(columns, 1)


def _product(p: Tensor, q: Tensor) -> Tensor:
    """P·Qᵀ, column by column: the same bits on every machine, which a library's product need not be."""
    product = torch.outer(p[:, 0], q[:, 0])
    for j in range(1, p.shape[1]):
        product = product + torch.outer(p[:, j], q[:, j])
    return product


def _view(vector: Tensor, matrix: Matrix) -> Tensor:
    return vector[matrix.start : matrix.start + matrix.rows * matrix.columns].view(matrix.rows, matrix.columns)


def _gaps(matrices: Sequence[Matrix], n: int) -> Iterator[tuple[int, int]]:
    """[start, stop) of all that is no matrix."""
    at = 0
    for matrix in matrices:
        yield at, matrix.start
        at = matrix.start + matrix.rows * matrix.columns
    yield at, n


def _keep(matrix: Matrix, q: Tensor) -> None:
    """The next step's guess; of columns that became 0 or not finite, the last one."""
    length = q.norm(dim=0)
    matrix.guess.copy_(torch.where((length > 0) & length.isfinite(), q, matrix.guess.to(q)))


def _mean_of(
    group: Group, factors: list[Tensor], rest: list[Tensor], like: Tensor, weight: float, bits: int
) -> tuple[list[Tensor], list[Tensor], MeanResult]:
    """The mean of all these in one exchange, in the dtype of `like`."""
    flat = torch.cat([piece.reshape(-1).to(like.dtype) for piece in [*factors, *rest]] or [like[:0]])
    total = group.mean_(flat, weight, bits)
    pieces = flat.split([piece.numel() for piece in [*factors, *rest]]) if factors or rest else ()
    means = [computed(mean).view(factor.shape) for mean, factor in zip(pieces, factors, strict=False)]
    return means, list(pieces[len(factors) :]), total
