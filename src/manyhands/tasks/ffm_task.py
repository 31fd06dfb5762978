"""The task `ffm`: a field-aware factorization machine on the rows of libffm files."""

from __future__ import annotations

from typing import Any

from manyhands.data.csr import Csr
from manyhands.kernels.ffm import FFM
from manyhands.task import Task
from manyhands.tasks.sparse_rows import entries_a_row, read_both, slice_rows

NS_A_NUMBER = 0.65  # of a pair's two vectors


def ffm(
    path: str,
    *,
    validation_path: str | None = None,
    k: int = 4,
    ridge: float = 2e-5,
    normalize: bool = True,
    field_count: int | None = None,
    features: int | None = None,
    **fields: Any,
) -> Task:
    """The task, with any of Task's fields changed: rate=0.2 and epochs=5 stand there at first. Options are those of the kernel
    `FFM`, and of `Csr.libffm`, whose `fields` is called field_count here.

    path: one file, URL or pattern (clicks-*.ffm.gz). validation_path: likewise, of rows that are measured alone.
    """
    rows, validation, counts = read_both(Csr.libffm, path, validation_path, features=features, fields=field_count)
    rows.check_binary()
    kernel = FFM(features=counts["features"], fields=counts["fields"], k=k, ridge=ridge, normalize=normalize)
    task = Task(
        name="ffm",
        kernel=kernel,
        rate=0.2,
        train_data=rows,
        validation_data=validation,
        batch_size_per_worker=slice_rows(rows, NS_A_NUMBER * k * entries_a_row(rows) ** 2),
        epochs=5,
    )
    return task.with_fields(**fields)
