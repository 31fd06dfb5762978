"""`plan()`: the ways to put a model on workers, with the memory and time that each is predicted to take."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from manyhands import engines, units
from manyhands.checkpoint.checkpoints import write_whole
from manyhands.engines.cores import usable_cores
from manyhands.errors import BadInput, Unsupported
from manyhands.evidence.text_table import text_table
from manyhands.parallel.build import build
from manyhands.parallel.planner.search import Plan, one_process, plans_of
from manyhands.parallel.spec import ModelParallel
from manyhands.strategies import spec_of, strategy_of
from manyhands.strategies.base import Strategy
from manyhands.task import Task, check_differentiable
from manyhands.training.config import TrainConfig, task_from
from manyhands.training.planning import measure

LOG = logging.getLogger("manyhands")
AUTO = "auto"
KIND, SCHEMA = "manyhands plan", 1
_AGAIN = "write it again with `manyhands plan TASK -n WORKERS -o FILE`"


@dataclass(frozen=True, kw_only=True)
class Plans:
    """What `plan` found for a task, on this machine."""

    task: str
    strategy: str
    workers: int
    cores: int
    rows: int  # of a global batch
    parameters: int  # numbers of the model
    optimizer: str  # its class
    limits: tuple[int, ...]  # bytes that each worker may have; (): as much as it wants
    plans: tuple[Plan, ...]  # the first is the one to take, if it fits
    alone: Plan  # one process with all cores, for comparison
    identity: dict[str, str]  # what these predictions hold for
    seconds: float  # that it took

    @property
    def best(self) -> Plan | None:
        """The fastest that fits; within 3 %, that with the fewest stages. None: no plan fits."""
        return self.plans[0] if self.plans[0].fits else None

    @property
    def chosen(self) -> Plan:
        """`best`. BadInput where nothing fits: it says which memory would do, and with which plan."""
        if self.best is not None:
            return self.best
        found = [plan for plan in self.plans if not plan.refused]
        least = min(found, key=lambda plan: plan.memory)
        raise BadInput(
            f"model_parallel=auto: no plan for {units.count(self.workers, 'worker')} fits into memory_per_worker={units.size(min(self.limits))}; the smallest is {least}, which "
            f"takes {units.size(least.memory)} a worker: give each so much, give more workers, or smaller batches"
        )

    def text(self, width: int = 100) -> str:
        """A table of the best plan for each number of stages, and of what trades time for memory."""
        shown = [*_best_of_each(self.plans), self.alone]
        columns = {
            "plan": [str(plan) for plan in shown],
            "memory": ["" if plan.refused else units.size(plan.memory) for plan in shown],
            "step": ["" if plan.refused else units.duration(plan.step_s) for plan in shown],
            "rows/s": ["" if plan.refused else units.short(plan.rows_per_s) for plan in shown],
            "": [self._note(plan) for plan in shown],
        }
        limit = f", limit {' '.join(units.size(one) for one in dict.fromkeys(self.limits))} each" if self.limits else ""
        head = (
            f"{self.task}: {units.count(self.workers, 'worker')}, {units.count(self.cores, 'core')}{limit}; {units.count(self.rows, 'row')} a step; "
            f"{units.short(self.parameters)} parameters, {self.optimizer}, {self.strategy}"
        )
        return "\n".join([*self._first_line(), head, text_table(columns, width, notes=("",))])

    def _first_line(self) -> list[str]:
        best = self.best
        if not self.alone.fits or (best is not None and best.step_s < self.alone.step_s):
            return []
        return [
            f"One process is faster on this machine: {units.duration(self.alone.step_s)} a step, and the model fits."
        ]

    def _note(self, plan: Plan) -> str:
        if plan.refused:
            return f"refused: {plan.refused}"
        if plan.over > 0:
            return f"{units.size(plan.over)} over the limit"
        return "<- fastest that fits" if plan is self.best else ""

    def save(self, path: str | Path, plan: Plan | None = None) -> None:
        """Write a plan, for `model_parallel="plan.json"`: the one to take, or another of these. BadInput where none fits."""
        chosen = self.chosen if plan is None else plan
        content = {
            "kind": KIND,
            "schema": SCHEMA,
            "model_parallel": "stages=1" if chosen.spec is None else str(chosen.spec),
            "workers": self.workers,
            "for": self.identity,
            "predicted": predicted_of(chosen),
        }
        write_whole(Path(path), (json.dumps(content, indent=2) + "\n").encode())

    def to_json(self) -> str:
        """All plans, with each stage's memory and seconds."""
        content = asdict(self) | {"plans": [_facts(plan) for plan in self.plans], "alone": _facts(self.alone)}
        return json.dumps(content, indent=2)


def plan(
    task: Task | str | None = None,
    *,
    workers: int,
    strategy: Strategy | str = "allreduce",
    memory_per_worker: str | None = None,
    threads_per_worker: int | None = None,
    say: Callable[[str], None] = lambda message: None,
    **task_fields: Any,
) -> Plans:
    """Measure the units of a task's model on this machine, and predict what each plan for these workers takes.

    memory_per_worker: "2GB", or one for each worker in their order, "4GB,2GB,2GB,2GB". None: any.
    task, strategy, threads_per_worker, task_fields: as in `train`.
    say: is told what is done.

    Raises BadInput and Unsupported for what `train` would refuse.
    """
    own = task_from(task, task_fields)
    check_differentiable(own, "plan")
    config = TrainConfig(
        task=own,
        strategy=strategy_of(strategy),
        engine=engines.engine_of("local"),
        workers=workers,
        directory=None,
        model_parallel=ModelParallel(),
    )
    config.check(servers=1, nonfinite="raise", max_seconds=None, timeout_s=300.0, resume=False)
    return plans_for(config, memory_per_worker, threads_per_worker, say)


def plans_for(
    config: TrainConfig,
    memory_per_worker: str | None,
    threads: int | None,
    say: Callable[[str], None] = lambda message: None,
) -> Plans:
    """`plan`, of arguments that are checked."""
    limits, began = limits_of(memory_per_worker, config.count), time.monotonic()
    if config.count < 2:
        raise BadInput(
            f"a plan is for 2 workers or more, and this is for {config.count}, which holds the whole model: give more workers, or leave the plan out"
        )
    say("measuring the model's units, one at a time")
    machine, profile, all_cores = measure(config, threads)
    machine = replace(machine, caps=tuple(map(float, limits)))
    say(f"{len(profile.units)} units, {profile.distinct} of them measured in {time.monotonic() - began:.1f} s")
    model = _model_of(config.task)
    return Plans(
        task=config.task.name,
        strategy=spec_of(config.strategy),
        workers=config.count,
        cores=usable_cores(),
        rows=machine.rows,
        parameters=sum(p.numel() for p in model.parameters()),
        optimizer=type(config.task.optimizer(model)).__name__,
        limits=limits,
        plans=tuple(plans_of(profile, machine)),
        alone=one_process(all_cores, machine),
        identity=identity_of(model),
        seconds=time.monotonic() - began,
    )


def is_planned(given: str | ModelParallel | None) -> bool:
    """Whether `model_parallel` is to be looked for, or read from a plan's file."""
    return isinstance(given, str) and (given.strip() == AUTO or given.strip().endswith(".json"))


def with_plan(
    config: TrainConfig, given: str | ModelParallel | None, memory_per_worker: str | None, threads: int | None
) -> tuple[TrainConfig, dict[str, Any] | None]:
    """The arguments of a run with the plan that they ask for, and what it predicts."""
    auto = isinstance(given, str) and given.strip() == AUTO
    if not auto and memory_per_worker is not None:
        raise BadInput(f'memory_per_worker is what a plan may take: give model_parallel="{AUTO}", too, or leave it out')
    if not is_planned(given):
        return config, None
    assert isinstance(given, str)
    if auto and config.engine.name not in ("local", "hosts"):
        raise Unsupported(
            f"model_parallel={AUTO} measures the model with engine local, and this run has engine {config.engine.name}: make a plan with `manyhands plan`, "
            "and give its file"
        )
    replace(config, model_parallel=ModelParallel()).check_model_parallel()
    if auto:
        found = plans_for(config, memory_per_worker, threads)
        LOG.warning("%s", found.text())
        spec, predicted = found.chosen.spec or ModelParallel(), predicted_of(found.chosen)
    else:
        spec, predicted = read_plan(given.strip(), config.task, config.count)
    if spec.stages == 1:
        return config, predicted
    planned = replace(config, model_parallel=spec)
    planned.check_model_parallel()
    return planned, predicted


def limits_of(given: str | None, workers: int) -> tuple[int, ...]:
    """Bytes by worker; BadInput for sizes without a unit, or another number of them."""
    if given is None:
        return ()
    found = [units.read_bytes(one, "memory_per_worker") for one in str(given).split(",")]
    if len(found) not in (1, workers):
        raise BadInput(
            f"memory_per_worker must be one size, or one for each of the {workers} workers; got {len(found)}: {given}"
        )
    return tuple(found * (workers if len(found) == 1 else 1))


def read_plan(path: str, task: Task, workers: int) -> tuple[ModelParallel, dict[str, Any]]:
    """What `Plans.save` wrote, with its prediction. BadInput for what is no such file, or is of something else."""
    try:
        content = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise BadInput(f"model_parallel: plan {path} cannot be read ({error.strerror}): {_AGAIN}") from error
    except ValueError as error:
        raise BadInput(f"model_parallel: plan {path} is not JSON ({error}): {_AGAIN}") from error
    if not isinstance(content, dict) or content.get("kind") != KIND or content.get("schema") != SCHEMA:
        raise BadInput(f"model_parallel: {path} is not a plan of this version of manyhands: {_AGAIN}")
    try:
        spec, made_for = content["model_parallel"], dict(content["for"])
        planned, predicted = int(content["workers"]), dict(content["predicted"])
        found = ModelParallel.of(spec)
    except (KeyError, TypeError, ValueError, BadInput) as error:
        raise BadInput(f"model_parallel: plan {path} is damaged ({error}): {_AGAIN}") from error
    if planned != workers:
        raise BadInput(f"model_parallel: plan {path} is for {planned} workers, and this run has {workers}: {_AGAIN}")
    for name, value in identity_of(_model_of(task)).items():
        if made_for.get(name) != value:
            raise BadInput(
                f"model_parallel: plan {path} is of another {name} ({made_for.get(name)}, here {value}): {_AGAIN}"
            )
    assert found is not None
    return found, predicted


def identity_of(model: nn.Module) -> dict[str, str]:
    """What a plan holds for: the model's parameters, torch, and the processor."""
    shapes = sorted((name, list(p.shape), str(p.dtype)) for name, p in model.named_parameters())
    return {
        "model": hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16],
        "torch": torch.__version__,
        "processor": f"{_processor()}, {units.count(usable_cores(), 'core')}",
    }


def predicted_of(plan: Plan) -> dict[str, Any]:
    """What is compared with a run: seconds, bytes by stage, and the terms of the time."""
    return {"step_s": plan.step_s, "memory": [stage.memory for stage in plan.stages], "terms": dict(plan.terms)}


def _model_of(task: Task) -> nn.Module:
    """The task's, without memory for its parameters."""
    return task.model if isinstance(task.model, nn.Module) else build(task.model, draws=False)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _best_of_each(plans: Sequence[Plan]) -> list[Plan]:
    """Of each number of stages, and of what trades time for memory, the first. What lies on the disk is shown where nothing
    fits without."""
    in_memory = any(plan.fits and (plan.spec is None or plan.spec.offload == "none") for plan in plans)
    found: dict[tuple[int, str, str], Plan] = {}
    for plan in plans:
        spec = plan.spec or ModelParallel()
        if spec.offload == "none" or not in_memory:
            found.setdefault((spec.stages, spec.recompute, spec.offload), plan)
    return list(found.values())


def _facts(plan: Plan) -> dict[str, Any]:
    stages = [asdict(stage) for stage in plan.stages]
    step_s = None if math.isinf(plan.step_s) else plan.step_s
    return {
        "plan": str(plan),
        "step_s": step_s,
        "stages": stages,
        "terms": plan.terms,
        "over": plan.over,
        "refused": plan.refused,
    }
