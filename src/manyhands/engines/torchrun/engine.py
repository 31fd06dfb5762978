"""Engine `torchrun`: this process is already a worker, started by torchrun, mpirun, srun or a like launcher."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import torch
import torch.distributed
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from typing_extensions import override

from manyhands.comm.device_group import has_own_gpu
from manyhands.data.leases import End, Lease, Segment
from manyhands.engines.base import Capabilities, Engine, LaunchSpec
from manyhands.engines.make_group import Meet, Topology, hosts_met, make_group, meet_at
from manyhands.engines.nested import NestedDriverClient
from manyhands.engines.shared_memory import host_identity
from manyhands.engines.single_process import (
    InProcessDriverClient,
    pick_device,
    run_as,
    running_threads,
    threads_in_callers_process,
)
from manyhands.engines.torchrun import launchers
from manyhands.engines.torchrun.store_leases import StoreLeases
from manyhands.errors import BadInput
from manyhands.server.base import Server, ServerSpec
from manyhands.signals import leave_sigterm_to_the_system
from manyhands.worker import DriverClient, SoloDriverClient, Worker, as_current

if TYPE_CHECKING:
    from manyhands.engines.hosts.network import Network

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class LauncherRank:
    """What the launcher's variables say of this process."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @classmethod
    def from_environment(cls) -> LauncherRank:
        """Raises BadInput where a variable is missing or no whole number."""
        place = cls(
            rank=launchers.number_of(launchers.RANK),
            size=launchers.number_of(launchers.SIZE),
            local_rank=launchers.number_of(launchers.LOCAL_RANK),
            local_size=launchers.number_of(launchers.LOCAL_SIZE, default="1"),
        )
        for name in launchers.MEETING:
            if name not in os.environ:
                raise launchers.missing(name)
        if not 0 <= place.rank < place.size:
            names = launchers.launcher_of().names
            raise BadInput(
                f"{names[launchers.RANK]} must be in range({names[launchers.SIZE]}), not {place.rank} of {place.size}"
            )
        return place


@dataclass(frozen=True, kw_only=True)
class Torchrun(Engine):
    """Workers that were started already, by torchrun, mpirun or srun: each process of theirs is one.

    The network is the launcher's choice: MASTER_ADDR and MASTER_PORT are followed as they are, and torch.distributed
    connects without encryption; keep it on a network that you trust. Ranks that all live on one host use shared memory
    instead. The first worker of each host holds a shard of the parameter server, where a strategy needs one; between
    hosts it is reached over TLS, with the file that MANYHANDS_CREDENTIALS names. `launch` returns a list with this
    rank's value in its place and None for the others. Errors are raised on the rank where they happen, and torchrun
    ends the others; other ranks' events arrive at each `collect`.
    """

    name: ClassVar[str] = "torchrun"
    capabilities: ClassVar[Capabilities] = Capabilities(spmd=True, serves=True)

    @override
    def default_workers(self) -> int:
        return launchers.number_of(launchers.SIZE, "1")

    @override
    def own_rank(self) -> int:
        return launchers.number_of(launchers.RANK, "0")

    @override
    def on_one_host(self, workers: int) -> bool:
        return launchers.number_of(launchers.LOCAL_SIZE, "1") == self.default_workers()

    @override
    def check(self, spec: LaunchSpec) -> None:
        if spec.server is not None and spec.servers > 1:
            raise BadInput(
                f"servers={spec.servers} under torchrun, where the first worker of each host holds one shard: leave servers out"
            )

    @override
    def launch(self, program: Callable[[Worker], T], spec: LaunchSpec) -> list[T]:
        self.check(spec)
        here = InProcessDriverClient(spec.observer, poll_s=0)
        rank = LauncherRank.from_environment().rank
        with joined(spec, lambda leases: _RankDriverClient(rank, here, leases)) as worker:
            values: list[Any] = [None] * worker.size
            values[rank] = run_as(worker, program, here)
        return cast(list[T], values)


class _RankDriverClient(NestedDriverClient):
    """Of a rank that is its own driver: slices are leased at the launcher's store."""

    def __init__(self, rank: int, here: InProcessDriverClient, leases: StoreLeases) -> None:
        super().__init__(rank, here, SoloDriverClient())
        self._leases = leases

    @override
    def lease(self, segment: Segment, replica: int, push: int | None = None) -> Lease | End:
        return self._leases.take(replica, segment, self.should_stop)


class _ScriptDriverClient(SoloDriverClient):
    """Of a script with a loop of its own."""

    def __init__(self, leases: StoreLeases) -> None:
        super().__init__()
        self._shared = leases

    @override
    def lease(self, segment: Segment, replica: int, push: int | None = None) -> Lease | End:
        return self._shared.take(replica, segment)


@contextmanager
def joined(spec: LaunchSpec, driver: Callable[[StoreLeases], DriverClient] = _ScriptDriverClient) -> Iterator[Worker]:
    """Within, this process is its rank's Worker (`manyhands.worker.current()`); collective to enter.

    A torch.distributed process group that exists already is used and left; one made here is destroyed at the end.
    """
    place = LauncherRank.from_environment()
    if spec.workers != place.size:
        raise BadInput(
            f"workers={spec.workers} under torchrun with WORLD_SIZE={place.size}: leave workers out, the launcher decides"
        )
    leave_sigterm_to_the_system()  # torchrun sends it where a peer has failed, while this process waits for all of them
    device = pick_device(spec.device, place.local_rank)
    with (
        _process_group(place, spec.device, device, spec.timeout_s) as store,
        ExitStack() as held_shard,  # it ends after the group: peers hear first who left, and why
        ExitStack() as stack,
    ):
        meet = meet_at(store, place.rank, spec.timeout_s)
        topology = _topology(place, spec, device, meet)

        def reach() -> Network:
            from manyhands.engines.torchrun.server import network_of  # loads TLS, which most runs do not need

            return network_of(topology, meet)

        group = make_group(topology, meet, reach=reach)
        stack.callback(group.close)

        def start_server(wanted: ServerSpec) -> Server:
            from manyhands.engines.torchrun.server import start_server  # loads TLS, which most runs do not need

            server, held = start_server(wanted, topology, meet)
            if held is not None:
                held_shard.push(held)
            stack.callback(server.close)
            return server

        worker = Worker(
            rank=place.rank,
            size=place.size,
            host=socket.gethostname(),
            device=device,
            group=group,
            subgroup=lambda members: make_group(topology.of(members), meet, reach=reach),
            server=None if spec.server is None else start_server(spec.server),
            start_server=start_server,
            driver=driver(StoreLeases(PrefixStore("leases", store), spec.timeout_s)),
            threads=threads_in_callers_process(place.local_size, spec.threads_per_worker),
            local_rank=place.local_rank,
        )
        with as_current(worker), running_threads(worker.threads):
            yield worker


@contextmanager
def _process_group(place: LauncherRank, wanted: str, device: torch.device, timeout_s: float) -> Iterator[Store]:
    """Within, there is one of all ranks; they meet at this store."""
    timeout = timedelta(seconds=timeout_s)
    if torch.distributed.is_initialized():
        yield _own_keys(torch.distributed.distributed_c10d._get_default_store())
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if _own_gpu(place, wanted, device) else "gloo"
    store = _store(place, timeout)
    torch.distributed.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, timeout=timeout)
    try:
        yield PrefixStore("meet", store)
    finally:
        torch.distributed.destroy_process_group()


def _own_gpu(place: LauncherRank, wanted: str, device: torch.device) -> bool:
    return device.type == "cuda" and has_own_gpu(wanted, place.local_size, torch.cuda.device_count())


_meeting_point: Store | None = None
_meetings = 0


def _store(place: LauncherRank, timeout: timedelta) -> Store:
    """The launcher's store, with keys of its own for each process group that is made here.

    Without them a rank that is early finds its peers' addresses of the group before, and connects to nobody. Ranks
    make groups in the same order, so they count alike. The store stays for the next one: rank 0 may be serving it.
    """
    global _meeting_point
    if _meeting_point is None:
        _meeting_point, _, _ = next(rendezvous("env://", place.rank, place.size, timeout=timeout))
    _meeting_point.set_timeout(timeout)
    return _own_keys(_meeting_point)


def _own_keys(store: Store) -> Store:
    """A part of the store that nobody used yet; workers that torchrun has started again have the store of those before."""
    global _meetings
    _meetings += 1
    again = launchers.restart_count()
    return PrefixStore(f"manyhands-{f'{again}-' if again else ''}{_meetings}", store)


def _topology(place: LauncherRank, spec: LaunchSpec, device: torch.device, meet: Meet) -> Topology:
    """Who is where; all ranks meet for it."""
    hosts, names = hosts_met(meet, place.size, host_identity())
    return Topology(
        rank=place.rank,
        hosts=hosts,
        names=names,
        device=device,
        own_gpus=_own_gpu(place, spec.device, device),
        over_torch=True,
        timeout_s=spec.timeout_s,
        connect_s=spec.timeout_s,
    )
