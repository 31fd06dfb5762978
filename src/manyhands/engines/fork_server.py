"""A small fork server: a fresh interpreter that loads torch once and then forks workers, which start at once.

It runs no code of the user's and never touches a GPU. The workers get the program as a descriptor and unpickle it
themselves, so the caller's main is never imported again. Messages from the driver (see control.py):

    launch  what all workers of a run share; descriptors: program[, stdout, stderr]
    worker  fork rank r; descriptors: its line to the driver, its file for stacks, its page for phase and step
    end     the run is over: kill whoever is left after `grace_s`

and to it: `started` (rank, pid), `exited` (rank, status), `idle` (everything of the run is gone).
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import select
import signal
import socket
import time
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from manyhands.engines.control import Closed, Message, Wire
from manyhands.engines.limits import raise_limit_of_descriptors

if TYPE_CHECKING:
    from manyhands.engines.worker_process import Place

_PRELOAD = (
    "torch",
    "torch._dynamo",  # the first optimizer imports it, and that takes as long as torch itself
    "torch.utils.data",
    "manyhands.engines.worker_process",
)


def main(fd: int) -> None:
    """Serve the driver at the other end of the socket `fd` until it closes it or dies."""
    _fill_standard_descriptors()
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # the driver's to answer: it ends the workers, or lets them save first
        signal.signal(number, signal.SIG_IGN)
    server = ForkServer(Wire(socket.socket(fileno=fd)))
    server.end_with_driver()
    raise_limit_of_descriptors()
    for name in _PRELOAD:
        importlib.import_module(name)
    server.serve()


def _fill_standard_descriptors() -> None:
    """Where the caller's were closed, no socket of ours may get the number 1 and receive what a worker prints."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number is this one


@dataclass
class Run:
    """What the workers of one run share."""

    body: dict[str, Any]
    fds: list[int]
    memory: list[int] = field(default_factory=list)
    lifelines: list[tuple[int, int]] = field(default_factory=list)

    def close(self) -> None:
        for fd in [*self.fds, *self.memory, *(end for pipe in self.lifelines for end in pipe)]:
            os.close(fd)
        self.fds, self.memory, self.lifelines = [], [], []


class ForkServer:
    """See the module's docstring. One run at a time."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._ranks: dict[int, int] = {}  # pid -> rank of workers not yet reaped
        self._run: Run | None = None
        self._wakeup, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._inherited = (self._wakeup, wakeup)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # any handler: the wakeup descriptor tells us
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)

    def end_with_driver(self) -> None:
        """A signal tells when the driver is gone, so that this also holds during the seconds of importing torch."""
        fd = self._wire.fileno()
        signal.signal(signal.SIGIO, self._on_io)
        fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
        self._on_io()  # it may have gone already

    def serve(self) -> None:
        poll = select.poll()
        poll.register(self._wire, select.POLLIN)
        poll.register(self._wakeup, select.POLLIN)
        try:
            while True:
                ready = [fd for fd, _ in poll.poll(1000)]
                self._drain_wakeup()
                self._reap()
                if self._wire.fileno() in ready:
                    self._receive()
        except (Closed, BrokenPipeError, ConnectionResetError):
            self._abandon()

    def _on_io(self, *_: object) -> None:
        if self._wire.hung_up():
            self._abandon()

    def _abandon(self) -> NoReturn:
        """The driver is gone, and with it everything ends."""
        for pid in list(self._ranks):
            os.killpg(pid, signal.SIGKILL)
        os._exit(0)

    def _receive(self) -> None:
        for message in self._wire.receive():
            {"launch": self._launch, "worker": self._fork, "end": self._end}[message.body["type"]](message)

    def _launch(self, message: Message) -> None:
        body = {name: value for name, value in message.body.items() if name != "type"}
        size = body["size"]
        self._run = Run(body, message.fds)
        if size > 1:
            from manyhands.comm.shared_memory import SharedMemory

            self._run.memory = list(SharedMemory.create(size))
            self._run.lifelines = [os.pipe2(os.O_CLOEXEC) for _ in range(size)]

    def _fork(self, message: Message) -> None:
        assert self._run is not None
        parent, rank = os.getpid(), message.body["rank"]
        pid = os.fork()
        if pid == 0:
            self._become_worker(parent, rank, message.fds)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the child does it too, whoever comes first
            os.setpgid(pid, pid)
        self._ranks[pid] = rank
        for fd in message.fds:
            os.close(fd)
        self._wire.send({"type": "started", "rank": rank, "pid": pid})
        if rank == self._run.body["size"] - 1:  # all workers have the memory and the lifelines: now nobody else has
            self._run.close()

    def _become_worker(self, parent: int, rank: int, fds: list[int]) -> NoReturn:
        """In the child: leave everything of the fork server's behind, and never return to its code."""
        assert self._run is not None
        code = 1
        try:
            from manyhands.engines.worker_process import die_with, run

            die_with(parent)
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGIO):
                signal.signal(number, signal.SIG_DFL)
            self._wire.close()
            for fd in self._inherited:
                os.close(fd)
            code = run(_place(self._run, rank, fds))
        except BaseException:  # noqa: BLE001 - nothing may return into the fork server's loop
            traceback.print_exc()
        finally:
            os._exit(code)

    def _end(self, message: Message) -> None:
        """Give the workers a moment to exit, then kill their groups; answer when all are gone."""
        deadline = time.monotonic() + message.body["grace_s"]
        while self._ranks and (left := deadline - time.monotonic()) > 0:
            select.select([self._wakeup], [], [], left)
            self._drain_wakeup()
            self._reap()
        for pid in self._ranks:
            os.killpg(pid, signal.SIGKILL)
        while self._ranks:
            select.select([self._wakeup], [], [], 0.1)
            self._drain_wakeup()
            self._reap()
        if self._run is not None:
            self._run.close()
        self._run = None
        self._wire.send({"type": "idle"})

    def _drain_wakeup(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wakeup, 4096)

    def _reap(self) -> None:
        """Tell of workers that ended, and kill the children they left: while its leader is unreaped, a group's number is safe."""
        while self._ranks and (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(ended.si_pid, signal.SIGKILL)
            _, status = os.waitpid(ended.si_pid, 0)
            rank = self._ranks.pop(ended.si_pid)
            self._wire.send({"type": "exited", "rank": rank, "status": os.waitstatus_to_exitcode(status)})


def _place(run: Run, rank: int, fds: list[int]) -> Place:
    """What worker `rank` inherits, with the three descriptors that are its alone."""
    from manyhands.engines.worker_process import Place

    program, *streams = run.fds
    line, stacks, status = fds
    return Place(
        rank=rank,
        program=program,
        streams=streams,
        line=socket.socket(fileno=line),
        stacks=stacks,
        status=status,
        memory=run.memory,
        lifelines=run.lifelines,
        **run.body,
    )
