"""The task `factors`: matrix factorisation of ratings in a file."""

from __future__ import annotations

import numpy as np

from manyhands import units
from manyhands.data.cells import by_cells
from manyhands.errors import BadInput, is_number
from manyhands.kernels.factors import Factors
from manyhands.task import Task
from manyhands.tasks.table_file import Array, read_columns, slice_rows

NS_A_FACTOR = 1.0  # of a rating
MOST_ROWS = 10  # of a table, for each of its ratings


def factors(
    path: str,
    *,
    users: str = "users",
    items: str = "items",
    ratings: str = "ratings",
    validation_path: str | None = None,
    held_out: float = 0.0,
    rank: int = 32,
    ridge: float = 0.05,
    biases: bool = True,
    seed: int = 0,
    **fields: object,
) -> Task:
    """The task, with any of Task's fields changed: rate=0.1 and epochs=10 stand there at first.

    path: a .csv, .npz or .parquet file. users, items, ratings: the names of its columns. validation_path: a file of
    ratings that are measured alone; held_out: a share of those of `path`, drawn by the seed, in the place of such a
    file. rank, ridge, biases: of the kernel `Factors`.

    Ratings are put into an order by cells (`data.cells`), once: shuffle=False.
    """
    names = {"users": users, "items": items, "ratings": ratings}
    train, validation = read_columns(path, names), read_columns(validation_path, names) if validation_path else None
    if not (is_number(held_out) and 0 <= held_out < 1) or (held_out and validation):
        raise BadInput(
            f"held_out must be a share of the ratings, from 0 to below 1, and goes without validation_path; got {held_out!r}"
        )
    if held_out:
        drawn = np.random.default_rng(seed).random(len(train["ratings"])) < held_out
        train, validation = ({name: column[part] for name, column in train.items()} for part in (~drawn, drawn))
    parts = [train, validation] if validation else [train]
    counts = {name: _count(name, names[name], parts) for name in ("users", "items")}
    order = by_cells(train["users"], train["items"], row_bytes=4 * rank, seed=seed)
    task = Task(
        name="factors",
        kernel=Factors(
            users=counts["users"],
            items=counts["items"],
            rank=rank,
            ridge=ridge,
            biases=biases,
            mean=float(train["ratings"].mean()),
            scale=float(train["ratings"].std()) or 1.0,
        ),
        rate=0.1,
        train_data={name: column[order] for name, column in _packed(train).items()},
        validation_data=validation and _packed(validation),
        shuffle=False,
        batch_size_per_worker=slice_rows(len(order), rank * NS_A_FACTOR),
        epochs=10,
        seed=seed,
    )
    return task.with_fields(**fields)


def _count(name: str, column: str, parts: list[dict[str, Array]]) -> int:
    """How many keys there are: the greatest and one more."""
    for keys in (part[name] for part in parts):
        if keys.dtype.kind not in "iu" or (len(keys) and keys.min() < 0):
            raise BadInput(
                f"column {column!r} must hold keys, whole numbers from 0 (it is {keys.dtype}, from {keys.min()}): number them"
            )
    count = 1 + max(int(part[name].max(initial=0)) for part in parts)
    ratings = len(parts[0][name])
    if not ratings:
        raise BadInput("there are no ratings to train on: check the path, or lower held_out")
    if count > max(1 << 20, MOST_ROWS * ratings):
        raise BadInput(
            f"column {column!r} has keys up to {count - 1:,} in {units.count(ratings, 'rating')}, and each key from 0 on takes a row: "
            "number them (numpy.unique(keys, return_inverse=True), for example)"
        )
    return count


def _packed(columns: dict[str, Array]) -> dict[str, Array]:
    """In four bytes each."""
    dtypes = {"users": np.uint32, "items": np.uint32, "ratings": np.float32}
    return {name: column.astype(dtypes[name]) for name, column in columns.items()}
