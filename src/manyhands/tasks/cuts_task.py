"""The task `cuts`: nodes of a graph in a file, shared out to classes."""

from __future__ import annotations

import numpy as np

from manyhands.errors import BadInput
from manyhands.kernels.cuts import Cuts
from manyhands.task import Task
from manyhands.tasks.table_file import Array, read_columns, slice_rows

NS_A_CLASS = 60.0  # of an edge


def cuts(
    path: str,
    known_path: str,
    *,
    nodes: str = "nodes",
    others: str = "others",
    weights: str = "weights",
    known: str = "nodes",
    classes: str = "classes",
    **fields: object,
) -> Task:
    """The task, with any of Task's fields changed: rate=0.05, rate_decay=0.9 and epochs=20 stand there at first.

    path: a .csv, .npz or .parquet file of edges. nodes, others, weights: the names of its columns, the ends of an edge
    (whole numbers from 0) and what it costs to cut it. known_path: a file of nodes whose class is known; known, classes:
    the names of its columns. There are as many classes as the greatest of them says.
    """
    edges = read_columns(path, {"nodes": nodes, "others": others, "weights": weights})
    given = read_columns(known_path, {"known": known, "classes": classes})
    if not len(edges["nodes"]) or not len(given["known"]):
        raise BadInput("there are no edges, or no nodes of a known class: check path and known_path")
    for name, keys in (("nodes", edges["nodes"]), ("others", edges["others"]), *given.items()):
        if keys.dtype.kind not in "iu" or keys.min() < 0:
            raise BadInput(f"{name} must be whole numbers from 0 (it is {keys.dtype}, from {keys.min()}): number them")
    count = 1 + max(int(keys.max()) for keys in (edges["nodes"], edges["others"], given["known"]))
    of_node = np.full(count, -1, np.int64)
    of_node[given["known"]] = given["classes"]
    kernel = Cuts(known=of_node, classes=max(2, int(given["classes"].max()) + 1))
    packed = _packed(edges)
    task = Task(
        name="cuts",
        kernel=kernel,
        rate=0.05,
        rate_decay=0.9,
        train_data=packed,
        validation_data=packed,
        batch_size_per_worker=slice_rows(len(edges["nodes"]), kernel.classes * NS_A_CLASS),
        epochs=20,
    )
    return task.with_fields(**fields)


def _packed(edges: dict[str, Array]) -> dict[str, Array]:
    """In four bytes each."""
    dtypes = {"nodes": np.uint32, "others": np.uint32, "weights": np.float32}
    return {name: column.astype(dtypes[name]) for name, column in edges.items()}
