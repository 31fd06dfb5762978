"""A simulated run that goes on when workers are lost: in virtual time, by the same Membership as real ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from typing_extensions import override

from manyhands.comm.solo import SoloGroup
from manyhands.engines.base import LaunchSpec
from manyhands.engines.driver.membership import (
    RECONNECT_S,
    Action,
    Cause,
    FailRun,
    Form,
    Interrupt,
    Membership,
    Release,
    Report,
    RestartRun,
    StartWorker,
    StopWorker,
)
from manyhands.engines.driver.run_monitor import STEPPING
from manyhands.engines.driver.shard_copies import pushes_since
from manyhands.engines.driver.stragglers import NAMED_AT, Straggler, Stragglers
from manyhands.engines.faults import ORDERLY, Fault, Faults
from manyhands.engines.sim.compute import Compute
from manyhands.engines.sim.costs import Costs
from manyhands.engines.sim.driver_client import SimDriverClient
from manyhands.engines.sim.group import SimGroup
from manyhands.engines.sim.network import SimNetworkSpec
from manyhands.engines.sim.rendezvous import SimRendezvous
from manyhands.engines.sim.simulation import Simulation
from manyhands.engines.sim.timeline import Due, Future, Killed, SimProgram
from manyhands.errors import BadInput, ManyhandsError, NotFinite, Preempted, WorkerFailed, users_line
from manyhands.events import Event
from manyhands.server.client import ShardLost
from manyhands.worker import FormedGroup, LastPushes, Mesh


class ElasticSimulation(Simulation):
    """One launch. A worker's id is its node in the network. What the driver decides takes no time."""

    def __init__(self, parts: tuple[SimNetworkSpec, Compute, Faults], seed: int, spec: LaunchSpec) -> None:
        super().__init__(parts, seed, spec)
        assert spec.survive is not None
        self._survive = spec.survive
        workers = {rank: self._host(rank) for rank in range(spec.workers)}
        self.membership = Membership(spec.survive, workers, 0.0, timeout_s=math.inf, generation=spec.generation)
        self._result: Any = None
        self._groups: dict[int, SimRendezvous] = {}  # by worker id, of the newest generation that it is in
        self._waiting: dict[int, Future[FormedGroup | None]] = {}  # by worker id
        self._stopped: list[SimProgram] = []  # of which Membership knows already
        self.lease_server.waits = self._decide_soon  # members may be about to change
        self._pushes_of_lost: list[tuple[int, int, LastPushes]] = []
        """(the generation in which it was lost, worker id, what the server has of it), oldest first."""
        self._back_s: dict[int, float] = {}  # worker id -> seconds until its next process, as `restart` says
        self._stragglers = Stragglers()
        self._straggler: Straggler | None = None  # that was found, and not acted on
        self._silent_since: dict[SimProgram, float] = {}  # that was paused
        self._decides = False  # at this very time
        self._next: Due | None = None  # when to decide though nothing happens

    def _host(self, worker_id: int) -> str:
        return f"host{self.wires.host_of(worker_id)}"

    @override
    def _results(self) -> list[Any]:
        if self.membership.phase != "finishing":  # all were lost before the first generation, and nobody else comes
            raise self._given_up("no worker is left that has the model's state", None)
        return [self._result, *[None] * (self.spec.workers - 1)]

    # -- workers -----------------------------------------------------------------------------------------------------

    @override
    def _start(self, rank: int, generation: int = 0, at: float = 0.0) -> None:
        super()._start(rank, generation, at)
        self.drivers[rank].emitted = self._judge_pace
        self.drivers[rank].begun = self._begun
        self.drivers[rank].lost_pushes = self._lost_pushes
        self.membership.started(rank, self.timeline.now)
        lifetime = self.faults.lifetime(self.seed + self.spec.generation, rank, self.processes[rank])
        if lifetime < math.inf:
            self.timeline.at(at + lifetime, partial(self._die, self.programs[rank]))

    def _die(self, victim: SimProgram) -> None:
        """By `mtbf`."""
        if not victim.ended and self.membership.phase != "finishing":
            values = {"fault": "mtbf"}
            self.spec.observer.event(Event(type="fault", time_s=self.timeline.now, rank=victim.name, values=values))
            victim.throw()

    @override
    def _members(self, rank: int, driver: SimDriverClient, generation: int) -> dict[str, Any]:
        own, known = SoloGroup(), -1

        def form(blank: bool, lost: int | None) -> FormedGroup | None:
            nonlocal known
            cell: Future[FormedGroup | None] = self.timeline.cell()
            self._waiting[rank] = cell
            is_parted = rank in self._groups and self._groups[rank].is_parted
            message = partial(self._requested, rank, known, blank, lost if is_parted else None)
            self._to_driver(self.timeline.running, message)
            formed = self.timeline.wait(cell, "a place in the next generation")
            if formed is not None:
                known = formed.generation
                if driver.injector is not None:
                    driver.injector.watch(formed.group)
            return formed

        rows = rank % self.spec.workers, self.spec.workers
        mesh = Mesh(world=own, data=own, rows=rows)
        return {"group": own, "mesh": mesh, "form": form, "generation": -1, "worker_id": rank}

    def _requested(self, worker_id: int, generation: int, blank: bool, cut_off: int | None) -> None:
        """cut_off: the member whose connection broke, while nobody is dead."""
        self.membership.requested(worker_id, generation, blank, self.timeline.now)
        if cut_off is not None:
            self.membership.accused(worker_id, cut_off, self.timeline.now, generation)
        self._decide_soon()

    def _to_driver(self, program: SimProgram, message: Callable[[], None]) -> None:
        """A worker's message arrives, in order: at once. Nothing of a process in whose place another one is."""
        if self.programs[program.name] is program:
            message()

    def _to_worker(self, program: SimProgram, message: Callable[[], None]) -> None:
        """A message of the driver's arrives, in order: at once."""
        message()

    @override
    def _ended(self, program: SimProgram) -> None:
        worker_id, now = program.name, self.timeline.now
        if self.programs[worker_id] is not program:  # another has taken its place
            return
        if program in self._stopped:
            self._take_back(worker_id)
            self.membership.gone(worker_id, now)
        elif program.error is not None:
            self._failed(worker_id, program.error)
        elif program.killed:
            self.timeline.left += 1  # nobody may be left; then the notice of it is still to come
            self.timeline.at(now + self.faults.notice_s, partial(self._notice, program))
        else:
            if self.membership.phase != "finishing" and worker_id == self.membership.members[0]:
                self._result = program.value
                self.membership.finished(worker_id, now)
            self.membership.gone(worker_id, now)
        self._decide_soon()

    def _failed(self, worker_id: int, error: BaseException) -> None:
        """An exception is a loss, unless no other worker would do better."""
        if not isinstance(error, ManyhandsError) or isinstance(error, BadInput | NotFinite | Preempted):
            raise error
        cause = error.__cause__ or error
        name = type(cause).__name__
        where = (name, str(users_line(cause) or ""))
        self._lose(worker_id, "memory" if isinstance(cause, MemoryError) else "error", where, f"raised {name}")

    def _notice(self, program: SimProgram) -> None:
        """The driver, and whoever is in a group with it, notices a death."""
        self.timeline.left -= 1
        if self.programs[program.name] is program:
            self._lose(program.name, "death", None, "was killed")
            self._decide()

    def _lose(self, worker_id: int, cause: Cause, error: tuple[str, str] | None, detail: str) -> None:
        driver, now = self.drivers[worker_id], self.timeline.now
        place = driver.phase, driver.step
        group = self._groups.pop(worker_id, None)
        if group is not None:
            group.lose(worker_id)
        self._take_back(worker_id)
        self.membership.lost(worker_id, cause, now, place=place, error=error, detail=detail)
        self.membership.gone(worker_id, now)

    def _take_back(self, worker_id: int) -> None:
        """It is lost, or leaves: the server refuses what still comes of its process, and the slices of which it has nothing
        are leased again."""
        if self.membership.phase == "finishing":
            return
        had_slices = self.lease_server.lose(worker_id)
        if self.servers is not None:
            self.servers.fence(worker_id, partial(self._closed, worker_id, self.membership.generation, had_slices))

    def _closed(self, worker_id: int, generation: int, had_slices: bool, pushes: LastPushes) -> None:
        """Nothing of this process enters any more. generation: in which it was lost."""
        self._pushes_of_lost.append((generation, worker_id, pushes))
        if had_slices:
            self.lease_server.recover(worker_id, pushes.numbers)

    def _lost_pushes(self, generation: int) -> dict[int, LastPushes]:
        """What `DriverClient.pushes_of_lost` answers."""
        assert self.servers is not None
        self.servers.wait_for_fences()
        return pushes_since(generation, self._pushes_of_lost)

    def _judge_pace(self, event: Event) -> None:
        if event.type == "step" and event.rank is not None:
            self._stragglers.step(event.rank, event.generation, event.values)
            self._straggler = self._stragglers.judge(self.membership.members) or self._straggler
            if self._straggler is not None:
                self._decide_soon()  # outside of its turn

    # -- deciding ----------------------------------------------------------------------------------------------------

    def _decide_soon(self) -> None:
        """At this very time, outside of any worker's turn; once for all that happens before."""
        if not self._decides:
            self._decides = True
            self.timeline.at(self.timeline.now, self._decide)

    def _decide(self) -> None:
        self._decides = False
        for worker_id in self.membership.members:
            driver = self.drivers[worker_id]
            if driver.phase in STEPPING and driver.step > 0:
                self.membership.stepped(worker_id, self.timeline.now, driver.step)
        if self._straggler is not None:
            found, self._straggler = self._straggler, None
            if self.membership.spares(found.worker_id, found.factor):
                self._lose(found.worker_id, "slow", None, f"takes {found}")
            elif found.factor >= NAMED_AT:
                self.membership.straggles(found.worker_id, f"takes {found}")
        if self.membership.phase == "gathering":
            for worker_id in self.membership.members:
                message = partial(setattr, self.drivers[worker_id], "broke", self.membership.generation)
                self._to_worker(self.programs[worker_id], message)
            for worker_id in self.lease_server.leases.send_away():
                message = partial(self.lease_server.send_away, worker_id)
                self._to_worker(self.programs[worker_id], message)
        for action in self.membership.decide(self.timeline.now):
            self._act(action)
        if self._next is not None:
            self._next.cancel()
        deadline = self.membership.next_deadline()
        if deadline is not None and self.timeline.left:
            self._next = self.timeline.at(max(deadline, self.timeline.now), self._decide)

    def _act(self, action: Action) -> None:
        now = self.timeline.now
        match action:
            case Form(generation, worker_ids):
                rendezvous = self._connect(worker_ids)
                for rank, worker_id in enumerate(worker_ids):
                    self._groups[worker_id] = rendezvous
                    group = SimGroup(rendezvous, rank, self.compute)
                    formed = FormedGroup(generation=generation, worker_ids=worker_ids, group=group)
                    self._answer(worker_id, formed)
            case Interrupt(generation, worker_ids):
                for worker_id in worker_ids:
                    message = partial(setattr, self.drivers[worker_id], "interrupt", generation)
                    self._to_worker(self.programs[worker_id], message)
            case Release(worker_ids):
                for worker_id in worker_ids:
                    self._take_back(worker_id)  # before the others can come to an epoch's end
                    self._answer(worker_id, None)
            case StartWorker(worker_id, _):
                self._start(worker_id, at=now + self._back_s.pop(worker_id, self.faults.back_s))
            case StopWorker(worker_id):
                if not self.programs[worker_id].ended:
                    self._stopped.append(self.programs[worker_id])
                    self.programs[worker_id].kill()
            case Report():
                self.spec.observer.event(action.event(now))
            case FailRun(message, worker_id, _):
                error = self._given_up(message, worker_id)
                error.final = True
                raise error
            case RestartRun(message):
                raise self._given_up(message, None)

    def _answer(self, worker_id: int, formed: FormedGroup | None) -> None:
        self._to_worker(self.programs[worker_id], partial(self._waiting.pop(worker_id).set, formed))

    def _connect(self, worker_ids: Sequence[int]) -> SimRendezvous:
        """Of a new generation. Where a host is cut off its members try for so long, and find each other gone."""
        now, size = self.timeline.now, len(worker_ids)
        hosts = {self.wires.host_of(worker_id) for worker_id in worker_ids}
        costs, given_up_at = Costs(self.wires, size, worker_ids), now + RECONNECT_S
        begins_at = min(self.wires.passes_at(hosts), given_up_at)
        rendezvous = SimRendezvous(
            self.timeline, costs, self.wires, size, self.spec.timeout_s, worker_ids, begins_at=begins_at
        )
        for host in sorted(hosts):
            if self.wires.cut_until.get(host, 0.0) > given_up_at:
                self.timeline.at(given_up_at, partial(rendezvous.part, host))
        return rendezvous

    def _given_up(self, message: str, worker_id: int | None) -> WorkerFailed:
        rank = -1 if worker_id is None else worker_id
        driver = self.drivers.get(rank)
        phase, step = ("", 0) if driver is None else (driver.phase, driver.step)
        return WorkerFailed(message, rank=rank, host=self._host(max(rank, 0)), phase=phase, step=step)

    # -- faults ------------------------------------------------------------------------------------------------------

    def _begun(self, step: int) -> None:
        """A worker begins to compute a step: who is to leave or join then does."""
        for fault in [one for one in self.planned if one.what in ORDERLY and one.step is not None and one.step <= step]:
            self._befall(fault)

    @override
    def _befall_worker(self, fault: Fault) -> None:
        now = self.timeline.now
        if fault.what == "join":
            self._fired(fault)
            self.membership.host_joined(self._host(0), fault.node, now)
            self._decide_soon()
            return
        if fault.node not in self.programs or self.programs[fault.node].ended:
            return  # it never came, or is gone: reported as missed
        if fault.what == "leave":
            self._fired(fault)
            self.membership.leave_announced([fault.node], now)
            self._decide_soon()
        elif fault.what == "restart":
            self._fired(fault)
            self._back_s[fault.node] = fault.seconds
            self.programs[fault.node].killed = True
            if fault.step is not None:
                raise Killed
            self.programs[fault.node].throw()
        else:
            if fault.what == "pause":
                self._fall_silent(self.programs[fault.node])
            super()._befall_worker(fault)

    def _fall_silent(self, program: SimProgram) -> None:
        """From now on, or it is so already: a process that is paused sends no heartbeat."""
        now = self.timeline.now
        if program.paused_until <= now:
            self._silent_since[program] = now
            self.timeline.at(now + self._survive.silence_s, partial(self._lose_silent, program, now))

    def _lose_silent(self, program: SimProgram, since: float) -> None:
        """Unless it went on meanwhile."""
        went_on = program.paused_until <= self.timeline.now or self._silent_since[program] != since
        over = program.ended or self.programs[program.name] is not program or self.membership.phase == "finishing"
        if not went_on and not over:
            seconds = self.timeline.now - since
            self._lose(program.name, "silence", None, f"sent no heartbeat for {seconds:.1f} s")
            self._decide()

    @override
    def _befall_shard(self, fault: Fault) -> None:
        """A shard without a copy ends the run, as without `survive`."""
        super()._befall_shard(fault)
        assert self.servers is not None
        for shard in self.servers.shards:
            if shard.is_killed and not self.servers.copies:
                raise ShardLost(shard.number, f"server shard {shard.number}", "server.call", 0, 0.0, "is gone")

    @override
    def _part(self, host: int) -> None:
        for rendezvous in {id(one): one for one in self._groups.values()}.values():
            rendezvous.part(host)

    @override
    def _killed(self) -> int | None:
        return None
