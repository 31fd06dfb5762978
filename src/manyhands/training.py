"""train(): a task × a strategy × an engine → a Run."""

from __future__ import annotations

import copy
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from manyhands import checkpoint, engines, evaluation, random_state, spec
from manyhands.callbacks.base import Callback
from manyhands.callbacks.progress import Progress
from manyhands.comm.group import Group
from manyhands.data.sources import open_source
from manyhands.engines.base import Engine, Launch
from manyhands.errors import BadInput, Preempted, UnknownName, Unsupported
from manyhands.flat import Layout
from manyhands.keep import Keep
from manyhands.loop import work
from manyhands.plan import Outcome, Plan, State, build_model, global_batch
from manyhands.recorder import Recorder
from manyhands.run import Run
from manyhands.signals import sigterm_to
from manyhands.strategies import spec_of, strategy_of
from manyhands.strategies.base import Strategy
from manyhands.task import Task, check_fields
from manyhands.task_specs import task_of
from manyhands.worker import Worker

CHECKPOINTS, FINAL, RESULT = "checkpoints", "model.safetensors", "result.json"


def train(
    task: Task | str | None = None,
    *,
    strategy: Strategy | str = "allreduce",
    engine: Engine | str = "auto",
    workers: int | None = None,
    servers: int = 1,
    device: str = "auto",
    threads_per_worker: int | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
    callbacks: Iterable[Callback] = (),
    validate_every: str | int = "epoch",
    checkpoint_every: str | int = "epoch",
    keep: str = "last",
    nonfinite: str = "raise",
    max_seconds: float | None = None,
    timeout_s: float = 300.0,
    **task_fields: Any,
) -> Run:
    """Train a task on workers and return what came of it.

    task: a Task, a spec string ("digits:epochs=5", "my.py:task"), or None when `task_fields` are a whole task.
    strategy, engine: an object or its spec string. Engine "auto" is the launcher that started this process (torchrun,
        `manyhands run`), else `local`.
    workers: None is one per visible GPU, else 1. One worker runs in the calling process.
    servers: shards of the parameter server, for strategies that have one.
    run_dir: events, checkpoints and result go there; None writes nothing. An existing one needs `resume=True`.
    resume: go on from the newest checkpoint. Starts on an empty directory; returns a finished run as it is, unless
        more epochs or steps are asked for than it had.
    validate_every, checkpoint_every: "epoch", or a number of steps.
    keep: "last", or "best:METRIC" (see Keep).
    nonfinite: "raise", or "skip" steps whose gradient is not finite (their rows count as unused).
    max_seconds: stop all workers at the same step after so long.
    timeout_s: a worker without any progress for so long ends the run.
    task_fields: any field of Task, overriding the task's.

    Raises BadInput (and its kinds) for what cannot be, before any process starts where that can be known; WorkerFailed
    when a worker raises, dies or hangs; Preempted after SIGTERM.
    """
    asked = _Asked(
        task=_task(task, task_fields),
        strategy=strategy_of(strategy),
        engine=engines.engine_of(engine),
        workers=workers,
        directory=None if run_dir is None else Path(run_dir),
    )
    asked.check(servers=servers, nonfinite=nonfinite, max_seconds=max_seconds, timeout_s=timeout_s, resume=resume)
    _check_place(device, threads_per_worker)
    plan = Plan(
        task=asked.task,
        strategy=asked.strategy,
        validate_every=_every("validate_every", validate_every),
        checkpoint_every=_every("checkpoint_every", checkpoint_every),
        keep=_keep(keep, asked.task),
        nonfinite=nonfinite,
        max_seconds=max_seconds,
        checkpoints=asked.directory / CHECKPOINTS if asked.directory else None,
    )
    finished, refusal = _open_directory(asked, resume)
    if finished is not None and not asked.in_place:
        return _finished(asked, finished)
    plan = replace(plan, everywhere=asked.in_place, finished=finished is not None)
    launch = Launch(workers=asked.count, threads_per_worker=threads_per_worker, device=device, timeout_s=timeout_s)
    return _Training(asked, plan, _shown(callbacks), launch, resume, refusal).run()


def _shown(callbacks: Iterable[Callback]) -> tuple[Callback, ...]:
    """The callbacks, with a progress line where a notebook's cell would otherwise stay empty."""
    given = tuple(callbacks)
    shell = sys.modules.get("IPython")
    in_notebook = shell is not None and getattr(shell.get_ipython(), "kernel", None) is not None
    return (*given, Progress()) if in_notebook and not any(isinstance(c, Progress) for c in given) else given


def _task(task: Task | str | None, task_fields: dict[str, Any]) -> Task:
    if isinstance(task, str):
        task = task_of(task)
    if isinstance(task, Task):
        return task.with_fields(**task_fields)
    if task is not None:
        raise BadInput(
            f"task must be a Task, a string such as 'digits' or 'my.py:task', or None; got {type(task).__name__}"
        )
    check_fields(task_fields)
    missing = [name for name in ("model", "loss", "optimizer", "train_data") if name not in task_fields]
    if missing:
        raise BadInput(
            f"nothing to train: {', '.join(missing)} missing; give a task, or its fields (model=, loss=, optimizer=, train_data=)"
        )
    return Task(**task_fields)


def _check_place(device: str, threads: int | None) -> None:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(device)):
        raise UnknownName(f"no device {device!r}: give auto, cpu, cuda (each worker its own GPU) or cuda:0")
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
        raise BadInput(
            f"threads_per_worker must be a whole number of at least 1, not {threads!r}; leave it out for usable cores / workers"
        )


def _every(name: str, value: str | int) -> str | int:
    if value == "epoch" or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise BadInput(f'{name} must be "epoch" or a number of steps of at least 1, not {value!r}')


def _keep(text: str, task: Task) -> Keep:
    keep = Keep.parse(text)
    if keep.metric and task.validation_data is None:
        raise BadInput(f"keep={text!r} needs validation_data to judge by: give the task some, or keep the last")
    return keep


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What the caller asked for, resolved to objects."""

    task: Task
    strategy: Strategy
    engine: Engine
    workers: int | None
    directory: Path | None

    @property
    def count(self) -> int:
        if self.workers is not None:
            return self.workers
        return engines.default_workers(self.engine)

    @property
    def in_place(self) -> bool:
        """Several processes make this very call."""
        return self.engine.in_place and self.count > 1

    @property
    def first(self) -> bool:
        """Whether this process is the one that looks after the run directory."""
        return not self.in_place or engines.own_rank(self.engine) == 0

    def check(self, *, servers: int, nonfinite: str, max_seconds: float | None, timeout_s: float, resume: bool) -> None:
        """Raise BadInput for what cannot be, before anything starts."""
        if self.workers is not None and (
            isinstance(self.workers, bool) or not isinstance(self.workers, int) or self.workers < 1
        ):
            raise BadInput(f"workers must be a whole number of at least 1, not {self.workers!r}")
        if servers < 1:
            raise BadInput(f"servers must be at least 1, not {servers}")
        if nonfinite not in ("raise", "skip"):
            raise BadInput(f'nonfinite must be "raise" or "skip", not {nonfinite!r}')
        for name, value in (("max_seconds", max_seconds), ("timeout_s", timeout_s)):
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise BadInput(f"{name} must be a positive number of seconds, not {value!r}")
        if resume and self.directory is None:
            raise BadInput("resume needs a run directory: give run_dir (--run-dir)")
        self._check_strategy()
        self._check_data()

    def _check_strategy(self) -> None:
        if self.strategy.name == "solo" and self.count > 1:
            raise Unsupported(
                f"strategy solo is one worker, and {self.count} were asked for: take allreduce, which equals it, or workers=1"
            )
        if self.strategy.server() is not None or self.strategy.needs.server:
            raise Unsupported(
                f"strategy {self.strategy.name} needs a parameter server, which engine {self.engine.name} does not have yet"
            )

    def _check_data(self) -> None:
        """Open what is at hand (a function that gives data is called on the workers alone), and check the batch size."""
        if isinstance(self.task.model, nn.Module):
            Layout(self.task.model)
        own = None
        for data in (self.task.train_data, self.task.validation_data, self.task.test_data):
            if data is not None and not callable(data):
                source = open_source(data, collate=self.task.collate, loader_processes=self.task.loader_processes)
                own = source.batch_size if data is self.task.train_data else own
        global_batch(self.task, self.count, own)


def _open_directory(asked: _Asked, resume: bool) -> tuple[dict[str, Any] | None, str]:
    """(the result of the finished run that lies there, "") or (None, why the directory is refused); nothing on other ranks.

    Raises BadInput instead where nobody else has to hear why.
    """
    if asked.directory is None or not asked.first:
        return None, ""
    try:
        return _make_directory(asked.directory, asked.task, resume), ""
    except BadInput as error:
        if not asked.in_place:
            raise
        return None, str(error)


def _make_directory(directory: Path, task: Task, resume: bool) -> dict[str, Any] | None:
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


def _finished(asked: _Asked, saved: dict[str, Any]) -> Run:
    """The Run that lies finished in the run directory."""
    was = saved["info"]["strategy"]
    if spec.parse(was)[0] != asked.strategy.name:
        raise BadInput(
            f"the finished run in {asked.directory} is of strategy {was}, not {asked.strategy.name}: give another run directory"
        )
    try:
        tensors = safetensors.torch.load_file(_file(asked, FINAL))
    except (OSError, SafetensorError) as problem:
        raise BadInput(
            f"the finished run in {asked.directory} has lost its parameters ({problem}): start again in another run directory"
        ) from None

    def part(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}

    members = sorted({int(name.partition("/")[0]) for name in tensors})
    models = _models(asked.task, [(part(f"{i}/parameters/"), part(f"{i}/buffers/")) for i in members])
    return Run.from_json(saved, directory=asked.directory, **_answer(models))


class _Training:
    """One launch: recorder, workers, and the Run made of what they bring back."""

    def __init__(
        self,
        asked: _Asked,
        plan: Plan,
        callbacks: tuple[Callback, ...],
        launch: Launch,
        resume: bool,
        refusal: str = "",
    ) -> None:
        self.asked, self.launch, self.refusal = asked, launch, refusal
        self.signals = ExitStack()
        self.recorder = Recorder(workers=launch.workers, directory=asked.directory, callbacks=callbacks)
        self.plan = replace(plan, resume_from=self._newest(plan.checkpoints) if resume else None)

    def _newest(self, folder: Path | None) -> checkpoint.Checkpoint | None:
        assert folder is not None
        found = checkpoint.newest(folder, self.recorder.warn if self.asked.first else lambda message: None)
        if found is not None and self.asked.first:
            self.recorder.preload(found.tick)
            if (
                found.ranks == self.launch.workers
                and self.launch.threads_per_worker is None
                and not self.asked.engine.in_place
            ):
                self.launch = replace(self.launch, threads_per_worker=found.values(0)["place"]["threads"])
        return found

    def run(self) -> Run:
        start = time.monotonic()
        with self.recorder, self.signals:
            outcome = self._launched()
            if outcome is None:
                return _finished(self.asked, json.loads(_file(self.asked, RESULT).read_text()))
            run = self._run_of(outcome, time.monotonic() - start)
            self.recorder.end(run)
        if outcome.reason == "preempted":
            kept = "give a run_dir to be able to resume"
            if self.asked.directory:
                kept = f"resume it with resume=True (--resume) from {self.asked.directory}"
            raise Preempted(f"stopped at step {run.steps} because the run was asked to end (SIGTERM): {kept}")
        self._write(run, outcome)
        return run

    def _launched(self) -> Outcome | None:
        program: Callable[[Worker], Outcome | None] = self._together
        if not self.asked.in_place:
            program = partial(work, self.plan)
            self._obey_sigterm()
        with random_state.kept():
            outcomes = self.asked.engine.launch(program, replace(self.launch, observer=self.recorder))
        return next((outcome for outcome in outcomes if outcome is not None), None)

    def _obey_sigterm(self) -> None:
        """Until the run is over."""
        self.signals.enter_context(sigterm_to(self.recorder.stop))

    def _together(self, worker: Worker) -> Outcome | None:
        """The program where every worker makes this very call, once they have met.

        Until then SIGTERM ends this process: torchrun sends it where a peer has failed, and nothing else would end the wait.
        """
        self._obey_sigterm()
        start = self.plan.resume_from
        _agree(worker.group, self.refusal, self.asked.directory, None if start is None else start.tick)
        return work(self.plan, worker)

    def _run_of(self, outcome: Outcome, seconds: float) -> Run:
        workers = outcome.workers
        rows = [one["rows"] for one in workers]
        return Run(
            **_answer(_models(self.asked.task, outcome.states)),
            metrics=outcome.metrics,
            history=self.recorder.history,
            rows={"total": sum(rows), "workers": rows, "unused": sum(one["unused"] for one in workers)},
            timing=self.recorder.timing(),
            ledger=_summed([one["ledger"] for one in workers]),
            seconds=seconds,
            steps=outcome.steps,
            rounds=outcome.rounds,
            directory=self.asked.directory,
            info=self._info(outcome),
        )

    def _info(self, first: Outcome) -> dict[str, Any]:
        asked = self.asked
        return {
            "task": asked.task.name,
            "strategy": spec_of(asked.strategy),
            "engine": asked.engine.name,
            "workers": self.launch.workers,
            "max_steps": asked.task.max_steps,
            "ticks": first.ticks,
            "stopped": first.reason,
            **first.facts,
            **self._rates(first.facts),
        }

    def _rates(self, facts: dict[str, Any]) -> dict[str, float]:
        """The highest rate of the schedule, and by how much it moves the one answer."""
        factor = facts["effective_rate"] / facts["rate"] if facts["rate"] else 1.0
        highest = max((row["rate"] for row in self.recorder.history), default=facts["rate"])
        return {"rate": highest, "effective_rate": highest * factor}

    def _write(self, run: Run, outcome: Outcome) -> None:
        """The final parameters and result.json, last: a directory that has it is a finished run's."""
        if self.asked.directory is None or not self.asked.first:
            return
        tensors: dict[str, Tensor] = {}
        for i, (parameters, buffers) in enumerate(outcome.states):
            tensors |= {f"{i}/parameters/{name}": tensor.contiguous() for name, tensor in parameters.items()}
            tensors |= {f"{i}/buffers/{name}": tensor.contiguous() for name, tensor in buffers.items()}
        checkpoint.write_whole(_file(self.asked, FINAL), safetensors.torch.save(tensors))
        run.save(_file(self.asked, RESULT))


def _agree(group: Group, refusal: str, directory: Path | None, tick: int | None) -> None:
    """A collective: raise BadInput on all ranks where rank 0 refuses the run directory, or where ranks see different ones."""
    own = {"refusal": refusal, "directory": None if directory is None else str(directory), "tick": tick}
    first, *others = group.all_gather_json(own)
    if first["refusal"]:
        raise BadInput(first["refusal"])
    for rank, said in enumerate(others, start=1):
        if said["directory"] != first["directory"]:
            raise BadInput(
                f"run_dir is {first['directory']} on worker 0 and {said['directory']} on worker {rank}: give all workers the same "
                "(a name with the time in it is made before they start)"
            )
        if said["tick"] != first["tick"]:
            raise BadInput(
                f"the newest checkpoint in {first['directory']}/{CHECKPOINTS} is of tick {first['tick']} on worker 0 and of tick {said['tick']} on worker {rank}: "
                "put the run directory where all hosts see the same files"
            )


def _file(asked: _Asked, name: str) -> Path:
    assert asked.directory is not None
    return asked.directory / name


def _models(task: Task, states: list[State]) -> list[nn.Module]:
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


def _answer(models: list[nn.Module]) -> dict[str, Any]:
    """The fields of Run that hold the parameters."""
    first = Layout(models[0])
    flat = torch.cat([p.detach().reshape(-1) for p in first.parameters])
    return {
        "model": models[0] if len(models) == 1 else evaluation.AveragedOutputs(models).eval(),
        "models": models,
        "parameters": flat,
    }


def _summed(ledgers: list[dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    summed: dict[str, dict[str, int]] = {}
    for ledger in ledgers:
        for name, counts in ledger.items():
            total = summed.setdefault(name, {"bytes": 0, "messages": 0})
            for key, value in counts.items():
                total[key] += value
    return summed
