"""The run directory as train() opens and closes it: refused, fresh, resumed or finished; a Run's model."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from manyhands import rng, spec
from manyhands.checkpoint import checkpoints, launch_lock, model_file
from manyhands.checkpoint.launch_lock import Claim, LaunchLock
from manyhands.checkpoint.model_file import FINAL
from manyhands.checkpoint.paths import PARTIAL, AnyPath, RemotePath, open_regular
from manyhands.errors import BadInput, ManyhandsError
from manyhands.parallel.build import build, give_memory
from manyhands.recording import event_log
from manyhands.recording.run import Answer, Run
from manyhands.replica import evaluation
from manyhands.task import Task
from manyhands.training.config import TrainConfig
from manyhands.training.plan import Outcome, State, build_model

Shapes = dict[str, tuple[int, ...]]  # by name
CHECKPOINTS, RESULT, CONFIG_FILE = "checkpoints", "result.json", "config.json"
_UNFINISHED = re.compile(
    rf"(model(-\d+)?\.safetensors|{re.escape(RESULT)}|{re.escape(CONFIG_FILE)})\.[0-9a-f]{{16}}{re.escape(PARTIAL)}"
)


def files_of(members: int) -> list[str]:
    """The files of a run's models: one, or one for each member of an ensemble."""
    return [FINAL] if members == 1 else [f"model-{member}.safetensors" for member in range(members)]


@dataclass
class Opened:
    """A run directory that train() may use, or why not; as a context manager it holds its lock."""

    finished: dict[str, Any] | None = None  # the result of the finished run that lies there, if there is no more to do
    refusal: str = ""
    claim: Claim | None = None
    warnings: list[str] = field(default_factory=list)
    lock: LaunchLock | None = None
    made: list[Path] = field(default_factory=list)  # the folders that this launch made, the run directory first

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, BadInput) and self.made:
            _remove_refused(self.made)
        if self.lock is not None:
            self.lock.close()


def open_directory(config: TrainConfig, resume: bool) -> Opened:
    """The run directory, locked; nothing on other ranks.

    Raises BadInput instead of a refusal where no other process waits for it, and ManyhandsError where a file system
    elsewhere cannot be reached.
    """
    if config.directory is None or not config.owns_run_dir:
        return Opened()
    try:
        return _opened(config.directory, config.task, resume)
    except ManyhandsError as error:
        if not config.spmd:
            raise
        return Opened(refusal=str(error))


def _opened(directory: AnyPath, task: Task, resume: bool) -> Opened:
    """Make the run directory, or refuse it."""
    opened = Opened()
    try:
        if directory.exists() and not directory.is_dir():
            raise BadInput(f"run directory {directory} is a file: give another path")
        if not resume:
            _refuse_used(directory)
        if isinstance(directory, Path):
            opened.made = [folder for folder in (directory, *directory.parents) if not folder.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        _check_kinds(directory)
        saved = _result_in(directory, opened.warnings.append)
        if saved is not None and not _has_more_to_do(task, saved["info"]):
            return replace(opened, finished=saved)
        with ExitStack() as stack:
            lock = LaunchLock(directory)
            stack.callback(lock.close)
            if not resume:
                _refuse_used(directory)  # nobody has begun and ended here meanwhile
            claim = lock.claim(checkpoints.last_launch(directory / CHECKPOINTS) + 1)
            _remove_partials(directory)
            stack.pop_all()
            return replace(opened, claim=claim, lock=lock)
    except OSError as problem:
        raise BadInput(
            f"cannot use the run directory {directory}: {problem.strerror or problem}; give another (run_dir=, --run-dir)"
        ) from None


def _refuse_used(directory: AnyPath) -> None:
    """BadInput where something lies there."""
    if not directory.is_dir() or all(path.name == launch_lock.FILE for path in directory.iterdir()):
        return
    if (directory / launch_lock.FILE).exists():
        LaunchLock(directory).close()  # a driver that is at work is named
    folder, is_run = directory / CHECKPOINTS, (directory / launch_lock.FILE).exists()
    found = (
        "exists" if not is_run or (folder.is_dir() and any(folder.iterdir())) else "exists, with no checkpoint in it"
    )
    raise BadInput(f"run directory {directory} {found}: resume it (resume=True, --resume), or give another")


def _remove_refused(made: list[Path]) -> None:
    """What a launch made that was refused before its first checkpoint; what others put there stays."""
    directory = made[0]
    folder = directory / CHECKPOINTS
    if folder.is_dir() and checkpoints.newest(folder, lambda message: None) is not None:
        return
    _remove_partials(directory)
    shutil.rmtree(folder, ignore_errors=True)
    names = {CONFIG_FILE, launch_lock.FILE, *(path.name for path in event_log.files_in(directory))}
    for name in names:
        (directory / name).unlink(missing_ok=True)
    with suppress(OSError):  # somebody else's file is there
        for path in made:
            path.rmdir()


def _check_kinds(directory: AnyPath) -> None:
    """BadInput where something else stands in the place of one of a run's files or folders."""
    if isinstance(directory, RemotePath):
        return
    for name in (launch_lock.FILE, CONFIG_FILE, RESULT, FINAL, event_log.FILE):
        if os.path.lexists(path := directory / name) and not stat.S_ISREG(path.lstat().st_mode):
            raise BadInput(
                f"{path} must be a file, and it is a folder, a link or a device: move it away, or give another run "
                "directory"
            )
    if os.path.lexists(path := directory / CHECKPOINTS) and not path.is_dir():
        raise BadInput(
            f"{path} must be a folder for checkpoints, and it is not a folder: move it away, or give another run "
            "directory"
        )


def _remove_partials(directory: AnyPath) -> None:
    """What a launch left that was killed while it wrote; what has another name is somebody else's."""
    for path in () if isinstance(directory, RemotePath) else directory.iterdir():
        if _UNFINISHED.fullmatch(path.name) and not path.is_dir():
            path.unlink()


def _result_in(directory: AnyPath, warn: Callable[[str], None]) -> dict[str, Any] | None:
    """The result of a finished run; None without one, or if it is damaged and checkpoints can be resumed."""
    if not (directory / RESULT).exists():
        return None
    try:
        return read_result(directory)
    except BadInput as problem:
        if not (directory / CHECKPOINTS).is_dir():
            raise
        warn(f"{problem}. The run ignores it, continues from its newest checkpoint, and writes a new result")
        return None


def read_result(directory: AnyPath, others: Iterable[str] | None = None) -> dict[str, Any]:
    """The content of result.json, once it and the `others` beside it are what the run wrote; BadInput else. Without
    `others`, the files of its models are looked at."""
    try:
        with open_regular(directory / RESULT) as file:
            saved = json.load(file)
        digests = saved["sha256"]
        wrong = [] if digests[RESULT] == _own_digest(saved) else [RESULT]
        others = _models_among(digests) if others is None else others
        wrong += [
            name for name in others if digests[name] != _digest(directory / name, digests[name].partition(":")[2])
        ]
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as problem:
        raise BadInput(
            f"the result of the run in {directory} is damaged ({type(problem).__name__}: {problem!s:.200})"
        ) from None
    if wrong:
        raise BadInput(
            f"the result of the run in {directory} is damaged (changed after it was written: {', '.join(wrong)})"
        )
    return dict(saved)


def _models_among(names: Iterable[str]) -> list[str]:
    """The files of models; at least one must be there."""
    found = [name for name in names if re.fullmatch(r"model(-\d+)?\.safetensors", name)]
    return sorted(found, key=lambda name: (len(name), name)) or [FINAL]


def _size_of(path: AnyPath) -> int | None:
    """None: it is not there."""
    try:
        with open_regular(path) as file:
            return file.seek(0, os.SEEK_END)
    except FileNotFoundError:
        return None


def _digest(path: AnyPath, most: str = "") -> str:
    """Of a file, or `digest:bytes` of its first bytes: the events of a run's end follow its result."""
    if not most:
        return checkpoints.digest_of(path)
    found, left = hashlib.sha256(), int(most)
    with open_regular(path) as file:
        while left > 0 and (piece := file.read(min(left, 1 << 20))):
            found.update(piece)
            left -= len(piece)
    return f"{found.hexdigest()}:{most}"


def _own_digest(saved: dict[str, Any]) -> str:
    """Of a result.json's values, but for the digests themselves."""
    values = {name: value for name, value in saved.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _has_more_to_do(task: Task, info: dict[str, Any]) -> bool:
    """Whether a finished run has to go on: more epochs or steps than it had, or its time was up."""
    if info["stopped"] == "max_seconds":
        return True
    return task.epochs > info["epochs"] or (
        info["max_steps"] is not None and (task.max_steps or math.inf) > info["max_steps"]
    )


def note(directory: AnyPath, config: dict[str, Any], task_fields: dict[str, Any]) -> None:
    """Record the arguments of train(), so that `replay` can repeat it; a task without a name is null."""
    try:
        text = json.dumps(config | {"fields": task_fields}, indent=1)
    except TypeError:  # a field is an object: whoever replays gives it
        text = json.dumps(config | {"task": None, "fields": _plain(task_fields)}, indent=1)
    with _written(directory):
        checkpoints.write_whole(directory / CONFIG_FILE, (text + "\n").encode())


@contextmanager
def _written(directory: AnyPath) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise ManyhandsError(
            f"cannot write into {directory}: {problem.strerror}. Make room, then go on with resume=True (--resume), or give another run directory"
        ) from problem


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if isinstance(value, int | float | str | bool | None)}


def finished_run(config: TrainConfig, saved: dict[str, Any] | None = None) -> Run:
    """The Run that lies finished in the run directory; `saved` is its result.json, if that was read already."""
    assert config.directory is not None
    if saved is None:
        saved = read_result(config.directory)
    was = saved["info"]["strategy"]
    if spec.parse(was)[0] != config.strategy.name:
        raise BadInput(
            f"the finished run in {config.directory} used strategy {was}, not {config.strategy.name}: give another run "
            "directory"
        )
    path = config.directory / FINAL
    if config.model_parallel is not None and isinstance(path, Path) and path.exists():
        _check_shapes(config.task, path)
        return Run.from_json(saved, directory=config.directory, answer=_answer_in(config.task, path, {}))
    return restored_run(config.task, config.directory, saved)


def restored_run(task: Task, directory: AnyPath, saved: dict[str, Any]) -> Run:
    """The finished run in a directory, whose result.json is `saved`, with the models of this task."""
    try:
        states = [checkpoints.SavedTensors(directory / name) for name in _models_among(saved["sha256"])]
    except (OSError, SafetensorError) as problem:
        raise BadInput(
            f"cannot read the parameters of the finished run in {directory} ({problem}): start again in another run directory"
        ) from None

    models = _models_for(task, [state.shapes() for state in states], _saved)  # checked now
    answer = Answer(lambda: _restored(models, states), list(_trainable(models[0]).values()))
    if isinstance(task.model, nn.Module):
        answer = Answer.of(answer.models)
    return Run.from_json(saved, directory=directory, answer=answer)


def shapes_in(directory: AnyPath) -> list[tuple[int, ...]]:
    """Of what a finished run's model file holds; [] where it is not there any more."""
    for name in (FINAL, files_of(2)[0]):
        with suppress(OSError, SafetensorError):
            return list(checkpoints.SavedTensors(directory / name).shapes().values())
    return []


def write(directory: AnyPath, run: Run, outcome: Outcome) -> None:
    """Each model's state_dict, unless the workers wrote it, then result.json with all SHA-256: a directory that has it is of
    a finished run."""
    files = files_of(len(outcome.states))
    with _written(directory):
        for file, (parameters, buffers, rest) in zip(files, outcome.states, strict=True) if not outcome.file else ():
            held = parameters | buffers | rest
            tensors = {name: held[name].contiguous() for name in outcome.saved}
            checkpoints.write_whole(directory / file, safetensors.torch.save(tensors))
        values: dict[str, Any] = json.loads(run.to_json())
        names = [name for name in (CONFIG_FILE, *files) if (directory / name).exists()]
        digests = {name: _digest(directory / name) for name in names} | {RESULT: _own_digest(values)}
        if (size := _size_of(directory / event_log.FILE)) is not None:
            digests[event_log.FILE] = _digest(directory / event_log.FILE, str(size))
        checkpoints.write_whole(directory / RESULT, (json.dumps(values | {"sha256": digests}) + "\n").encode())


def answer_of(task: Task, outcome: Outcome, directory: AnyPath | None) -> Answer:
    """What the workers brought, or wrote into the run directory; a task's own module holds the first at once, other models
    are made at first use."""
    states = outcome.states
    if outcome.file:
        assert isinstance(directory, Path)
        return _answer_in(task, directory / outcome.file, states[0][1])
    if not states:
        return Answer(list, [])  # nobody gets the Run of one that is preempted
    shapes = {name: tuple(tensor.shape) for name, tensor in states[0][0].items()}
    made = partial(_models_for, task, [shapes] * len(states), _trainable)
    answer = Answer(lambda: _filled(made(), states), list(shapes.values()))
    return Answer.of(answer.models) if isinstance(task.model, nn.Module) else answer


def _answer_in(task: Task, path: Path, others: Mapping[str, Tensor]) -> Answer:
    """The model of this file, and buffers that it does not hold. Until its first use it takes no memory."""
    shapes, read = model_file.shapes_in(path), _identity(path)
    answer = Answer(partial(_read, task, path, shapes, read, others), list(shapes.values()))
    return Answer.of(answer.models) if isinstance(task.model, nn.Module) else answer


def _check_shapes(task: Task, path: Path) -> None:
    """BadInput where the task's model is not this file's; no memory is taken for parameters."""
    with rng.kept():
        model = task.model if isinstance(task.model, nn.Module) else build(task.model)
    if _saved(model) != model_file.shapes_in(path):
        raise _other_model()


def _read(
    task: Task, path: Path, shapes: Shapes, read: tuple[int, int], others: Mapping[str, Tensor]
) -> list[nn.Module]:
    """The model, once it is asked for. ManyhandsError where memory is short, and where the file is another one by now."""
    if not path.exists() or _identity(path) != read:
        raise ManyhandsError(
            f"{path} was moved, or written anew, since the run ended whose model it held: look at run.model before, or give each run a directory"
        )
    try:
        models = _models_for(task, [shapes], _saved)
        held = models[0].state_dict() | dict(models[0].named_buffers())
        with torch.no_grad():
            for name, tensor in itertools.chain(model_file.tensors_in(path), others.items()):
                held[name].copy_(tensor)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "allocate memory" not in str(error):
            raise
        raise ManyhandsError(
            f"this process has not the memory for the model, whose parameters are in {path}: read them where there is more, or tensor by tensor "
            "(safetensors.safe_open), or train on with stages"
        ) from error
    return models


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_ino, found.st_mtime_ns


def _trainable(model: nn.Module) -> Shapes:
    return {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}


def _saved(model: nn.Module) -> Shapes:
    """Of what its file holds."""
    return {name: tuple(value.shape) for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def _models_for(task: Task, shapes: Sequence[Shapes], of: Callable[[nn.Module], Shapes]) -> list[nn.Module]:
    """A module for each answer, which does not hold it yet; BadInput where the shapes are not `of` this model."""
    models = []
    for i, wanted in enumerate(shapes):
        if isinstance(task.model, nn.Module) and i == 0:
            give_memory(task.model)
            model = task.model.cpu()  # under a launcher this process may have been a stage of it
        else:
            with rng.kept():
                rng.seed_all(task.seed)
                model = copy.deepcopy(task.model) if isinstance(task.model, nn.Module) else build_model(task)
        if of(model) != wanted:
            raise _other_model()
        models.append(model)
    return models


def _other_model() -> BadInput:
    return BadInput(
        "the finished run's parameters are not this model's: give the model it was made with, or another run directory"
    )


def _filled(models: list[nn.Module], states: Sequence[State]) -> list[nn.Module]:
    for model, (parameters, buffers, _) in zip(models, states, strict=True):
        evaluation.load(model, parameters, buffers)
    return models


def _restored(models: list[nn.Module], states: Sequence[Mapping[str, Tensor]]) -> list[nn.Module]:
    for model, state in zip(models, states, strict=True):
        model.load_state_dict(dict(state), strict=False)  # what is no tensor there (extra state) is the model's own
    return models
