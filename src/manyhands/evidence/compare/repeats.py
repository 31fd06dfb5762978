"""The trials of a comparison: a warm-up, then repeats, in each of which every variant trains once."""

from __future__ import annotations

import math
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor

from manyhands import units
from manyhands.engines.base import Engine
from manyhands.engines.hosts.engine import Hosts
from manyhands.engines.local.engine import Local
from manyhands.engines.sim.engine import Sim
from manyhands.errors import ManyhandsError, Preempted
from manyhands.evidence.compare.comparison import Comparison, Point, Trial
from manyhands.evidence.compare.metric import metric_of
from manyhands.evidence.compare.optimum import Optimum, optimum_of
from manyhands.evidence.compare.trial import FinishedTrial, Known, TrialEntry, TrialSetup, start_of, try_once, warm_up
from manyhands.evidence.compare.variants import orders
from manyhands.recording.run import environment
from manyhands.signals import sigterm_to
from manyhands.task import Task


@dataclass(kw_only=True)
class Repeating:
    """One comparison's trials. `run` once."""

    setting: TrialSetup
    entries: list[TrialEntry]
    engine: Engine
    repeats: int
    validations: int
    time_margin: float
    metric_margin: float
    say: Callable[[str], None]
    trials: list[Trial] = field(default_factory=list, init=False)
    _pace: TrialPace = field(default_factory=lambda: TrialPace(), init=False)
    _launches: int = field(default=0, init=False)
    _optimum: Optimum | None = field(default=None, init=False)

    @property
    def reference(self) -> TrialEntry:
        """Solo with all threads."""
        return [entry for entry in self.entries if entry.variant.solo][-1]

    def run(self) -> Comparison:
        """All measurements, without findings. Raises as `train` in the warm-up; ManyhandsError where solo fails."""
        began = time.monotonic()
        self.say("warming up")
        known = warm_up(self.setting, self.reference, self._engine_of(self.reference))
        judged, higher = metric_of(known.names, self.setting.target)
        self._optimum = optimum = optimum_of(self.setting.task, self.say)
        complete = self._repeat_all(known, judged)
        engine = self.engine
        return Comparison(
            task=self.setting.task.name,
            parameters=known.parameters,
            shapes=known.shapes,
            ticks_per_epoch=known.ticks_per_epoch,
            variants=tuple(entry.variant for entry in self.entries),
            trials=tuple(self.trials),
            repeats=1 + max(trial.repeat for trial in self.trials),
            metric=judged,
            higher=higher,
            target=self.setting.target,
            reference=self.reference.variant.name,
            time_margin=self.time_margin,
            metric_margin=self.metric_margin,
            optimum="" if optimum is None else f"{optimum.how}: loss {units.metric(optimum.loss)}",
            simulated=engine.facts()["simulated"] if engine.capabilities.simulated else {},
            facts=known.facts,
            machine=machine(engine, known.device),
            seconds=time.monotonic() - began,
            complete=complete,
        )

    def _repeat_all(self, known: Known, judged: str) -> bool:
        """Whether all repeats are done: Ctrl-C and SIGTERM end them after the first."""
        going = list(range(len(self.entries)))
        for repeat, order in enumerate(orders(len(self.entries), self.repeats, self.setting.task.seed)):
            self._pace.left = [self.entries[i].variant.name for i in going] * (self.repeats - repeat)
            try:
                with sigterm_to(_preempt):
                    trials = self._repeat(repeat, [self.entries[i] for i in order if i in going], known, judged)
            except (KeyboardInterrupt, Preempted) as end:
                why = "asked to end (SIGTERM)" if isinstance(end, Preempted) else "interrupted"
                if repeat:
                    self.say(f"{why}: {repeat} of {self.repeats} repeats are complete")
                    return False
                if isinstance(end, Preempted):
                    raise Preempted(f"{why} before the first repeat was complete: there is nothing to report") from end
                raise
            self.trials += trials
            failed = {trial.variant for trial in trials if trial.failure}
            going = [i for i in going if self.entries[i].variant.name not in failed]
        return True

    def _repeat(self, repeat: int, entries: list[TrialEntry], known: Known, judged: str) -> list[Trial]:
        task, finished = self.setting.task, []
        for entry in entries:
            name = entry.variant.name
            self.say(self._pace.line(name, f"repeat {repeat + 1} of {self.repeats}"))
            began = time.monotonic()
            one = try_once(
                self.setting,
                entry,
                self._engine_of(entry),
                repeat=repeat,
                validate_every=validate_every(task, known.ticks_of(entry, task), self.validations),
                judged=judged,
            )
            if one.trial.failure and entry.variant.solo:
                raise ManyhandsError(
                    f"{name}, with which all others are compared, failed in repeat {repeat + 1}: {one.trial.failure}"
                )
            if one.trial.failure:
                self.say(f"{name} failed, and is not tried again: {one.trial.failure}")
            self._pace.done(name, time.monotonic() - began)
            finished.append(self._placed(one))
        return compared_with_solo(finished, self.reference.variant.name, start_of(task, task.seed + repeat))

    def _placed(self, one: FinishedTrial) -> FinishedTrial:
        """With how far it is from the optimum, where both are known."""
        if self._optimum is None or one.parameters is None:
            return one
        away, excess = self._optimum.distance(one.parameters), self._optimum.excess(one.parameters)
        return replace(one, trial=replace(one.trial, optimum_distance=away, excess_loss=excess))

    def _engine_of(self, entry: TrialEntry) -> Engine:
        """For the next launch. Each simulated one has a seed of its own, or repeats would differ by rows alone; solo
        beside engine hosts is on this one."""
        self._launches += 1
        if isinstance(self.engine, Sim):
            return replace(self.engine, seed=self.engine.seed + self._launches)
        if isinstance(self.engine, Hosts) and entry.variant.workers == 1:
            return Local(apart=True)
        return self.engine


def _preempt(reason: str) -> None:
    raise Preempted("asked to end (SIGTERM)")


class TrialPace:
    """How long trials take, and how many are left."""

    def __init__(self) -> None:
        self.left: list[str] = []  # variants, of this repeat and those to come
        self._taken: defaultdict[str, list[float]] = defaultdict(list)
        self._done = 0

    def done(self, name: str, seconds: float) -> None:
        """A trial of this variant is over."""
        self._taken[name].append(seconds)
        self.left.remove(name)
        self._done += 1

    def line(self, name: str, repeat: str) -> str:
        """Of the trial that begins: `trial 5 of 21: local-sgd:period=8 on 2, repeat 2 of 3; about 40 s left`."""
        text = f"trial {self._done + 1} of {self._done + len(self.left)}: {name}, {repeat}"
        return f"{text}; about {units.duration(round(self.left_s()))} left" if self._taken else text

    def left_s(self) -> float:
        """As long as trials of the same variant took, or the mean of all, before there was one."""
        usual = fmean(seconds for taken in self._taken.values() for seconds in taken)
        return sum(fmean(self._taken.get(name, [usual])) for name in self.left)


# -- compared with solo: how far parameters and predictions of a repeat's trials are from its own -----------------------------


def compared_with_solo(repeat: Sequence[FinishedTrial], reference: str, start: Tensor) -> list[Trial]:
    """The trials of a repeat, with what sets them apart from the reference's. start: [D] where all of them began."""
    solo = next(one for one in repeat if one.trial.variant == reference)
    return [one.trial if one.trial.failure else _compared(one, solo, start) for one in repeat]


def _compared(one: FinishedTrial, solo: FinishedTrial, start: Tensor) -> Trial:
    def placed(point: Point) -> Point:
        if point.rows not in one.sketches or point.rows not in solo.sketches:
            return point
        return replace(point, distance=one.sketches[point.rows].distance(solo.sketches[point.rows]))

    trial = replace(one.trial, curve=tuple(map(placed, one.trial.curve)))
    if one.predictions is not None and solo.predictions is not None:
        agreement = one.predictions.agreement(solo.predictions)
        if agreement is not None:
            trial = replace(trial, agreement=agreement, agreement_of=one.predictions.of)
    own, other = one.parameters, solo.parameters
    if own is None or other is None or own.shape != other.shape:
        return trial
    return replace(trial, distance=distance(own, other), cosine=cosine(own, other, start))


def distance(own: Tensor, solo: Tensor) -> float | None:
    """|p - s| / |s|, 0 where all bits are equal; None where |s| is 0."""
    size = float(solo.double().norm())
    return float((own.double() - solo.double()).norm()) / size if size else None


def cosine(own: Tensor, solo: Tensor, start: Tensor) -> float | None:
    """Of the angle between p - start and s - start; None where one of them did not move."""
    moved, reference = own.double() - start.double(), solo.double() - start.double()
    sizes = float(moved.norm()) * float(reference.norm())
    return max(-1.0, min(1.0, float(moved @ reference) / sizes)) if sizes else None


# -- how often, and where ------------------------------------------------------------------------------------------------


def validate_every(task: Task, ticks_per_epoch: int | None, validations: int) -> str | int:
    """What `train` takes, for about so many validations; at ends of epochs where there are at least as many of them."""
    if ticks_per_epoch is None:
        return "epoch"
    total = min(ticks_per_epoch * task.epochs, task.max_steps or math.inf)
    epochs = total / ticks_per_epoch / validations  # between two validations
    if epochs < 1:
        return max(1, round(total / validations))
    return "epoch" if epochs < 2 else ticks_per_epoch * math.floor(epochs)


def machine(engine: Engine, device: str) -> dict[str, Any]:
    """What a comparison says of where and when it ran."""
    return {
        **environment(),
        "processor": processor(),
        "engine": engine.name,
        "device": device,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Its name, where Linux says it, else what Python knows."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
