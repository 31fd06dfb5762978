"""One random order for all workers: rank 0's, as a plain script would draw it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from manyhands import rng
from manyhands.comm.group import Group
from manyhands.data.readers.loaders import length_of
from manyhands.errors import BadInput


def plan_of(loader: DataLoader[Any]) -> list[list[Any]]:
    """The pass's global batches as lists of the sampler's items; draws the numbers that `loader` would draw."""
    sampler: Any = loader.batch_sampler
    expected = length_of(sampler)
    plan = []
    for batch in DataLoader(_Keys(), batch_sampler=sampler, collate_fn=list, generator=loader.generator):
        plan.append(batch)
        if len(plan) > expected:
            raise BadInput(
                f"the DataLoader's batch sampler says len() = {expected} batches and gave more: make both agree"
            )
    return plan


class _Keys(Dataset[Any]):
    """In place of the dataset: gives the sampler's own indices, or keys, back."""

    def __getitems__(self, keys: list[Any]) -> list[Any]:
        return keys


def number_ahead() -> int:
    """A number that depends on the random state and leaves it as it is."""
    with rng.kept():
        return int(torch.randint(2**62, ()).item())


@contextmanager
def drawing_alike(group: Group, generators: list[torch.Generator]) -> Iterator[None]:
    """Inside, every rank draws rank 0's numbers. Rank 0's generators, and all of `generators`, have then moved on as in
    a plain script; the other ranks' global ones are as before. A collective."""
    tensors, values = rng.capture()
    tensors.pop("cuda", None)  # orders are drawn on the CPU
    own = [generator.get_state() for generator in generators]
    for state in [*tensors.values(), *own]:
        group.broadcast_(state, 0)
    values = group.all_gather_json(values if group.rank == 0 else None)[0]
    for generator, state in zip(generators, own, strict=True):
        generator.set_state(state)
    with rng.kept() if group.rank else nullcontext():
        if group.rank:
            rng.restore(tensors, values)
        yield


def check_equal(group: Group, mine: list[int]) -> None:
    for rank, theirs in enumerate(group.all_gather_json(mine)):
        if theirs != mine:
            (a, x), (b, y) = sorted([(group.rank, mine), (rank, theirs)])
            raise BadInput(
                f"all workers must iterate the same data: rank {a} has {x[1]} rows in {x[0]} batches, rank {b} has {y[1]} in {y[0]}; "
                "give every worker the whole dataset, manyhands shares it out"
            )
