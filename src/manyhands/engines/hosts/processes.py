"""The processes of another host, as the driver sees them: an agent there (`manyhands join`) starts them.

Messages over a channel to the agent: launch (with the program), to_process, signal, signal_to, start_worker, form, stacks,
end, over, again. From it: from_process, stacks, idle (everything of the run is gone there), preempted (asked to end), failed (no fork server).
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from manyhands.engines.driver.host_processes import HostProcesses, name_of
from manyhands.engines.driver.message_checks import checked
from manyhands.engines.hosts.message_channel import ALIVE_S, SILENCE_S, HostMessage, MessageChannel
from manyhands.engines.hosts.plain_values import decode
from manyhands.errors import ManyhandsError, WorkerFailed, is_whole
from manyhands.transport.channel import ChannelClosed, ChannelTimeout
from manyhands.transport.credentials import VARIABLE
from manyhands.transport.frame import FrameError, bytes_of
from manyhands.units import printable

LOG = logging.getLogger("manyhands")

OWN = frozenset({"path", "folder", "environment", "network"})
"""What a joined host has of its own: the driver's would mean nothing there."""
PREFIX = "MANYHANDS_"
_STACKS_S = 3.0  # the agent's own second, and the way
_QUIET_S = 3 * ALIVE_S
"""A host that has sent nothing for so long gives no answer either."""
_LOOK_S = 0.5
_END_S = 20.0


class RemoteProcesses(HostProcesses):
    """See HostProcesses. preempted: the joined host got SIGTERM. log: where its own output is, for errors."""

    def __init__(self, post: MessageChannel, host: str, log: str = "see what `manyhands join` printed there") -> None:
        self.host, self._log = host, log
        self.process_indices: list[int] = []  # when all hosts are there
        self.preempted = False
        self.silence_s = SILENCE_S  # after which either end gives the other up, once the run has begun
        self.restarts = False  # whether the run may start again: then this host comes again, too
        self.network: dict[str, Any] = {}
        self._post = post
        self._received: list[tuple[int, dict[str, Any]]] = []
        self._where: dict[int, tuple[str, int]] = {}  # process index -> (phase, step) of its last heartbeat
        self._gone = False  # its end was reported
        self._ended = False

    @override
    def start(self, shared: dict[str, Any], program: int) -> None:
        """The program goes through this process's memory as it lies in its file: nothing is unpickled or copied."""
        body = {name: value for name, value in shared.items() if name not in OWN}
        body |= {"process_indices": self.process_indices, "network": self.network}
        if self.restarts:
            body["restarts"] = True
        self._post.set_silence(self.silence_s)
        variables = {name: os.environ[name] for name in os.environ if name.startswith(PREFIX) and name != VARIABLE}
        launch = {
            "type": "launch",
            "host": self.host,
            "shared": body,
            "variables": variables,
            "silence_s": self.silence_s,
        }
        # a private view of the program's file; the tensor holds the mapping
        memory = mmap.mmap(program, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        self._send(launch, [torch.frombuffer(memory, dtype=torch.uint8)])

    @override
    def filenos(self) -> list[int]:
        return [self._post.fileno()]

    @override
    def receive(self) -> list[tuple[int, dict[str, Any]]]:
        for message in self._post.receive():
            self._take(message)
        if self._post.lost and not self._gone and not self._ended:
            self._gone = True
            why = f"its host is gone: {self._post.lost}; {self._log}"
            for process_index in self.process_indices:
                phase, step = self._where.get(process_index, ("start", 0))
                self._received.append((process_index, {"type": "lost", "why": why, "phase": phase, "step": step}))
        came, self._received = self._received, []
        return came

    def _take(self, message: HostMessage) -> None:
        """WorkerFailed, naming the host, for invalid messages: they must not end the driver with another error."""
        body, kind = message.body, message.body["type"]
        if kind == "from_process" and body.get("process_index") in self.process_indices:
            process_index: int = body["process_index"]
            try:
                self._received.append((process_index, self._checked(process_index, body.get("body"), message.tensors)))
            except (FrameError, ManyhandsError) as error:
                phase, step = self._where.get(process_index, ("start", 0))
                raise WorkerFailed(
                    f"host {self.host} sent a message that cannot be read: {name_of(process_index)} sent {error}. "
                    f"Use the same version of manyhands on all hosts; {self._log}",
                    rank=process_index,
                    host=self.host,
                    phase=phase,
                    step=step,
                ) from error
        elif kind == "preempted":
            self.preempted = True
        elif kind == "failed":
            text = printable(body.get("message"), 10_000, keep="\n\t")
            raise WorkerFailed(text, rank=-1, host=self.host, phase="start", step=0)

    def _checked(self, process_index: int, body: Any, tensors: list[Tensor]) -> dict[str, Any]:
        message = checked(process_index, body)
        if message["type"] == "beat":
            self._where[process_index] = (message["phase"], message["step"])
        if message["type"] == "value" and "value" in message:
            message["value"] = decode(message["value"], tensors)
        if message["type"] == "rows":
            if [tensor.dtype for tensor in tensors] != [torch.uint8]:
                raise FrameError(f"rows in {len(tensors)} tensors: expected one of bytes")
            message["data"] = bytes_of(tensors[0])
        return message

    @override
    def send(self, process_index: int, body: dict[str, Any]) -> None:
        self._send({"type": "to_process", "process_index": process_index, "body": body})

    @override
    def signal(self, number: int, process_indices: Sequence[int] | None = None) -> None:
        if process_indices is None:
            self._send({"type": "signal", "number": number})
        else:
            self._send({"type": "signal_to", "number": number, "process_indices": list(process_indices)})

    @override
    def start_worker(self, worker_id: int, faults: str) -> None:
        if worker_id not in self.process_indices:
            self.process_indices.append(worker_id)
        self._where.pop(worker_id, None)
        self._send({"type": "start_worker", "worker_id": worker_id, "faults": faults})

    @override
    def form(self, generation: int, hosts: Sequence[Sequence[int]], names: Sequence[str]) -> None:
        self._send({"type": "form", "generation": generation, "hosts": list(map(list, hosts)), "names": list(names)})

    @override
    def abandon(self, why: str) -> bool:
        """The agent is told why, and ends what it has."""
        self._send({"type": "over", "error": why, "preempted": False})
        self._post.hang_up(why)
        return True

    @override
    def stacks(self) -> dict[int, str]:
        self._send({"type": "stacks"})
        answer = self._wait_for("stacks", _STACKS_S)
        found, places = (_object(answer, "stacks"), _object(answer, "where"))
        stacks: dict[int, str] = {}
        for process_index in self.process_indices:
            stacks[process_index] = printable(found.get(str(process_index), ""), 1 << 20, keep="\n\t")
            match places.get(str(process_index)):
                case [str() as phase, step] if is_whole(step, 0):
                    self._where[process_index] = printable(phase), step
        return stacks

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
        if not self.process_indices or self._post.lost:  # never started, or lost: the agent ends what it has by itself
            return
        self._send({"type": "end", "grace_s": grace_s})
        if self._wait_for("idle", grace_s + _END_S) is None:
            LOG.warning(
                "host %s did not confirm that its workers ended (%s). They end when that host notices that the driver "
                "is gone",
                self.host,
                self._post.lost or f"nothing came for {self.silent_s():.0f} s",
            )

    @property
    def lost(self) -> str:  # type: ignore[override]
        return self._post.lost

    @override
    def dismiss(self) -> None:
        self._ended = True
        self.leave("", preempted=True)

    def come_again(self, why: str) -> None:
        """The run starts again: it ends what it has, and connects once more. Hang up."""
        self._send({"type": "again", "why": why})
        self._post.close()

    def leave(self, error: str, preempted: bool = False) -> None:
        """Say how the run ended ("": well; preempted: it stopped where it can be resumed), and hang up. Idempotent."""
        self._send({"type": "over", "error": error, "preempted": preempted})
        self._post.close()

    def assign(self, process_indices: list[int], host: str, network: dict[str, Any]) -> None:
        """All hosts are there: this one's ranks, how messages name it, and who is where."""
        self.process_indices, self.host, self.network = process_indices, host, network

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
            messages = self._post.wait(min(left, _LOOK_S))
            found = [message.body for message in messages if message.body["type"] == type]
            for message in messages:
                self._take(message)
            if found:
                return found[0]
        return None

    def _send(self, body: dict[str, Any], tensors: list[Tensor] | None = None) -> None:
        with contextlib.suppress(ChannelClosed, ChannelTimeout, OSError):  # the news of its end is on its way
            self._post.send(body, tensors or [])


def _object(answer: dict[str, Any] | None, name: str) -> dict[str, Any]:
    """A part of an answer; nothing where it is no object."""
    found = answer.get(name) if answer else None
    return found if isinstance(found, dict) else {}
