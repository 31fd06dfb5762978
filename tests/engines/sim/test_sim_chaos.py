"""Searches schedules of delay, reorder, duplicate, drop, pauses, restarts and kills for one that breaks a promise.

A failure ends with the line that repeats it. Workers lease rows and push them to a simulated server, without a training around.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from sim_world import servers_of

from chaos import expect, first_broken, keeps
from manyhands.data.leases import Lease, Leases, Segment
from manyhands.engines.sim.shard import SimShard
from manyhands.engines.sim.timeline import Timeline
from manyhands.errors import PeerLost
from manyhands.server.base import ServerSpec
from manyhands.server.gate import Gate
from manyhands.server.merging import TickMerge
from manyhands.server.store import Store

NETWORK = "latency=10ms"
MOMENT_S = 0.02  # events happen at whole numbers of it
NOTICE_S = 0.5
SLACK_S = 30.0  # after the last thing that happened whoever lives has ended: far more than the work takes

Event = tuple[str, int, int, int]
"""(what, who, when, for how long), times in moments."""


@dataclass(frozen=True)
class Schedule:
    """What happens to a run of workers with a server."""

    seed: int = 0
    workers: int = 3
    shards: int = 1
    bound: int | None = 1
    rows: int = 6
    naps: tuple[int, ...] = ()  # moments of each tick, worker after worker
    fates: tuple[tuple[int, ...], ...] = ()  # of each message: how many moments late each copy is; () is lost
    events: tuple[Event, ...] = ()


_NAPS = (0, 0, 1, 2, 5, 25)
_FATES = ((0,), (0,), (0,), (), (0, 0), (0, 4), (3,), (15,), (0, 25), (12, 12))


def _some(draw: random.Random, most: int, of: Any) -> tuple[Any, ...]:
    return tuple(draw.choice(of) for _ in range(draw.randint(0, most)))


def _events(draw: random.Random, *whats: str) -> tuple[Event, ...]:
    number = draw.randint(0, 5)
    return tuple(
        (draw.choice(whats), draw.randint(0, 3), draw.randint(0, 60), draw.randint(1, 30)) for _ in range(number)
    )


def schedule_of(seed: int) -> Schedule:
    draw = random.Random(seed)
    return Schedule(
        seed=seed,
        workers=draw.randint(1, 4),
        shards=draw.randint(1, 2),
        bound=draw.choice((None, 0, 1, 2)),
        rows=draw.randint(1, 12),
        naps=_some(draw, 8, _NAPS),
        fates=_some(draw, draw.choice((0, 20, 60)), _FATES),
        events=_events(draw, "kill", "restart", "pause", "pause_shard", "restart_shard"),
    )


class _Fates:
    def __init__(self, fates: tuple[tuple[int, ...], ...]) -> None:
        self._fates = iter(fates)

    def copies(self) -> list[float]:
        return [late * MOMENT_S for late in next(self._fates, (0,))]


class _Begun:
    """All who live wait here until all have begun, once."""

    def __init__(self, timeline: Timeline, workers: int) -> None:
        self.timeline, self.missing, self.cells = timeline, set(range(workers)), []

    def come(self, rank: int) -> None:
        self.leave(rank)
        if self.missing:
            self.cells.append(self.timeline.cell())
            self.timeline.wait(self.cells[-1], "all to begin")

    def leave(self, rank: int) -> None:
        self.missing.discard(rank)
        if not self.missing:
            for cell in self.cells:
                cell.set(None)


class World:
    """Workers lease rows and push each as a unit vector, once to each shard: the center says which are in, and how often."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.timeline = schedule, Timeline(schedule.seed)
        spec = ServerSpec(rule="add", bound=schedule.bound)
        faults = f"drop=0.5,retry={10 * MOMENT_S}" if schedule.fates else ""
        self.servers = servers_of(self.timeline, spec, schedule.workers, schedule.shards, NETWORK, faults)
        if schedule.fates:
            self.servers._messages = _Fates(schedule.fates)
        self.leases, self.segment = Leases(), Segment(epoch=0, first=0, until=schedule.rows, parts=1, size=1)
        self.begun = _Begun(self.timeline, schedule.workers)
        self.finished: dict[int, list[int]] = {}  # of those who take part, by shard: counted before they are told
        self.taken: list[int] = []  # rows, as they were handed out
        self.acknowledged: set[int] = set()
        self.seen: dict[int, list[float]] = {}  # bound 0: what those who were there from the start pulled, by tick
        self.lost: set[int] = set()
        self.programs = [self._start(rank, 0) for rank in range(schedule.workers)]
        self.calm_s = 0.0  # when the last thing that happens from outside is over
        for what, who, when, long in schedule.events:
            self.calm_s = max(self.calm_s, MOMENT_S * (when + long) + NOTICE_S)
            self.timeline.at(MOMENT_S * when, partial(getattr(self, f"_{what}"), who, MOMENT_S * long))

    def run(self) -> None:
        self.timeline.on_end = self._ended
        self.timeline.run()
        expect(self.timeline.now <= self.calm_s + SLACK_S, f"until {self.timeline.now:g} s, after {self.calm_s:g} s")
        while self.timeline.advance():  # whose death nobody had heard of yet
            pass
        self._check_rows()

    # -- what workers do ---------------------------------------------------------------------------------------------

    def _start(self, rank: int, generation: int) -> Any:
        return self.timeline.start(rank, partial(self._work, rank, generation), at=self.timeline.now)

    def _work(self, rank: int, generation: int) -> None:
        client, shards, rows = self.servers.clients[rank], self.schedule.shards, self.schedule.rows
        client.initialize(torch.zeros(rows * shards, dtype=torch.float64))
        client.activate()
        self.finished[rank] = [store._gate.finished(rank) for store in self.servers.stores]
        self.begun.come(rank)
        center, own, tick = torch.zeros(rows * shards, dtype=torch.float64), [], 0
        while isinstance(lease := self.leases.take(0, self.segment), Lease):
            self.taken.append(lease.index)
            if naps := self.schedule.naps:
                self.timeline.sleep(MOMENT_S * naps[(rank + self.schedule.workers * tick) % len(naps)])
            before = center.clone()
            client.pull(center)
            self._check_pull(client, rank, generation, tick, before, center, own)
            update = torch.zeros(shards, rows, dtype=torch.float64)
            update[:, lease.index] = 1.0
            client.push(update.view(-1))
            self.acknowledged.add(lease.index)
            update.fill_(float("nan"))  # it is the caller's again
            own.append(lease.index)
            self.finished[rank] = [count + 1 for count in self.finished[rank]]
            self._check_gap()
            client.tick()
            tick += 1
        del self.finished[rank]
        client.deactivate()
        client.close()

    # -- what befalls ------------------------------------------------------------------------------------------------

    def _killed(self, who: int) -> int | None:
        """The worker that dies, unless it is dead."""
        program = self.programs[rank := who % self.schedule.workers]
        if program.killed or program.ended:
            return None
        program.kill()
        return rank

    def _kill(self, who: int, seconds: float) -> None:
        if (rank := self._killed(who)) is not None:
            self.timeline.at(self.timeline.now + NOTICE_S, partial(self._lose, rank))

    def _pause(self, who: int, seconds: float) -> None:
        self.programs[who % self.schedule.workers].paused_until = self.timeline.now + seconds

    def _lose(self, rank: int) -> None:
        self.lost.add(rank)
        self.servers.lose(rank)
        self.finished.pop(rank, None)
        self.begun.leave(rank)

    def _restart(self, who: int, seconds: float) -> None:
        if (rank := self._killed(who)) is not None:
            self.timeline.left += 1
            self.timeline.at(self.timeline.now + seconds, partial(self._again, rank))

    def _again(self, rank: int) -> None:
        self.timeline.left -= 1
        self.finished.pop(rank, None)
        self.servers.restart(rank)
        self.programs[rank] = self._start(rank, 1)

    def _pause_shard(self, who: int, seconds: float) -> None:
        self.servers.shards[who % self.schedule.shards].pause(seconds)

    def _restart_shard(self, who: int, seconds: float) -> None:
        self.servers.restart_shard(who % self.schedule.shards, seconds)

    # -- what must be so ---------------------------------------------------------------------------------------------

    def _ended(self, program: Any) -> None:
        if isinstance(program.error, PeerLost):
            expect(program.error.rank in self.lost, f"{program.error} is not lost")
        elif program.error is not None:
            raise program.error

    def _check_gap(self) -> None:
        bound = self.schedule.bound
        for shard in range(self.schedule.shards):
            counts = [counts[shard] for counts in self.finished.values()]
            gap = max(counts) - min(counts)
            assert bound is None or gap <= bound + 1, f"a gap of {gap} finished ticks at bound {bound}: {self.finished}"

    def _check_pull(
        self, client: Any, rank: int, generation: int, tick: int, before: Any, center: Any, own: list[int]
    ) -> None:
        (versions,) = client.drain_journal()["pulls"]
        parts = center.view(self.schedule.shards, -1)
        assert bool((center >= before).all()), "a later pull has less in it"
        assert bool((parts[:, own] == 1).all()), f"of its own rows {own}, worker {rank} sees {parts[:, own].tolist()}"
        if self.schedule.bound != 0:
            assert parts.sum(1).tolist() == versions, f"versions {versions} have {parts.sum(1).tolist()} pushes in them"
        elif generation == 0:
            seen = self.seen.setdefault(tick, center.tolist())
            assert seen == center.tolist(), f"in tick {tick}, worker {rank} has another center than others"

    def _check_rows(self) -> None:
        assert len(self.taken) == len(set(self.taken)), f"rows were handed out twice: {self.taken}"
        if not all(store.initialized for store in self.servers.stores):
            assert not self.acknowledged, "a push was acknowledged, and there is no center"
            return
        for store in self.servers.stores:
            counts = store.center.tolist()
            assert set(counts) <= {0.0, 1.0}, f"rows are in the center so often: {counts}"
            applied = {row for row, count in enumerate(counts) if count}
            assert self.acknowledged <= applied, f"acknowledged, and not in: {self.acknowledged - applied}"
            assert applied <= set(self.taken), f"in, and never handed out: {applied - set(self.taken)}"
        unheard = set(self.taken) - self.acknowledged  # reported lost: their workers died
        assert len(unheard) <= sum(what in ("kill", "restart") for what, *_ in self.schedule.events)
        if any(not program.killed and program.error is None for program in self.programs):
            assert len(self.taken) == self.schedule.rows, "somebody was left to take the rest"


def check(schedule: Schedule) -> None:
    World(schedule).run()


# -- the search ------------------------------------------------------------------------------------------------------


def test_some_schedules_keep_all_promises() -> None:
    """CASES 10, 11: each push in once, no row twice, the gap at most bound + 1, own updates seen, nobody waits for the dead."""
    keeps(check, map(schedule_of, range(100)))


@pytest.mark.nightly
def test_many_more_schedules_keep_all_promises() -> None:
    keeps(check, map(schedule_of, range(100, 8000)))


# -- the search finds planted bugs -----------------------------------------------------------------------------------


def forgets_the_sequence(original, store, worker, sequence, update, weight, bits):
    state = store._states[worker]
    if state.reply is not None and sequence == state.sequence:
        state.sequence, state.reply = sequence - 1, None
    return original(store, worker, sequence, update, weight, bits)


def off_by_one(original, gate, worker, slowest):
    return gate._bound is None or slowest >= gate._finished[worker] - gate._bound - 1


def waits_for_the_lost(original, store, worker):
    store._states[worker].lost = True


def forgets_what_is_held(original, policy, ticks, version):
    return original(policy, ticks, version)[:-1]


def handles_late_copies(original, shard, request):
    shard._newest[request.call.worker] = (-1, 0.0)
    original(shard, request)


def forgets_its_store(original, shard, back):
    shard._newest = [(-1, 0.0)] * len(shard._newest)
    shard._held.clear()
    original(shard, back)


PLANTED: dict[str, tuple[Any, str, Callable[..., Any], Any]] = {  # with what a search found, made as small as it goes
    "forgets the sequence": (
        *(Store, "push", forgets_the_sequence),
        Schedule(workers=1, bound=None, rows=2, events=(("restart", 0, 0, 2), ("restart_shard", 0, 9, 1))),
    ),
    "off by one": (Gate, "_may_go", off_by_one, Schedule(workers=2, bound=0, rows=3, naps=(0, 1))),
    "waits for the lost": (
        *(Store, "leave", waits_for_the_lost),
        Schedule(workers=4, bound=0, rows=1, events=(("kill", 0, 2, 1),)),
    ),
    "forgets what is held": (
        *(TickMerge, "take_complete", forgets_what_is_held),
        Schedule(workers=1, bound=0, rows=1),
    ),
    "handles late copies": (
        *(SimShard, "_handle", handles_late_copies),
        Schedule(workers=2, bound=0, rows=2, fates=(*[(0,)] * 19, (), (0, 0))),
    ),
    "forgets its store": (
        *(SimShard, "_be_back", forgets_its_store),
        Schedule(workers=2, bound=0, rows=2, events=(("kill", 0, 4, 1), ("restart_shard", 0, 6, 1))),
    ),
}


@contextmanager
def planted(bug: str) -> Iterator[None]:
    owner, name, broken, _ = PLANTED[bug]
    original = getattr(owner, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, lambda *arguments: broken(original, *arguments))
        yield


@pytest.mark.parametrize("bug", PLANTED)
def test_a_schedule_that_the_search_found_shows_the_bug_again(bug: str) -> None:
    """And the line that repeats it does."""
    found = PLANTED[bug][3]
    check(found)
    with planted(bug):
        with pytest.raises(Exception) as failure:
            keeps(check, [found])
        (line,) = failure.value.__notes__
        with pytest.raises(type(failure.value)):
            eval(line.removeprefix("repeat with: "))


@pytest.mark.nightly
@pytest.mark.parametrize("bug", PLANTED)
def test_the_search_finds_a_planted_bug(bug: str) -> None:
    with planted(bug):
        found = first_broken(check, map(schedule_of, range(8000)))
    check(found)


def test_the_same_schedule_gives_the_same_run() -> None:
    """The order in which rows are handed out shows all that happened before."""
    schedule = Schedule(seed=1, workers=4, bound=2, rows=12, fates=((0, 25), (), (3,)) * 10)
    runs = [World(schedule) for _ in range(2)]
    for world in runs:
        world.run()
    assert runs[0].timeline.now == runs[1].timeline.now
    assert [world.servers.stores[0].version for world in runs] == [12, 12]
    assert (runs[0].taken, runs[0].seen) == (runs[1].taken, runs[1].seen)
