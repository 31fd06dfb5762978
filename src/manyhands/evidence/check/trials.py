"""The same steps alone and on N workers, and how far apart they are, step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from manyhands.engines.base import Engine, LaunchSpec
from manyhands.engines.cores import usable_cores
from manyhands.engines.local.engine import Local
from manyhands.engines.sim.engine import Sim
from manyhands.evidence.check.copies import Copies
from manyhands.evidence.check.findings import Step
from manyhands.evidence.check.function_mode import eager
from manyhands.evidence.check.reading import handed_out
from manyhands.evidence.check.recording import Trace, Watched
from manyhands.evidence.check.trial_config import SLICES, WORKERS, TrialConfig, arranged
from manyhands.task import Task
from manyhands.training.plan import WorkerPlan
from manyhands.training.worker import work
from manyhands.worker import Worker

SMALL = 1e-4
"""A gradient whose numbers are all below this share of the largest is measured by that share: its own may be rounding alone."""


@dataclass(frozen=True)
class Program:
    """What every worker of a trial does."""

    own: Callable[[], Task]
    """Gives it a task of its own."""
    setting: TrialConfig

    def __call__(self, worker: Worker) -> Trace:
        task, trace = arranged(self.own(), self.setting), Trace()
        if self.setting.count:
            trace.handed_out = handed_out(task, worker.rank, worker.size)
        strategy = Watched(setting=self.setting, seed=task.seed, trace=trace)
        with eager():
            work(WorkerPlan(task=task, strategy=strategy, nonfinite="skip"), worker)
        return trace


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Where trials run. One worker alone is always in this process, as it is in training; simulated workers take turns in it, on a free
    network."""

    copies: Copies
    sent: Copies
    """What goes to real workers: the task as it was given, with the functions that give its data."""
    workers: int
    engine: Engine
    timeout_s: float

    def alone(self, setting: TrialConfig) -> Trace:
        """One worker. Raises what a training raises."""
        return self._launch(Local(), 1, setting)[0]

    def together(self, setting: TrialConfig) -> list[Trace]:
        """N simulated workers, by rank."""
        return self._launch(Sim(), self.workers, setting)

    def for_real(self, setting: TrialConfig) -> list[Trace]:
        """N workers of the engine that was asked for, by rank."""
        return self._launch(self.engine, self.workers, setting)

    def difference(self, setting: TrialConfig) -> tuple[Step, ...]:
        """How far simulated workers are from one."""
        solo = self.alone(replace(setting, slices=self.workers) if SLICES in setting.without else setting)
        return between(solo, self.together(as_alone(setting, solo)))

    def _launch(self, engine: Engine, workers: int, setting: TrialConfig) -> list[Trace]:
        here = engine.simulated or workers == 1
        own = self.copies.fresh if here else partial(_given, self.sent.fresh())
        threads = max(1, usable_cores() // 2) if here else None  # one at a time, beside whatever else runs here
        launch = LaunchSpec(workers=workers, device="cpu", timeout_s=self.timeout_s, threads_per_worker=threads)
        return engine.launch(Program(own, setting), launch)


def _given(task: Task) -> Task:
    return task


def as_alone(setting: TrialConfig, solo: Trace) -> TrialConfig:
    """The setting for N workers, where it wants them to have the rates that one had."""
    return replace(setting, rates=tuple(solo.rates)) if WORKERS in setting.without else setting


# -- how far apart -------------------------------------------------------------------------------------------------------


def between(solo: Trace, ranks: Sequence[Trace]) -> tuple[Step, ...]:
    """Step by step, as far as all went."""
    made = min(len(solo.parameters), *(len(rank.parameters) for rank in ranks))
    return tuple(_step(solo, ranks, t) for t in range(made))


def _step(solo: Trace, ranks: Sequence[Trace], t: int) -> Step:
    loss = _mean([(rank.losses[t], rank.weights[t]) for rank in ranks])
    gradient, worst = apart(solo.gradients[t], ranks[0].gradients[t], solo.bounds, SMALL)
    moved = [apart(solo.parameters[t], rank.parameters[t], solo.bounds, 1.0) for rank in ranks]
    parameters, farthest = max(moved, key=lambda one: one[0])
    whose = worst if gradient >= parameters else farthest
    return Step(
        step=t + 1,
        rows=sum(rank.rows[t] for rank in ranks),
        loss=_relative(_mean([(solo.losses[t], solo.weights[t])]), loss),
        gradient=gradient,
        parameters=parameters,
        worst="" if whose is None else solo.names[whose],
    )


def apart(a: Tensor, b: Tensor, bounds: Sequence[tuple[int, int]], floor: float) -> tuple[float, int | None]:
    """(the largest difference of two vectors [D'], that of each parameter relative to its largest number in `a`; whose it is).

    Where a parameter's largest number is below the share `floor` of the largest of all, that share of it counts; with 1
    all are measured by the largest of all. Numbers that are not finite differ from all but the same; their difference is infinite.
    """
    least = floor * float(a.abs().nan_to_num(posinf=0.0).max())
    worst, whose = 0.0, None
    for i, (start, stop) in enumerate(bounds):
        far = _far(a[start:stop], b[start:stop], least)
        if far > worst:
            worst, whose = far, i
    return worst, whose


def _far(a: Tensor, b: Tensor, least: float) -> float:
    if a.numel() == 0 or torch.equal(a, b):
        return 0.0
    if not (bool(a.isfinite().all()) and bool(b.isfinite().all())):
        return 0.0 if torch.equal(a.nan_to_num(), b.nan_to_num()) else float("inf")
    scale = max(float(a.abs().max()), least)
    largest = float((a - b).abs().max())
    return largest / scale if scale else float("inf")


def _relative(a: float, b: float) -> float:
    if a == b or (a != a and b != b):
        return 0.0
    scale = max(abs(a), abs(b))
    return abs(a - b) / scale if scale < float("inf") else float("inf")


def _mean(parts: Sequence[tuple[float, float]]) -> float:
    total = sum(weight for _, weight in parts)
    return sum(loss * weight for loss, weight in parts if weight) / total if total else 0.0
