"""A task whose answer shows which rows were trained: the model has one number for each, which its gradient alone moves.

The loss is minus the mean of the numbers of a batch. With rate 1, a step on n rows adds 1 / n to each of theirs.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations_with_replacement, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.recording import event_log
from manyhands.recording.run import Run
from manyhands.strategies.streaming import Schedule


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


def memberships(run_dir: Path, workers: int = 3) -> dict[int, int]:
    """By global batch, how many workers go on from there."""
    changes = [event for event in event_log.read(run_dir / event_log.FILE) if event.type == "membership"]
    return {0: workers, **{event.tick: event.values["workers"] for event in changes}}


# -- tasks of one epoch, whose rows are in their own order ---------------------------------------------------------------

PERIOD = 4
ROUNDS = [f"local-sgd:period={PERIOD}", f"diloco:period={PERIOD},outer_rate=1,outer_momentum=0"]


def in_order(batch_size: int, ticks: int, **fields: object) -> mh.Task:
    rows = batch_size * ticks
    return task(rows, batch_size, **{"epochs": 1, "order": lambda epoch: range(rows), **fields})


def each_in_a_round(run: Run, run_dir: Path, batch_size: int = 6) -> None:
    """Each row is in its round once."""
    counted(run, batch_size)
    assert rounds_problem(run.model.of.detach(), run.history, memberships(run_dir), batch_size) == ""


# -- two fragments of the parameters, which have rounds of their own -------------------------------------------------------

HALF = 48  # the first fragment's numbers; both are whole pieces of 128 bytes
STREAMING = "diloco:period=4,outer_rate=1,outer_momentum=0,streaming=2,overlap=0"
ON_THEIR_WAY = "diloco:period=4,streaming=2,overlap=1"


def one_of_each_half(epoch: int) -> list[int]:
    """Each slice has as many rows of each fragment."""
    return [number // 2 + HALF * (number % 2) for number in range(2 * HALF)]


def in_fragments(**fields: object) -> mh.Task:
    return task(2 * HALF, 12, **{"epochs": 1, "order": one_of_each_half, **fields})


def each_in_a_round_of_its_fragment(run: Run, run_dir: Path, period: int = 4) -> None:
    """With rate 1 and whole outer steps, a worker whose slices of n rows had R of the S rows of a fragment's window moves
    R / 2 of that fragment's numbers by R / (S·n) each."""
    ticks, batch_size = 8, 12
    counted(run, batch_size)
    schedule = Schedule(period=period, fragments=2, overlap=0, mixing=0.0, rate=1.0, momentum=0.0)
    members = memberships(run_dir)
    moved = run.model.of.detach()[one_of_each_half(0)].view(ticks, batch_size // 2, 2)
    for fragment in range(2):
        edges = {*members, ticks}
        for begin, end in pairwise(sorted({*members, ticks})):  # all fragments are synced where members change
            edges |= {begin + tick for tick in range(1, end - begin) if schedule.due(tick) == fragment}
        for first, until in pairwise(sorted(edges)):
            slice_rows = batch_size // members[max(tick for tick in members if tick <= first)]
            had = moved[first:until, :, fragment].flatten() * slice_rows * (until - first) * batch_size  # R
            counts = Counter(round(float(value)) for value in had)
            assert torch.allclose(had, had.round(), rtol=0, atol=1e-9), (fragment, first, until, counts)
            assert all(rows > 0 and 2 * found % rows == 0 for rows, found in counts.items()), (fragment, first, counts)


# -- at their own pace -----------------------------------------------------------------------------------------------------


def each_at_the_server(run: Run, batch_size: int, epochs: int, share: int = 1) -> None:
    """All rows moved alike: an epoch keeps the slices of three, two or one workers with which it began.

    share: of how many workers the server's numbers are the mean.
    """
    moved = run.model.of.detach()
    of_epochs = [workers / (batch_size * share) for workers in (3, 2, 1)]
    assert min(abs(float(moved[0]) - sum(one)) for one in combinations_with_replacement(of_epochs, epochs)) < 1e-9
    assert torch.allclose(moved, moved[0].expand(len(moved)), rtol=0, atol=1e-9), moved
    counted(run, batch_size, epochs)


def counted(run: Run, batch_size: int, epochs: int = 1) -> None:
    """Each global batch of each epoch is in the history once."""
    rows = epochs * len(run.model.of)
    assert (run.rows["total"], run.rows["unused"]) == (rows, 0)
    assert sorted((row["tick"], row["rows"]) for row in run.history) == [
        (tick, batch_size) for tick in range(rows // batch_size)
    ]
