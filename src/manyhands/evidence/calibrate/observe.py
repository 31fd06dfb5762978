"""Runs of the real training loop on real or simulated workers, and the times of their ticks."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

from typing_extensions import override

from manyhands import rng
from manyhands.engines.base import Engine, LaunchSpec, Observer
from manyhands.errors import BadInput
from manyhands.events import Event
from manyhands.evidence.calibrate.fit import lognormal, step_seconds
from manyhands.strategies import spec_of
from manyhands.strategies.base import Strategy
from manyhands.task import Task
from manyhands.training.plan import WorkerPlan
from manyhands.training.worker_main import work

WARM = 4  # ticks at the start of a run that are not measured: memory is allocated, caches fill
LEAST_BLOCK = 8  # ticks whose mean is one sample of the time of a step
_NEVER = 1 << 40


@dataclass(frozen=True, kw_only=True)
class RunSetup:
    """The workers of a run, real or simulated."""

    engine: Engine
    workers: int
    threads: int | None = None
    device: str = "auto"
    timeout_s: float = 300.0

    def launch(self, **more: Any) -> LaunchSpec:
        return LaunchSpec(
            workers=self.workers,
            threads_per_worker=self.threads,
            device=self.device,
            timeout_s=self.timeout_s,
            **more,
        )


@dataclass
class _EventKeeper(Observer):
    """Keeps the events of one type. Their times are of the workers' clock: workers of one host share it."""

    type: str
    events: list[Event] = field(default_factory=list)

    @override
    def event(self, event: Event) -> None:
        if event.type == self.type:
            self.events.append(event)


def observe(setup: RunSetup, task: Task, strategy: Strategy, steps: int, event_type: str = "step") -> list[Event]:
    """Train `steps` steps without validation or checkpoints. Returns the workers' events of a type, as they arrived."""
    keeper = _EventKeeper(event_type)
    train_observed(keeper, setup, task, strategy, steps)
    return keeper.events


def train_observed(observer: Observer, setup: RunSetup, task: Task, strategy: Strategy, steps: int) -> None:
    """Train at most `steps` steps without validation or checkpoints."""
    bare = task.with_fields(validation_data=None, test_data=None, epochs=_NEVER, max_steps=steps)
    plan = WorkerPlan(task=bare, strategy=strategy, validate_every=_NEVER, checkpoint_every=_NEVER)
    with rng.kept():
        setup.engine.launch(partial(work, plan), setup.launch(server=strategy.server(), observer=observer))


def tick_seconds(events: Sequence[Event]) -> dict[int, list[float]]:
    """{rows: seconds of a worker's ticks, without waiting for others}, in order.

    A tick's event is sent at the end of the next tick, or at the end of the epoch. So of three events in one epoch, the
    times of the first two give the duration of the third one's tick.
    """
    by_rank: defaultdict[int | None, list[Event]] = defaultdict(list)
    for event in events:
        by_rank[event.rank].append(event)
    found: defaultdict[int, list[float]] = defaultdict(list)
    for ticks in by_rank.values():
        for first, second, third in zip(ticks[WARM:], ticks[WARM + 1 :], ticks[WARM + 2 :], strict=False):
            seconds = second.time_s - first.time_s - third.values["wait_s"]
            if first.values["epoch"] == third.values["epoch"] and third.values["rows"] and seconds > 0:
                found[third.values["rows"]].append(seconds)
    return dict(found)


@dataclass(frozen=True)
class TickTime:
    """The mean tick of a worker in one run."""

    seconds: float  # without waiting for other workers
    input_s: float  # of `seconds`, the time to get its rows, a lease included
    leased: bool


def tick_time(events: Sequence[Event]) -> TickTime:
    """The mean over ticks with the most frequent number of rows."""
    samples = max(tick_seconds(events).values(), key=len)
    inputs = [event.values["input_s"] for event in events[WARM:] if event.values["input_s"] > 0]
    leased = any("lease" in event.values for event in events)
    return TickTime(lognormal(samples).mean, lognormal(inputs).mean if inputs else 0.0, leased)


def block_of(events: Sequence[Event], strategy: Strategy) -> int:
    """The steps of a block: whole rounds, at least LEAST_BLOCK. Raises BadInput if there were too few rounds to know."""
    ticks = [event.tick for event in events if event.rank == 0]
    rounds = [event.tick for event in events if event.rank == 0 and event.values["round"]]
    complete = [tick for tick in rounds if tick != max(ticks)]  # the last step closes an open round
    if len(complete) == 1 or (rounds and not complete):
        raise BadInput(
            f"{spec_of(strategy)} exchanged too rarely to measure a step (exchanges: {len(rounds)}, steps: "
            f"{len(ticks)}): give more steps (--steps), at least three periods"
        )
    gaps = [later - earlier for earlier, later in pairwise(complete)]
    gap = round(statistics.median(gaps)) if gaps else 1
    return -(-LEAST_BLOCK // gap) * gap


def blocks(events: Sequence[Event], workers: int, every: int) -> list[float]:
    """Seconds a global batch, one sample for each block of `every`. Every worker reports its part of each batch.

    The last report is dropped: unlike the others, it is not sent at the end of a later tick.
    """
    ends = sorted(event.time_s for event in events)[workers - 1 :: workers]
    return step_seconds(ends[WARM:-1], every)


def steps_for(steps: int) -> int:
    """Steps to run so that `steps` are measured."""
    return WARM + steps + 2


def merged(runs: Sequence[Mapping[int, list[float]]]) -> dict[int, list[list[float]]]:
    """{rows: [each run's seconds]}, for `fit.fit_compute`."""
    by_rows: defaultdict[int, list[list[float]]] = defaultdict(list)
    for run in runs:
        for rows, seconds in run.items():
            by_rows[rows].append(seconds)
    return dict(by_rows)
