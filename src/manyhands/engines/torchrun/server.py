"""The parameter server of workers that a launcher started: the first worker of each host holds a shard, in a process beside
its own.

The workers of a host reach its shard over sockets that they inherit or are handed; those of other hosts over TLS, with
the credentials file that MANYHANDS_CREDENTIALS names on each host.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from manyhands.engines.hosts.network import Network
from manyhands.engines.hosts.secret import Secret
from manyhands.engines.make_group import Meet, Topology
from manyhands.engines.own_rules import from_fields, to_fields
from manyhands.engines.shared_memory import hand_out, take
from manyhands.errors import BadInput, ManyhandsError
from manyhands.server.base import ServerSpec
from manyhands.server.client import ServedServer
from manyhands.server.protocol import hello
from manyhands.transport.channel import Channel
from manyhands.transport.credentials import VARIABLE, Credentials
from manyhands.transport.listener import connect

_WHAT = "the parameter server"
_END_S = 1.0
LEAVE = "leave"
"""The holder ended in order: its shard goes on while other workers are there. Without this word the run is over."""


def start_server(spec: ServerSpec, topology: Topology, meet: Meet) -> tuple[ServedServer, HeldShard | None]:
    """(this worker's connection, the shard that it holds, if it does); a collective of all workers.

    BadInput on all of them, with nothing started, where there are several hosts and one is without credentials.
    """
    members, rank = topology.members, topology.rank
    fields = meet("server rule", members, to_fields(spec) if rank == members[0] else None)[0]
    spec = from_fields(fields)  # of a rule of one's own: the first worker's text, on all of them
    credentials = _credentials(f"a parameter server (rule {spec.rule})", topology, meet)
    shards = 1 if spec.one_shard else len(topology.hosts)
    here = next(number for number, ranks in enumerate(topology.hosts) if rank in ranks)
    own: socket.socket | None = None
    held: HeldShard | None = None
    with ExitStack() as on_error:
        if here < shards:
            own, held = _own_shard(here, shards, fields, credentials, topology, meet)
            on_error.callback(own.close)
        if held is not None:
            on_error.push(held)
        address = None if held is None or credentials is None else held.address(topology.connect_s)
        addresses = meet("server addresses", members, address)
        channels = []
        for shard in range(shards):
            link = own if shard == here and own is not None else _reach(shard, shards, addresses, credentials, topology)
            os.register_at_fork(after_in_child=link.close)  # a loader's process must not keep the connection open
            channels.append(Channel(link, peer=_name_of(shard, topology), timeout_s=topology.timeout_s))
        on_error.pop_all()
    return ServedServer(spec, channels, hosts=topology.host_names), held


def network_of(topology: Topology, meet: Meet, meeting_point: tuple[str, int] | None = None) -> Network:
    """For connections of these workers' own between hosts; a collective. BadInput where a host is without credentials.

    meeting_point: (host, port) that all hosts reach; None: the launcher's.
    """
    credentials = _credentials("an exchange of messages", topology, meet)
    hosts, names = [list(ranks) for ranks in topology.hosts], list(topology.names)
    return Network(hosts=hosts, names=names, listen=_address_here(meeting_point), secret=Secret(credentials))


def _credentials(what: str, topology: Topology, meet: Meet) -> Credentials | None:
    """Those of this host; None where all workers are on one."""
    if len(topology.hosts) == 1:
        return None
    found, why = None, f"{VARIABLE} is not set there"
    try:
        found = Credentials.from_environment()
    except BadInput as error:
        why = str(error)
    everyone = meet("server credentials", topology.members, None if found is not None else why)
    names = topology.host_names
    for name, reason in zip(names, everyone, strict=True):
        if reason is not None:
            raise BadInput(
                f"{what} over {len(topology.hosts)} hosts needs credentials, and {name} has none: "
                f"{reason}. Make a file (docs/hosts.md says how), copy it to each host, and name it there in {VARIABLE}"
            )
    return found


def _own_shard(
    shard: int, shards: int, fields: dict[str, Any], credentials: Credentials | None, topology: Topology, meet: Meet
) -> tuple[socket.socket, HeldShard | None]:
    """(this worker's connection to the shard of its host, the shard if this worker holds it)."""
    ranks = topology.hosts[shard]
    place, exchange = ranks.index(topology.rank), partial(meet, f"server shard {shard}", ranks)
    if place:
        (message,) = take(place, 1, exchange, topology.connect_s, _WHAT)
        return socket.socket(fileno=message.fds[0]), None
    with ExitStack() as opened, ExitStack() as on_error:
        pairs = [socket.socketpair() for _ in ranks]
        for mine, theirs in pairs:
            opened.enter_context(theirs)
            (on_error if mine is pairs[0][0] else opened).enter_context(mine)
        served = {
            "server": fields,
            "shard": shard,
            "shards": shards,
            "workers": len(topology.members),
            "here": {rank: theirs.fileno() for rank, (_, theirs) in zip(ranks, pairs, strict=True)},
            "listen": None if credentials is None else _address_here(),
            "timeout_s": topology.timeout_s,
        }
        held = on_error.enter_context(HeldShard.start(served, credentials))
        hand_out(lambda peer: [({}, [pairs[peer][0].fileno()])], len(ranks), exchange, topology.connect_s, _WHAT)
        on_error.pop_all()
    return pairs[0][0], held


def _reach(
    shard: int, shards: int, addresses: list[Any], credentials: Credentials | None, topology: Topology
) -> socket.socket:
    """A connection to the shard of another host."""
    host, port = addresses[topology.members.index(topology.hosts[shard][0])]
    greeting, peer = hello(topology.rank, shard, shards, socket.gethostname()), _name_of(shard, topology)
    return connect((host, port), greeting, credentials=credentials, peer=peer, timeout_s=topology.connect_s).detach()


def _name_of(shard: int, topology: Topology) -> str:
    return f"server shard {shard} on {topology.names[shard]}"


def _address_here(meeting_point: tuple[str, int] | None = None) -> str:
    """This host's address on the way to the meeting point, where the other hosts are."""
    host, port = meeting_point or (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    family, kind, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # nothing is sent
        return str(probe.getsockname()[0])


@dataclass
class HeldShard:
    """The process of a shard, as the worker that holds it has it. As a context: at its end the shard is told how the
    holder left."""

    process: subprocess.Popen[str]

    @classmethod
    def start(cls, served: dict[str, Any], credentials: Credentials | None) -> HeldShard:
        """served: what `shard_process` reads; the descriptors in it stay open here."""
        secret = None if credentials is None else Secret(credentials).to_json()
        process = subprocess.Popen(
            [sys.executable, "-m", "manyhands.engines.torchrun.shard_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=list(served["here"].values()),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            text=True,
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps({**served, "secret": secret}) + "\n")
        process.stdin.flush()
        return cls(process)

    def address(self, timeout_s: float) -> list[Any]:
        """[host, port] at which it listens for workers of other hosts."""
        out = self.process.stdout
        assert out is not None
        line = out.readline() if select.select([out], [], [], timeout_s)[0] else ""
        if not line:
            raise ManyhandsError(
                f"the process of this host's server shard did not say within {timeout_s:g} s where it listens: look for its "
                "error in the log"
            )
        address: list[Any] = json.loads(line)
        return address

    def __enter__(self) -> HeldShard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with suppress(OSError, subprocess.TimeoutExpired):  # it may have ended, or others may need it longer
            self.process.communicate(LEAVE if kind is None else "", timeout=_END_S)
