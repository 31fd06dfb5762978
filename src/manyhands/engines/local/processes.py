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

from manyhands.comm.shared_memory.memory import create_arena
from manyhands.comm.shared_memory.table import create_table
from manyhands.engines.cores import threads_per_worker
from manyhands.engines.driver.host_processes import HostProcesses
from manyhands.engines.local.fork_client import Spawner
from manyhands.engines.local.messages import Closed, ControlMessage, ControlSocket, Status, create_status_page
from manyhands.engines.local.serialization import deserialize
from manyhands.errors import ManyhandsError, WorkerFailed

_STACKS_S = 1.0
_ANSWERS = frozenset(
    {"answer", "leased", "complete", "dropped", "formed", "over", "connected", "pushes_of_lost", "delivered"}
)
"""Messages that go to the thread that asked; all others go to the one that listens."""


@dataclass
class ProcessConnection:
    """The driver's end of one process: its sockets, its status page, and the file for its stacks."""

    wire: ControlSocket
    questions: ControlSocket
    stacks: int
    status: Status
    arena: int = -1  # its vectors' memory, where members may change

    def release_arena(self) -> None:
        """Its process is gone, and no later group has it: the memory goes with the last mapping."""
        if self.arena >= 0:
            os.close(self.arena)
            self.arena = -1

    def close(self) -> None:
        self.wire.close()
        self.questions.close()
        self.status.close()
        self.release_arena()
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
        self._arenas = 0  # how many of them a process may map; 0: members never change

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
            self._arenas = shared.get("survive", 0)
            for process_index in self.process_indices:
                self._fork(process_index, {})
        except (BrokenPipeError, ConnectionResetError):
            raise self._server_died() from None

    @override
    def start_worker(self, worker_id: int, faults: str) -> None:
        if (before := self._connections.pop(worker_id, None)) is not None:
            for line in (before.wire, before.questions):
                if line.fileno() >= 0:
                    self._listen().unregister(line)
            before.close()
        if worker_id not in self.process_indices:
            self.process_indices.append(worker_id)
            self._workers.append(worker_id)  # a shard's process index was here from the start
        try:
            self._fork(worker_id, {"process_indices": self.process_indices, "faults": faults})
        except (BrokenPipeError, ConnectionResetError):
            raise self._server_died() from None

    @override
    def form(self, generation: int, hosts: Sequence[Sequence[int]], names: Sequence[str]) -> None:
        """One message a member brings what it maps of that member, and one more the group's table."""
        place = {"type": "formed", "generation": generation, "hosts": hosts, "names": names}
        for name, here in zip(names, hosts, strict=True):
            if name == self.host and len(here) == 1:
                self._answer(here[0], place)
            elif name == self.host:
                self._share(here, place)

    def _share(self, here: Sequence[int], place: dict[str, Any]) -> None:
        pipes = [os.pipe2(os.O_CLOEXEC) for _ in here]
        table = create_table(len(here))
        try:
            for rank, worker_id in enumerate(here):
                for peer, (read, write) in enumerate(pipes):
                    arena = self._connections[here[peer]].arena
                    self._answer(worker_id, {"type": "member"}, [arena, read, *([write] if peer == rank else [])])
                self._answer(worker_id, place, [table])
        finally:
            for fd in [table, *(end for pipe in pipes for end in pipe)]:
                os.close(fd)

    def _answer(self, worker_id: int, body: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """To a question."""
        self._send_over(self._connections[worker_id].questions, body, fds)

    def _send_over(self, line: ControlSocket, body: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """To a process that is gone nothing, its `exited` is on the way."""
        if line.fileno() >= 0:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                line.send(body, fds)

    @override
    def connect(self, first: tuple[int, dict[str, Any]], second: tuple[int, dict[str, Any]]) -> None:
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            for (process_index, body), end in zip((first, second), ends, strict=True):
                connection = self._connections[process_index]
                line = connection.questions if body["type"] in _ANSWERS else connection.wire
                self._send_over(line, body, [end.fileno()])
        finally:
            for end in ends:
                end.close()

    def _fork(self, process_index: int, own: dict[str, Any]) -> None:
        wire, there = ControlSocket.pair()
        questions, askers = ControlSocket.pair()
        page = create_status_page()
        try:
            with there, askers:
                stacks = os.memfd_create("manyhands-stacks", os.MFD_CLOEXEC)
                arena = create_arena(self._arenas) if self._arenas and process_index >= 0 else -1
                connection = ProcessConnection(wire, questions, stacks, Status(page), arena)
                self._connections[process_index] = connection
                for line in (wire, questions):
                    line.sock.settimeout(self._timeout_s)
                    self._listen().register(line, select.EPOLLIN)
                inherited = [there.fileno(), askers.fileno(), stacks, page, *([arena] if arena >= 0 else [])]
                self._spawner.fork(process_index, inherited, own)
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
        if message.body["type"] == "rows":
            return {**message.body, "data": _bytes_of(fd)}
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
                connection.release_arena()
                came.append((process_index, {"type": "exited", "status": body["status"], **last}))

    @override
    def send(self, process_index: int, body: dict[str, Any]) -> None:
        connection = self._connections[process_index]
        self._send_over(connection.questions if body["type"] in _ANSWERS else connection.wire, body)

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


def _bytes_of(fd: int) -> bytearray:
    """What a file without a name holds; the descriptor is closed."""
    try:
        data, done = bytearray(os.fstat(fd).st_size), 0
        while done < len(data):
            done += os.preadv(fd, [memoryview(data)[done:]], done)
        return data
    finally:
        os.close(fd)


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
