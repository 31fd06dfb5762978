"""The task `kmeans`: centres of the rows of a file."""

from __future__ import annotations

from typing import Literal

import numpy as np

from manyhands.kernels.kmeans import KMeans, plus_plus, sampled
from manyhands.task import Task
from manyhands.tasks.table_file import read_matrix, slice_rows

NS_A_ROW, NS_A_PRODUCT = 50.0, 0.05  # of a number of a row and one of a centre


def kmeans(
    path: str,
    *,
    clusters: int,
    validation_path: str | None = None,
    initial: Literal["plus_plus", "sampled"] = "plus_plus",
    minibatch: int = 1024,
    seed: int = 0,
    **fields: object,
) -> Task:
    """The task, with any of Task's fields changed: rate=1 and epochs=3 stand there at first.

    path: an .npy file [rows, dim], or a .csv, .npz or .parquet file of which all columns are numbers. validation_path:
    likewise, of rows that are measured alone. initial: how centres begin, by rows drawn with the seed; `minibatch`: of
    the kernel `KMeans`.
    """
    points = read_matrix(path).astype(np.float32, copy=False)
    begin = {"plus_plus": plus_plus, "sampled": sampled}[initial]
    task = Task(
        name="kmeans",
        kernel=KMeans(initial=begin(points, clusters, seed), minibatch=minibatch),
        rate=1.0,
        train_data=points,
        validation_data=read_matrix(validation_path).astype(np.float32) if validation_path else None,
        batch_size_per_worker=slice_rows(len(points), NS_A_ROW + clusters * points.shape[1] * NS_A_PRODUCT),
        epochs=3,
        seed=seed,
    )
    return task.with_fields(**fields)
