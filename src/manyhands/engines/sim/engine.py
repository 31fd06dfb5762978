"""Engine `sim`: the same program on any number of workers in one process, in virtual time."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from typing_extensions import override

from manyhands.engines.base import Capabilities, Engine, LaunchSpec, check_counts
from manyhands.engines.faults import Faults, most_workers
from manyhands.engines.sim.compute import Compute
from manyhands.engines.sim.driver_client import backward_in_turn
from manyhands.engines.sim.elastic import ElasticSimulation
from manyhands.engines.sim.network import NetworkState, SimNetworkSpec
from manyhands.engines.sim.profile import Profile
from manyhands.engines.sim.simulation import Simulation
from manyhands.errors import BadInput, Unsupported
from manyhands.worker import Worker

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
    """Costs of gradients: row=1e-4,step=1e-3,jitter=lognormal:0.2,3=5x (worker 3: 5 times slower); topk=15ns/1ns;
    stages=equal,forward=0.4 where a replica spans several workers."""
    faults: str | Faults = ""
    """What goes wrong: kill=2@step:100,pause=1@2.5s+3,drop=0.01 …; nothing without it."""
    seed: int = 0
    """Of jitter, faults, and the order of what happens at the same time."""
    profile: Path | None = None
    """A machine that `manyhands calibrate` measured; `network` and `compute` override its numbers."""

    name: ClassVar[str] = "sim"
    capabilities: ClassVar[Capabilities] = Capabilities(simulated=True, serves=True, survives=True, copies=True)

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
        compute.check(spec.workers, spec.stages)
        hosts = NetworkState(network, most_workers(spec), spec.shards).hosts
        rejoins = spec.rejoins or (spec.survive is not None and not spec.fixed_members)
        faults.check(most_workers(spec), spec.shards, rejoins=rejoins, copies=spec.copies)
        faults.check_changes(spec)
        if missing := [str(fault) for fault in faults.planned if fault.what == "cut" and fault.node >= hosts]:
            raise BadInput(
                f"faults: {', '.join(missing)} names a host that is not there: the workers' hosts are host0 to host{hosts - 1} "
                f"(workers_per_host={network.workers_per_host} in network=)"
            )

    @override
    def launch(self, program: Callable[[Worker], T], spec: LaunchSpec) -> list[T]:
        self.check(spec)
        threads = torch.get_num_threads()
        begun = time.monotonic()
        torch.set_num_threads(spec.threads_per_worker or 1)
        try:
            with backward_in_turn():
                plain = spec.survive is None or spec.fixed_members
                simulation = Simulation if plain else ElasticSimulation
                network, compute, faults = self.parts
                return simulation((network, compute, faults.without(spec.fired)), self.seed, spec).run(program)
        finally:
            torch.set_num_threads(threads)
            if time.monotonic() - begun > COLLECT_AFTER_S:
                gc.collect()  # replicas are in circles, and would stay beside those of the next run
