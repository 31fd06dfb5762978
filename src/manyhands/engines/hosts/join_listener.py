"""The driver's side of `manyhands join`: accepts hosts until all workers are there, and reports the end to them."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from manyhands.engines.base import LaunchSpec, Observer, PassingObserver
from manyhands.engines.driver.host_processes import Entrance, HostProcesses
from manyhands.engines.hosts.message_channel import MessageChannel
from manyhands.engines.hosts.processes import RemoteProcesses
from manyhands.engines.hosts.roster import Offer, Roster, free_name, refusal
from manyhands.errors import ManyhandsError, Preempted, WorkerFailed
from manyhands.events import Event
from manyhands.signals import PREEMPTED
from manyhands.transport.channel import ChannelTimeout
from manyhands.transport.frame import FrameError
from manyhands.transport.listener import Listener
from manyhands.units import count

_POLL_S = 0.1


@dataclass
class KeptHosts:
    """The hosts of a launch that failed, of a run that may start again."""

    hosts: list[RemoteProcesses] = field(default_factory=list)
    why: str = ""

    def call_again(self) -> None:
        """There is another launch."""
        while self.hosts:
            self.hosts.pop().come_again(self.why)

    def release(self) -> None:
        """There is none."""
        while self.hosts:
            self.hosts.pop().leave(self.why)


@dataclass
class JoinedHosts:
    """The hosts that joined, in the order of their coming. At the end of the `with` each gets the result of the run.

    log: where a lost host's own words are to be found, for the error. stopped: why the run was asked to stop, or "".
    """

    log: str = "see what `manyhands join` printed there"
    hosts: list[RemoteProcesses] = field(default_factory=list)
    stopped: Callable[[], str] = str
    kept: KeptHosts | None = None

    def __enter__(self) -> JoinedHosts:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        text = "" if error is None else (str(error).strip() or type(error).__name__).splitlines()[0][:500]
        preempted = isinstance(error, Preempted) or (error is None and self.stopped() == PREEMPTED)
        if self.kept is not None and isinstance(error, WorkerFailed) and not error.final:
            self.kept.hosts += self.hosts
            self.kept.why = text
            return
        for host_processes in self.hosts:
            host_processes.leave(text, preempted)

    def assign(self, roster: Roster, shards: Sequence[int] = ()) -> None:
        """All are there: tell each its ranks, its name, and who is where. shards: those of the run's first host."""
        ranks, names = roster.process_indices(), roster.names()
        own = len(names) - len(self.hosts)  # the driver's host, where it has workers
        for i, host_processes in enumerate(self.hosts, start=own):
            process_indices = [*ranks[i], *([] if i else shards)]
            host_processes.assign(process_indices, names[i], {"hosts": ranks, "names": names})


@dataclass
class JoinListener:
    """Lets hosts in until all workers are there.

    waiting_for: who is to come. late: what to do where they do not come, for the error.
    """

    listener: Listener
    roster: Roster
    joined_hosts: JoinedHosts
    say: Callable[[str], None]
    waiting_for: str = "the other hosts"
    late: Callable[[], str] = str

    def wait(self, observer: Observer, wait_s: float, check: Callable[[], None] = lambda: None) -> None:
        """Until nobody is missing; the hosts lie in the order that they gave then. ManyhandsError after `wait_s`, and
        where the observer stops the run. `check` is called about ten times a second, and raises what else ends it."""
        deadline, poll = time.monotonic() + wait_s, select.poll()
        poll.register(self.listener, select.POLLIN)
        while self.roster.missing:
            if reason := observer.stopping():
                message = f"asked to stop ({reason}) while waiting for {self.waiting_for}: nothing was trained"
                raise Preempted(message) if reason == PREEMPTED else ManyhandsError(message)
            check()
            if time.monotonic() >= deadline:
                raise ManyhandsError(
                    f"waited {wait_s:.0f} s for {self.waiting_for}; {self.roster.text()}; {self.late()}"
                )
            self._drop_departed()
            if poll.poll(_POLL_S * 1000):
                self._let_in()
        hosts, offers = self.joined_hosts.hosts, self.roster.offers
        own = len(offers) - len(hosts)
        both = sorted(zip(offers[own:], hosts, strict=True), key=lambda pair: pair[0].order)
        offers[own:], hosts[:] = [offer for offer, _ in both], [host_processes for _, host_processes in both]

    def _let_in(self) -> None:
        try:
            channel, fields = self.listener.accept(self._name, timeout_s=0.0)
        except ChannelTimeout:  # its hello has not come yet
            return
        host = self.roster.name_of(fields)
        self.roster.offers.append(Offer(host, min(fields["workers"], self.roster.missing), fields["order"]))
        self.joined_hosts.hosts.append(RemoteProcesses(MessageChannel(channel), host, self.joined_hosts.log))
        self.say(self.roster.text())

    def _name(self, fields: dict[str, Any]) -> str:
        if reason := self.roster.refusal(fields):
            raise FrameError(reason)
        return f"host {self.roster.name_of(fields)}"

    def _drop_departed(self) -> None:
        """Drop hosts that left before the start; their places are free again."""
        hosts, offers = self.joined_hosts.hosts, self.roster.offers
        own = len(offers) - len(hosts)  # the driver's host itself does not join
        for i in reversed([i for i, host_processes in enumerate(hosts) if not host_processes.here()]):
            host_processes, offer = hosts.pop(i), offers.pop(own + i)
            host_processes.leave("")
            self.say(f"{offer.host} left before the run began; {self.roster.text()}")


@dataclass
class HostEntrance(Entrance):
    """Lets hosts in while a run goes on whose members may change."""

    listener: Listener
    joined_hosts: JoinedHosts
    spec: LaunchSpec
    network: dict[str, Any]  # of the run's hosts at its start
    say: Callable[[str], None]

    @override
    def admit(self, names: Collection[str]) -> tuple[HostProcesses, int] | None:
        try:
            channel, fields = self.listener.accept(self._name, timeout_s=0.0)
        except ChannelTimeout:
            return None
        name = free_name(Roster.name_of(fields), names)
        host_processes = RemoteProcesses(MessageChannel(channel), name, self.joined_hosts.log)
        assert self.spec.survive is not None
        host_processes.silence_s, host_processes.restarts = self.spec.survive.silence_s, self.spec.restarts
        host_processes.assign([], name, self.network)
        self.joined_hosts.hosts.append(host_processes)
        self.say(f"{name} has joined with {count(fields['workers'], 'worker')}")
        return host_processes, fields["workers"]

    def _name(self, fields: dict[str, Any]) -> str:
        if reason := refusal(fields):
            raise FrameError(reason)
        return f"host {Roster.name_of(fields)}"


class Listening(PassingObserver):
    """The caller's observer; SIGTERM at a joined host stops the run as SIGTERM here does, unless hosts may leave it.

    warning: goes behind the run's first event.
    """

    def __init__(
        self, observer: Observer, hosts: Sequence[RemoteProcesses], warning: str = "", hosts_may_leave: bool = False
    ) -> None:
        super().__init__(observer)
        self.hosts, self.warning, self.hosts_may_leave = hosts, warning, hosts_may_leave

    @override
    def event(self, event: Event) -> None:
        super().event(event)
        if self.warning:
            message, self.warning = self.warning, ""
            self.observer.event(Event(type="warning", values={"message": message}))

    @override
    def stopping(self) -> str:
        asked = not self.hosts_may_leave and any(host_processes.preempted for host_processes in self.hosts)
        return self.observer.stopping() or (PREEMPTED if asked else "")
