"""A task whose answer shows which rows were trained: the model has one number for each, which its gradient alone moves.

The loss is minus the mean of the numbers of a batch. With rate 1, a step on n rows adds 1 / n to each of theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.recording.run import Run


def task(rows: int, batch_size: int, **fields: object) -> mh.Task:
    """fields: of the task, instead of these."""
    common = {
        "model": lambda: Numbers(rows),
        "loss": minus_mean,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
        "train_data": torch.arange(rows),
        "batch_size": batch_size,
    }
    return mh.Task(**{**common, **fields})


class Numbers(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.of = nn.Parameter(torch.zeros(rows, dtype=torch.float64))

    def forward(self, rows: Tensor) -> Tensor:
        return self.of[rows]


def minus_mean(model: nn.Module, batch: Tensor) -> Tensor:
    return -model(batch).mean()


def trained_once(run: Run, batch_size: int, slices: Collection[int]) -> None:
    """Each row was in one slice of one epoch, of so many rows as one of `slices`, and each global batch is one step."""
    partly_trained(run, batch_size, slices, partial=0)
    assert run.model.of.detach().min() > 0


def partly_trained(run: Run, batch_size: int, slices: Collection[int], partial: int) -> None:
    """The same, but for so many rows of a slice that some of several shards have: the others' numbers did not move."""
    moved = run.model.of.detach()
    off = torch.stack([(moved - 1 / rows).abs() for rows in slices]).min(dim=0).values
    off[moved == 0] = 0
    assert off.max() < 1e-9, sorted({round(float(value), 3) for value in moved})
    assert (moved == 0).sum() <= partial
    assert run.rows["total"] == len(moved)
    assert run.rows["unused"] == 0
    assert run.rows["partial"] == partial
    ticks = len(moved) // batch_size
    assert sorted(row["tick"] for row in run.history) == list(range(ticks))
    assert {row["rows"] for row in run.history} <= {batch_size, batch_size - partial}


def rounds_problem(
    moved: Tensor, history: Sequence[Mapping[str, Any]], members: Mapping[int, int], batch_size: int
) -> str:
    """What is wrong with the answer of a run whose workers meet every few steps, "" where nothing is.

    Rows are in their own order. A worker whose slices of n rows had R of the S rows of a round moves R numbers by
    R / (S·n) each, and so do those who train its slices. members: by global batch, how many go on from there.
    """
    ticks = len(moved) // batch_size
    rounds = {row["tick"] + 1 for row in history if row["round"]}
    for first, until in pairwise(sorted({*members, *rounds, ticks})):
        slice_rows = batch_size // members[max(tick for tick in members if tick <= first)]
        whole = (until - first) * batch_size
        had = moved[first * batch_size : until * batch_size] * slice_rows * whole  # R, on R rows
        counts = Counter(round(float(value)) for value in had)
        exact = torch.allclose(had, had.round(), rtol=0, atol=1e-9)
        if not exact or any(rows <= 0 or found % rows for rows, found in counts.items()):
            return f"of global batches {first} to {until - 1} by {slice_rows} rows a slice: {dict(counts)}"
    return ""
