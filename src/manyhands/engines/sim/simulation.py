"""One launch of engine `sim`: its workers and servers on a timeline, and what befalls them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch

from manyhands.engines.base import LaunchSpec
from manyhands.engines.driver.shard_copies import copies_changed
from manyhands.engines.fault_injector import FaultInjector, install
from manyhands.engines.faults import OF_A_STEP, ORDERLY, Fault, Faults, most_workers
from manyhands.engines.sim.compute import Compute, ComputeSpeed
from manyhands.engines.sim.costs import Costs
from manyhands.engines.sim.driver_client import LeaseServer, SimDriverClient
from manyhands.engines.sim.group import SimGroup
from manyhands.engines.sim.network import NetworkState, SimNetworkSpec
from manyhands.engines.sim.rendezvous import SimRendezvous
from manyhands.engines.sim.server import SimServers
from manyhands.engines.sim.timeline import Killed, SimProgram, Timeline
from manyhands.engines.single_process import run_as
from manyhands.errors import PeerLost, WorkerFailed
from manyhands.events import Event
from manyhands.server.client import ShardLost
from manyhands.worker import Worker, current, set_current

T = TypeVar("T")


class Simulation:
    """See the module's docstring."""

    def __init__(self, parts: tuple[SimNetworkSpec, Compute, Faults], seed: int, spec: LaunchSpec) -> None:
        """parts: what the engine's options say."""
        network, self.compute, self.faults = parts
        self.spec, self.seed = spec, seed
        self.timeline = Timeline(seed)
        self.timeline.on_end = self._ended
        self.wires = NetworkState(network, most_workers(spec), spec.shards)
        self.meeting = SimRendezvous(
            self.timeline, Costs(self.wires, spec.workers), self.wires, spec.workers, spec.timeout_s
        )
        self.servers = self._servers()
        self.lease_server = LeaseServer(self.timeline, spec.observer, self.compute.lease, spec.timeout_s)
        self.subgroups: dict[tuple[int, ...], SimRendezvous] = {}  # (how many of these ranks before, *ranks): theirs
        self.workers: dict[int, Worker] = {}  # by rank, as the next two
        self.drivers: dict[int, SimDriverClient] = {}
        self.programs: dict[int, SimProgram] = {}
        self.processes: Counter[int] = Counter()  # that each rank has had
        self._program: Callable[[Worker], Any] | None = None  # what each runs
        self.planned = list(self.faults.planned)  # what did not happen yet

    def _servers(self) -> SimServers | None:
        if self.spec.server is None:
            return None
        return SimServers(
            self.spec.server,
            most_workers(self.spec),
            self.spec.shards,
            self.timeline,
            self.wires,
            self.faults.messages(self.seed),
            self.compute,
            self.faults,
            self.spec.timeout_s,
            self.spec.copies,
            self._report_copies,
        )

    def _report_copies(self, shard: int, copies: int) -> None:
        self.spec.observer.event(copies_changed(shard, copies, self.timeline.now))

    def run(self, program: Callable[[Worker], T]) -> list[T]:
        """Its values in rank order; errors as `Engine.launch` says."""
        self._program = program
        for rank in range(self.spec.workers):
            self._start(rank)
        for fault in self.faults.planned:
            if fault.step is None:
                self.timeline.at(fault.time or 0.0, partial(self._befall, fault))
        end_injection = install(self.faults.planned, _injector_of_turn)
        try:
            self.timeline.run()
        finally:
            end_injection()
        if (killed := self._killed()) is not None:
            raise self._lost(killed)
        for fault in self.planned:
            warning = Event(type="warning", time_s=self.timeline.now, rank=0, values={"message": fault.missed()})
            self.spec.observer.event(warning)
        return self._results()

    def _results(self) -> list[Any]:
        return [self.programs[rank].value for rank in range(self.spec.workers)]

    # -- workers -----------------------------------------------------------------------------------------------------

    def _start(self, rank: int, generation: int = 0, at: float = 0.0) -> None:
        self.processes[rank] += 1
        driver = SimDriverClient(self.lease_server, rank, ComputeSpeed(self.compute, rank, self.seed))
        worker = Worker(
            rank=rank,
            size=self.spec.workers,
            host=f"host{self.wires.host_of(rank)}",
            device=torch.device("cpu"),
            **self._members(rank, driver, generation),
            server=None if self.servers is None else self.servers.clients[rank],
            clock=lambda: self.timeline.now,
            driver=driver,
            threads=torch.get_num_threads(),
            shares_process=True,
        )
        own = [one for one in self.planned if one.step is not None and one.node == rank and one.what not in ORDERLY]
        if own:
            driver.injector = FaultInjector(own, lambda fault, step: self._befall(fault))
        self.workers[rank], self.drivers[rank] = worker, driver
        is_first = self.processes[rank] == 1
        self.programs[rank] = self.timeline.start(rank, partial(self._as_worker, worker, driver, is_first), at)

    def _members(self, rank: int, driver: SimDriverClient, generation: int) -> dict[str, Any]:
        """The fields of a Worker that say whom it works with."""
        made: Counter[tuple[int, ...]] = Counter()

        def subgroup(ranks: Sequence[int]) -> SimGroup:
            members = tuple(ranks)
            key = made[members], *members
            made[members] += 1
            if key not in self.subgroups:
                costs = Costs(self.wires, len(members), members)
                self.subgroups[key] = SimRendezvous(
                    self.timeline, costs, self.wires, len(members), self.spec.timeout_s, members
                )
            group = SimGroup(self.subgroups[key], members.index(rank), self.compute)
            if driver.injector is not None:
                driver.injector.watch(group)
            return group

        return {
            "group": SimGroup(self.meeting, rank, self.compute),
            "subgroup": subgroup,
            "generation": generation,
        }

    def _as_worker(self, worker: Worker, driver: SimDriverClient, is_first: bool) -> Any:
        """is_first: of this rank's processes."""
        assert self._program is not None
        set_current(worker)
        if not is_first and self.servers is not None:
            self.servers.restart(worker.rank)
            worker.server = self.servers.clients[worker.rank]
        if driver.injector is not None:
            driver.injector.watch(None if worker.elastic else worker.group, worker.server)
        try:
            value = run_as(worker, self._program, driver)
        finally:
            if worker.server is not None:
                with suppress(Killed):  # a dead worker says no goodbye
                    worker.server.close()
        worker.group.close()  # whoever waits for this worker gets PeerLost
        for (_, *members), meeting in self.subgroups.items():
            if worker.rank in members:
                meeting.leave(members.index(worker.rank))
        return value

    def _ended(self, program: SimProgram) -> None:
        if (error := program.error) is not None:
            names_a_peer = isinstance(error, PeerLost) and not isinstance(error, ShardLost)
            if names_a_peer and (killed := self._killed()) is not None:  # whose death explains the error
                raise self._lost(killed) from error
            raise error
        if program.killed and self.programs[program.name] is program:  # and no other has taken its place
            self.timeline.at(self.timeline.now + self.faults.notice_s, partial(self._declare_lost, program.name))

    def _killed(self) -> int | None:
        """The first worker that was killed, and that no new process takes the place of."""
        return next((rank for rank, program in self.programs.items() if program.killed and program.ended), None)

    def _declare_lost(self, rank: int) -> None:
        raise self._lost(rank)

    def _lost(self, rank: int) -> WorkerFailed:
        driver, host = self.drivers[rank], f"host{self.wires.host_of(rank)}"
        error = WorkerFailed(
            f"worker {rank} on {host} was killed, as faults= asks for, in phase {driver.phase} at step {driver.step}, "
            f"and declared lost at {self.timeline.now:g} s",
            rank=rank,
            host=host,
            phase=driver.phase,
            step=driver.step,
        )
        error.cause = "death"
        return error

    # -- faults ------------------------------------------------------------------------------------------------------

    def _fired(self, fault: Fault) -> None:
        self.planned.remove(fault)
        rank = fault.node if fault.node >= 0 and fault.what not in ("join", "cut") else None
        step = 0 if rank is None else self.drivers[rank].step
        self.spec.observer.event(
            Event(type="fault", time_s=self.timeline.now, rank=rank, step=step, values={"fault": str(fault)})
        )

    def _befall(self, fault: Fault) -> None:
        """At a time of which nobody knows anything, or at a worker's step, in its own turn."""
        if fault.what == "cut":
            self._fired(fault)
            self.wires.cut(fault.node, self.timeline.now + fault.seconds)
            self._part(fault.node)
        elif fault.node < 0:
            self._befall_shard(fault)
        elif fault.what in OF_A_STEP:
            self._fired(fault)
        else:
            self._befall_worker(fault)

    def _part(self, host: int) -> None:
        for meeting in (self.meeting, *self.subgroups.values()):
            meeting.part(host)

    def _befall_shard(self, fault: Fault) -> None:
        assert self.servers is not None
        shard = -1 - fault.node
        if self.servers.copies and fault.what == "kill":
            if self.servers.copies[shard].kill(fault.backup):
                self._fired(fault)
            return
        if self.servers.shards[shard].is_killed:
            return
        self._fired(fault)
        match fault.what:
            case "kill":
                self.servers.kill_shard(shard)
            case "pause":
                self.servers.shards[shard].pause(fault.seconds)
            case "restart":
                self.servers.restart_shard(shard, fault.seconds)

    def _befall_worker(self, fault: Fault) -> None:
        victim = self.programs[fault.node]
        if victim.ended:
            return
        self._fired(fault)
        if fault.what == "pause":
            victim.pause(fault.seconds)
            if fault.phase != "compute":  # that passes with what it computes
                self.timeline.work(0.0)
            return
        if fault.what == "restart":  # a new process runs the program from its beginning, and the victim's ends now
            generation = self.workers[victim.name].generation + 1
            self._start(victim.name, generation, self.timeline.now + fault.seconds)
        if fault.step is not None:
            victim.killed = fault.what == "kill"
            raise Killed
        if fault.what == "restart":
            victim.throw()  # now: the new one may begin at this very time
        else:
            victim.kill()


def _injector_of_turn() -> FaultInjector | None:
    worker = current()
    return worker.driver.injector if worker is not None and isinstance(worker.driver, SimDriverClient) else None
