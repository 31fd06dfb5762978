"""The crew of another host, as the driver sees it: an agent there (`manyhands join`) has the processes, a post joins us.

Letters to the agent: launch (with the program), tell, signal, stacks, end, over. From it: seat (what a seat said), stacks,
idle (everything of the run is gone there), preempted (it was asked to end), failed (its fork server died).
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import time
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from manyhands.engines.driver.host_processes import HostProcesses, name_of
from manyhands.engines.driver.message_checks import checked
from manyhands.engines.hosts.message_channel import ALIVE_S, HostMessage, MessageChannel
from manyhands.engines.hosts.plain_values import decode
from manyhands.errors import ManyhandsError, WorkerFailed, is_whole
from manyhands.transport.channel import ChannelClosed, ChannelTimeout
from manyhands.transport.frame import FrameError
from manyhands.units import printable

LOG = logging.getLogger("manyhands")

OWN = frozenset({"path", "folder", "environment", "network"})
"""What a joined host has of its own: the driver's would mean nothing there."""
PREFIX, CREDENTIALS = "MANYHANDS_", "MANYHANDS_CREDENTIALS"
_STACKS_S = 3.0  # the agent's own second, and the way
_QUIET_S = 3 * ALIVE_S
"""A host that has sent nothing for so long gives no answer either."""
_LOOK_S = 0.5
_END_S = 20.0


class RemoteProcesses(HostProcesses):
    """See Crew. `preempted`: the joined host was asked to end (SIGTERM there). log: where its own words are, for the error."""

    def __init__(self, post: MessageChannel, host: str, log: str = "see what `manyhands join` said there") -> None:
        self.host, self._log = host, log
        self.seats: list[int] = []  # when all hosts are there
        self.preempted = False
        self.network: dict[str, Any] = {}
        self._post = post
        self._came: list[tuple[int, dict[str, Any]]] = []
        self._where: dict[int, tuple[str, int]] = {}  # seat -> the last (phase, step) heard
        self._gone = False  # its end was told
        self._ended = False

    @override
    def start(self, shared: dict[str, Any], program: int) -> None:
        """The program goes through this process's memory as it lies in its file: nothing is unpickled or copied."""
        body = {name: value for name, value in shared.items() if name not in OWN}
        body |= {"seats": self.seats, "network": self.network}
        variables = {
            name: value for name, value in os.environ.items() if name.startswith(PREFIX) and name != CREDENTIALS
        }
        launch = {"type": "launch", "host": self.host, "shared": body, "variables": variables}
        self._send(launch, [_mapped(program)])

    @override
    def filenos(self) -> list[int]:
        return [self._post.fileno()]

    @override
    def receive(self) -> list[tuple[int, dict[str, Any]]]:
        for letter in self._post.receive():
            self._take(letter)
        if self._post.lost and not self._gone and not self._ended:
            self._gone = True
            self._came += [(seat, self._lost(seat)) for seat in self.seats]
        came, self._came = self._came, []
        return came

    def _take(self, letter: HostMessage) -> None:
        """WorkerFailed, naming the host, for what makes no sense: it must not end the driver with an error of its own."""
        body, kind = letter.body, letter.body["type"]
        if kind == "seat" and body.get("seat") in self.seats:
            seat: int = body["seat"]
            try:
                self._came.append((seat, self._said(seat, body.get("body"), letter.tensors)))
            except (FrameError, ManyhandsError) as error:
                raise self._nonsense(f"{name_of(seat)} sent {error}", seat) from error
        elif kind == "preempted":
            self.preempted = True
        elif kind == "failed":
            message = printable(body.get("message"), 10_000, keep="\n\t")
            raise WorkerFailed(message, rank=-1, host=self.host, phase="start", step=0)

    def _nonsense(self, what: str, seat: int = -1) -> WorkerFailed:
        phase, step = self._where.get(seat, ("start", 0))
        message = (
            f"host {self.host} sent what makes no sense: {what}. Does it run the same version of manyhands? {self._log}"
        )
        return WorkerFailed(message, rank=seat, host=self.host, phase=phase, step=step)

    def _said(self, seat: int, body: Any, tensors: list[Tensor]) -> dict[str, Any]:
        message = checked(seat, body)
        if message["type"] == "beat":
            self._where[seat] = (message["phase"], message["step"])
        if "value" in message and message["type"] == "value":
            return {**message, "value": decode(message["value"], tensors)}
        return message

    def _lost(self, seat: int) -> dict[str, Any]:
        """The news that the whole host is gone, for one of its seats."""
        phase, step = self._where.get(seat, ("start", 0))
        why = f"the connection to its host ended ({self._post.lost}); {self._log}"
        return {"type": "lost", "why": why, "phase": phase, "step": step}

    @override
    def tell(self, seat: int, body: dict[str, Any]) -> None:
        self._send({"type": "tell", "seat": seat, "body": body})

    @override
    def signal(self, number: int) -> None:
        self._send({"type": "signal", "number": number})

    @override
    def stacks(self) -> dict[int, str]:
        self._send({"type": "stacks"})
        answer = self._wait_for("stacks", _STACKS_S)
        found, places = (_object(answer, "stacks"), _object(answer, "where"))
        self._where |= {seat: place for seat in self.seats if (place := _place(places.get(str(seat)))) is not None}
        return {seat: printable(found.get(str(seat), ""), 1 << 20, keep="\n\t") for seat in self.seats}

    @override
    def where(self) -> dict[int, tuple[str, int]]:
        """As of the last heartbeats, or of the last `stacks`, which brings what the pages there say."""
        return dict(self._where)

    @override
    def silent_s(self) -> float:
        return self._post.silent_s()

    @override
    def end(self, grace_s: float) -> None:
        if self._ended:
            return
        self._ended = True
        if not self.seats or self._post.lost:  # never started, or lost: the agent ends what it has by itself
            return
        self._send({"type": "end", "grace_s": grace_s})
        if self._wait_for("idle", grace_s + _END_S) is None:
            LOG.warning(
                "host %s did not say that its workers ended (%s): they end as soon as it finds that the driver is gone",
                self.host,
                self._post.lost or f"nothing came for {self.silent_s():.0f} s",
            )

    def leave(self, error: str, preempted: bool = False) -> None:
        """Say how the run ended ("": well; preempted: it stopped where it can be resumed), and hang up. Idempotent."""
        self._send({"type": "over", "error": error, "preempted": preempted})
        self._post.close()

    def take_seats(self, seats: list[int], host: str, network: dict[str, Any]) -> None:
        """All hosts are there: this one's ranks, how messages name it, and who is where."""
        self.seats, self.host, self.network = seats, host, network

    @property
    def local_address(self) -> str:
        """The address of this host by which the other reached it."""
        return self._post.local_address

    def here(self) -> bool:
        """Before the start: whether the host is still connected; what it says then is taken."""
        self.receive()
        return not self._post.lost

    def _wait_for(self, type: str, timeout_s: float) -> dict[str, Any] | None:
        """The agent's answer, or None, at once where the host is silent; what comes before it is kept."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0 and not self._post.lost and self.silent_s() < _QUIET_S:
            letters = self._post.wait(min(left, _LOOK_S))
            found = [letter.body for letter in letters if letter.body["type"] == type]
            for letter in letters:
                self._take(letter)
            if found:
                return found[0]
        return None

    def _send(self, body: dict[str, Any], tensors: list[Tensor] | None = None) -> None:
        with contextlib.suppress(ChannelClosed, ChannelTimeout, OSError):  # the news of its end is on its way
            self._post.send(body, tensors or [])


def _mapped(fd: int) -> Tensor:
    """uint8 [bytes]: a private view of a file; the tensor holds the mapping."""
    memory = mmap.mmap(fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _object(answer: dict[str, Any] | None, name: str) -> dict[str, Any]:
    """A part of an answer; nothing where it is no object."""
    found = answer.get(name) if answer else None
    return found if isinstance(found, dict) else {}


def _place(said: Any) -> tuple[str, int] | None:
    """(phase, step), where it is one."""
    right = isinstance(said, list) and len(said) == 2 and isinstance(said[0], str) and is_whole(said[1], 0)
    return (printable(said[0]), said[1]) if right else None
