"""Which group workers get: chosen by where they are, made over whatever they can meet by. The same for every engine.

`Meet` is all that a group needs beside the processes: it lets them learn each other's addresses. It is the driver's
(`ProcessDriverClient.rendezvous`), a store of torch.distributed (`meet_at`), or anything else that brings values to all.
"""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from manyhands.comm.group import Group
from manyhands.comm.shared_memory.group import SharedMemoryGroup
from manyhands.comm.shared_memory.memory import Arena
from manyhands.comm.solo import SoloGroup
from manyhands.engines.shared_memory import InheritedMemory, swap_memory
from manyhands.errors import BadInput, ManyhandsError, Unsupported

if TYPE_CHECKING:  # it loads TLS, which most runs do not need
    from torch.distributed.distributed_c10d import Store

    from manyhands.comm.ring.group import RingGroup
    from manyhands.engines.hosts.network import Network
    from manyhands.transport.channel import Channel

Meet = Callable[[str, Sequence[int], Any], list[Any]]
"""meet(name, ranks, value): each of the ranks, this process's among them, gives a value (JSON) and gets all values, in
the order of the ranks. It waits for all, not for ever. A name can be used again, but after an error by these ranks."""


def meet_at(store: Store, rank: int, timeout_s: float) -> Meet:
    """Meet at a store of torch.distributed (TCPStore, FileStore, HashStore), waiting for the others so long at most."""
    met: Counter[str] = Counter()

    def meet(name: str, ranks: Sequence[int], value: Any) -> list[Any]:
        met[meeting := json.dumps([name, list(ranks)])] += 1
        keys = {other: f"{meeting} {met[meeting]} {other}" for other in ranks}
        try:
            store.set(keys[rank], json.dumps(value))
            store.wait(list(keys.values()), timedelta(seconds=timeout_s))
            return [json.loads(store.get(key)) for key in keys.values()]
        except (torch.distributed.DistStoreError, torch.distributed.DistNetworkError) as error:
            raise ManyhandsError(
                f"worker {rank} waited for the workers {list(ranks)} to set up {name!r}, and not all of them came: "
                f"look for their errors in the log ({error})"
            ) from error

    return meet


def hosts_met(meet: Meet, size: int, identity: str) -> tuple[list[list[int]], list[str]]:
    """(the ranks by host, the hosts' names) of so many processes, of which this one is on the host of this identity; all
    meet for it."""
    hosts: dict[str, list[int]] = {}
    everyone = meet("hosts", range(size), [identity, socket.gethostname()])
    for rank, (theirs, _) in enumerate(everyone):
        hosts.setdefault(theirs, []).append(rank)
    return list(hosts.values()), [everyone[ranks[0]][1] for ranks in hosts.values()]


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Where the members of a group are, as one of them sees it. Ranks are those of the run."""

    rank: int  # this worker's
    hosts: Sequence[Sequence[int]]  # the members by host, in order
    names: Sequence[str]  # of these hosts
    device: torch.device
    own_gpus: bool = False  # each member has a GPU of its own
    over_torch: bool = False  # torch.distributed links all workers of the run: a launcher's variables say how
    timeout_s: float = 300.0  # a peer for which others wait and which shows no progress for so long is lost
    connect_s: float = 60.0  # most time to connect to the others, once all have met
    scratch: str = ""  # a folder for a while, which somebody removes whatever happens; "": a temporary one
    generation: int = 0  # members of another one are refused

    @property
    def members(self) -> list[int]:
        """In rank order."""
        return sorted(rank for host in self.hosts for rank in host)

    @property
    def host_names(self) -> list[str]:
        """By member."""
        named = {rank: name for name, host in zip(self.names, self.hosts, strict=True) for rank in host}
        return [named[rank] for rank in self.members]

    def of(self, members: Sequence[int]) -> Topology:
        """Of these members alone, this worker among them; BadInput for others, or out of order."""
        asked, known = list(members), self.members
        if asked != [rank for rank in known if rank in set(asked)] or self.rank not in asked:
            raise BadInput(
                f"a group made by worker {self.rank} must list this worker and others of {known}, in that order; got "
                f"{asked}"
            )
        parts = [
            ([rank for rank in host if rank in asked], name) for host, name in zip(self.hosts, self.names, strict=True)
        ]
        kept = [(host, name) for host, name in parts if host]
        return replace(self, hosts=[host for host, _ in kept], names=[name for _, name in kept])


def make_group(
    topology: Topology,
    meet: Meet,
    *,
    memory: InheritedMemory | None = None,
    network: Network | None = None,
    arena: Arena | None = None,
    check: Callable[[], None] = lambda: None,
    reach: Callable[[], Network] | None = None,
) -> Group:
    """The group of the topology's members, for this one; a collective of them alone. The caller closes it.

    Shared memory within a host: `memory`, else the members swap their own. arena: this member's, where its vectors lie
    already. Between hosts rings over `network`, with shared memory inside each host. Where each member has a GPU of its
    own, nccl. check: called while it connects, raises what ends that. reach: gives, in a collective, the network for a
    mailbox, for which torch.distributed has no way. After an error `memory` is still the caller's.
    Raises Unsupported for a part of what torch.distributed links, whose groups all ranks must make together, and
    PeerLost where another host's member cannot be connected.
    """
    here = next(host for host in topology.hosts if topology.rank in host)
    if len(topology.members) == 1:
        return SoloGroup(arena)
    if len(topology.hosts) == 1:
        if not (topology.own_gpus and topology.over_torch):
            return _on_one_host(topology, meet, memory, topology.members, arena)
    elif network is not None:
        return _between_hosts(topology, here, meet, memory, network, arena, check)
    if not topology.over_torch:
        raise BadInput(f"a group of workers on {len(topology.hosts)} hosts needs a network between them")
    if len(topology.members) < torch.distributed.get_world_size():
        raise Unsupported(
            f"torch.distributed links the workers {topology.members}, and a group over it must have all workers of the "
            "run: use engine hosts, or group workers of one host"
        )
    from manyhands.comm.torch_group import TorchGroup

    def connect() -> dict[int, Channel]:
        assert reach is not None
        return _channels(topology, topology.members, "mailbox", meet, reach(), check)

    return TorchGroup(
        timeout_s=topology.timeout_s,
        device=topology.device,
        hosts=topology.host_names,
        connect=None if reach is None else connect,
    )


def _on_one_host(
    topology: Topology,
    meet: Meet,
    memory: InheritedMemory | None,
    names: Sequence[int] = (),
    arena: Arena | None = None,
) -> Group:
    """names: how messages call the members; without any, by their places."""
    members = topology.members
    place, hosts = members.index(topology.rank), topology.host_names
    if memory is None:
        exchange = partial(meet, "shared memory", members)
        memory = swap_memory(place, len(members), exchange, topology.connect_s, topology.scratch)
    descriptors, lifelines = memory
    group = SharedMemoryGroup(
        place,
        len(members),
        descriptors,
        arena=arena,
        lifelines=lifelines,
        hosts=hosts,
        names=names,
        timeout_s=topology.timeout_s,
    )
    if topology.own_gpus:
        from manyhands.comm.device_group import nccl_group

        return nccl_group(group, topology.device, topology.timeout_s)
    return group


def _between_hosts(
    topology: Topology,
    here: Sequence[int],
    meet: Meet,
    memory: InheritedMemory | None,
    network: Network,
    arena: Arena | None,
    check: Callable[[], None],
) -> Group:
    """A ring where each host has one member; else shared memory in each host, and a ring of the hosts' first ones.

    Messages from one member to another go between hosts on links of all with all.
    """
    from manyhands.comm.hierarchical import HierarchicalGroup

    members, leaders = topology.members, [host[0] for host in topology.hosts]
    if len(leaders) == len(members):
        return _ring(topology, members, "ring", meet, network, check)
    places = {rank: place for place, rank in enumerate(members)}
    layout = [[places[rank] for rank in host] for host in topology.hosts]
    with ExitStack() as made:  # closed again if the next cannot be made
        across = _ring(topology, leaders, "ring", meet, network, check) if topology.rank in leaders else None
        if across is not None:
            made.callback(across.close)
        direct = _ring(topology, members, "direct", meet, network, check)
        made.callback(direct.close)
        local = SoloGroup() if len(here) == 1 else _on_one_host(topology.of(here), meet, memory, arena=arena)
        made.pop_all()
    return HierarchicalGroup(
        places[topology.rank], layout, local, across, direct=direct, hosts=topology.names, names=members
    )


def _ring(
    topology: Topology, ranks: list[int], purpose: str, meet: Meet, network: Network, check: Callable[[], None]
) -> RingGroup:
    """Of these ranks, with this worker's among them."""
    from manyhands.comm.ring.group import RingGroup

    def connect(purpose: str) -> dict[int, Channel]:
        return _channels(topology, ranks, purpose, meet, network, check)

    hosts = _hosts_of(topology, ranks)
    return RingGroup(
        ranks.index(topology.rank),
        len(ranks),
        connect(purpose),
        hosts=hosts,
        names=ranks,
        timeout_s=topology.timeout_s,
        connect=partial(connect, "mailbox"),
    )


def _channels(
    topology: Topology, ranks: list[int], purpose: str, meet: Meet, network: Network, check: Callable[[], None]
) -> dict[int, Channel]:
    """To all other ones of these ranks. This worker's port is closed when all are connected."""
    from manyhands.comm.ring.links import connect_all

    place = ranks.index(topology.rank)
    # Each connects to the lower ranks: the higher ones give up first, their error says whose port is shut.
    patience_s = topology.connect_s * (1.5 - 0.5 * (place + 1) / len(ranks))
    with closing(network.listener(topology.timeout_s, topology.generation)) as listener:
        found = meet(purpose, ranks, network.address_of(listener))
        addresses, proof = [(str(host), int(port)) for host, port in found], network.secret.proof
        return connect_all(
            place,
            listener,
            addresses,
            **proof,
            hosts=_hosts_of(topology, ranks),
            names=ranks,
            purpose=purpose,
            generation=topology.generation,
            timeout_s=patience_s,
            check=check,
        )


def _hosts_of(topology: Topology, ranks: Sequence[int]) -> list[str]:
    name_of = dict(zip(topology.members, topology.host_names, strict=True))
    return [name_of[rank] for rank in ranks]
