"""Runs of the real loop, on workers that are real or simulated, seen as times of ticks."""

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
from manyhands.evidence.calibrate.fit import spread, step_seconds
from manyhands.strategies import spec_of
from manyhands.strategies.base import Strategy
from manyhands.task import Task
from manyhands.training.plan import WorkerPlan
from manyhands.training.worker import work

WARM = 4  # first ticks of a run that nobody counts: memory is taken, caches fill
LEAST_BLOCK = 8  # ticks whose mean is one sample of a step's time
_NEVER = 1 << 40


@dataclass(frozen=True, kw_only=True)
class ObservedOn:
    """Where runs are observed; the same for the real ones and the simulated."""

    engine: Engine
    workers: int
    threads: int | None = None
    device: str = "auto"
    timeout_s: float = 300.0

    def launch(self, **more: Any) -> LaunchSpec:
        """With these workers."""
        return LaunchSpec(
            workers=self.workers,
            threads_per_worker=self.threads,
            device=self.device,
            timeout_s=self.timeout_s,
            **more,
        )


@dataclass
class _EventKeeper(Observer):
    """Keeps what workers say, on the workers' own clocks: those of one host are one clock."""

    kind: str  # events of this type
    events: list[Event] = field(default_factory=list)

    @override
    def event(self, event: Event) -> None:
        if event.type == self.kind:
            self.events.append(event)


def observe(place: ObservedOn, task: Task, strategy: Strategy, steps: int, kind: str = "step") -> list[Event]:
    """Train so many steps (global batches) without validation or checkpoints; the workers' events of type `said`, as they came."""
    kept = _EventKeeper(kind)
    train_before(kept, place, task, strategy, steps)
    return kept.events


def train_before(observer: Observer, place: ObservedOn, task: Task, strategy: Strategy, steps: int) -> None:
    """Train at most so many steps, without validation or checkpoints."""
    bare = task.with_fields(validation_data=None, test_data=None, epochs=_NEVER, max_steps=steps)
    plan = WorkerPlan(task=bare, strategy=strategy, validate_every=_NEVER, checkpoint_every=_NEVER)
    with rng.kept():
        place.engine.launch(partial(work, plan), place.launch(server=strategy.server(), observer=observer))


def own_ticks(events: Sequence[Event]) -> dict[int, list[float]]:
    """{rows: seconds of a worker's tick, without waiting for others}, in the order in which they came.

    A tick's event is sent at the end of the next tick, or with the epoch: so of three in one epoch, the times of the
    first two tell how long the third took.
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
    """A worker's tick in one run, on the mean."""

    seconds: float  # without waiting for other workers
    input_s: float  # of them until its rows were there: a lease is part of that
    leased: bool


def tick_time(events: Sequence[Event]) -> TickTime:
    """Of the ticks with the number of rows that most have."""
    samples = max(own_ticks(events).values(), key=len)
    inputs = [event.values["input_s"] for event in events[WARM:] if event.values["input_s"] > 0]
    leased = any("lease" in event.values for event in events)
    return TickTime(spread(samples).mean, spread(inputs).mean if inputs else 0.0, leased)


def block_of(events: Sequence[Event], strategy: Strategy) -> int:
    """So many steps make a block: whole rounds, at least LEAST_BLOCK. BadInput where too few rounds were seen to tell."""
    ticks = [event.tick for event in events if event.rank == 0]
    rounds = [event.tick for event in events if event.rank == 0 and event.values["round"]]
    seen = [tick for tick in rounds if tick != max(ticks)]  # the last step closes an open round
    if len(seen) == 1 or (rounds and not seen):
        raise BadInput(
            f"{spec_of(strategy)} made {len(rounds)} exchange(s) in {len(ticks)} steps, too few to know what a step takes: "
            "give steps (--steps) of at least three periods"
        )
    gaps = [later - earlier for earlier, later in pairwise(seen)]
    gap = round(statistics.median(gaps)) if gaps else 1
    return -(-LEAST_BLOCK // gap) * gap


def blocks(events: Sequence[Event], workers: int, every: int) -> list[float]:
    """Seconds a global batch, one sample for each block of `every`; every worker reports its part of each.

    The last report is left out: it does not wait for the end of another tick, as the others do.
    """
    ends = sorted(event.time_s for event in events)[workers - 1 :: workers]
    return step_seconds(ends[WARM:-1], every)


def steps_for(steps: int) -> int:
    """So many steps to run, of which `steps` count."""
    return WARM + steps + 2


def merged(runs: Sequence[Mapping[int, list[float]]]) -> dict[int, list[list[float]]]:
    """{rows: a list of each run's seconds}, as `fit.computed` takes them."""
    together: defaultdict[int, list[list[float]]] = defaultdict(list)
    for run in runs:
        for rows, seconds in run.items():
            together[rows].append(seconds)
    return dict(together)
