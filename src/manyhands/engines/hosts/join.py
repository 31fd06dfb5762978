"""The agent behind `manyhands join`: gives workers of this host to a run whose driver is on another.

It has processes of its own, and carries messages both ways. What it gets from the driver, the program included, is as
trustworthy as the driver: joining a run means running its code. Hence it takes it only from whoever has the run's
credentials. The driver in turn gets JSON and tensors, and unpickles nothing.
"""

from __future__ import annotations

import logging
import mmap
import os
import select
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from manyhands.data.shards.host_cache import VARIABLE as CACHE
from manyhands.engines.base import check_count, check_seconds
from manyhands.engines.cores import threads_per_worker
from manyhands.engines.descriptors import room_for_descriptors
from manyhands.engines.driver.message_checks import order
from manyhands.engines.driver.run_monitor import Failure
from manyhands.engines.hosts import roster
from manyhands.engines.hosts.message_channel import SILENCE_S, HostMessage, MessageChannel
from manyhands.engines.hosts.network import PLAIN_RISK, Network, check_advertised, check_way, ports_of
from manyhands.engines.hosts.plain_values import encode
from manyhands.engines.hosts.secret import Secret, named_file
from manyhands.engines.local.fork_client import Spawner, import_path
from manyhands.engines.local.processes import LocalProcesses
from manyhands.errors import BadInput, ManyhandsError, Preempted
from manyhands.signals import sigterm_to
from manyhands.transport.address import parse_address
from manyhands.transport.channel import Channel, ChannelClosed, ChannelTimeout
from manyhands.transport.credentials import VARIABLE
from manyhands.transport.frame import FrameError
from manyhands.transport.listener import connect
from manyhands.units import count

LOG = logging.getLogger("manyhands")

_POLL_S = 0.2
_AGAIN_S = 2.0  # of each try to connect once more
_IMPORTS = ("ModuleNotFoundError", "ImportError")


@dataclass(frozen=True, kw_only=True)
class Join:
    """What a host offers, and how it is reached."""

    address: str  # the driver's, HOST:PORT
    workers: int
    listen: str = ""  # where other hosts reach this one's workers; "": where this host reaches the driver from
    advertise: str = ""  # where they reach it, if that is no address of this host; "": listen
    ports: str = ""  # to listen on, "7000-7100"; "": any that is free
    tls: bool = True
    plain_network: bool = False  # without TLS also over addresses other than loopback
    wait_s: float = 600.0  # for the driver to be there
    threads: int | None = None  # of each worker, where the run does not say; None: usable cores / workers
    order: int = 0  # this host's place among the others, where they have one
    variables: Mapping[str, str] = field(default_factory=dict)  # for the workers' environment, beside this process's

    def __post_init__(self) -> None:
        check_count("workers", self.workers)
        check_seconds("wait_s", self.wait_s)
        host, _ = parse_address(self.address)
        for one in filter(None, (host, self.listen)):
            check_way(one, tls=self.tls, plain_network=self.plain_network)
        if self.advertise != "":
            check_advertised(self.advertise, self.listen)
        ports_of(self.ports)


def join(
    offer: Join, say: Callable[[str], None] = LOG.info, secret: Secret | None = None, spawner: Spawner | None = None
) -> None:
    """Give workers to the run at `offer.address`, until it is over; then nothing of it is left on this host.

    Where the connection to the driver is lost, of a run that goes on without this host or that may start again, this
    host's workers are ended, and it connects again, for `offer.wait_s` at most.

    say: gets a line where there is news for the user. spawner: a fork server that was started for this; it is closed.
    secret: the run's; None: in the file that MANYHANDS_CREDENTIALS names.
    Raises ManyhandsError with the driver's reason where it refuses, and with the run's error where it fails; Preempted
    after SIGTERM (the driver stops the run where it can be resumed).
    """
    if sys.platform != "linux":
        raise BadInput(f"joining a run needs Linux, this is {sys.platform}: on Windows use WSL2")
    secret, before = secret or _secret(offer), None
    with room_for_descriptors(8 * offer.workers + 16):
        while True:
            spawner = spawner or Spawner()  # it loads torch while we look for the driver
            try:
                agent = Agent(offer, secret, spawner, say)
                agent.serve(MessageChannel(_connected(offer, secret, before), agent.memory_for))
            finally:
                spawner.close()
            if not agent.comes_back:
                return
            say(f"{agent.comes_back}. This host connects again, for up to {offer.wait_s:.0f} s")
            spawner, before = None, agent


def _secret(offer: Join) -> Secret:
    """From the file that MANYHANDS_CREDENTIALS names; on a shared disk the driver may be about to make it."""
    path, deadline = named_file(), time.monotonic() + offer.wait_s
    if path is None:
        raise BadInput(
            f"joining a run needs its credentials: copy the file that the driver names to this host, and set {VARIABLE} to its path"
        )
    while not path.exists():
        if time.monotonic() >= deadline:
            raise BadInput(
                f"{VARIABLE} names {path}, and no such file appeared within {offer.wait_s:.0f} s: copy the driver's "
                "credentials file to it"
            )
        time.sleep(_POLL_S)
    return Secret.load(path, tls=offer.tls)


def _connected(offer: Join, secret: Secret, before: Agent | None) -> Channel:
    """A channel to the driver, once it listens and has accepted this host. before: whose connection was lost."""
    deadline = time.monotonic() + offer.wait_s
    while True:
        timeout_s = min(SILENCE_S if before is None else _AGAIN_S, max(0.1, deadline - time.monotonic()))
        try:
            return connect(
                parse_address(offer.address),
                roster.hello(offer.workers, offer.order),
                **secret.proof,
                peer="the driver",
                timeout_s=timeout_s,
            )
        except ChannelClosed as error:
            raise JoinError(str(error) if before is None else f"{before.comes_back}; {error}") from error
        except ChannelTimeout as error:
            if before is not None and not before.starts_again and isinstance(error.__cause__, ConnectionRefusedError):
                raise JoinError(f"{before.comes_back}, and no run listens there any more") from error
            if time.monotonic() >= deadline and before is not None:
                raise JoinError(f"{before.comes_back}, and within {offer.wait_s:.0f} s {error}") from error
            if time.monotonic() >= deadline:
                raise JoinError(
                    f"no run took this host's workers within {offer.wait_s:.0f} s: {error} Or did the run begin "
                    "without this host?"
                ) from error


class JoinError(ManyhandsError):
    """No run took this host's workers."""


@dataclass
class Agent:
    """One host's part in one run."""

    offer: Join
    secret: Secret
    spawner: Spawner
    say: Callable[[str], None]
    _program: int = -1
    _processes: LocalProcesses | None = None
    _running: bool = False
    _preempted: str = ""
    _warned: bool = False
    _over: str | None = field(default=None)  # how the run ended, "" is well
    _stopped: bool = False  # it was asked to end (SIGTERM), wherever that was
    _goes_on: bool = False  # the run goes on without this host
    starts_again: bool = False  # the run may start again, also after its driver's death
    comes_back: str = ""  # why this host is to connect once more

    def memory_for(self, body: dict[str, Any], nbytes: int) -> Tensor:
        """The program arrives in the file from which the workers map it."""
        if body.get("type") != "launch" or self._program >= 0:
            return torch.empty(nbytes, dtype=torch.uint8)
        self._program = os.memfd_create("manyhands-program", os.MFD_CLOEXEC)
        os.ftruncate(self._program, nbytes)
        return torch.frombuffer(mmap.mmap(self._program, nbytes), dtype=torch.uint8)

    def serve(self, post: MessageChannel) -> None:
        """Until the run is over. The post is closed at the end, and no process of the run is left."""
        self._post = post
        if not self.offer.tls:
            self.say(PLAIN_RISK)
        self.say(
            f"joined the run at {self.offer.address} with {count(self.offer.workers, 'worker')}. The run begins when "
            "all workers have joined"
        )
        try:
            with sigterm_to(self._ask_to_end):
                while self._over is None and not self.comes_back:
                    self._turn()
        finally:
            if self._processes is not None:
                self._processes.end(0.0)
            post.close()
            if self._program >= 0:
                os.close(self._program)
        if self.comes_back:
            return
        if self._over and not self._stopped:
            raise ManyhandsError(f"the run at {self.offer.address} failed: {self._over}")
        if self._preempted or self._stopped:
            if self._preempted and self._goes_on:
                raise Preempted(f"this host was asked to end (SIGTERM) and has left the run at {self.offer.address}")
            who = "this host" if self._preempted else "the run"
            raise Preempted(
                f"{who} was asked to end (SIGTERM), and the run at {self.offer.address} stopped: {self._over or 'it can be resumed'}"
            )
        self.say("the run is done")

    def _ask_to_end(self, reason: str) -> None:
        self._preempted = reason

    # -- both ways ---------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Wait for news of either side, and pass it on."""
        poll = select.poll()
        poll.register(self._post, select.POLLIN)
        for fd in self._processes.filenos() if self._processes is not None and self._running else []:
            poll.register(fd, select.POLLIN)
        poll.poll(_POLL_S * 1000)
        for message in self._post.receive():
            self._obey(message)
        if self._processes is not None and self._running:
            try:
                for process_index, body in self._processes.receive():
                    self._pass_on(process_index, body)
            except ManyhandsError as error:  # the fork server died, or a value cannot be read
                self._failed(error)
        if self._preempted and self._processes is None:
            raise Preempted("asked to end (SIGTERM) before the run began")
        if self._preempted and not self._warned:
            self._warned = True
            self._send({"type": "preempted"})
        if not self._post.lost or self._over is not None or self.comes_back:
            return
        if not self._preempted and (self._goes_on or self.starts_again):
            ended = ": this host's workers were ended" if self._running else ""
            self.comes_back = f"the driver at {self.offer.address} is gone ({self._post.lost}){ended}"
        else:
            raise ManyhandsError(
                f"the driver at {self.offer.address} is gone ({self._post.lost}): this host's workers were ended"
                if self._running
                else f"the driver at {self.offer.address} left before the run began ({self._post.lost})"
            )

    def _obey(self, message: HostMessage) -> None:
        """ManyhandsError for what no driver of this version sends: this host's workers end then."""
        try:
            body = order(message.body)
            match body["type"]:
                case "launch":
                    self._post.set_silence(body["silence_s"])
                    self._launch(body)
                case "end":
                    self._end(body["grace_s"])
                case "again":
                    self.comes_back = f"the run at {self.offer.address} starts again ({body['why']})"
                case "over":
                    self._over, self._stopped = body["error"], body["preempted"]
                case _ if self._processes is not None and self._running:
                    self._order(self._processes, body)
        except FrameError as error:
            raise ManyhandsError(
                f"the driver at {self.offer.address} sent {error}: use the same version of manyhands on all hosts"
            ) from error

    def _order(self, host_processes: LocalProcesses, body: dict[str, Any]) -> None:
        match body["type"]:
            case "to_process":
                if body["process_index"] not in host_processes.process_indices:
                    raise FrameError(
                        f"a message to process {body['process_index']}; here are {host_processes.process_indices}"
                    )
                host_processes.send(body["process_index"], body["body"])
            case "signal":
                host_processes.signal(body["number"])
            case "signal_to":
                host_processes.signal(body["number"], body["process_indices"])
            case "start_worker":
                host_processes.start_worker(body["worker_id"], body["faults"])
            case "form":
                self._form(host_processes, body)
            case "stacks":
                # JSON's keys are strings
                stacks = {str(process_index): stack for process_index, stack in host_processes.stacks().items()}
                where = {str(process_index): place for process_index, place in host_processes.where().items()}
                self._send({"type": "stacks", "stacks": stacks, "where": where})

    def _form(self, host_processes: LocalProcesses, body: dict[str, Any]) -> None:
        names, hosts = body["names"], body["hosts"]
        if len(names) != len(hosts):
            raise FrameError(f"a group on {len(hosts)} hosts, with {len(names)} names")
        here = [i for name, ids in zip(names, hosts, strict=True) if name == host_processes.host for i in ids]
        if strangers := set(here) - set(host_processes.process_indices):
            raise FrameError(
                f"a group of processes {strangers} on this host; here are {host_processes.process_indices}"
            )
        host_processes.form(body["generation"], hosts, names)

    def _launch(self, body: dict[str, Any]) -> None:
        if self._processes is not None or self._program < 0:
            raise FrameError("a second launch" if self._processes is not None else "a launch without a program")
        shared = body["shared"]
        self._goes_on, self.starts_again = bool(shared.get("survive")), bool(shared.pop("restarts", False))
        process_indices = shared["process_indices"]
        ranks = [process_index for process_index in process_indices if process_index >= 0]
        threads = shared["threads"] or self.offer.threads
        if not process_indices:
            self.say("the run is under way. This host takes a free place, or the next one that is")
            threads = threads or threads_per_worker(self.offer.workers)
        else:
            self.say(
                f"the run begins. Its workers on this host (by rank, of 0 to {shared['size'] - 1}): "
                f"{', '.join(map(str, ranks)) or 'none'}"
            )
        network = Network(  # the driver's view of who is where, with this host's own address and key
            hosts=shared["network"]["hosts"],
            names=shared["network"]["names"],
            listen=self.offer.listen or self._post.local_address,
            advertise=self.offer.advertise,
            ports=ports_of(self.offer.ports),
            plain_network=self.offer.plain_network,
            secret=self.secret,
        ).to_json()
        self._processes = LocalProcesses(
            self.spawner, process_indices, shared["timeout_s"], host=body["host"], network=network
        )
        self._running = True
        own = {
            "threads": threads,
            "path": list(dict.fromkeys([os.getcwd(), *import_path()])),
            "folder": os.getcwd(),
            "environment": self._environment(body["variables"]),
        }
        try:
            self._processes.start({**shared, **own}, self._program)
        except ManyhandsError as error:
            self._failed(error)

    def _environment(self, drivers: Mapping[str, str]) -> dict[str, str]:
        """Of the workers: the driver's variables take precedence, except over a cache folder, which is of this host's disk."""
        own = {**os.environ, **self.offer.variables}
        return {**own, **drivers, **({CACHE: own[CACHE]} if CACHE in own else {})}

    def _failed(self, error: ManyhandsError) -> None:
        """The driver decides what it means, and ends the run."""
        self._running = False
        self._send({"type": "failed", "message": str(error)})

    def _pass_on(self, process_index: int, body: dict[str, Any]) -> None:
        if body["type"] == "value" and "value" in body:
            try:
                value, tensors = encode(body["value"], f"the value that worker {process_index} returned")
                sent = {"type": "from_process", "process_index": process_index, "body": {**body, "value": value}}
                self._send(sent, tensors)
                return
            except BadInput as error:
                name = type(error).__name__
                failure = Failure(
                    rank=process_index, phase="end", step=0, message=str(error), error=name, family=name, exit_code=2
                )
                body = {"type": "error", **vars(failure)}
        elif body["type"] == "rows":
            data = body.pop("data")
            tensor = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
            self._send({"type": "from_process", "process_index": process_index, "body": body}, [tensor])
            return
        elif body["type"] == "error" and body["error"] in _IMPORTS and body["phase"] == "start":
            hint = (
                "this host needs it too: install it, or start `manyhands join` in the folder that has it, not in "
                f"{os.getcwd()}"
            )
            body = {**body, "message": f"{body['message']} ({hint})"}
        self._send({"type": "from_process", "process_index": process_index, "body": body})

    def _end(self, grace_s: float) -> None:
        """The driver has received all it needs: end the processes, then report that."""
        if self._processes is not None:
            self._processes.end(grace_s)
        self._running = False
        self._send({"type": "idle"})

    def _send(self, body: dict[str, Any], tensors: list[Tensor] | None = None) -> None:
        with suppress(ChannelClosed, ChannelTimeout):  # `lost` will say so
            self._post.send(body, tensors or [])
