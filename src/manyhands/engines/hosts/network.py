"""How the processes of one host reach those of the others: who is where, on which address to listen, with what secret.

It travels as JSON inside one host only, over inherited sockets; a joined host makes its own from what the driver says
of the others. The key never leaves the host on which its file lies.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from dataclasses import dataclass
from typing import Any

from manyhands.engines.driver.host_processes import name_of, shard_of
from manyhands.engines.hosts.secret import Secret
from manyhands.engines.local.heartbeat import ProcessDriverClient
from manyhands.engines.local.messages import ProcessPlace, connect_s, last_resort_s
from manyhands.errors import BadInput
from manyhands.server.protocol import hello
from manyhands.transport.address import is_loopback
from manyhands.transport.channel import Channel
from manyhands.transport.listener import Listener, connect


@dataclass(frozen=True, kw_only=True)
class Network:
    """One host's view."""

    hosts: list[list[int]]  # ranks by host, the driver's first
    names: list[str]  # of the hosts
    listen: str  # the address of this host at which its processes listen
    advertise: str = ""  # at which others reach them, where it is another: published ports of a container; "": listen
    ports: tuple[int, int] | None = None  # (first, last) to listen on; None: any that is free
    plain_network: bool = False  # without TLS also on addresses other than loopback
    secret: Secret  # has no repr

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "secret": self.secret.to_json()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Network:
        ports, secret = values["ports"], Secret.from_json(values["secret"])
        return cls(**{**values, "ports": None if ports is None else tuple(ports), "secret": secret})

    @property
    def host_names(self) -> list[str]:
        """By rank."""
        return [name for name, ranks in zip(self.names, self.hosts, strict=True) for _ in ranks]

    def address_of(self, listener: Listener) -> list[Any]:
        """[host, port] by which others reach it."""
        return [self.advertise or listener.address[0], listener.address[1]]

    def listener(self, timeout_s: float, generation: int = 0) -> Listener:
        """Of this host; timeout_s is of the channels that it gives. Who comes from an older generation is refused."""
        return Listener(
            self.listen,
            **self.secret.proof,
            ports=self.ports,
            plain_network=self.plain_network,
            generation=generation,
            timeout_s=timeout_s,
        )


PLAIN_RISK = (
    "WITHOUT TLS: anybody on the network between these hosts can read and change parameters, gradients and events, and "
    "can replace the program that joining hosts run"
)
"""Said where a run, or a host that joins one, does without TLS."""


def check_way(host: str, *, tls: bool, plain_network: bool) -> None:
    """BadInput where traffic of this address may leave the machine neither encrypted nor explicitly allowed."""
    if not (tls or plain_network or is_loopback(host)):
        raise BadInput(
            f"{host} can be reached from other machines, and without TLS anybody on that network can read and change "
            "all messages, and the program too: leave TLS on, or add --plain-network (plain_network=on) if you trust "
            "the network"
        )


def check_advertised(host: object, listen: str) -> None:
    """BadInput for what is not the name or address of one host, without a port, or where `listen` lets nobody in."""
    try:
        fine = not ipaddress.ip_address(str(host)).is_unspecified
    except ValueError:
        fine = isinstance(host, str) and re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", host) is not None
    if not fine:
        raise BadInput(
            f"advertise (--advertise) must be a host's name or address, without a port, such as 10.0.0.1 or node-1; not {host!r}"
        )
    if listen and is_loopback(listen) and not is_loopback(str(host)):
        raise BadInput(
            f"advertise={host} is where other hosts reach this one, and listen={listen} lets in this machine alone: "
            "also give --listen 0.0.0.0 (listen=)"
        )


def ports_of(text: str) -> tuple[int, int] | None:
    """ "7000-7100", "7000", "" (any free one) as (first, last) or None. BadInput for anything else."""
    if not text:
        return None
    found = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= first <= last <= 65535:
        raise BadInput(f'ports must be one port or a range such as "7000-7100", not {text!r}')
    return first, last


_REACH_S = 5.0
"""A primary that cannot be reached for so long is asked for again: the driver may know of another one."""


# -- of a process ----------------------------------------------------------------------------------------------------------


def shard_listener(place: ProcessPlace, driver: ProcessDriverClient) -> Listener | None:
    """Where this shard's workers on other hosts come to; they know it when this returns. None: all are here."""
    remote = _remote(place)
    if not remote:
        return None
    network = network_of(place)
    listener = network.listener(last_resort_s(place))
    driver.rendezvous(name_of(place.process_index), [place.process_index, *remote], network.address_of(listener))
    return listener


def shard_channel(place: ProcessPlace, driver: ProcessDriverClient, shard: int) -> Channel:
    network, process_index = network_of(place), shard_of(shard)
    (host, port), *_ = driver.rendezvous(name_of(process_index), [process_index, *_remote(place)], None)
    greeting = hello(place.process_index, shard, place.servers, network.host_names[place.process_index])
    peer = f"{name_of(process_index)} on {network.names[0]}"
    sock = connect((host, port), greeting, **network.secret.proof, peer=peer, timeout_s=connect_s(place)).detach()
    os.register_at_fork(after_in_child=sock.close)  # a loader's process must not keep the connection open
    return Channel(sock, peer=peer, timeout_s=last_resort_s(place))


def copy_listener(place: ProcessPlace, driver: ProcessDriverClient) -> Listener:
    """Where members may change: the driver says to workers of other hosts where this copy of a shard listens."""
    network = network_of(place)
    listener = network.listener(last_resort_s(place))
    driver.say({"type": "listens", "address": network.address_of(listener)})
    return listener


def reach_shard(place: ProcessPlace, shard: int, answer: dict[str, Any]) -> Channel:
    """Connect to the primary that the driver names. ChannelClosed or ChannelTimeout where it is not there any more."""
    network, (host, port) = network_of(place), answer["address"]
    greeting = hello(place.process_index, shard, place.servers, socket.gethostname())
    greeting["process"] = answer["process"]
    peer = f"{name_of(shard_of(shard))} on {network.names[0]}"
    sock = connect((host, port), greeting, **network.secret.proof, peer=peer, timeout_s=_REACH_S).detach()
    os.register_at_fork(after_in_child=sock.close)  # a loader's process must not keep the connection open
    return Channel(sock, peer=peer, timeout_s=last_resort_s(place), generation=answer["process"])


def network_of(place: ProcessPlace) -> Network:
    assert place.network is not None
    return Network.from_json(place.network)


def _remote(place: ProcessPlace) -> list[int]:
    """Ranks of workers on other hosts than the driver's, which has all shards."""
    return [] if place.network is None else [rank for ranks in network_of(place).hosts[1:] for rank in ranks]
