"""Fresh copies of a task, each as a real worker has it: nothing that one does to its copy is seen by another, or by the user."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from manyhands import rng
from manyhands.data.sources import is_function
from manyhands.engines.local.serialization import deserialize, serialize
from manyhands.errors import BadInput, ManyhandsError
from manyhands.evidence.check import source_locations
from manyhands.evidence.check.findings import BREAKS, Finding
from manyhands.task import Task
from manyhands.training.plan import build_model


@contextmanager
def users_code(what: str) -> Iterator[None]:
    """Within, what the user's code raises becomes a BadInput that says where."""
    try:
        yield
    except ManyhandsError:
        raise
    except Exception as error:
        place = source_locations.of_error(error)
        where = "" if place is None else f" ({place})"
        raise BadInput(f"{what} failed: {type(error).__name__}: {error}{where}") from error


class Copies:
    """`fresh()` gives one; by the way that a task takes to real workers, else by `copy.deepcopy`."""

    def __init__(self, task: Task, fd: int | None) -> None:
        """fd: what `serialize` gave, or None for a task that cannot be sent."""
        self._task, self._fd = task, fd

    @property
    def sendable(self) -> bool:
        """Whether real processes can have it."""
        return self._fd is not None

    @property
    def usable(self) -> bool:
        """Whether there can be any."""
        try:
            self.fresh()
        except BadInput:
            return False
        return True

    def fresh(self) -> Task:
        """A task of one's own. Memory of tensors and arrays is shared until it is written to. Raises BadInput where none can be made."""
        if self._fd is not None:
            task: Task = deserialize(self._fd, mapped=True)
            return task
        try:
            return copy.deepcopy(self._task)
        except Exception as error:  # user classes raise what they like
            raise BadInput(
                f"the task can be neither sent nor copied ({type(error).__name__}: {error}): nothing that reading it would change can be looked at"
            ) from error


@contextmanager
def copies_of(task: Task) -> Iterator[tuple[Copies, list[Finding]]]:
    """(copies, what of the task cannot be sent to another process)"""
    try:
        fd = serialize(task, "the task")
    except BadInput:
        yield Copies(task, None), unsendable(task)
        return
    try:
        yield Copies(task, fd), []
    finally:
        os.close(fd)


@contextmanager
def with_data(copies: Copies) -> Iterator[Copies]:
    """Copies of the task with functions that give data called, once for all; where the data cannot be sent they stay functions."""
    task = data_made(copies)
    if task is None:
        yield copies
        return
    with copies_of(task) as (own, problems):
        yield copies if problems else own


def data_made(copies: Copies) -> Task | None:
    """A task whose functions that give data were called, where the loop calls them: after the model was built from the seed.

    What can be read only once stays a function. None where there is nothing to call.
    """
    task = copies.fresh()
    given = {name: getattr(task, name) for name in ("train_data", "validation_data", "test_data")}
    functions = {name: data for name, data in given.items() if data is not None and is_function(data)}
    if not functions:
        return None
    rng.seed_all(task.seed)
    with users_code("model() or a function that gives data"):
        build_model(task)
        made = {name: _made(function) for name, function in functions.items()}
    return None if all(made[name] is given[name] for name in made) else task.with_fields(**made)


def _made(function: Any) -> Any:
    made = function()
    return function if isinstance(made, Iterator | IterableDataset | DataLoader) else made


def unsendable(task: Task) -> list[Finding]:
    """A finding for each field of a task that no worker process can have."""
    found = []
    for field in fields(task):
        value = getattr(task, field.name)
        try:
            os.close(serialize(value, field.name))
        except BadInput as error:
            found.append(
                Finding(
                    kind="not-picklable",
                    severity=BREAKS,
                    text=f"{error} Several processes cannot train this task: each needs a copy of it.",
                    places=source_locations.as_tuple(_begins(value)),
                    numbers={"field": field.name},
                )
            )
    return found


def _begins(value: Any) -> Any:
    owned = not callable(value) or isinstance(value, nn.Module)
    return source_locations.of_method(value, "__init__") if owned else source_locations.of_function(value)
