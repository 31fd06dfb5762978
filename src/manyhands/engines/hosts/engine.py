"""Engine `hosts`: workers on several hosts. This one listens, the others join with the command that it prints.

The driver and its own workers are here; every other host runs `manyhands join`, whose agent has that host's workers.
Inside a host workers share memory, between hosts their leaders form a ring over TLS.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import shlex
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeVar

from typing_extensions import override

from manyhands.engines.base import Capabilities, Engine, LaunchSpec, check_counts, check_seconds
from manyhands.engines.driver import supervisor
from manyhands.engines.driver.host_processes import process_indices_of
from manyhands.engines.faults import Faults
from manyhands.engines.hosts.join_listener import HostEntrance, JoinedHosts, JoinListener, KeptHosts, Listening
from manyhands.engines.hosts.message_channel import ALIVE_S, SILENCE_S
from manyhands.engines.hosts.network import PLAIN_RISK, Network, check_advertised, check_way, ports_of
from manyhands.engines.hosts.roster import Offer, Roster
from manyhands.engines.hosts.secret import Secret, named_file
from manyhands.errors import BadInput, Unsupported, is_whole
from manyhands.transport.address import format_address, is_loopback
from manyhands.transport.credentials import VARIABLE
from manyhands.transport.listener import Listener

if TYPE_CHECKING:
    from manyhands.worker import Worker

T = TypeVar("T")

LOG = logging.getLogger("manyhands")

_ANYWHERE = ("0.0.0.0", "::", "")


@dataclass
class _Announcer:
    """How to join is passed to `say`, and the hosts that came. Equal for all engines: it is no option."""

    say: Callable[[str], None] = field(default=LOG.warning, compare=False)  # a script's user must see it, too

    def __reduce__(self) -> tuple[type[_Announcer], tuple[()]]:
        return _Announcer, ()


@dataclass
class _Kept:
    """What the launches of one run share: where hosts find it, and those of the launch before. It is no option."""

    port: int | None = None
    secret: tuple[Secret, bytes] | None = None  # and its file
    joined: KeptHosts = field(default_factory=KeptHosts)

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()


@dataclass(frozen=True, kw_only=True)
class Hosts(Engine):
    """Workers of several hosts: this one listens, the others join it with the command that it prints.

    What remote workers return travels as JSON and tensors; anything else raises BadInput. The hosts need the same
    versions of Python, torch and manyhands, and the modules that the program imports. Shards of a server are here.
    """

    name: ClassVar[str] = "hosts"
    capabilities: ClassVar[Capabilities] = Capabilities(serves=True, survives=True, copies=True)
    listen: str = "127.0.0.1"
    """An address of this host that the others reach. Other than loopback it needs TLS."""
    advertise: str = ""
    """The address at which the others reach this host, where it is not one of its own, as with the published ports of a
    container: they are the same numbers outside as inside (`ports`). Without it, `listen`."""
    local_workers: int | None = None
    """So many workers this host gives itself, at least one (worker 0 is here); `none`: half of them, rounded up."""
    tls: bool = True
    """on: every connection is encrypted, and both ends prove that they hold the run's credentials: the file that
    MANYHANDS_CREDENTIALS names, made where it is missing, else a file of this run's alone. off: both ends still prove
    that they hold the file, but whoever is on the way can read and change what is sent, the program included; on
    loopback only, unless plain_network says otherwise."""
    ports: str = ""
    """"7000-7100", to listen on; without it, any that are free. Every host needs one a worker, this one also one a
    shard, or copy of one."""
    plain_network: bool = False
    """With tls off, also on addresses other than loopback."""
    wait_s: float = 600.0
    """Seconds to wait for the others."""
    faults: str | Faults = ""
    """What goes wrong, to try out what a run then does: kill=2@step:100,pause=1@2.5s+3 … send real signals."""
    announcer: _Announcer = field(default_factory=_Announcer, init=False, repr=False, compare=False)
    _kept: _Kept = field(default_factory=_Kept, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.local_workers is not None and not is_whole(self.local_workers):
            raise BadInput(
                f"local_workers must be a whole number of at least 1, not {self.local_workers!r}: worker 0 runs on the "
                "driver's host"
            )
        check_seconds("wait_s", self.wait_s)
        _ = Faults.of(self.faults)
        if self.tls and self.plain_network:
            raise BadInput("plain_network works only with tls=off: leave plain_network out, or give tls=off too")
        check_way(self.listen, tls=self.tls, plain_network=self.plain_network)
        if self.advertise != "":
            check_advertised(self.advertise, self.listen)
        ports_of(self.ports)

    @override
    def announce(self, say: Callable[[str], None]) -> None:
        self.announcer.say = say

    @override
    def on_one_host(self, workers: int) -> bool:
        return workers == 1

    @override
    def check(self, spec: LaunchSpec) -> None:
        check_counts(spec)
        if spec.survive is not None and spec.survive.silence_s < 2 * ALIVE_S:
            raise BadInput(
                f"survive: silence_s must be at least {2 * ALIVE_S:g} on engine hosts, whose hosts say every {ALIVE_S:g} s "
                f"that they live; got {spec.survive.silence_s:g}"
            )
        instead = "give several workers" if spec.workers == 1 and spec.survive is None else ""
        Faults.of(self.faults).check_real(self.name, spec, instead)

    @override
    def launch(self, program: Callable[[Worker], T], spec: LaunchSpec) -> list[T]:
        self.check(spec)
        local_workers = math.ceil(spec.workers / 2) if self.local_workers is None else self.local_workers
        if local_workers > spec.workers:
            raise BadInput(
                f"local_workers={local_workers} is more than workers={spec.workers}: give at most {spec.workers}"
            )
        if sys.platform != "linux":
            raise Unsupported(f"engine hosts needs Linux, this is {sys.platform}: on Windows use WSL2")
        if spec.workers == 1 and spec.survive is None and not spec.restarts:
            from manyhands.engines.single_process import run_here

            return [run_here(program, spec)]
        from manyhands.engines.descriptors import room_for_descriptors
        from manyhands.engines.driver.elastic_driver import driver_of
        from manyhands.engines.local.fork_client import Spawner
        from manyhands.engines.local.processes import LocalProcesses

        with ExitStack() as stack:
            stack.enter_context(room_for_descriptors(4 * spec.workers + 16))
            folder = Path(tempfile.gettempdir()) / f"manyhands-{secrets.token_hex(8)}"
            spawner = Spawner(leftover=folder)  # it loads torch while the others come
            stack.callback(spawner.close)
            self._kept.joined.call_again()
            joined = stack.enter_context(JoinedHosts(kept=self._kept.joined if spec.restarts else None))
            gathering = stack.enter_context(ExitStack())
            network, listener = self._gathered(spec, local_workers, joined, folder, gathering)
            if spec.survive is None:
                gathering.close()
            here = [*network.hosts[0], *process_indices_of(0, spec.shard_processes)]
            own = LocalProcesses(spawner, here, spec.timeout_s, host=network.names[0], network=network.to_json())
            warning = (
                f"engine hosts ran WITHOUT TLS on {self.listen}: anybody on the network between the hosts could read "
                "and change all messages, and the program too. Leave TLS on unless you trust this network"
            )
            observer = Listening(spec.observer, joined.hosts, "" if self.tls else warning, spec.survive is not None)
            joined.stopped = observer.stopping  # a host that was asked to end stops the others, too
            faults = Faults.of(self.faults)
            entrance = None
            if spec.survive is not None:
                there = {"hosts": network.hosts, "names": network.names}
                entrance = HostEntrance(listener, joined, spec, there, self.announcer.say)
                for host_processes in joined.hosts:
                    host_processes.silence_s = spec.survive.silence_s
            for host_processes in joined.hosts:
                host_processes.restarts = spec.restarts
            driver = driver_of([own, *joined.hosts], replace(spec, observer=observer), faults, entrance)
            return driver.run(program)

    @override
    def finish_run(self) -> None:
        self._kept.joined.release()
        self._kept.port, self._kept.secret = None, None

    def _gathered(
        self, spec: LaunchSpec, local_workers: int, joined: JoinedHosts, folder: Path, stack: ExitStack
    ) -> tuple[Network, Listener]:
        """This host's Network, once all workers are there; the processes of the others are in `joined`.

        stack: holds the listener and the file of the run's secret open.
        """
        offers = [Offer(socket.gethostname(), local_workers)]
        roster = Roster(spec.workers, offers, takes_part_of_offers=spec.survive is not None)
        ports, plain = ports_of(self.ports), self.plain_network

        def late() -> str:
            return (
                f"start `manyhands join` on the other hosts (workers still missing: {roster.missing}), or give a "
                "longer wait_s (--wait)"
            )

        secret, path = stack.enter_context(self._secret(folder, kept=spec.restarts))
        port = (self._kept.port or supervisor.link().take_port()) if spec.restarts else None
        same = ports if port is None else (port, port)
        listener = Listener(self.listen, **secret.proof, ports=same, plain_network=plain, timeout_s=SILENCE_S)
        stack.callback(listener.close)
        if spec.restarts:
            self._kept.port = listener.address[1]
            supervisor.link().report(port=self._kept.port)
        if roster.missing:
            self.announcer.say(f"{roster.text()}. {self._how_to_join(listener, roster.missing, path)}")
        elif spec.survive is not None:
            self.announcer.say(f"Hosts may join at any time. {self._how_to_join(listener, 1, path)}")
        JoinListener(listener, roster, joined, self.announcer.say, late=late).wait(spec.observer, self.wait_s)
        address, advertise = listener.address[0], self.advertise
        if address in _ANYWHERE and spec.survive is not None and not joined.hosts:
            advertise = advertise or socket.gethostname()
        names = roster.names()
        if address in _ANYWHERE and joined.hosts and not self.advertise:
            came_by = [host_processes.local_address for host_processes in joined.hosts]
            address = _common_address(dict(zip(names[1:], came_by, strict=True)))
        joined.assign(roster)
        network = Network(
            hosts=roster.process_indices(),
            names=names,
            listen=address,
            advertise=advertise,
            ports=ports,
            plain_network=plain,
            secret=secret,
        )
        return network, listener

    @contextmanager
    def _secret(self, folder: Path, kept: bool) -> Iterator[tuple[Secret, Path]]:
        """The run's secret and the file that holds it; one of this run's alone lies in `folder`, and is gone afterwards.

        kept: the next launch of the run has the same one.
        The fork server removes the folder where this process is killed meanwhile.
        """
        named = named_file()
        if named is not None:
            yield (Secret.load if named.exists() else Secret.create)(named, tls=self.tls), named
            return
        folder.mkdir(mode=0o700)
        try:
            path = folder / f"manyhands-{os.getpid()}.pem"
            if self._kept.secret is None:
                secret = Secret.create(path, tls=self.tls)
                if kept:
                    self._kept.secret = secret, path.read_bytes()
            else:  # of the launch before: hosts have it
                secret, content = self._kept.secret
                with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(content)
            yield secret, path
        finally:
            shutil.rmtree(folder)

    def _how_to_join(self, listener: Listener, workers: int, path: Path) -> str:
        host, port = self.advertise or listener.address[0], listener.address[1]
        address = format_address((socket.gethostname() if host in _ANYWHERE else host, port))
        plain = "" if self.tls else " --no-tls"
        copy, name = "", str(path)
        if not is_loopback(host):
            plain += " --plain-network" if self.plain_network else ""
            there = f"{address.rpartition(':')[0]}:{path}"
            copy, name = f"  scp -p {shlex.quote(there)} .\n", path.name
            if self.advertise:  # what has this path there may be of another file system
                copy = f"  (with a copy of {path}, a file of the machine or container where this runs)\n"
        risk = "" if self.tls else f"\n{PLAIN_RISK}.\n"
        return (
            f"On {'the other hosts' if copy else 'this host'}, run this{'' if self.tls else ', WITHOUT TLS'} (several "
            "hosts may share the workers; keep the file private, because whoever has it can join):\n\n"
            f"{copy}  {VARIABLE}={shlex.quote(name)} manyhands join {address} --workers {workers}{plain}\n{risk}"
        )


def _common_address(came_by: dict[str, str]) -> str:
    """Where workers of all joined hosts reach this one's, from the address of this host that each host came by.

    Loopback only if all came by it: its own workers listen where a host came by. BadInput for a mix.
    """
    near = [host for host, address in came_by.items() if is_loopback(address)]
    far = [address for address in came_by.values() if not is_loopback(address)]
    if near and far:
        raise BadInput(
            f"{', '.join(near)} joined over loopback, and other hosts cannot reach workers there: on that host, join "
            f"with the address {far[0]} too, or listen on {far[0]} only"
        )
    return (far or list(came_by.values()))[0]
