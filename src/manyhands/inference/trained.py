"""The model that `predict` and `evaluate` were given: a module, a Run, or the directory of a finished run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from torch import nn

from manyhands import tasks
from manyhands.checkpoint.paths import AnyPath, RemotePath, open_regular, path_of
from manyhands.errors import BadInput
from manyhands.recording.run import Run
from manyhands.spec import parse
from manyhands.task import Task, named
from manyhands.training.config import task_from
from manyhands.training.run_directory import CONFIG_FILE, RESULT, read_result, restored_run
from manyhands.units import printable


def trained(given: Any, task: Task | str | None, call: str) -> tuple[nn.Module, Task | None]:
    """(model, its task, where that is known).

    task: the run's, as an object or a spec. A directory names built-in tasks; a file that it names (my.py:task) is never
    imported, so the caller names it. call: of which command or function an error speaks.

    Raises BadInput for anything else, for a directory without a finished run, and for one whose files are damaged.
    """
    if isinstance(given, nn.Module):
        return given, None if task is None else task_from(task, {})
    if isinstance(given, Run):
        if task is not None or given.directory is None:
            return given.model, None if task is None else task_from(task, {})
        settings = _settings(given.directory)
        named_here = settings is not None and _is_built_in(settings.get("task"))
        return given.model, _task_in(settings, given.directory, call) if settings and named_here else None
    if isinstance(given, str | Path | RemotePath):
        return _of_directory(path_of(given), task, call)
    raise BadInput(f"{call} needs an nn.Module, a manyhands.Run or the directory of a finished run, not {named(given)}")


def _of_directory(folder: AnyPath, task: Task | str | None, call: str) -> tuple[nn.Module, Task]:
    if not (folder / RESULT).exists():
        what = "does not exist" if not folder.exists() else f"holds no {RESULT}"
        raise BadInput(f"{folder} {what}: give the directory of a finished run (--run-dir of `manyhands train`)")
    saved = read_result(folder)
    settings = _settings(folder) or {}
    if task is None:
        own = _task_in(settings, folder, call)
    else:
        own = task_from(task, settings.get("fields", {}) if isinstance(task, str) else {})
    return restored_run(own, folder, saved).model, own


def _settings(folder: AnyPath) -> dict[str, Any] | None:
    """The arguments of the run's `train()`; None: they are not there."""
    try:
        with open_regular(folder / CONFIG_FILE) as file:
            return dict(json.load(file))
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def _is_built_in(given: Any) -> bool:
    return isinstance(given, str) and parse(given)[0] in tasks.CATALOGUE


def _task_in(settings: dict[str, Any], folder: AnyPath, call: str) -> Task:
    given = settings.get("task")
    if given is None:
        raise BadInput(
            f"the run in {folder} was given its task as an object, which no file can hold: call mh.{call}(directory, …, task=…) with the same, or give its model"
        )
    if not _is_built_in(given):
        raise BadInput(
            f"the run in {folder} names task {printable(given)}, and code that a run directory names is not imported. If you trust that file, give it: "
            f"--task {shlex.quote(printable(given))}, or mh.{call}(directory, …, task=…)"
        )
    return task_from(str(given), settings.get("fields", {}))
