"""Spec strings of tasks: `digits:epochs=5`, `my.py:task`, `my.py:make_task:width=64`."""

from __future__ import annotations

from manyhands import spec, tasks
from manyhands.errors import BadInput
from manyhands.task import Task


def task_of(given: str) -> Task:
    """The task that a spec string names. Options are arguments of the function that makes it, or fields of Task.

    Raises UnknownName, listing what there is, and BadInput for a file that fails to import or gives no Task.
    """
    name, options = spec.parse(given)
    found = spec.find(name, tasks.CATALOGUE, "task")
    what = f"task {name}"
    if isinstance(found, Task):
        return spec.make(found.with_fields, options, what)  # type: ignore[no-any-return]
    if not callable(found):
        raise BadInput(f"{name} is neither a Task nor a function that gives one, but {type(found).__name__}")
    task = spec.make(found, options, what)
    if not isinstance(task, Task):
        raise BadInput(f"{name}() returned {type(task).__name__}, not a manyhands.Task")
    return task
