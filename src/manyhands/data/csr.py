"""Sparse rows: features by number, values, and a target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np

from manyhands.data.ragged import Array, Ragged
from manyhands.errors import BadInput

if TYPE_CHECKING:
    from manyhands.data.sparse_text import Paths


class Csr(Ragged):
    """Compressed sparse rows: row i has the features keys[offsets[i]:offsets[i + 1]], each with a value and, where the rows
    have any, a field; and the target targets[i].

    A batch of it is a Csr again, with the same arrays and the numbers of its rows.
    """

    def __init__(
        self,
        offsets: Any,
        keys: Any,
        values: Any,
        targets: Any,
        *,
        fields: Any = None,
        features: int | None = None,
        field_count: int | None = None,
    ) -> None:
        """offsets: [rows + 1]. keys, values, fields: [entries]. targets: [rows].

        features: how many there are; default: the greatest key and one more. field_count: likewise, of fields.
        Raises BadInput for arrays that do not fit together, and keys and fields out of range.
        """
        flat = {"keys": _numbered(keys, "keys", features), "values": np.ascontiguousarray(values, np.float32)}
        if fields is not None:
            flat["fields"] = _numbered(fields, "fields", field_count)
        by_row = {"targets": np.ascontiguousarray(targets, np.float32)}
        super().__init__(np.ascontiguousarray(offsets, np.int64), flat, by_row)
        self.features = _count(flat["keys"], features)
        self.field_count = _count(flat["fields"], field_count) if fields is not None else 0
        self._not_binary = _not_binary(by_row["targets"])

    @classmethod
    def of(cls, matrix: Any, targets: Any, *, features: int | None = None) -> Self:
        """A scipy sparse matrix or array [rows, features], and targets [rows]."""
        rows = matrix.tocsr()
        rows.sort_indices()
        return cls(rows.indptr, rows.indices, rows.data, targets, features=features or matrix.shape[1])

    @classmethod
    def libsvm(cls, paths: Paths, *, features: int | None = None, zero_based: bool = False) -> Self:
        """Rows of libsvm (svmlight) text, `target index:value …`, with ascending indices that count from 1.

        paths: one or more files or URLs (fsspec's), with * in the last part, compressed or not (by the ending). They are
        parsed once, into files without names in the folder for temporary files, which are mapped.
        features: how many there are; default: the greatest index. zero_based: indices count from 0.
        From # on a line is a comment; qid:… is read over. Numbers are as float() reads them, rounded to float32.
        Raises BadInput, with file, line and column, for what is not of this form, and for a file without rows.
        """
        from manyhands.data import sparse_text

        read = sparse_text.read(paths, with_fields=False, features=features, zero_based=zero_based)
        return cls(read.offsets, read.keys, read.values, read.targets, features=features)

    @classmethod
    def libffm(cls, paths: Paths, *, fields: int | None = None, features: int | None = None) -> Self:
        """Rows of libffm text, `target field:index:value …`, where fields and indices count from 0; as `libsvm` otherwise,
        but for the order of a row's indices, which is free.

        fields: how many there are; default: the greatest and one more. BadInput for a field beyond.
        """
        from manyhands.data import sparse_text

        read = sparse_text.read(paths, with_fields=True, features=features, fields=fields, zero_based=True)
        return cls(
            read.offsets,
            read.keys,
            read.values,
            read.targets,
            fields=read.fields,
            features=features,
            field_count=fields,
        )

    @property
    def keys(self) -> Array:
        """uint32 [entries] of the whole data."""
        return self.flat["keys"]

    @property
    def values(self) -> Array:
        """float32 [entries] of the whole data."""
        return self.flat["values"]

    @property
    def fields(self) -> Array | None:
        """uint32 [entries] of the whole data; None where its rows have no fields."""
        return self.flat.get("fields")

    @property
    def targets(self) -> Array:
        """float32 [rows] of the whole data."""
        return self.by_row["targets"]

    def degrees(self, features: int | None = None) -> Array:
        """int64 [features]: how many of these rows have each feature. `features`: more than these rows know of."""
        count = features if features is not None else self.features
        if self.index is None:
            return np.bincount(self.keys, minlength=count)
        counts = np.zeros(count, np.int64)
        for i in self.index:
            counts[self.keys[self.offsets[i] : self.offsets[i + 1]]] += 1
        return counts

    def check_binary(self) -> None:
        """BadInput unless the targets of the whole data are 0 and 1, or -1 and 1."""
        if self._not_binary:
            raise BadInput(f"targets must be 0 and 1, or -1 and 1, for two classes: {self._not_binary}")


def _not_binary(targets: Array) -> str:
    """What is wrong with them as two classes; "" where nothing is."""
    negative, zero = bool((targets == -1).any()), bool((targets == 0).any())
    others = np.flatnonzero((targets != 1) & (targets != 0) & (targets != -1))
    if len(others):
        return f"row {others[0]:,} (from 0) has {targets[others[0]]:g}"
    return "there are rows with 0 and rows with -1" if negative and zero else ""


def _numbered(numbers: Any, what: str, count: int | None) -> Array:
    """uint32; BadInput for what is no whole number in range(count)."""
    found = np.asarray(numbers)
    if found.dtype.kind not in "iu" or found.ndim != 1:
        raise BadInput(f"{what} must be whole numbers in one dimension, not {found.dtype} of shape {list(found.shape)}")
    if len(found) and (least := int(found.min())) < 0:
        raise BadInput(f"{what} must be at least 0, and one is {least}")
    if len(found) and (most := int(found.max())) >= (count if count is not None else 1 << 32):
        raise BadInput(f"{what} must be below {count or 1 << 32:,}, and one is {most:,}")
    return np.ascontiguousarray(found, np.uint32)


def _count(numbers: Array, given: int | None) -> int:
    return given if given is not None else int(numbers.max(initial=0)) + 1
