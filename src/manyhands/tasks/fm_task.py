"""The task `fm`: a factorization machine on the rows of libsvm files."""

from __future__ import annotations

from typing import Any, Literal

from manyhands.data.csr import Csr
from manyhands.kernels.fm import FM
from manyhands.task import Task
from manyhands.tasks.sparse_rows import entries_a_row, read_both, slice_rows

NS_AN_ENTRY, NS_A_NUMBER = 9.0, 0.7  # a number of an entry's vector


def fm(
    path: str,
    *,
    validation_path: str | None = None,
    k: int = 8,
    loss: Literal["logistic", "squared"] = "logistic",
    ridge: float = 2e-5,
    normalize: bool = True,
    features: int | None = None,
    zero_based: bool = False,
    **fields: Any,
) -> Task:
    """The task, with any of Task's fields changed: rate=0.1 and epochs=10 stand there at first. Options are those of the
    kernel `FM` and of `Csr.libsvm`.

    path: one file, URL or pattern (rows-*.svm.gz). validation_path: likewise, of rows that are measured alone.
    """
    rows, validation, counts = read_both(Csr.libsvm, path, validation_path, features=features, zero_based=zero_based)
    kernel = FM(features=counts["features"], k=k, loss=loss, ridge=ridge, normalize=normalize)
    if loss == "logistic":
        rows.check_binary()
    task = Task(
        name="fm",
        kernel=kernel,
        rate=0.1,
        train_data=rows,
        validation_data=validation,
        batch_size_per_worker=slice_rows(rows, entries_a_row(rows) * (NS_AN_ENTRY + k * NS_A_NUMBER)),
        epochs=10,
    )
    return task.with_fields(**fields)
