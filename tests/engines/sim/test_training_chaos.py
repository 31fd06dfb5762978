"""Searches random schedules of what befalls whole trainings for one in which a row is lost or counted twice, or that does not end.

Workers of engine `sim` are lost, leave, join and are cut off, with the real loop, Membership, SliceLedger, Leases and stores. The
model has one number for each row, so that its parameters show which rows are in it, see numbered_rows.py. What needs messages
that `sim` does not have, as a broken connection between two copies, test_membership_chaos.py and test_replication_chaos.py have.
"""

import random
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations_with_replacement
from typing import Any

import numbered_rows
import pytest
import torch
from torch import Tensor
from typing_extensions import override

import manyhands as mh
from chaos import expect, first_broken, keeps
from manyhands.data.slice_ledger import SliceLedger
from manyhands.engines.base import LaunchSpec, Observer, PassingObserver
from manyhands.engines.sim import engine as sim_engine
from manyhands.engines.sim.elastic import ElasticSimulation
from manyhands.engines.sim.shard import SimShard
from manyhands.engines.sim.simulation import Simulation
from manyhands.engines.sim.timeline import SimProgram
from manyhands.errors import ManyhandsError, PeerLost
from manyhands.events import Event
from manyhands.server.client import ShardLost
from manyhands.strategies import strategy_of

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
STAYING = (
    "allreduce",
    "local-sgd:period=2",
    "downpour:bound=0",
    "quorum",
    "easgd:via=group",
    "diloco:period=2",
    "gossip",
)
STAYING_AT_OWN_PACE = ("downpour", "downpour:bound=1", "dynsgd:window=2,bound=2", "easgd:period=2,bound=0", "easgd",
                       "quorum:backups=1", "gossip:graph=pairs", "diloco:period=2,via=server")  # fmt: skip


@dataclass(frozen=True)
class Schedule:
    strategy: str
    warmup: int  # at their own pace: worker 0 trains alone for so many ticks
    workers: int
    epochs: int
    survive: str | None
    engine: dict[str, Any]
    seed: int
    servers: int = 1

    @property
    def options(self) -> str:
        """The strategy with all its options."""
        between = "," if ":" in self.strategy else ":"
        return f"{self.strategy}{between}warmup={self.warmup}" if self.warmup else self.strategy


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


def staying_schedule_of(seed: int) -> Schedule:
    """Of members that stay: a run whose worker or shard dies ends."""
    draw = random.Random(f"{seed} stays")
    workers, strategy = draw.randint(2, 4), draw.choice(STAYING + STAYING_AT_OWN_PACE)
    spec = strategy_of(strategy).server()
    servers = 1 if spec is None or spec.one_shard else draw.randint(1, 2)
    faults = []
    for _ in range(draw.randint(0, 3)):
        what, when = (
            draw.choice(("pause", "pause", "pause", "kill")),
            draw.choice(("step:0", "step:3", "0.05s", "1.2s")),
        )
        faults.append(f"{what}={draw.randrange(workers)}@{when}{'+0.7' if what == 'pause' else ''}")
    if spec is not None:
        for what in {draw.choice(("pause", "restart", "kill", "", "", ""))} - {""}:
            when = draw.choice((0.05, 0.3, 0.9, 2.5))
            faults.append(f"{what}=shard{draw.randrange(servers)}@{when}s{'' if what == 'kill' else '+0.6'}")
        if rate := draw.choice(("", "0.05", "0.2")):
            faults += [f"drop={rate}", f"duplicate={rate}", f"delay={rate}:0.05", f"reorder={rate}", "retry=0.1"]
    slow = draw.choice(("", f",{workers - 1}=5x", ",0=3x"))
    engine = {
        "compute": f"row=0.1,jitter={draw.choice(('none', 'exponential'))}{slow}",
        "network": draw.choice(("", "latency=10ms,bandwidth=1e5")),
        "faults": ",".join(faults),
    }
    return Schedule(strategy, 0, workers, 1, None, engine, seed, servers)


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

WORLDS: list[Any] = []  # the simulations that `check` makes


class Seen(PassingObserver):
    """Keeps what is checked."""

    def __init__(self, observer: Observer) -> None:
        super().__init__(observer)
        self.members: dict[int, int] = {}  # by global batch: how many go on from there
        self.faults: Counter[str] = Counter()
        self.losses: Counter[str] = Counter()  # by cause

    @override
    def event(self, event: Event) -> None:
        if event.type == "fault":
            self.faults[event.values["fault"].partition("=")[0]] += 1
        if event.type == "change" and event.values["kind"] == "lost":
            self.losses[event.values["cause"]] += 1
        super().event(event)

    @override
    def answer(self, event: Event) -> dict[str, Any]:
        if event.type == "membership":
            self.members[event.tick] = event.values["workers"]
        return super().answer(event)


class SeenSimulation(Simulation):
    """Of fixed members."""

    def __init__(self, parts: Any, seed: int, spec: LaunchSpec) -> None:
        self.seen = Seen(spec.observer)
        super().__init__(parts, seed, replace(spec, observer=self.seen))
        WORLDS.append(self)


class LateSimulation(ElasticSimulation):
    """Messages between a worker and the driver take a while."""

    def __init__(self, parts: Any, seed: int, spec: LaunchSpec) -> None:
        self.seen = Seen(spec.observer)
        super().__init__(parts, seed, replace(spec, observer=self.seen))
        self.random = random.Random(f"{seed} late")
        self.late_by = self.random.choice((0.0, *LATE))
        self.last_at: dict[tuple[SimProgram, str], float] = {}
        self.under_way: dict[tuple[SimProgram, str], deque[Callable[[], None]]] = {}
        WORLDS.append(self)

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


@contextmanager
def watched() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sim_engine, "ElasticSimulation", LateSimulation)
        patch.setattr(sim_engine, "Simulation", SeenSimulation)
        yield
    WORLDS.clear()


def train(schedule: Schedule) -> mh.Run:
    return mh.train(
        numbered_rows.task(ROWS, BATCH, epochs=schedule.epochs, order=lambda epoch: range(ROWS)),
        workers=schedule.workers,
        strategy=schedule.options,
        survive=schedule.survive,
        engine=sim_engine.Sim(seed=schedule.seed, **schedule.engine),
        servers=schedule.servers,
        threads_per_worker=1,
    )


def check(schedule: Schedule) -> None:
    with watched():
        try:
            run = train(schedule)
        except (mh.WorkerFailed, PeerLost) as error:
            (check_error if schedule.survive else check_error_of_staying)(schedule, error, WORLDS[-1].seen)
            return
        (check_run if schedule.survive else check_staying)(schedule, run, WORLDS[-1])


# -- what must be so ---------------------------------------------------------------------------------------------------


def check_error(schedule: Schedule, error: ManyhandsError, seen: Seen) -> None:
    """A run fails where nobody is left alone: all with whom it began are lost, left, or parted; or both copies are lost."""
    ended = sum(seen.faults[what] for what in ("kill", "restart", "leave", "cut"))
    if isinstance(error, ShardLost) and "has no copy left" in str(error):
        expect(seen.faults["kill"] >= 2, f"{error}, after {dict(seen.faults)}")
    elif "no worker is left" in str(error) or "0 workers are left" in str(error):
        expect(ended >= schedule.workers, f"{error}, after {dict(seen.faults)}")
    else:
        raise error


def check_error_of_staying(schedule: Schedule, error: ManyhandsError, seen: Seen) -> None:
    """It names one that was to die."""
    killed = re.findall(r"kill=(\w+)@", schedule.engine["faults"])
    if isinstance(error, mh.WorkerFailed):
        lost_at = re.search(r"as faults= asks for.*declared lost at ([\d.]+) s", str(error))
        expect(str(error.rank) in killed and lost_at and float(lost_at[1]) <= BOUND_S, f"it was not to die: {error}")
    else:
        shards = [name for name in killed if name.startswith("shard")]
        expect([name for name in shards if name in str(error).replace(" ", "")], f"who is lost? {error}")


@cache
def undisturbed(strategy: str, workers: int) -> Tensor:
    return train(Schedule(strategy, 0, workers, 1, None, {}, 0)).parameters


def check_staying(schedule: Schedule, run: mh.Run, world: SeenSimulation) -> None:
    expect(run.seconds <= BOUND_S, f"it took {run.seconds:.0f} s")
    expect(run.rows["total"] == sum(run.rows["workers"]) == ROWS, f"{run.rows} of {ROWS}")
    expect(run.rows["unused"] == 0 or "backups" in schedule.strategy, f"{run.rows}")
    expect(run.parameters.isfinite().all(), f"{run.parameters}")
    if schedule.strategy in STAYING:
        wanted = undisturbed(schedule.strategy, schedule.workers)
        expect(torch.equal(run.parameters, wanted), f"{run.parameters} instead of {wanted}")


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


# -- the search --------------------------------------------------------------------------------------------------------


def without_fence(shard: SimShard, worker: int, generation: int) -> tuple[int, int]:
    """What still comes of a lost worker enters."""
    state = shard.store._states[worker]
    sequence = state.sequence if state.generation == generation else 0
    return sequence, shard.store.pushed_in(worker, generation)


def orphans_left_out(ledger: SliceLedger, until: int, survivors: Any, plain: Any = SliceLedger.reassign) -> Any:
    """What a lost worker had of a round is nobody's."""
    made, orphaned = plain(ledger, until, survivors)
    return (ledger, []) if orphaned else (made, orphaned)


KINDS = (schedule_of, server_schedule_of, staying_schedule_of)


@pytest.mark.parametrize("draw", KINDS)
def test_some_schedules_keep_all_promises(draw: Callable[[int], Schedule]) -> None:
    keeps(check, map(draw, range(12)))


def test_what_the_search_has_found_stays_mended() -> None:
    """622: all lost before the first generation was no error. 733: one that waited for the next generation held up another
    at the server's gate, which nobody interrupts there."""
    keeps(check, map(schedule_of, (622, 733)))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("draw", KINDS)
@pytest.mark.parametrize("block", range(4))
def test_many_more_schedules_keep_all_promises(
    block: int, draw: Callable[[int], Schedule], pytestconfig: pytest.Config
) -> None:
    """--schedules=N: so many of each kind. 20,000 take more than an hour of a core."""
    each = int(pytestconfig.getoption("--schedules")) // 4
    keeps(check, map(draw, range(12 + each * block, 12 + each * (block + 1))))


@pytest.mark.parametrize(
    ("draw", "owner", "method", "wrong"),
    [
        (schedule_of, SimShard, "fence", without_fence),
        (server_schedule_of, SimShard, "fence", without_fence),
        (schedule_of, SliceLedger, "reassign", orphans_left_out),
        (staying_schedule_of, Simulation, "_ended", lambda simulation, program: None),  # nobody hears of a death
    ],
)
def test_the_search_finds_a_rule_that_is_left_out(draw: Any, owner: Any, method: str, wrong: Any) -> None:
    """Those of Membership are left out in test_membership_chaos.py, those of copies in test_replication_chaos.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, method, wrong)
        found = first_broken(check, map(draw, range(10_000)))
    check(found)
