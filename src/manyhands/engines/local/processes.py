"""The processes of this host: processes that the fork server forks, each with a connection of its own to the driver."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from manyhands.engines.cores import threads_per_worker
from manyhands.engines.driver.host_processes import HostProcesses
from manyhands.engines.local.fork_client import Spawner
from manyhands.engines.local.messages import Closed, ControlMessage, ControlSocket, Status, create_status_page
from manyhands.engines.local.serialization import deserialize
from manyhands.errors import ManyhandsError, WorkerFailed

_STACKS_S = 1.0


@dataclass
class ProcessConnection:
    """The driver's end of one process: its sockets, its status page, and the file for its stacks."""

    wire: ControlSocket
    questions: ControlSocket
    stacks: int
    status: Status

    def close(self) -> None:
        self.wire.close()
        self.questions.close()
        self.status.close()
        if self.stacks >= 0:
            os.close(self.stacks)
            self.stacks = -1

    def stack(self) -> str:
        return tidy(os.pread(self.stacks, 1 << 20, 0).decode(errors="replace"))


class LocalProcesses(HostProcesses):
    """See HostProcesses. The fork server is the caller's, and ready for another run after `end`.

    timeout_s bounds every send; network: how this host's processes reach those of others, where there are any.
    """

    def __init__(
        self,
        spawner: Spawner,
        process_indices: Sequence[int],
        timeout_s: float,
        host: str = "",
        network: dict[str, Any] | None = None,
    ) -> None:
        self.host = host or socket.gethostname()
        self._network = network
        self.process_indices = list(process_indices)
        self._workers = [process_index for process_index in process_indices if process_index >= 0]
        self._spawner = spawner
        self._timeout_s = timeout_s
        self._connections: dict[int, ProcessConnection] = {}
        self._ready: select.epoll | None = None  # every descriptor of these processes, as one

    @override
    def start(self, shared: dict[str, Any], program: int) -> None:
        """shared["threads"] is what the user wants for each worker, or None.

        Shards do not count as workers: they wait most of the time, and each has one thread.
        """
        self._ready = select.epoll()
        self._ready.register(self._spawner.wire, select.EPOLLIN)
        threads = threads_per_worker(max(1, len(self._workers)), shared["threads"])
        try:
            own: dict[str, Any] = {"process_indices": self.process_indices, "threads": threads}
            if self._network is not None:
                own["network"] = self._network
            self._spawner.launch({**shared, **own}, program)
            for process_index in self.process_indices:
                self._fork(process_index)
        except (BrokenPipeError, ConnectionResetError):
            raise self._server_died() from None

    def _fork(self, process_index: int) -> None:
        wire, there = ControlSocket.pair()
        questions, askers = ControlSocket.pair()
        page = create_status_page()
        try:
            with there, askers:
                stacks = os.memfd_create("manyhands-stacks", os.MFD_CLOEXEC)
                self._connections[process_index] = ProcessConnection(wire, questions, stacks, Status(page))
                for connection in (wire, questions):
                    connection.sock.settimeout(self._timeout_s)
                    self._listen().register(connection, select.EPOLLIN)
                self._spawner.fork(process_index, there.fileno(), askers.fileno(), stacks, page)
        finally:
            os.close(page)

    @override
    def filenos(self) -> list[int]:
        return [self._listen().fileno()]

    def _listen(self) -> select.epoll:
        assert self._ready is not None  # between `start` and `end`
        return self._ready

    @override
    def receive(self) -> list[tuple[int, dict[str, Any]]]:
        came: list[tuple[int, dict[str, Any]]] = []
        ready = {fd for fd, _ in self._listen().poll(0)}
        for process_index, connection in self._connections.items():
            if connection.wire.fileno() in ready or connection.questions.fileno() in ready:
                self._drain(process_index, came)
        if self._spawner.wire.fileno() in ready:
            self._hear_server(came)
        return came

    def _drain(self, process_index: int, came: list[tuple[int, dict[str, Any]]]) -> None:
        """Take what this process has sent: its questions last, they were asked after all the rest that is here."""
        connection = self._connections[process_index]
        asked = self._all_of(connection.questions)
        own = self._all_of(connection.wire)
        came += [(process_index, self._opened(process_index, message)) for message in [*own, *asked]]

    def _all_of(self, wire: ControlSocket) -> list[ControlMessage]:
        """What has come on a wire; once its other end is gone it is closed."""
        messages: list[ControlMessage] = []
        try:
            while wire.fileno() >= 0 and (more := wire.receive(wait=False)):
                messages += more
        except Closed:
            self._listen().unregister(wire)
            wire.close()
        return messages

    def _opened(self, process_index: int, message: ControlMessage) -> dict[str, Any]:
        """With what a worker returned in place of the descriptor that it sent, which is closed here."""
        if not message.fds:
            return message.body
        (fd,) = message.fds
        try:
            value = deserialize(fd, mapped=False)  # copied: it outlives the run, and no descriptor may
            return {**message.body, "value": value}
        except Exception as error:  # what a user's __setstate__ raises
            raise ManyhandsError(
                f"the value that worker {process_index} returned cannot be rebuilt here ({type(error).__name__}: {error}): return numbers, arrays or tensors"
            ) from error
        finally:
            os.close(fd)

    def _hear_server(self, came: list[tuple[int, dict[str, Any]]]) -> None:
        try:
            messages = self._spawner.receive()
        except Closed:
            raise self._server_died() from None
        for body, _ in messages:
            if body["type"] == "started":
                came.append((body["process_index"], {"type": "started"}))
            elif body["type"] == "exited":
                process_index = body["process_index"]
                self._drain(process_index, came)  # its last words come before the news of its end
                connection = self._connections[process_index]
                phase, step = connection.status.read() or (None, None)
                last = {"phase": phase, "step": step, "detail": connection.stack()}
                came.append((process_index, {"type": "exited", "status": body["status"], **last}))

    @override
    def send(self, process_index: int, body: dict[str, Any]) -> None:
        connection = self._connections[process_index]
        wire = connection.wire if body["type"] == "stop" else connection.questions
        if wire.fileno() >= 0:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                wire.send(body)

    @override
    def signal(self, number: int, process_indices: Sequence[int] | None = None) -> None:
        self._spawner.signal(self._workers if process_indices is None else process_indices, number)

    @override
    def stacks(self) -> dict[int, str]:
        """A signal has the interpreter write them, even where the global lock is held."""
        self._spawner.signal(self.process_indices, signal.SIGUSR1)
        deadline, before = time.monotonic() + _STACKS_S, None
        while time.monotonic() <= deadline:
            sizes = [os.fstat(connection.stacks).st_size for connection in self._connections.values()]
            if sizes == before and 0 not in sizes:
                break
            before = sizes
            time.sleep(0.05)
        return {process_index: connection.stack() for process_index, connection in self._connections.items()}

    @override
    def where(self) -> dict[int, tuple[str, int]]:
        pages = {process_index: connection.status.read() for process_index, connection in self._connections.items()}
        return {process_index: place for process_index, place in pages.items() if place is not None}

    @override
    def silent_s(self) -> float:
        return 0.0

    @override
    def end(self, grace_s: float) -> None:
        try:
            self._spawner.end_run(grace_s)
        finally:
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()
            if self._ready is not None:
                self._ready.close()
                self._ready = None

    def _server_died(self) -> WorkerFailed:
        status = self._spawner.died()
        how = f"ended with exit code {status}"
        if status < 0:
            how = f"was killed by signal {-status} ({signal.Signals(-status).name})"
        message = (
            f"the process that starts the workers on {self.host} {how}. If it printed an error, the error is above"
        )
        return WorkerFailed(message, rank=-1, host=self.host, phase="start", step=0)


def tidy(dump: str) -> str:
    """What `faulthandler` wrote, without the heartbeat's thread and the frames of the engine below the program."""
    kept = []
    for block in dump.split("\n\n"):
        lines = block.splitlines()
        if "Current" not in block and ("heartbeat.py" in block or "Extension modules:" in block):
            continue
        ours = [i for i, line in enumerate(lines) if "local/child.py" in line]
        kept.append("\n".join(lines[: ours[0]] if ours else lines))
    return "\n\n".join(kept).strip()
