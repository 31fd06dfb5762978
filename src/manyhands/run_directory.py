"""The run directory as train() opens and closes it: refused, fresh, resumed or finished; and a Run's model out of values."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from manyhands import checkpoint, evaluation, random_state, spec
from manyhands.asked import Asked
from manyhands.errors import BadInput, ManyhandsError
from manyhands.flat import Layout
from manyhands.plan import State, build_model
from manyhands.remote_path import AnyPath
from manyhands.run import Run
from manyhands.task import Task

CHECKPOINTS, FINAL, RESULT, ASKED = "checkpoints", "model.safetensors", "result.json", "asked.json"


def open_directory(asked: Asked, resume: bool) -> tuple[dict[str, Any] | None, str]:
    """(the result of the finished run that lies there, "") or (None, why the directory is refused); nothing on other ranks.

    Raises BadInput instead where nobody else has to hear why, and ManyhandsError where a file system elsewhere cannot be reached.
    """
    if asked.directory is None or not asked.first:
        return None, ""
    try:
        return _make_directory(asked.directory, asked.task, resume), ""
    except ManyhandsError as error:
        if not asked.in_place:
            raise
        return None, str(error)


def _make_directory(directory: AnyPath, task: Task, resume: bool) -> dict[str, Any] | None:
    """Make the run directory, or refuse it; the result of the finished run that lies there if there is no more to do."""
    if directory.exists() and not directory.is_dir():
        raise BadInput(f"run directory {directory} is a file: give another path")
    if directory.is_dir() and any(directory.iterdir()) and not resume:
        raise BadInput(f"run directory {directory} exists: resume it (resume=True, --resume), or give another")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise BadInput(
            f"cannot make the run directory {directory}: {problem.strerror}; give another (run_dir=, --run-dir)"
        ) from None
    result = directory / RESULT
    if not result.exists():
        return None
    saved: dict[str, Any] = json.loads(result.read_text())
    return None if _more_is_asked(task, saved["info"]) else saved


def _more_is_asked(task: Task, info: dict[str, Any]) -> bool:
    """Whether a finished run has to go on: more epochs or steps than it had, or its time was up."""
    if info["stopped"] == "max_seconds":
        return True
    return task.epochs > info["epochs"] or (
        info["max_steps"] is not None and (task.max_steps or math.inf) > info["max_steps"]
    )


def note(directory: AnyPath, asked: dict[str, Any], task_fields: dict[str, Any]) -> None:
    """Write down what train() was called with, so that `replay` can call it again; a task that no text names is null."""
    try:
        text = json.dumps(asked | {"fields": task_fields}, indent=1)
    except TypeError:  # a field is an object: whoever replays gives it
        text = json.dumps(asked | {"task": None, "fields": _plain(task_fields)}, indent=1)
    checkpoint.write_whole(directory / ASKED, (text + "\n").encode())


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if isinstance(value, int | float | str | bool | None)}


def finished_run(asked: Asked, saved: dict[str, Any] | None = None) -> Run:
    """The Run that lies finished in the run directory; `saved` is its result.json, if that was read already."""
    assert asked.directory is not None
    if saved is None:
        saved = dict(json.loads((asked.directory / RESULT).read_text()))
    was = saved["info"]["strategy"]
    if spec.parse(was)[0] != asked.strategy.name:
        raise BadInput(
            f"the finished run in {asked.directory} is of strategy {was}, not {asked.strategy.name}: give another run directory"
        )
    try:
        tensors = checkpoint.load_tensors(asked.directory / FINAL)
    except (OSError, SafetensorError) as problem:
        raise BadInput(
            f"the finished run in {asked.directory} has lost its parameters ({problem}): start again in another run directory"
        ) from None

    def part(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}

    members = sorted({int(name.partition("/")[0]) for name in tensors})
    models = models_of(asked.task, [(part(f"{i}/parameters/"), part(f"{i}/buffers/")) for i in members])
    return Run.from_json(saved, directory=asked.directory, **answer(models))


def write(directory: AnyPath, run: Run, states: list[State]) -> None:
    """The final parameters, then result.json, last: a directory that has it is a finished run's."""
    tensors: dict[str, Tensor] = {}
    for i, (parameters, buffers) in enumerate(states):
        tensors |= {f"{i}/parameters/{name}": tensor.contiguous() for name, tensor in parameters.items()}
        tensors |= {f"{i}/buffers/{name}": tensor.contiguous() for name, tensor in buffers.items()}
    checkpoint.write_whole(directory / FINAL, safetensors.torch.save(tensors))
    run.save(directory / RESULT)


def models_of(task: Task, states: list[State]) -> list[nn.Module]:
    """A module for each state, holding it. A task's own module holds the first."""
    models = []
    for i, (parameters, buffers) in enumerate(states):
        if isinstance(task.model, nn.Module) and i == 0:
            model = task.model.cpu()
        else:
            with random_state.kept():
                random_state.seed_all(task.seed)
                model = copy.deepcopy(task.model) if isinstance(task.model, nn.Module) else build_model(task)
        _check_same(model, parameters)
        evaluation.load(model, parameters, buffers)
        models.append(model)
    return models


def _check_same(model: nn.Module, parameters: dict[str, Tensor]) -> None:
    """Raise BadInput where a finished run's parameters are not this model's."""
    shapes = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
    if shapes != {name: tensor.shape for name, tensor in parameters.items()}:
        raise BadInput(
            "the finished run's parameters are not this model's: give the model it was made with, or another run directory"
        )


def answer(models: list[nn.Module]) -> dict[str, Any]:
    """The fields of Run that hold the parameters."""
    first = Layout(models[0])
    flat = torch.cat([p.detach().reshape(-1) for p in first.parameters])
    return {
        "model": models[0] if len(models) == 1 else evaluation.AveragedOutputs(models).eval(),
        "models": models,
        "parameters": flat,
    }
