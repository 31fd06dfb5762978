"""Spec strings of tasks: `digits:epochs=5`, `my.py:task`, `my.py:make_task:width=64`."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path

from manyhands import spec, tasks
from manyhands.errors import BadInput, ManyhandsError, UnknownName, users_line
from manyhands.task import Task


def task_of(given: str) -> Task:
    """The task that a spec string names. Options are arguments of the function that makes it, else fields of Task.

    Raises UnknownName, listing what there is, and BadInput for a file that fails to import or gives no Task.
    """
    _check_file(given)
    name, options = spec.parse(given)
    found = spec.find(name, tasks.CATALOGUE, "task")
    what = f"task {name}"
    if isinstance(found, Task):
        return spec.make(found.with_fields, options, what)  # type: ignore[no-any-return]
    if not (inspect.isroutine(found) or isinstance(found, type | partial)):
        raise BadInput(
            f"{name} is neither a Task nor a function that gives one, but {type(found).__name__}; a script with a loop of its own is for `manyhands run`"
        )
    known = spec.options_of(found)
    fields = {name: options.pop(name) for name in list(options) if name not in known and name in spec.options_of(Task)}
    try:
        task = spec.make(found, options, what)
    except ManyhandsError:
        raise
    except Exception as error:
        place = users_line(error)
        raise BadInput(
            f"{name}() failed: {type(error).__name__}: {error}{f' ({place.in_words})' if place else ''}"
        ) from error
    if not isinstance(task, Task):
        raise BadInput(f"{name}() returned {type(task).__name__}, not a manyhands.Task")
    return spec.make(task.with_fields, fields, what) if fields else task


def _check_file(given: str) -> None:
    """Raise for a file without a name in it, and for a file whose ending was forgotten."""
    stem, _, rest = given.strip().partition(":")
    if stem.endswith(".py") and not rest.strip(":"):
        raise BadInput(
            f"{given!r} names a file but no task in it: write {stem}:NAME, a Task there or a function that gives one; "
            f"a script with a loop of its own is for `manyhands run {stem}`"
        )
    if stem not in tasks.CATALOGUE and Path(f"{stem}.py").is_file():
        raise UnknownName(f"no task {given!r}: a task in a file is named with its ending, {stem}.py:{rest or 'NAME'}")
