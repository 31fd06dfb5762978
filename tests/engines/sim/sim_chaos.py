"""Schedules of what goes wrong, and the worlds that must keep their promises under each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from sim_world import meeting_of, servers_of

from manyhands.comm.reducing import naive_mean
from manyhands.data.leases import Lease, Leases, Segment
from manyhands.engines.sim.group import SimGroup
from manyhands.engines.sim.timeline import Timeline
from manyhands.errors import PeerLost
from manyhands.server.base import ServerSpec

NETWORK = "latency=10ms"
MOMENT_S = 0.02  # events happen at whole numbers of it
NOTICE_S = 0.5
SLACK_S = 30.0  # after the last thing that happened, whoever lives has ended: far more than the work takes, far less than a deadline

Event = tuple[str, int, int, int]
"""(what, who, when, for how long), times in moments."""


@dataclass(frozen=True)
class ServerSchedule:
    """What happens to a run of workers with a server."""

    seed: int = 0
    workers: int = 3
    shards: int = 1
    bound: int | None = 1
    rows: int = 6
    naps: tuple[int, ...] = ()  # moments of each tick, worker after worker
    fates: tuple[tuple[int, ...], ...] = ()  # of each message: how many moments late each copy is; () is lost
    events: tuple[Event, ...] = ()


@dataclass(frozen=True)
class GroupSchedule:
    """What happens to a run of workers with a group."""

    seed: int = 0
    workers: int = 3
    calls: tuple[str, ...] = ("mean",)
    naps: tuple[int, ...] = ()
    events: tuple[Event, ...] = ()


def repeated_by(check: Callable[[Any], None], schedule: Any) -> str:
    """The line that repeats a failure: paste it after `from sim_chaos import *`."""
    return f"{check.__name__}({schedule!r})"


def checked(check: Callable[[Any], None], schedule: Any) -> None:
    """Run a check; what it raises says how to repeat it."""
    try:
        check(schedule)
    except Exception as error:
        error.add_note(f"repeat with: {repeated_by(check, schedule)}")
        raise


# -- the server ------------------------------------------------------------------------------------------------------


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


class ServerWorld:
    """Workers lease rows and push each as a unit vector, once to each shard: the center says which are in, and how often."""

    def __init__(self, schedule: ServerSchedule) -> None:
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
        self.last_s = 0.0  # when the last thing happened from outside
        for event in schedule.events:
            self._plan(*event)

    def run(self) -> None:
        self.timeline.on_end = self._ended
        self.timeline.run()
        end = self.timeline.now
        assert end <= self.last_s + SLACK_S, f"it took until {end:g} s, and what happened was over at {self.last_s:g} s"
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
            self._nap(rank, tick)
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

    def _nap(self, rank: int, tick: int) -> None:
        naps = self.schedule.naps
        if naps:
            self.timeline.sleep(MOMENT_S * naps[(rank + self.schedule.workers * tick) % len(naps)])

    # -- what befalls ------------------------------------------------------------------------------------------------

    def _plan(self, what: str, who: int, when: int, long: int) -> None:
        self.last_s = max(self.last_s, MOMENT_S * (when + long) + NOTICE_S)
        self.timeline.at(MOMENT_S * when, partial(getattr(self, f"_{what}"), who, MOMENT_S * long))

    def _kill(self, who: int, seconds: float) -> None:
        rank = who % self.schedule.workers
        if not self.programs[rank].killed and not self.programs[rank].ended:
            self.programs[rank].kill()
            self.timeline.at(self.timeline.now + NOTICE_S, partial(self._lose, rank))

    def _lose(self, rank: int) -> None:
        self.lost.add(rank)
        self.servers.lose(rank)
        self.finished.pop(rank, None)
        self.begun.leave(rank)

    def _restart(self, who: int, seconds: float) -> None:
        rank = who % self.schedule.workers
        if not self.programs[rank].killed and not self.programs[rank].ended:
            self.programs[rank].kill()
            self.timeline.left += 1
            self.timeline.at(self.timeline.now + seconds, partial(self._again, rank))

    def _again(self, rank: int) -> None:
        self.timeline.left -= 1
        self.finished.pop(rank, None)
        self.servers.restart(rank)
        self.programs[rank] = self._start(rank, 1)

    def _pause(self, who: int, seconds: float) -> None:
        self.programs[who % self.schedule.workers].paused_until = self.timeline.now + seconds

    def _pause_shard(self, who: int, seconds: float) -> None:
        self.servers.shards[who % self.schedule.shards].pause(seconds)

    def _restart_shard(self, who: int, seconds: float) -> None:
        self.servers.restart_shard(who % self.schedule.shards, seconds)

    # -- what must be so ---------------------------------------------------------------------------------------------

    def _ended(self, program: Any) -> None:
        if isinstance(program.error, PeerLost):
            assert program.error.rank in self.lost, f"{program.error} is not lost"
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


def check_server(schedule: ServerSchedule) -> None:
    ServerWorld(schedule).run()


# -- the group -------------------------------------------------------------------------------------------------------


class GroupWorld:
    """Workers make the same collectives; each knows what all bring, and what must come of it."""

    def __init__(self, schedule: GroupSchedule) -> None:
        self.schedule, self.timeline = schedule, Timeline(schedule.seed)
        self.meeting = meeting_of(self.timeline, schedule.workers, NETWORK)
        self.results: dict[int, torch.Tensor] = {}  # by call: the first one's, and so everybody's
        self.lost_at: dict[int, float] = {}
        self.calm_s = 0.0  # when the last pause was over
        self.programs = [
            self.timeline.start(rank, partial(self._work, SimGroup(self.meeting, rank)))
            for rank in range(schedule.workers)
        ]
        for what, who, when, long in schedule.events:
            self.calm_s = max(self.calm_s, MOMENT_S * (when + long) + NOTICE_S)
            self.timeline.at(MOMENT_S * when, partial(getattr(self, f"_{what}"), who, MOMENT_S * long))

    def run(self) -> None:
        self.timeline.on_end = self._ended
        self.timeline.run()
        assert self.timeline.now <= self.calm_s + SLACK_S, f"it took until {self.timeline.now:g} s"
        for program in self.programs:
            whole = program.killed or program.error is not None or program.value == len(self.schedule.calls)
            assert whole, f"worker {program.name} ended after {program.value} calls"

    def _work(self, group: SimGroup) -> int:
        for index, call in enumerate(self.schedule.calls):
            naps = self.schedule.naps
            nap = MOMENT_S * naps[(group.rank + group.size * index) % len(naps)] if naps else 0.0
            result = getattr(self, f"_call_{call}")(group, index, nap)
            first = self.results.setdefault(index, result)
            assert torch.equal(first, result), f"after call {index} worker {group.rank} holds {result}, another {first}"
        return len(self.schedule.calls)

    def _all(self, index: int) -> list[torch.Tensor]:
        return [torch.tensor([float(index), 2.0**rank, 1.0 / (1 + rank)]) for rank in range(self.schedule.workers)]

    def _call_mean(self, group: SimGroup, index: int, nap: float) -> torch.Tensor:
        self.timeline.sleep(nap)
        return self._mean(group, index, 0.0)

    def _call_overlapped(self, group: SimGroup, index: int, nap: float) -> torch.Tensor:
        return self._mean(group, index, nap)

    def _mean(self, group: SimGroup, index: int, nap: float) -> torch.Tensor:
        values, weights = self._all(index), [float((rank + index) % 3) for rank in range(group.size)]
        mine = values[group.rank]
        handle = group.start_mean_(mine, weights[group.rank], 1 << group.rank)
        if nap:
            self.timeline.sleep(nap)
        total = handle.wait()
        assert (total.weight, total.bits) == (sum(weights), (1 << group.size) - 1)
        if not total.weight:
            return torch.zeros(3)
        assert torch.allclose(mine, naive_mean(self._all(index), weights)), f"{mine} is not the mean"
        return mine

    def _call_gather(self, group: SimGroup, index: int, nap: float) -> torch.Tensor:
        self.timeline.sleep(nap)
        rows = group.all_gather(self._all(index)[group.rank])
        assert torch.equal(rows, torch.stack(self._all(index)))
        return rows

    def _call_barrier(self, group: SimGroup, index: int, nap: float) -> torch.Tensor:
        self.timeline.sleep(nap)
        group.barrier()
        return torch.zeros(1)

    def _call_ring(self, group: SimGroup, index: int, nap: float) -> torch.Tensor:
        self.timeline.sleep(nap)
        right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        got = torch.zeros(3)
        group.send(self._all(index)[group.rank], right)
        group.receive_(got, left)
        assert torch.equal(got, self._all(index)[left]), f"worker {left} sent something else than {got}"
        return torch.zeros(1)

    def _kill(self, who: int, seconds: float) -> None:
        rank = who % self.schedule.workers
        if not self.programs[rank].killed and not self.programs[rank].ended:
            self.programs[rank].kill()
            self.timeline.at(self.timeline.now + NOTICE_S, partial(self._lose, rank))

    def _lose(self, rank: int) -> None:
        self.lost_at.setdefault(rank, self.timeline.now)
        self.meeting.lose(rank)

    def _pause(self, who: int, seconds: float) -> None:
        self.programs[who % self.schedule.workers].paused_until = self.timeline.now + seconds

    def _ended(self, program: Any) -> None:
        if isinstance(program.error, PeerLost):
            assert program.error.rank in self.lost_at, f"{program.error} is not lost"
        elif program.error is not None:
            raise program.error


def check_group(schedule: GroupSchedule) -> None:
    GroupWorld(schedule).run()


# -- what is searched ------------------------------------------------------------------------------------------------

_NAPS = st.lists(st.sampled_from([0, 0, 1, 2, 5, 25]), max_size=8).map(tuple)
_FATE = st.sampled_from([(0,), (0,), (0,), (), (0, 0), (0, 4), (3,), (15,), (0, 25), (12, 12)])


def _events(*whats: str) -> st.SearchStrategy[tuple[Event, ...]]:
    event = st.tuples(st.sampled_from(whats), st.integers(0, 3), st.integers(0, 60), st.integers(1, 30))
    return st.lists(event, max_size=5).map(tuple)


SERVER_SCHEDULES = st.builds(
    ServerSchedule,
    seed=st.integers(0, 99),
    workers=st.integers(1, 4),
    shards=st.integers(1, 2),
    bound=st.sampled_from([None, 0, 1, 2]),
    rows=st.integers(1, 12),
    naps=_NAPS,
    fates=st.lists(_FATE, max_size=60).map(tuple),
    events=_events("kill", "restart", "pause", "pause_shard", "restart_shard"),
)

GROUP_SCHEDULES = st.builds(
    GroupSchedule,
    seed=st.integers(0, 99),
    workers=st.integers(2, 5),
    calls=st.lists(st.sampled_from(["mean", "overlapped", "gather", "barrier", "ring"]), min_size=1, max_size=8).map(
        tuple
    ),
    naps=_NAPS,
    events=_events("kill", "pause"),
)
