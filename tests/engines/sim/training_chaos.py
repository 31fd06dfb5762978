"""A world of trainings whose workers are lost, leave, join and are cut off: a seed draws what happens to a whole training
on engine `sim`, with the real loop, Membership, SliceLedger, Leases and stores, and what must be so is checked.

The model has one number for each row, so that its parameters show which rows are in it, see numbered_rows.py. Messages
between workers and driver are late by chance: those of one worker stay in order, those of several do not.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import combinations_with_replacement
from typing import Any

import numbered_rows
import torch
from torch import Tensor

import manyhands as mh
from manyhands.engines.base import LaunchSpec, Observer
from manyhands.engines.sim import engine as sim_engine
from manyhands.engines.sim.elastic import ElasticSimulation
from manyhands.engines.sim.simulation import Simulation
from manyhands.engines.sim.timeline import SimProgram
from manyhands.errors import ManyhandsError
from manyhands.events import Event
from manyhands.server.client import ShardLost

BATCH, TICKS = 12, 6  # slices are equal with one to four workers
ROWS = BATCH * TICKS
MOST = 4
BOUND_S = 120.0  # of virtual time: more than all that is planned, and all that is waited for
ENDLESS_S = 5000.0  # more than all time limits together: a world that goes on until then never ends
LATE = (0.0, 0.0, 0.001, 0.02, 0.2)
TOGETHER = ("allreduce",)
ROUNDS = ("local-sgd:period=2", "local-sgd:period=4", "diloco:period=3,outer_rate=1,outer_momentum=0")
OWN_PACE = ("downpour", "downpour:push_every=3,pull_every=3", "downpour:bound=1", "downpour:bound=2,push_every=2")
IN_STEP = ("downpour:bound=0", "downpour:bound=0,push_every=2,pull_every=2", "quorum")
PHASES = ("", "", ":exchange", ":commit")


class Broken(AssertionError):
    """A promise was broken."""


def expect(holds: object, message: str) -> None:
    if not holds:
        raise Broken(message)


@dataclass(frozen=True)
class Schedule:
    strategy: str
    warmup: int  # at their own pace: worker 0 trains alone for so many ticks
    workers: int
    epochs: int
    survive: str
    engine: dict[str, Any]
    seed: int

    @property
    def options(self) -> str:
        """The strategy with all its options."""
        return (
            f"{self.strategy}{',' if ':' in self.strategy else ':'}warmup={self.warmup}"
            if self.warmup
            else self.strategy
        )


def schedule_of(seed: int) -> Schedule:
    draw = random.Random(seed)
    strategy = draw.choice(TOGETHER + ROUNDS + OWN_PACE)
    workers = draw.randint(1, 3)
    copies = strategy in OWN_PACE and draw.random() < 0.3
    number = draw.choice((0, 1, 1, 2, 2, 3, 4))
    faults = {_fault_of_copies(draw, workers) if copies else _fault(draw, workers) for _ in range(number)}
    options = [f"notice={draw.choice((0.01, 0.1, 0.5))}", f"back={draw.choice((0, 0.1, 0.4))}"]
    if strategy in OWN_PACE and draw.random() < 0.4:
        options += ["drop=0.1", "duplicate=0.1", "delay=0.2:0.1", "reorder=0.1", "retry=0.1"]
    slow = draw.choice(("", "", ",0=4x", f",{workers - 1}=3x"))
    replaced = "true" if draw.random() < 0.6 else "false"
    return Schedule(
        strategy=strategy,
        warmup=_warmup(draw, strategy),
        workers=workers,
        epochs=1 if strategy in ROUNDS else 2,
        survive="copies=2" if copies else f"max_losses=any,max_workers={MOST},replace={replaced}",
        engine={
            "compute": f"step=100ms,jitter={draw.choice(('none', 'exponential'))}{slow}",
            "network": draw.choice(("", "latency=10ms", "latency=60ms")),
            "faults": ",".join([*sorted(faults), *options]),
        },
        seed=seed,
    )


def server_schedule_of(seed: int) -> Schedule:
    """Of strategies with a server: workers in step, and workers and copies that are lost in one run."""
    draw, plain = random.Random(f"{seed} at a server"), schedule_of(seed)
    copies = draw.random() < 0.5
    strategy = draw.choice(IN_STEP + OWN_PACE if copies else IN_STEP)
    faults = {
        (_fault_of_copies if copies and draw.random() < 0.4 else _fault)(draw, plain.workers)
        for _ in range(draw.choice((0, 1, 1, 2, 2, 3)))
    }
    options = [f"notice={draw.choice((0.01, 0.1, 0.5))}", f"back={draw.choice((0, 0.1, 0.4))}"]
    replaced = draw.choice(("true", "false"))
    return replace(
        plain,
        strategy=strategy,
        warmup=_warmup(draw, strategy),
        epochs=1 if strategy in IN_STEP else 2,
        survive=f"max_losses=any,max_workers={MOST},replace={replaced}{',copies=2' if copies else ''}",
        engine={**plain.engine, "faults": ",".join([*sorted(faults), *options])},
    )


def _warmup(draw: random.Random, strategy: str) -> int:
    return draw.choice((0, 0, 0, 2, 5, 9)) if strategy in OWN_PACE else 0


def _fault(draw: random.Random, workers: int) -> str:
    what = draw.choice(("kill", "kill", "kill", "kill", "restart", "pause", "leave", "join", "cut"))
    when = f"{draw.uniform(0, 1.5):.3f}s"
    at_step = f"step:{draw.randint(0, TICKS)}"
    who = draw.randint(0, workers - 1)
    match what:
        case "kill":
            return f"kill={who}@{draw.choice((when, at_step + draw.choice(PHASES)))}"
        case "restart" | "pause":
            return f"{what}={who}@{draw.choice((when, at_step))}+{draw.choice((0.05, 0.6))}"
        case "cut":
            return f"cut=host{who}@{when}+{draw.choice((0.1, 2))}"
        case "leave":
            return f"leave={who}@{draw.choice((when, at_step))}"
    return f"join={draw.randint(1, 2)}@{draw.choice((when, at_step))}"


def _fault_of_copies(draw: random.Random, workers: int) -> str:
    when = f"{draw.uniform(0, 1.5):.3f}s"
    if draw.random() < 0.2:
        return f"pause={draw.randint(0, workers - 1)}@{when}+{draw.choice((0.05, 0.6))}"
    return f"kill={draw.choice(('shard0', 'shard0', 'backup0'))}@{when}"


# -- one training ------------------------------------------------------------------------------------------------------


@dataclass
class Seen(Observer):
    """Passes on all that the run's observer is asked, and keeps what is checked."""

    plain: Observer
    members: dict[int, int] = field(default_factory=dict)  # by global batch: how many go on from there
    faults: Counter[str] = field(default_factory=Counter)
    losses: Counter[str] = field(default_factory=Counter)  # by cause

    def event(self, event: Event) -> None:
        if event.type == "fault":
            self.faults[event.values["fault"].partition("=")[0]] += 1
        if event.type == "change" and event.values["kind"] == "lost":
            self.losses[event.values["cause"]] += 1
        self.plain.event(event)

    def own_event(self, event: Event) -> None:
        self.plain.own_event(event)

    def answer(self, event: Event) -> dict[str, Any]:
        if event.type == "membership":
            self.members[event.tick] = event.values["workers"]
        return self.plain.answer(event)

    def stopping(self) -> str:
        return self.plain.stopping()


class SeenSimulation(Simulation):
    """Of fixed members."""

    def __init__(self, parts: Any, seed: int, spec: LaunchSpec) -> None:
        self.seen = Seen(spec.observer)
        super().__init__(parts, seed, replace(spec, observer=self.seen))
        Newest.world = self


class LateSimulation(ElasticSimulation):
    """Messages between a worker and the driver take a while."""

    def __init__(self, parts: Any, seed: int, spec: LaunchSpec) -> None:
        self.seen = Seen(spec.observer)
        super().__init__(parts, seed, replace(spec, observer=self.seen))
        self.random = random.Random(f"{seed} late")
        self.late_by = self.random.choice((0.0, *LATE))
        self.last_at: dict[tuple[SimProgram, str], float] = {}
        self.under_way: dict[tuple[SimProgram, str], deque[Callable[[], None]]] = {}
        Newest.world = self

    def _to_driver(self, program: SimProgram, message: Callable[[], None]) -> None:
        self._later(program, "to the driver", lambda: super(LateSimulation, self)._to_driver(program, message))

    def _to_worker(self, program: SimProgram, message: Callable[[], None]) -> None:
        self._later(program, "to the worker", message)

    def _later(self, program: SimProgram, way: str, deliver: Callable[[], None]) -> None:
        at = max(self.timeline.now + self.late_by * self.random.random(), self.last_at.get((program, way), 0.0))
        under_way = self.under_way.setdefault((program, way), deque())
        self.last_at[program, way] = at
        under_way.append(deliver)

        def arrive() -> None:
            expect(self.timeline.now < ENDLESS_S, "the run does not end")
            under_way.popleft()()

        self.timeline.at(at, arrive)


class Newest:
    """The simulation that was made last."""

    world: SeenSimulation | LateSimulation


def failure_of(seed: int, schedule_of: Callable[[int], Schedule] = schedule_of) -> str:
    """What is broken in the world of this seed, "" where nothing is."""
    schedule = schedule_of(seed)
    task = numbered_rows.task(ROWS, BATCH, epochs=schedule.epochs, order=_in_order)
    plain = sim_engine.ElasticSimulation, sim_engine.Simulation
    sim_engine.ElasticSimulation, sim_engine.Simulation = LateSimulation, SeenSimulation  # type: ignore[misc]
    try:
        run = mh.train(
            task,
            workers=schedule.workers,
            strategy=schedule.options,
            survive=schedule.survive,
            engine=sim_engine.Sim(seed=schedule.seed, **schedule.engine),
            threads_per_worker=1,
        )
        check_run(schedule, run, Newest.world)
    except (mh.WorkerFailed, ShardLost) as error:
        return _why_it_may_not_fail(schedule, error, Newest.world.seen)
    except (Broken, ManyhandsError, AssertionError, LookupError) as broken:
        return f"{type(broken).__name__}: {broken}"
    finally:
        sim_engine.ElasticSimulation, sim_engine.Simulation = plain  # type: ignore[misc]
    return ""


def _in_order(epoch: int) -> range:
    return range(ROWS)


# -- what must be so ---------------------------------------------------------------------------------------------------


def _why_it_may_not_fail(schedule: Schedule, error: ManyhandsError, seen: Seen) -> str:
    """A run fails where nobody is left alone: all with whom it began are lost, left, or parted; or both copies are lost."""
    if "has no copy left" in str(error):
        return "" if seen.faults["kill"] >= 2 else f"{error}, after {dict(seen.faults)}"
    ended = sum(seen.faults[what] for what in ("kill", "restart", "leave", "cut"))
    if "no worker is left" in str(error) or "0 workers are left" in str(error):
        return "" if ended >= schedule.workers else f"{error}, after {dict(seen.faults)}"
    return f"{type(error).__name__}: {error}"


def check_run(schedule: Schedule, run: mh.Run, world: SeenSimulation | LateSimulation) -> None:
    seen, steps = world.seen, schedule.epochs * TICKS
    expect(run.seconds <= BOUND_S, f"it took {run.seconds:.0f} s")
    expect(run.rows["total"] == schedule.epochs * ROWS, f"{run.rows} of {schedule.epochs} epochs of {ROWS}")
    expect(run.rows["unused"] == 0, f"{run.rows}")
    history = sorted((row["tick"], row["rows"]) for row in run.history)
    missing = sorted({(tick, BATCH) for tick in range(steps)} - {*history})
    # at their own pace a worker that dies after its push, before it reports it, takes the report with it; where that
    # happens to all parts of a global batch, its row is not there
    most = seen.losses["death"] if schedule.strategy in OWN_PACE else 0
    expect(len(history) + len(missing) == steps and len(missing) <= most, f"the history is {history}")
    # one history: each change of the membership has its event, and each loss its reason
    harm = seen.faults["kill"] + seen.faults["restart"]
    expect(seen.losses["death"] <= harm, f"{seen.losses['death']} deaths, and {harm} were struck")
    expect(seen.losses["link"] <= seen.faults["cut"], f"{dict(seen.losses)} of {dict(seen.faults)}")
    expect(not seen.losses.keys() - {"death", "link"}, f"lost by {dict(seen.losses)}")
    started = sum(world.processes.values()) - schedule.workers
    events = started + sum(seen.faults[what] for what in ("kill", "restart", "leave", "cut"))
    expect(run.generations <= 1 + events, f"{run.generations} generations of {events} events")
    moved = run.model.of.detach()
    if schedule.strategy in TOGETHER:
        wanted = torch.full((ROWS,), schedule.epochs / BATCH, dtype=torch.float64)
        expect(torch.allclose(moved, wanted, rtol=0, atol=1e-9), f"rows are in it {(moved * BATCH).tolist()} times")
    elif schedule.strategy in ROUNDS:
        members = {0: schedule.workers, **seen.members}
        problem = numbered_rows.rounds_problem(moved, run.history, members, BATCH)
        expect(not problem, problem)
    elif schedule.strategy in IN_STEP:
        _check_steps(schedule, moved)
    else:
        _check_leases(schedule, moved)


def _check_leases(schedule: Schedule, moved: Tensor) -> None:
    """An epoch keeps the slices with which it began: all of one epoch move their numbers alike."""
    expect(torch.allclose(moved, moved[0].expand(ROWS), rtol=0, atol=1e-9), f"rows moved by {moved.tolist()}")
    of_epochs = [parts / BATCH for parts in range(1, MOST + 1)]
    sums = [sum(one) for one in combinations_with_replacement(of_epochs, schedule.epochs)]
    expect(min(abs(float(moved[0]) - one) for one in sums) < 1e-9, f"rows moved by {float(moved[0])}")


def _check_steps(schedule: Schedule, moved: Tensor) -> None:
    """Each row is in one step: of its slice's rows, or with quorum of those of all slices that are in the step."""
    expect(float(moved.min()) > 0, f"rows moved by {moved.tolist()}")
    if schedule.strategy != "quorum":
        slices = [BATCH // workers for workers in range(1, MOST + 1)]
        off = torch.stack([(moved - 1 / rows).abs() for rows in slices]).min(dim=0).values
        expect(float(off.max()) < 1e-9, f"rows moved by {moved.tolist()}")
