"""Engine `sim`: the same program on any number of workers in one process, in virtual time."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from typing_extensions import override

from manyhands.engines.base import Capabilities, Engine, LaunchSpec, check_counts
from manyhands.engines.faults import Fault, Faults
from manyhands.engines.sim.compute import Compute, ComputeSpeed
from manyhands.engines.sim.costs import Costs
from manyhands.engines.sim.driver_client import LeaseServer, SimDriverClient, backward_in_turn
from manyhands.engines.sim.group import SimGroup
from manyhands.engines.sim.network import NetworkState, SimNetworkSpec
from manyhands.engines.sim.profile import Profile
from manyhands.engines.sim.rendezvous import SimRendezvous
from manyhands.engines.sim.server import SimServers
from manyhands.engines.sim.timeline import Killed, SimProgram, Timeline
from manyhands.engines.single_process import run_as
from manyhands.errors import PeerLost, Unsupported, WorkerFailed
from manyhands.events import Event
from manyhands.server.client import ShardLost
from manyhands.worker import Worker, set_current

T = TypeVar("T")

COLLECT_AFTER_S = 1.0
"""After a run of so many seconds what it left is looked for; that takes a tenth of one."""


@dataclass(frozen=True, kw_only=True)
class Sim(Engine):
    """Any number of simulated workers in this process, in virtual time: real gradients on real data, repeatable.

    Workers take turns. Computing, messages and waiting take virtual seconds, by what `compute` and `network` say; the
    same seed gives the same bits, whatever else the machine does. What each cost is, docs/simulate.md says.
    """

    network: str | SimNetworkSpec = ""
    """What messages cost: latency=1e-3,bandwidth=1e9,workers_per_host=4 …; free without it."""
    compute: str | Compute = ""
    """Costs of gradients: row=1e-4,step=1e-3,jitter=lognormal:0.2,3=5x (worker 3: 5 times slower); topk=15ns/1ns."""
    faults: str | Faults = ""
    """What goes wrong: kill=2@step:100,pause=1@2.5s+3,drop=0.01 …; nothing without it."""
    seed: int = 0
    """Of jitter, faults, and the order of what happens at the same time."""
    profile: Path | None = None
    """A machine that `manyhands calibrate` measured; `network` and `compute` override its numbers."""

    name: ClassVar[str] = "sim"
    capabilities: ClassVar[Capabilities] = Capabilities(simulated=True, serves=True)

    def __post_init__(self) -> None:
        _ = self.parts  # what cannot be read is refused now

    @cached_property
    def parts(self) -> tuple[SimNetworkSpec, Compute, Faults]:
        """What the options say, put together, and the profile as it was when this engine was made."""
        network, compute = SimNetworkSpec(), Compute()
        if self.profile is not None:
            profile = Profile.load(self.profile)
            network, compute = profile.network, profile.compute
        network = self.network if isinstance(self.network, SimNetworkSpec) else network.with_text(self.network)
        compute = self.compute if isinstance(self.compute, Compute) else compute.with_text(self.compute)
        return network, compute, Faults.of(self.faults)

    @override
    def on_one_host(self, workers: int) -> bool:
        return self.parts[0].workers_per_host >= workers

    @override
    def facts(self) -> dict[str, Any]:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"simulated": {name: str(value) for name, value in given.items() if value not in ("", None)}}

    @override
    def check(self, spec: LaunchSpec) -> None:
        check_counts(spec)
        if spec.device not in ("auto", "cpu"):
            raise Unsupported(
                f"engine sim computes on the CPU, where the same seed gives the same bits; device {spec.device} was asked for: "
                "leave it out, and say with compute= how long a gradient takes"
            )
        network, compute, faults = self.parts
        compute.check(spec.workers)
        NetworkState(network, spec.workers, spec.shards)
        faults.check(spec.workers, spec.shards, rejoins=spec.rejoins)
        if later := [str(fault) for fault in faults.planned if fault.phase != "compute"]:
            raise Unsupported(
                f"faults: engine sim knows the beginning of a step alone, not {', '.join(later)}: leave the phase out, or "
                "use engine local"
            )

    @override
    def launch(self, program: Callable[[Worker], T], spec: LaunchSpec) -> list[T]:
        self.check(spec)
        threads = torch.get_num_threads()
        begun = time.monotonic()
        torch.set_num_threads(spec.threads_per_worker or 1)
        try:
            with backward_in_turn():
                return Simulation(self, spec).run(program)
        finally:
            torch.set_num_threads(threads)
            if time.monotonic() - begun > COLLECT_AFTER_S:
                gc.collect()  # replicas are in circles, and would stay beside those of the next run


class Simulation:
    """One launch."""

    def __init__(self, engine: Sim, spec: LaunchSpec) -> None:
        network, self.compute, self.faults = engine.parts
        self.spec, self.seed = spec, engine.seed
        self.timeline = Timeline(engine.seed)
        self.timeline.on_end = self._ended
        self.wires = NetworkState(network, spec.workers, spec.shards)
        self.meeting = SimRendezvous(
            self.timeline, Costs(self.wires, spec.workers), self.wires, spec.workers, spec.timeout_s
        )
        self.servers = self._servers()
        self.lease_server = LeaseServer(self.timeline, spec.observer, self.compute.lease, spec.timeout_s)
        self.workers: dict[int, Worker] = {}  # by rank, as the next two
        self.drivers: dict[int, SimDriverClient] = {}
        self.programs: dict[int, SimProgram] = {}
        self.planned = list(self.faults.planned)  # what did not happen yet

    def _servers(self) -> SimServers | None:
        if self.spec.server is None:
            return None
        return SimServers(
            self.spec.server,
            self.spec.workers,
            self.spec.shards,
            self.timeline,
            self.wires,
            self.faults.messages(self.seed),
            self.compute,
            self.faults,
            self.spec.timeout_s,
        )

    def run(self, program: Callable[[Worker], T]) -> list[T]:
        """Its values in rank order; errors as `Engine.launch` says."""
        for rank in range(self.spec.workers):
            self._start(program, rank)
        for fault in self.faults.planned:
            happen = partial(self._befall_shard, fault) if fault.node < 0 else partial(self._befall, program, fault)
            if fault.step is None:
                self.timeline.at(fault.time or 0.0, happen)
            else:
                self.lease_server.at_step.setdefault((fault.node, fault.step), []).append(happen)
        self.timeline.run()
        if (killed := self._killed()) is not None:
            raise self._lost(killed)
        for fault in self.planned:
            warning = Event(type="warning", time_s=self.timeline.now, rank=0, values={"message": fault.missed()})
            self.spec.observer.event(warning)
        return [self.programs[rank].value for rank in range(self.spec.workers)]

    # -- workers -----------------------------------------------------------------------------------------------------

    def _start(self, program: Callable[[Worker], T], rank: int, generation: int = 0, at: float = 0.0) -> None:
        driver = SimDriverClient(self.lease_server, rank, ComputeSpeed(self.compute, rank, self.seed))
        worker = Worker(
            rank=rank,
            size=self.spec.workers,
            host=f"host{self.wires.host_of(rank)}",
            device=torch.device("cpu"),
            generation=generation,
            group=SimGroup(self.meeting, rank, self.compute),
            server=None if self.servers is None else self.servers.clients[rank],
            clock=lambda: self.timeline.now,
            driver=driver,
            threads=torch.get_num_threads(),
            shares_process=True,
        )
        self.workers[rank], self.drivers[rank] = worker, driver
        self.programs[rank] = self.timeline.start(rank, partial(self._as_worker, worker, program, driver), at)

    def _as_worker(self, worker: Worker, program: Callable[[Worker], T], driver: SimDriverClient) -> T:
        set_current(worker)
        if worker.generation and self.servers is not None:
            self.servers.restart(worker.rank)
            worker.server = self.servers.clients[worker.rank]
        try:
            value = run_as(worker, program, driver)
        finally:
            if worker.server is not None:
                with suppress(Killed):  # a dead worker says no goodbye
                    worker.server.close()
        worker.group.close()  # whoever waits for this worker gets PeerLost
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
        return WorkerFailed(
            f"worker {rank} on {host} was killed, as faults= asks for, in phase {driver.phase} at step {driver.step}, "
            f"and declared lost at {self.timeline.now:g} s",
            rank=rank,
            host=host,
            phase=driver.phase,
            step=driver.step,
        )

    # -- faults ------------------------------------------------------------------------------------------------------

    def _fired(self, fault: Fault) -> None:
        self.planned.remove(fault)
        rank = fault.node if fault.node >= 0 else None
        step = self.drivers[fault.node].step if fault.node >= 0 else 0
        self.spec.observer.event(
            Event(type="fault", time_s=self.timeline.now, rank=rank, step=step, values={"fault": str(fault)})
        )

    def _befall_shard(self, fault: Fault) -> None:
        assert self.servers is not None
        shard = -1 - fault.node
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

    def _befall(self, program: Callable[[Worker], T], fault: Fault) -> None:
        """A worker: at a time of which it knows nothing, or at a step, in its own turn."""
        victim = self.programs[fault.node]
        if victim.ended:
            return
        self._fired(fault)
        if fault.what == "pause":
            victim.pause(fault.seconds)
            return
        if fault.what == "restart":  # a new process runs the program from its beginning, and the victim's ends now
            generation = self.workers[victim.name].generation + 1
            self._start(program, victim.name, generation, self.timeline.now + fault.seconds)
        if fault.step is not None:
            victim.killed = fault.what == "kill"
            raise Killed
        if fault.what == "restart":
            victim.throw()  # now: the new one may begin at this very time
        else:
            victim.kill()
