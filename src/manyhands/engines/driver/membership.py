"""Who is a member of a run when, as a pure state machine: no clock, no process, no socket.

What happened goes in with its time; `decide(now)` gives what is to be done, each action once. The driver acts on it.

    forming ── all have requested ──> running ── a loss, a join, a leave, an accusation ──> gathering ──> running
    gathering ── fewer than min_workers ──> waiting ── others came ──> running
    running, gathering ── a member delivered the result ──> finishing
    any ── too many losses, no state left, waited too long ──> restarting or failed

1. A generation is formed when every live member of the last one has requested a place, and at least one worker has
   state: nobody starts anew at step 0.
2. A worker that has not requested is not lost. Only an exit, silence, or gathering for longer than timeout_s is a loss.
3. Before a generation is formed, lost workers are fenced: killed, or so long silent that they have ended themselves.
4. Requests of older generations are dropped. An Interrupt names its generation and is obeyed once.
5. Members leave when the driver has the result: if the first one dies before, the next delivers it.
6. A broken connection without a death is no loss: same members, new generation. If the same pair breaks again within
   `ACCUSED_S`, the most accused of the two leaves, on a tie the higher worker id.
7. An exception is a loss; the same type at the same line from a second worker is the program's own error, and fatal.
8. A worker that is lost `EARLY_LOSSES` times before its first step is not started again.
9. A run ends where `STALLED_GENERATIONS` generations of the same members in a row, over more than timeout_s, have made
   no step: what breaks them is nobody's loss.
10. Where so many workers hold a replica together (worker id // `replica`), a generation is formed of whole replicas. One that
    was in a generation and loses a worker is ended, and its workers are started anew: what the others hold is of no use alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from manyhands.engines.driver.run_monitor import START_S
from manyhands.engines.survive import Survive
from manyhands.events import Event
from manyhands.units import count, short

Cause = Literal["death", "hang", "silence", "host", "error", "slow", "memory", "link"]
"""Why a worker is lost. link: its connection to the same member broke twice within `ACCUSED_S`."""
RunPhase = Literal["forming", "running", "gathering", "waiting", "finishing", "restarting", "failed"]

ACCUSED_S = 60.0
"""A pair of members that loses its connection again within so long is parted: one of the two leaves."""
RECONNECT_S = 15.0
"""So long members of a new generation try to connect: a pair that fails twice is to be parted within `ACCUSED_S`."""
EARLY_LOSSES = 3
"""A worker lost so often in a row before its first step is not started again."""
STALLED_GENERATIONS = 3
"""After so many generations of the same members without a step, and timeout_s, no other is formed of them."""
MOST_COOLDOWNS = 64
"""The longest time before a lost host may join again, in `cooldown_s`."""

_WORDS = {
    "death": "its process ended",
    "hang": "no progress",
    "silence": "no sign of life",
    "host": "its host is gone",
    "error": "an exception",
    "slow": "slower than the others",
    "memory": "out of memory",
    "link": "its connections broke twice",
}


@dataclass(frozen=True)
class Form:
    """Make this generation of these workers; their ranks are their order. It answers all that wait for a place."""

    generation: int
    worker_ids: tuple[int, ...]


@dataclass(frozen=True)
class Interrupt:
    """These members of this generation are to request a place in the next one. A worker of another one ignores it."""

    generation: int
    worker_ids: tuple[int, ...]


@dataclass(frozen=True)
class StartWorker:
    worker_id: int
    host: str


@dataclass(frozen=True)
class StopWorker:
    """Kill its process, and report `gone`: it is lost and may still run, or nobody needs it."""

    worker_id: int


@dataclass(frozen=True)
class Release:
    """The answer to workers that wait for a place and get none: the run is over, or they leave."""

    worker_ids: tuple[int, ...]


@dataclass(frozen=True)
class RestartRun:
    """End all processes, and start the run again from its newest checkpoint, in the generation after this one."""

    message: str


@dataclass(frozen=True)
class FailRun:
    """End all processes, and the run with this error. worker_id, cause: of the first loss; None and "" without one."""

    message: str
    worker_id: int | None
    cause: str


@dataclass(frozen=True)
class Report:
    """What users are to read. kind: lost, back, joined, leaves, accused, slow, waiting, or left-out (rule 8). loss: of a lost
    one, its entry in `Membership.losses`."""

    kind: str
    message: str
    worker_id: int | None
    loss: dict[str, Any] | None = field(default=None, compare=False)

    def event(self, time_s: float) -> Event:
        """The event `change` of a run, at this time."""
        values: dict[str, Any] = {"kind": self.kind, "message": self.message, "worker_id": self.worker_id}
        if self.loss is None:
            return Event(type="change", time_s=time_s, values=values)
        values |= {"host": self.loss["host"], "cause": self.loss["cause"]}
        return Event(type="change", time_s=time_s, step=self.loss["step"], values=values)


Action = Form | Interrupt | StartWorker | StopWorker | Release | RestartRun | FailRun | Report


@dataclass(eq=False)
class _Worker:
    """A worker id and its newest process. live: it takes part, or may; lost, left: and may still run, until gone."""

    worker_id: int
    host: str
    state: Literal["live", "lost", "left", "gone"] = "live"
    arrival: Literal["", "back", "joined"] = ""  # what to report at its first step
    started_at: float | None = None
    generation: int = -1  # the newest one that this process was in
    waits: bool = False  # it has requested a place in the next generation
    blank: bool = True
    stepped: bool = False
    step: int = 0  # the newest that it committed, as far as the driver said
    leaving: bool = False
    released: bool = False
    ends_by: float | None = None  # when a process that is lost or left has certainly ended
    frees_room: bool = False  # once it is gone, another may be started on its host in its place
    early_losses: int = 0  # in a row, of processes that made no step
    straggles: bool = False  # it was named as slow


class Membership:
    """Members, requests, losses and deadlines of one run. Times are seconds of one clock of the caller's choice.

    workers: {worker id: host}, their processes are being started. generation: the first one to form; a restarted run
    goes on at last + 1, with `rules.max_restarts` less those that were made. Once a process was lost or gone, the
    caller passes on nothing of it any more: its worker id may be another process's.
    replica: how many workers hold one together: those of ids 0 to replica - 1, and so on.
    """

    def __init__(
        self,
        rules: Survive,
        workers: Mapping[int, str],
        now: float,
        *,
        timeout_s: float = 300.0,
        generation: int = 0,
        replica: int = 1,
    ) -> None:
        self.rules, self.timeout_s, self._replica = rules, timeout_s, replica
        self.phase: RunPhase = "forming"
        self.generation = -1
        self.losses: list[dict[str, Any]] = []
        self._next_generation = generation
        self._began = self._since = now  # _since: when the phase began, for its deadline
        self._workers = {worker_id: _Worker(worker_id, host) for worker_id, host in sorted(workers.items())}
        self._members = set(workers)  # who must request before the next Form; before the first: who is started with
        self._places = rules.max_workers or len(workers)
        self._room = dict.fromkeys(workers.values(), 0)  # of hosts that are there: how many more may be started
        self._host_losses: dict[str, int] = {}
        self._cooling: dict[str, tuple[float, int]] = {}  # until when a lost host may not join, and how many it offers
        self._formed: list[_Worker] = []  # the newest generation
        self._stalled, self._stalled_since = (
            0,
            now,
        )  # so many generations of the same members, in which nobody made a step
        self._blank_so_far = True  # all generations were formed of blank workers only, and nobody made a step
        self._interrupts = False  # members would go on by themselves: interrupt those that do not wait
        self._interrupted: set[int] = set()
        self._accusations: list[tuple[float, int, int, int]] = []  # (when, generation, by, of)
        self._to_part: list[set[int]] = []  # pairs that have lost their connection again
        self._parted_in = -1  # the generation in which an accusation last made one leave
        self._errors: dict[tuple[str, str], int] = {}  # (type, line): the first worker that raised it
        self._actions: list[Action] = []

    @property
    def members(self) -> tuple[int, ...]:
        """The newest generation's members that are left; before the first, the workers that it waits for."""
        return tuple(sorted(self._members))

    # -- what happened -----------------------------------------------------------------------------------------------

    def started(self, worker_id: int, now: float) -> None:
        """Its process is there."""
        self._workers[worker_id].started_at = now

    def requested(self, worker_id: int, generation: int, blank: bool, now: float) -> None:
        """A worker asks for a place in the generation after `generation`, -1 where it was in none; once or more often."""
        worker = self._workers[worker_id]
        if self._over or worker.state != "live" or generation != worker.generation:
            return  # rule 4: of an older generation, or of a process that is lost
        worker.waits, worker.blank = True, blank
        self._blank_so_far &= blank
        if self.phase == "finishing":
            self._release(worker)
        elif worker.leaving:
            self._leave(worker, now)
        elif worker_id in self._members:
            self._gather(now)  # it noticed a loss before the driver did
        elif worker in self._waiting():  # with all of its replica
            self._gather(now, interrupt=self.phase == "running")  # while others gather anyway, it is taken along

    def lost(
        self,
        worker_id: int,
        cause: Cause,
        now: float,
        *,
        place: tuple[str, int] | None = None,
        error: tuple[str, str] | None = None,
        detail: str = "",
    ) -> None:
        """A worker is lost. place: its phase and step, where known. error: (type, "file:line") of its exception.
        detail: how, for users, as "killed by signal 9"."""
        worker = self._workers[worker_id]
        if worker.state != "live":
            if cause == "death":
                self.gone(worker_id, now)
            elif worker.ends_by is None:
                worker.ends_by = now + self.rules.silence_s
            return
        counts = not (worker.leaving or self._over or self.phase == "finishing")
        worker.early_losses += counts and not worker.stepped
        stays_free = cause in ("host", "slow")  # there another would be no better off
        worker.frees_room = counts and self.rules.replace and not stays_free and worker.early_losses < EARLY_LOSSES
        worker.state = "lost"
        if cause == "death":
            self.gone(worker_id, now)
        else:  # rule 3
            worker.ends_by = now + self.rules.silence_s
            if not self._over:
                self._actions.append(StopWorker(worker_id))
        if worker_id in self._members:
            self._members.remove(worker_id)
            self._gather(now)  # its peers notice by themselves
        self._end_replica(worker, now)
        self._accusations = [entry for entry in self._accusations if worker_id not in entry[2:]]
        if counts:
            step = worker.step if place is None else place[1]
            loss = {"worker_id": worker_id, "host": worker.host, "cause": cause, "step": step}
            self.losses.append(loss | {"seconds": now - self._began})
            where = "" if place is None else f" during {place[0]} of step {place[1]}"
            how = f"worker {worker_id} on {worker.host} lost ({detail or _WORDS[cause]}){where}"
            self._judge_loss(worker, cause, how, error)

    def refused(self, worker_id: int, now: float, why: str) -> None:
        """It must not take part, whatever process it is: no loss, and it is not started again."""
        worker = self._workers[worker_id]
        if worker.state != "live" or self._over:
            return
        worker.state, worker.early_losses, worker.ends_by = "left", EARLY_LOSSES, now + self.rules.silence_s
        self._actions.append(StopWorker(worker_id))
        if worker_id in self._members:
            self._members.remove(worker_id)
            self._gather(now)
        self._end_replica(worker, now)
        self._report("left-out", f"worker {worker_id} on {worker.host} cannot take part: {why}", worker_id)

    def gone(self, worker_id: int, now: float) -> None:
        """Its process is certainly not there any more. Of one that is neither lost nor leaves, this is a death."""
        worker = self._workers[worker_id]
        if worker.state == "live":
            self.lost(worker_id, "death", now)
        elif worker.state != "gone":
            worker.state = "gone"
            if worker.frees_room and worker.host in self._room:
                self._room[worker.host] += 1

    def finished(self, worker_id: int, now: float) -> None:
        """It delivered the run's result. Rule 5: nobody needs what the others have any more."""
        if self._over or self.phase == "finishing" or worker_id not in self._members:
            return
        self.phase = "finishing"
        for member in sorted(self._members):
            self._arrived(self._workers[member])  # its first step may be too new to be known
        waiting = self._waiting()
        self._release(*waiting)
        for worker in self._workers.values():
            if worker.state == "live" and worker.generation < 0 and worker not in waiting:
                self._actions.append(StopWorker(worker.worker_id))

    def host_joined(self, host: str, count: int, now: float) -> None:
        """So many workers may be started on a host, once its cooldown is over. Those without a place are spares."""
        until, offered = self._cooling.get(host, (now, 0))
        self._cooling[host] = until, offered + count

    def host_lost(self, host: str, now: float) -> None:
        """All workers there are lost, unless they were leaving; then it may join again at once."""
        there = [worker for worker in self._workers.values() if worker.host == host]
        self._room.pop(host, None)
        self._cooling.pop(host, None)
        if not there or not all(worker.leaving for worker in there):
            times = self._host_losses[host] = self._host_losses.get(host, 0) + 1
            self._cooling[host] = now + self.rules.cooldown_s * min(2 ** (times - 1), MOST_COOLDOWNS), 0
        for worker in there:
            worker.frees_room = False
            if worker.state != "gone":
                self.lost(worker.worker_id, "host", now)

    def host_left(self, host: str, now: float) -> None:
        """Its workers leave in order, and no other is started there; it may join again at once."""
        self._room.pop(host, None)
        self._cooling.pop(host, None)
        there = [worker.worker_id for worker in self._workers.values() if worker.host == host]
        self.leave_announced(there, now)

    def leave_announced(self, worker_ids: Iterable[int], now: float) -> None:
        """They end soon, in order: no losses. Members leave with the next generation, which the others form."""
        for worker_id in worker_ids:
            worker = self._workers[worker_id]
            if worker.state != "live" or worker.leaving or self._over or self.phase == "finishing":
                continue
            worker.leaving = True
            self._report("leaves", f"worker {worker_id} on {worker.host} leaves, which is no loss", worker_id)
            if worker.waits or worker.generation < 0:
                self._leave(worker, now)
            else:
                self._gather(now, interrupt=True)

    def accused(self, by: int, worker_id: int, now: float, generation: int | None = None) -> None:
        """A member lost its connection to another in this generation (None: the newest), and neither is dead. Rule 6:
        same members, new generation."""
        generation = self.generation if generation is None else generation
        pair = {by, worker_id}
        if self._over or self.phase in ("finishing", "forming") or len(pair) < 2 or not pair <= self._members:
            return
        recent = [entry for entry in self._accusations if now - entry[0] <= ACCUSED_S]
        broke_in = {entry[1] for entry in recent if {entry[2], entry[3]} == pair}
        self._accusations = [*recent, (now, generation, by, worker_id)]
        if generation == self.generation:  # else they are connected again
            self._gather(now, interrupt=True)
        if generation not in broke_in:
            message = f"worker {by} lost its connection to worker {worker_id}: all connect again"
            self._report("accused", message, worker_id)
        if broke_in - {generation}:
            self._to_part.append(pair)

    def stepped(self, worker_id: int, now: float, step: int | None = None) -> None:
        """It committed a step."""
        worker = self._workers[worker_id]
        if worker.state != "live":
            return
        self._blank_so_far = False
        worker.stepped, worker.early_losses = True, 0
        if step is None or step > worker.step:
            self._stalled = 0
        worker.step = worker.step if step is None else step
        self._arrived(worker, "" if step is None else f" from step {step}")

    def _arrived(self, worker: _Worker, since: str = "") -> None:
        """Report, once, that a worker came while the run went on."""
        if worker.arrival:
            has = "is back" if worker.arrival == "back" else f"on {worker.host} has joined"
            self._report(
                worker.arrival, f"worker {worker.worker_id} {has}: {self._of_places()}{since}", worker.worker_id
            )
            worker.arrival = ""

    def spares(self, worker_id: int, factor: float) -> bool:
        """Whether a member that is so many times slower than the others is to leave, for the caller to have it `lost`:
        as `rules.slow` says, and where that does not end the run, nor has it wait for others."""
        rules = self.rules
        if self.phase != "running" or rules.slow is None or factor < rules.slow or self._workers[worker_id].leaving:
            return False
        budget = rules.max_losses == "any" or len(self.losses) < rules.max_losses
        return budget and len(self._members) - self._replica >= max(self._replica, rules.min_workers)

    def straggles(self, worker_id: int, how: str) -> None:
        """A member is much slower than the others and stays: its process is named once."""
        worker = self._workers[worker_id]
        if worker.state == "live" and not (worker.straggles or self._over or self.phase == "finishing"):
            worker.straggles = True
            self._report("slow", f"worker {worker_id} on {worker.host} {how}", worker_id)

    # -- what to do --------------------------------------------------------------------------------------------------

    def decide(self, now: float) -> list[Action]:
        """What is to be done by now, in this order. Without news, nothing."""
        if not self._over and self.phase != "finishing":
            self._part(now)
            self._expire(now)
        if not self._over and self.phase != "finishing":
            self._interrupt()
            self._form(now)
        if not self._over and self.phase != "finishing":
            self._fill_places()
        actions, self._actions = self._actions, []
        return actions

    def next_deadline(self) -> float | None:
        """When `decide` is to be called though nothing happens; None: never."""
        if self._over or self.phase == "finishing":
            return None
        times = [one.ends_by for one in self._workers.values() if one.state != "gone" and one.ends_by is not None]
        times += [until for until, offered in self._cooling.values() if offered]
        if self.phase in ("forming", "gathering"):
            times += [self._must_request_by(worker) for worker in self._missing()]
        earliest = min([*times, self._waits_until()])
        return earliest if earliest < math.inf else None

    def _part(self, now: float) -> None:
        """Rule 6, by all accusations that have come by now: at most one leaves a generation, whoever else it took along."""
        pairs, self._to_part = self._to_part, []
        for pair in pairs:
            if pair <= self._members and self._parted_in < self.generation:
                self._parted_in = self.generation
                accusations = [entry[3] for entry in self._accusations]
                self.lost(max(pair, key=lambda one: (accusations.count(one), one)), "link", now)

    def _expire(self, now: float) -> None:
        """What happens because time has passed."""
        for worker in self._workers.values():
            if worker.state != "gone" and worker.ends_by is not None and now >= worker.ends_by:
                self.gone(worker.worker_id, now)  # rule 3: it has ended itself
        for host, (until, offered) in list(self._cooling.items()):
            if offered and now >= until:
                del self._cooling[host]
                self._room[host] = self._room.get(host, 0) + offered
        if self.phase in ("forming", "gathering"):
            for worker in self._missing():  # rule 2: not before
                if now >= self._must_request_by(worker):
                    self.lost(worker.worker_id, "hang", now)
        if now >= self._waits_until():
            left = count(len(self._waiting()), "worker is", "workers are")
            within = f"none joined within {short(self.rules.wait_s)} s"
            self._end(f"{left} left, min_workers is {self.rules.min_workers}, {within}")

    def _fill_places(self) -> None:
        """Start workers where there is room until all places are taken: lost ones at home, then elsewhere, then new ones."""
        while sum(worker.state != "gone" for worker in self._workers.values()) < self._places:
            rooms = {host: room for host, room in self._room.items() if room}
            if not rooms:
                return
            free = [one for one in self._workers.values() if one.state == "gone" and one.early_losses < EARLY_LOSSES]
            free.sort(key=lambda one: (one.host not in rooms, one.worker_id))
            roomy = max(rooms, key=lambda host: rooms[host])
            if free:
                old = free[0]
                host = old.host if old.host in rooms else roomy
                new = _Worker(old.worker_id, host, arrival="back", early_losses=old.early_losses)
            else:
                new = _Worker(max(self._workers) + 1, roomy, arrival="joined")
            self._room[new.host] -= 1
            self._workers[new.worker_id] = new
            self._actions.append(StartWorker(new.worker_id, new.host))

    def _interrupt(self) -> None:
        """Once a generation, each member that would go on: rule 4."""
        if not self._interrupts or self.generation < 0:
            return
        to = tuple(w.worker_id for w in self._missing() if w.worker_id not in self._interrupted)
        if to:
            self._interrupted.update(to)
            self._actions.append(Interrupt(self.generation, to))

    def _form(self, now: float) -> None:
        """Rule 1: all live members have requested, and one has state. Rule 3: nobody lost can still take part."""
        if self.phase == "running" or self._missing() or self._unfenced():
            return
        waiting = self._waiting()
        if not self._stalled or waiting != self._formed:
            self._stalled, self._stalled_since = 0, now
        if not self._may_form_of(waiting):
            who = "worker" if self._replica == 1 else f"whole replica of {self._replica} workers"
            self._end(f"no {who} is left that has the model's state")
        elif self._stalled >= STALLED_GENERATIONS and now - self._stalled_since > self.timeout_s:
            within = f"{self._stalled} times in {short(now - self._stalled_since)} s"
            self._end(f"{count(len(waiting), 'worker')} formed a group {within} and made no step, and nobody was lost")
        elif len(waiting) < self.rules.min_workers:
            if self.phase != "waiting":
                self.phase, self._since = "waiting", now
                left = count(len(waiting), "worker is", "workers are")
                others = f"waiting up to {short(self.rules.wait_s)} s for others"
                self._report("waiting", f"{left} left, min_workers is {self.rules.min_workers}: {others}", None)
        else:
            self._blank_so_far &= all(worker.blank for worker in waiting)
            self.generation, self._next_generation = self._next_generation, self._next_generation + 1
            self.phase, self._since = "running", now
            self._formed, self._stalled = waiting, self._stalled + 1
            self._members = {worker.worker_id for worker in waiting}
            self._interrupts, self._interrupted = False, set()
            for worker in waiting:
                worker.generation, worker.waits = self.generation, False
            self._actions.append(Form(self.generation, self.members))

    def _may_form_of(self, waiting: list[_Worker]) -> bool:
        """Whether nobody starts anew at step 0 though steps were made.

        While there were only blank workers, a member that is still blank proves that none was: no first collective
        of a generation was complete, or all its members would have what it agreed on.
        """
        if self.generation < 0 or not all(worker.blank for worker in waiting):
            return True
        return self._blank_so_far and any(worker.generation == self.generation for worker in waiting)

    # -- parts of it -------------------------------------------------------------------------------------------------

    @property
    def _over(self) -> bool:
        return self.phase in ("restarting", "failed")

    def _missing(self) -> list[_Worker]:
        """Live members that have not requested."""
        return [self._workers[worker_id] for worker_id in self.members if not self._workers[worker_id].waits]

    def _waiting(self) -> list[_Worker]:
        """Who would be in the next generation, in order: rule 10."""
        ready = [worker for worker in self._workers.values() if worker.state == "live" and worker.waits]
        there = Counter(worker.worker_id // self._replica for worker in ready)
        whole = [worker for worker in ready if there[worker.worker_id // self._replica] == self._replica]
        return sorted(whole, key=lambda worker: worker.worker_id)

    def _unfenced(self) -> bool:
        """Whether a lost worker's process may still run. One that left has requested: it is out of its group."""
        return any(worker.state == "lost" for worker in self._workers.values())

    def _must_request_by(self, worker: _Worker) -> float:
        """A first generation waits for processes that load torch, see run_monitor.py."""
        if worker.started_at is None:
            return self._since + max(self.timeout_s, START_S)
        return max(self._since, worker.started_at) + self.timeout_s

    def _waits_until(self) -> float:
        """When the wait for more workers is over."""
        too_few = self.phase == "waiting" and len(self._waiting()) < self.rules.min_workers
        return self._since + self.rules.wait_s if too_few else math.inf

    def _gather(self, now: float, interrupt: bool = False) -> None:
        self._interrupts |= interrupt
        if self.phase == "running":
            self.phase, self._since = "gathering", now

    def _end_replica(self, lost: _Worker, now: float) -> None:
        """Rule 10: a worker is lost or leaves. No loss of the others of its replica."""
        if self._over or self.phase == "finishing":
            return
        for worker in self._workers.values():
            same = worker.worker_id // self._replica == lost.worker_id // self._replica
            if same and worker is not lost and worker.state == "live" and worker.generation >= 0:
                worker.state, worker.ends_by = "lost", now + self.rules.silence_s
                worker.frees_room = self.rules.replace and not worker.leaving
                self._members.discard(worker.worker_id)
                self._actions.append(StopWorker(worker.worker_id))

    def _leave(self, worker: _Worker, now: float) -> None:
        """In order: it waits for a place and gets none, or it never was a member."""
        worker.state = "left"
        self._members.discard(worker.worker_id)
        self._end_replica(worker, now)
        if worker.waits:
            self._release(worker)
        else:
            self._actions.append(StopWorker(worker.worker_id))

    def _release(self, *workers: _Worker) -> None:
        new = [worker for worker in workers if not worker.released]
        for worker in new:
            worker.released = True
        if new:
            self._actions.append(Release(tuple(worker.worker_id for worker in new)))

    def _judge_loss(self, worker: _Worker, cause: Cause, how: str, error: tuple[str, str] | None) -> None:
        """Rule 7 and the budget: go on, or not."""
        worker_id, number, most = worker.worker_id, len(self.losses), self.rules.max_losses
        if cause == "error" and error is not None:
            if error in self._errors:
                first = self._errors[error]
                who = f"worker {first}, then worker {worker_id}" if first != worker_id else f"worker {first}, twice,"
                message = f"{who} raised the same {error[0]} at {error[1]}: it follows the rows, not the worker"
                self._fail(message, first, cause)
                return
            self._errors[error] = worker_id
        if most != "any" and number > most:
            cause_id, cause = self.losses[0]["worker_id"], self.losses[0]["cause"]
            root = f", the first was worker {cause_id} ({_WORDS[cause]})" if number > 1 else ""
            self._end(f"{how}: loss {number}, and max_losses is {most}{root}")
            return
        budget = f"loss {number}" if most == "any" else f"loss {number} of {most}"
        message = f"{how}: continuing with {self._of_places()}, {budget}"
        self._actions.append(Report("lost", message, worker_id, self.losses[-1]))
        if worker.early_losses == EARLY_LOSSES and self.rules.replace:
            message = f"worker {worker_id} was lost {EARLY_LOSSES} times before its first step: it is not started again"
            self._report("left-out", message, worker_id)

    def _end(self, message: str) -> None:
        """The run cannot go on; it starts again if it may."""
        if self.rules.max_restarts:
            self.phase = "restarting"
            self._actions.append(RestartRun(message))
        else:
            worker_id, cause = (self.losses[0]["worker_id"], self.losses[0]["cause"]) if self.losses else (None, "")
            self._fail(message, worker_id, cause)

    def _fail(self, message: str, worker_id: int | None, cause: str) -> None:
        self.phase = "failed"
        self._actions.append(FailRun(message, worker_id, cause))

    def _report(self, kind: str, message: str, worker_id: int | None) -> None:
        self._actions.append(Report(kind, message, worker_id))

    def _of_places(self) -> str:
        return f"{len(self._members)} of {count(self._places, 'worker')}"
