"""The task `linear`: logistic regression or a linear SVM on the rows of libsvm files."""

from __future__ import annotations

from typing import Any, Literal

from manyhands.data.csr import Csr
from manyhands.kernels.linear import Linear
from manyhands.task import Task
from manyhands.tasks.sparse_rows import entries_a_row, read_both, slice_rows

NS_AN_ENTRY = 1.5


def linear(
    path: str,
    *,
    validation_path: str | None = None,
    loss: Literal["logistic", "hinge"] = "logistic",
    ridge: float = 0.0,
    bias: bool = True,
    merge_every: int | None = None,
    features: int | None = None,
    zero_based: bool = False,
    **fields: Any,
) -> Task:
    """The task, with any of Task's fields changed: rate=0.1 and epochs=10 stand there at first. Options are those of the
    kernel `Linear` and of `Csr.libsvm`.

    path: one file, URL or pattern (rows-*.svm.gz). validation_path: likewise, of rows that are measured alone.
    """
    rows, validation, counts = read_both(Csr.libsvm, path, validation_path, features=features, zero_based=zero_based)
    rows.check_binary()
    kernel = Linear.of(
        rows,
        features=counts["features"],
        loss=loss,
        ridge=ridge,
        bias=bias,
        merge_every=merge_every,
    )
    task = Task(
        name="linear",
        kernel=kernel,
        rate=0.1,
        train_data=rows,
        validation_data=validation,
        batch_size_per_worker=slice_rows(rows, NS_AN_ENTRY * entries_a_row(rows)),
        epochs=10,
    )
    return task.with_fields(**fields)
