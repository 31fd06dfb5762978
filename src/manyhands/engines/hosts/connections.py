"""How processes of several hosts are connected: addresses go round through the driver, then each connects as it needs.

Inside a host the fork server has given its workers shared memory already. Between hosts the first worker of each, its
leader, is linked with all other leaders; for messages from one worker to another all are linked with all; a worker on
another host than the server's is linked with every shard. Every connection begins with both ends' proof that they hold
the run's secret, and a hello that says who comes and what for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing

from manyhands.comm.group import Group
from manyhands.comm.hierarchical import HierarchicalGroup
from manyhands.comm.ring.group import RingGroup
from manyhands.comm.ring.links import connect_all
from manyhands.engines.driver.host_processes import name_of, shard_of
from manyhands.engines.hosts.network import Network
from manyhands.engines.local.heartbeat import ProcessDriverClient
from manyhands.engines.local.messages import ProcessPlace, last_resort_s
from manyhands.server.protocol import hello
from manyhands.transport.channel import Channel
from manyhands.transport.listener import Listener, connect

_MOST_CONNECT_S = 60.0


def group_of(
    place: ProcessPlace, driver: ProcessDriverClient, inside: Callable[[ProcessPlace, Sequence[str]], Group]
) -> Group:
    """The group of all workers, for this one. inside: makes the group of a host's workers, of all hosts by rank."""
    network, everyone = network_of(place), list(range(place.size))
    if len(network.hosts) == place.size:
        return _ring(place, network, driver, everyone, "ring")
    leads = place.process_index in network.leaders
    across = _ring(place, network, driver, network.leaders, "ring") if leads else None
    here = inside(place, network.host_names)
    direct = _ring(place, network, driver, everyone, "direct")
    return HierarchicalGroup(place.process_index, network.hosts, here, across, direct=direct, hosts=network.names)


def _ring(
    place: ProcessPlace, network: Network, driver: ProcessDriverClient, members: list[int], purpose: str
) -> RingGroup:
    """A group of the members, of which this worker is one. Its port is closed when all are connected."""
    rank, hosts = members.index(place.process_index), [network.host_names[member] for member in members]
    # Each connects to the lower ranks: the higher ones give up first, their error says whose port is shut.
    patience_s = _connect_s(place) * (1.5 - 0.5 * (rank + 1) / len(members))
    with closing(network.listener(place.timeout_s)) as listener:
        found = driver.rendezvous(purpose, members, list(listener.address))
        addresses, proof = [(str(host), int(port)) for host, port in found], network.secret.proof
        channels = connect_all(
            rank, listener, addresses, **proof, hosts=hosts, names=members, purpose=purpose, timeout_s=patience_s
        )
    return RingGroup(rank, len(members), channels, hosts=hosts, names=members, timeout_s=last_resort_s(place))


def shard_listener(place: ProcessPlace, driver: ProcessDriverClient) -> Listener | None:
    """Where this shard's workers on other hosts come to; they know it when this returns. None: all are here."""
    remote = _remote(place)
    if not remote:
        return None
    listener = network_of(place).listener(last_resort_s(place))
    driver.rendezvous(name_of(place.process_index), [place.process_index, *remote], list(listener.address))
    return listener


def shard_channel(place: ProcessPlace, driver: ProcessDriverClient, shard: int) -> Channel:
    network, process_index = network_of(place), shard_of(shard)
    (host, port), *_ = driver.rendezvous(name_of(process_index), [process_index, *_remote(place)], None)
    greeting = hello(place.process_index, shard, place.servers, network.host_names[place.process_index])
    peer = f"{name_of(process_index)} on {network.names[0]}"
    sock = connect((host, port), greeting, **network.secret.proof, peer=peer, timeout_s=_connect_s(place)).detach()
    os.register_at_fork(after_in_child=sock.close)  # a loader's process must not keep the connection open
    return Channel(sock, peer=peer, timeout_s=last_resort_s(place))


def _connect_s(place: ProcessPlace) -> float:
    """How long to try to connect: less than the driver's deadline, whose error would not name the shut port."""
    return min(_MOST_CONNECT_S, place.timeout_s / 2)


def network_of(place: ProcessPlace) -> Network:
    assert place.network is not None
    return Network.from_json(place.network)


def _remote(place: ProcessPlace) -> list[int]:
    """Ranks of workers on other hosts than the driver's, which has all shards."""
    return [] if place.network is None else [rank for ranks in network_of(place).hosts[1:] for rank in ranks]
