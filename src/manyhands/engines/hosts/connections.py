"""How a worker on another host than the server's is linked with every shard: addresses go round through the driver.

The connection begins with both ends' proof that they hold the run's secret, and a hello that says who comes and what
for. The workers' own links are made in `engines/make_group.py`.
"""

from __future__ import annotations

import os

from manyhands.engines.driver.host_processes import name_of, shard_of
from manyhands.engines.hosts.network import Network
from manyhands.engines.local.heartbeat import ProcessDriverClient
from manyhands.engines.local.messages import ProcessPlace, connect_s, last_resort_s
from manyhands.server.protocol import hello
from manyhands.transport.channel import Channel
from manyhands.transport.listener import Listener, connect


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
    sock = connect((host, port), greeting, **network.secret.proof, peer=peer, timeout_s=connect_s(place)).detach()
    os.register_at_fork(after_in_child=sock.close)  # a loader's process must not keep the connection open
    return Channel(sock, peer=peer, timeout_s=last_resort_s(place))


def network_of(place: ProcessPlace) -> Network:
    assert place.network is not None
    return Network.from_json(place.network)


def _remote(place: ProcessPlace) -> list[int]:
    """Ranks of workers on other hosts than the driver's, which has all shards."""
    return [] if place.network is None else [rank for ranks in network_of(place).hosts[1:] for rank in ranks]
