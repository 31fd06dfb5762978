"""One trial: a variant trained once, watched, and looked at."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from manyhands import rng
from manyhands.callbacks.base import Callback, CallbackResult
from manyhands.engines.base import Engine
from manyhands.errors import ManyhandsError, Preempted
from manyhands.events import Event
from manyhands.evidence.advise.run_facts import TASK_FACTS
from manyhands.evidence.compare import measures, metric
from manyhands.evidence.compare.comparison import Target, Trial, Variant
from manyhands.evidence.compare.final_evaluation import ROWS, FinalPredictions, evaluate_final
from manyhands.evidence.compare.probe import Sketch, probed, taken
from manyhands.recording.run import Run
from manyhands.sparse.kernel import ModelOfKernel
from manyhands.strategies import strategy_of
from manyhands.strategies.base import Strategy
from manyhands.task import Task
from manyhands.training.plan import build_model
from manyhands.training.train import train

WARM_TICKS = 4  # of the warm-up


@dataclass(frozen=True, kw_only=True)
class TrialSetup:
    """What all trials have in common."""

    task: Task  # the caller's own; every trial trains a copy of its model
    target: Target | None = None
    servers: int = 1
    device: str = "auto"
    timeout_s: float = 300.0
    callbacks: tuple[Callback, ...] = ()

    @property
    def on_test(self) -> bool:
        """Whether trials validate on the test rows."""
        return metric.on_test(self.task, self.target)

    def trained(self, seed: int) -> Task:
        """The task as a trial trains it."""
        task = metric.swapped(self.task) if self.on_test else self.task
        return task.with_fields(seed=seed, model=fresh(task.model))

    @property
    def validated(self) -> Any:
        """The rows that a trial validates on, None where there are none."""
        return self.task.test_data if self.on_test else self.task.validation_data

    def train(self, task: Task, entry: TrialEntry, engine: Engine, callback: Callback, **options: Any) -> Run:
        """One launch. Raises what `train` raises."""
        return train(
            task,
            strategy=entry.strategy,
            engine=engine,
            workers=entry.variant.workers,
            servers=self.servers,
            device=self.device,
            threads_per_worker=entry.variant.threads,
            timeout_s=self.timeout_s,
            partition=entry.variant.partition,
            callbacks=(callback, *self.callbacks),
            **options,
        )


@dataclass(frozen=True, kw_only=True)
class TrialEntry:
    """A variant, and the object that its strategy is."""

    variant: Variant
    strategy: Strategy


@dataclass(frozen=True, kw_only=True)
class FinishedTrial:
    """A trial, and what is kept of it until its repeat is over."""

    trial: Trial
    parameters: Tensor | None = None  # [D]; None of an ensemble, and of a failed trial
    predictions: FinalPredictions | None = None
    sketches: Mapping[int, Sketch] = field(default_factory=dict)  # {rows: of the parameters at that point}


@dataclass(frozen=True, kw_only=True)
class Known:
    """What the warm-up measured of the task."""

    names: list[str]  # of all metrics that a trial ends with
    ticks_per_epoch: int | None  # of one worker; None: a stream
    parameters: int
    shapes: tuple[tuple[int, ...], ...]
    device: str
    facts: Mapping[str, Any]  # those of a run's `info` that advice looks at

    def ticks_of(self, entry: TrialEntry, task: Task) -> int | None:
        """Of an epoch: fewer of more workers, where their batch is given by worker."""
        times = 1 if task.batch_size_per_worker is None else entry.variant.workers
        return None if self.ticks_per_epoch is None else -(-self.ticks_per_epoch // times)


# -- trials ----------------------------------------------------------------------------------------------------------


def warm_up(setting: TrialSetup, entry: TrialEntry, engine: Engine) -> Known:
    """Train for a few steps, so that no trial is the first to load and fill what is empty; and see what the task is
    like.

    Raises what `train` raises.
    """
    listener = ValidationListener(setting.on_test, stop_after=WARM_TICKS)
    task = setting.trained(setting.task.seed)
    run = setting.train(task, entry, engine, listener)
    final = evaluate_final(setting.task, run.model, setting.task.train_data, _device(run), rows=1)
    return Known(
        names=[*listener.metrics, *(metric.TRAIN + name for name in final.metrics)],
        ticks_per_epoch=run.info["ticks_per_epoch"],
        parameters=run.info["parameters"],
        shapes=tuple(tuple(one.shape) for one in run.model.parameters() if one.requires_grad),
        device=run.info["device"],
        facts={name: run.info[name] for name in TASK_FACTS},
    )


def try_once(
    setting: TrialSetup,
    entry: TrialEntry,
    engine: Engine,
    *,
    repeat: int,
    validate_every: str | int,
    judged: str,
) -> FinishedTrial:
    """Train a variant once. What fails in it is the trial's `failure`; raises Preempted, and what is no error of the
    trial's.

    judged: the metric to judge by; a trial that ends with one that is not finite, or with such a loss, has failed.
    """
    seed = setting.task.seed + repeat
    trial = Trial(variant=entry.variant.name, repeat=repeat, seed=seed)
    listener = ValidationListener(setting.on_test)
    try:
        task = setting.trained(seed)
        task = task if strategy_of(entry.strategy).needs.kernel else probed(task)  # else no worker has all parameters
        run = setting.train(task, entry, engine, listener, validate_every=validate_every)
    except Preempted:
        raise
    except ManyhandsError as error:
        first_line = str(error).partition("\n")[0].strip().rstrip(":")
        return FinishedTrial(trial=replace(trial, failure=first_line))
    finished = _finished(setting, trial, run, listener)
    failure = _failure(run, finished.trial.metrics, judged)
    return FinishedTrial(trial=replace(trial, failure=failure)) if failure else finished


def _failure(run: Run, metrics: Mapping[str, float], judged: str) -> str:
    """Why a run that came to its end is none to compare, or ""."""
    if run.info["stopped"]:
        return f"it stopped before its end: {run.info['stopped']}"
    finite = {name: math.isfinite(value) for name, value in metrics.items() if name == judged or name.endswith("_loss")}
    return next((f"{name} is {metrics[name]} at its end" for name, fine in finite.items() if not fine), "")


def _finished(setting: TrialSetup, trial: Trial, run: Run, listener: ValidationListener) -> FinishedTrial:
    device, target = _device(run), setting.target
    rows = min(ROWS, run.rows["total"])  # a short trial is not to be outlasted by what looks at it
    train = evaluate_final(setting.task, run.model, setting.task.train_data, device, rows)
    seen = train if setting.validated is None else evaluate_final(setting.task, run.model, setting.validated, device)
    curve = measures.curve(run.history, ((tick, metrics) for tick, metrics, _ in listener.validations))
    target_s, target_rows = (None if target is None else measures.reached(curve, target)) or (None, None)
    at = measures.until(run.history)
    sketches = {at(tick)[0]: sketch for tick, _, sketch in listener.validations if sketch is not None}
    return FinishedTrial(
        trial=replace(
            trial,
            rows=run.rows["total"],
            unused=run.rows["unused"],
            steps=run.steps,
            ticks=sum(row["ticks"] for row in run.history),
            rounds=run.rounds,
            seconds=sum(run.timing.values()),
            launch_seconds=run.seconds,
            rows_per_s=measures.rows_per_s(run.history),
            timing=tuple(run.timing_of_workers),
            bytes=sum(entry["bytes"] for entry in run.ledger.values()),
            messages=sum(entry["messages"] for entry in run.ledger.values()),
            input=run.input,
            staleness=run.staleness,
            gain=run.info.get("gain"),
            memory=tuple(run.memory_of_workers),
            effective_rate=run.info["effective_rate"],
            rate=run.info["rate"],
            batch_size=run.info["batch_size"],
            curve=tuple(curve),
            metrics=listener.metrics | {metric.TRAIN + name: value for name, value in train.metrics.items()},
            target_seconds=target_s,
            target_rows=target_rows,
        ),
        parameters=run.parameters.cpu() if len(run.models) == 1 else None,
        predictions=seen.predictions,
        sketches=sketches,
    )


def _device(run: Run) -> torch.device:
    """Where the workers were, if this process has it too."""
    wanted = torch.device(run.info["device"])
    return wanted if wanted.type == "cpu" or torch.cuda.is_available() else torch.device("cpu")


class ValidationListener(Callback):
    """Receives a trial's validations, and removes the probe's sketch from them before other callbacks get them.

    validations: (tick, metrics, sketch). metrics: the final ones. Where test rows were validated, names are put right.
    """

    def __init__(self, on_test: bool, stop_after: int | None = None) -> None:
        self.validations: list[tuple[int, dict[str, float], Sketch | None]] = []
        self.metrics: dict[str, float] = {}
        self._on_test, self._left = on_test, stop_after

    @override
    def on_step(self, event: Event) -> CallbackResult:
        if self._left is None:
            return None
        self._left -= 1
        return "stop" if self._left <= 0 else None

    @override
    def on_validation(self, event: Event) -> CallbackResult:
        metrics, sketch = self._own(event)
        self.validations.append((event.tick, metrics, sketch))
        return None

    @override
    def on_end(self, event: Event) -> None:
        if "metrics" in event.values:
            self.metrics, _ = self._own(event)

    def _own(self, event: Event) -> tuple[dict[str, float], Sketch | None]:
        """The task's own metrics, and the sketch; the callbacks after this one get the former alone."""
        metrics = dict(event.values["metrics"])  # a worker in this process may still need its own
        sketch = taken(metrics, metric.VALIDATION)
        event.values["metrics"] = metric.renamed(metrics) if self._on_test else metrics
        return event.values["metrics"], sketch


# -- where each trial begins --------------------------------------------------------------------------------------------


def start_of(task: Task, seed: int) -> Tensor:
    """[D] the parameters with which every trial of this seed begins."""
    with rng.kept():
        rng.seed_all(seed)
        model = build_model(task.with_fields(model=fresh(task.model)))
    return torch.cat([p.detach().reshape(-1).cpu() for p in model.parameters() if p.requires_grad])


def fresh(model: Any) -> Any:
    """The task's model so that training leaves it as it is: the next trial begins with it, too."""
    if isinstance(model, ModelOfKernel):  # it makes a new one each time
        return model
    return copy.deepcopy(model) if isinstance(model, nn.Module) else partial(_copy_of_built, model)


def _copy_of_built(make: Callable[[], nn.Module]) -> nn.Module:
    """`make` may give the same model each time."""
    return copy.deepcopy(make())
