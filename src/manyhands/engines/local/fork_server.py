"""A small fork server: a fresh interpreter that loads torch once and then forks workers and shards, which start at once.

It runs no code of the user's and never touches a GPU. The workers get the program as a descriptor and unpickle it
themselves, so the caller's main is never imported again. Messages from the driver (see messages.py):

    launch  the run's settings, its process indices in the order of forking; descriptors: program[, stdout, stderr]
    fork    fork a process; descriptors: its two sockets to the driver, its file for stacks, its page for phase and step,
            and its memory where members may change. Then one may be forked again
    signal  send a signal to these processes
    end     the run is over: kill whoever is left after `grace_s`

and to it: `started` (process_index, pid), `exited` (process_index, status), `idle` (everything of the run is gone).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import itertools
import os
import select
import signal
import socket
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from manyhands.engines.descriptors import raise_limit_of_descriptors
from manyhands.engines.driver.host_processes import shard_of
from manyhands.engines.local.fork_client import remove
from manyhands.engines.local.messages import Closed, ControlMessage, ControlSocket, ProcessPlace
from manyhands.rank_files import merge
from manyhands.signals import note_sigterm

_PRELOAD = (
    "torch",
    "torch._dynamo",  # the first optimizer imports it, and that takes as long as torch itself
    "torch.utils.data",
    "manyhands.engines.local.child",
    "manyhands.own_loop.rank_zero",
    "manyhands.training.worker_main",  # of a run of mh.train: else each of its workers reads a hundred files of its own
)

_LAST_S = 5.0  # to end what workers left, when the driver is gone
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(fd: int, leftovers: Sequence[str] = ()) -> None:
    """Serve the driver at the socket `fd` until it closes it or dies; then remove the folders `leftovers`."""
    for number in range(3):  # where the caller's is closed, no socket may get its number, and what a worker prints
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number is this one
    for number in (signal.SIGINT, signal.SIGTERM):  # the driver ends the workers, or lets them save first
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # it adopts its descendants' orphans, of other sessions too
    server = ForkServer(ControlSocket(socket.socket(fileno=fd)), leftovers)
    server.end_with_driver()
    raise_limit_of_descriptors()
    for name in _PRELOAD:
        importlib.import_module(name)
    gc.freeze()  # a collection in a worker does not go through what was imported, and copies no page of it
    server.serve()


@dataclass
class ForkServerRun:
    """What the processes of one run share."""

    body: dict[str, Any]
    fds: list[int]
    memory: list[int] = field(default_factory=list)
    lifelines: list[tuple[int, int]] = field(default_factory=list)
    channels: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """(rank, shard) -> (the worker's end, the shard's end)"""

    @property
    def workers(self) -> list[int]:
        return [process_index for process_index in self.body["process_indices"] if process_index >= 0]

    @property
    def shards(self) -> list[int]:
        return [shard_of(process_index) for process_index in self.body["process_indices"] if process_index < 0]

    def connect(self) -> None:
        """Make what the workers of this host share, and a socket pair for each of them and each shard."""
        if self.body.get("survive"):
            return  # groups and connections to shards are made whenever they are needed, by the driver
        if len(self.workers) > 1:
            from manyhands.comm.shared_memory.group import SharedMemory

            self.memory = SharedMemory.create(len(self.workers))
            self.lifelines = [os.pipe2(os.O_CLOEXEC) for _ in self.workers]
        for rank, shard in itertools.product(self.workers, self.shards):
            worker, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            self.channels[rank, shard] = worker.detach(), server.detach()

    def keep(self, process_index: int) -> dict[int, int]:
        """In a child: close what is others'; what remains of the channels, by shard or by rank.

        The end of a file must mean the death of its owner, so nobody may hold another's end.
        """
        kept = {}
        for (rank, shard), (worker, server) in self.channels.items():
            mine = {rank: (shard, worker), shard_of(shard): (rank, server)}.get(process_index)
            if mine is not None:
                kept[mine[0]] = mine[1]
            for fd in {worker, server} - {mine[1] if mine is not None else -1}:
                os.close(fd)
        self.channels = {}
        if process_index < 0:
            program, *streams = self.fds
            self.fds = streams
            for fd in [program, *self.memory, *(end for pipe in self.lifelines for end in pipe)]:
                os.close(fd)
            self.memory, self.lifelines = [], []
        return kept

    def close(self) -> None:
        pipes = [*self.lifelines, *self.channels.values()]
        for fd in [*self.fds, *self.memory, *(end for pipe in pipes for end in pipe)]:
            os.close(fd)
        self.fds, self.memory, self.lifelines, self.channels = [], [], [], {}


class ForkServer:
    """See the module's docstring. One run at a time."""

    def __init__(self, wire: ControlSocket, leftovers: Sequence[str] = ()) -> None:
        self._wire = wire
        self._leftovers = leftovers  # of a driver that may be killed: the run's private key, say
        self._process_indices: dict[int, int] = {}  # pid -> index of processes not yet reaped
        self._run: ForkServerRun | None = None
        self._wakeup, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._inherited = (self._wakeup, wakeup)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # any handler: the wakeup descriptor reports it
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)

    def end_with_driver(self) -> None:
        """A signal reports that the driver is gone, so that this also holds during the seconds of importing torch."""
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
        for folder in self._leftovers:
            remove(folder)  # it is gone already where the driver ended by itself
        for pid in list(self._process_indices):
            with contextlib.suppress(ProcessLookupError):  # reaped right before a signal brought us here
                os.killpg(pid, signal.SIGKILL)
        deadline = time.monotonic() + _LAST_S
        while kill_children() and time.monotonic() < deadline:
            time.sleep(0.01)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
        for folder in self._leftovers:
            remove(folder)  # once more: who lived until now may have written there
        os._exit(0)

    def _receive(self) -> None:
        for message in self._wire.receive():
            match message.body.pop("type"):
                case "launch":
                    self._run = ForkServerRun(message.body, message.fds)
                    self._run.connect()
                case "fork":
                    self._fork(message)
                case "signal":
                    self._signal(**message.body)
                case "end":
                    self._end(**message.body)
                case other:
                    raise ValueError(f"the driver sent a message of unknown type {other!r}")

    def _fork(self, message: ControlMessage) -> None:
        assert self._run is not None
        parent, process_index = os.getpid(), message.body["process_index"]
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # it waits until the child has a handler for it
        pid = os.fork()
        if pid == 0:
            self._become(parent, process_index, message.fds, message.body["own"])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the child does it too, whoever comes first
            os.setpgid(pid, pid)
        self._process_indices[pid] = process_index
        for fd in message.fds:
            os.close(fd)
        self._wire.send({"type": "started", "process_index": process_index, "pid": pid})
        if not self._run.body.get("survive") and process_index == self._run.body["process_indices"][-1]:
            self._run.close()  # all have their memory, lifelines and channels: now nobody else has

    def _become(self, parent: int, process_index: int, fds: list[int], own: dict[str, Any]) -> NoReturn:
        """In the child: leave everything of the fork server's behind, and never return to its code."""
        assert self._run is not None
        code = 1
        try:
            from manyhands.engines.local import child

            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # it dies with its parent, however that happens
            if os.getppid() != parent:  # it died before we asked
                os._exit(1)
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            note_sigterm()
            for number in (signal.SIGCHLD, signal.SIGIO):
                signal.signal(number, signal.SIG_DFL)
            self._wire.close()
            for fd in self._inherited:
                os.close(fd)
            channels = self._run.keep(process_index)
            program, *streams = self._run.fds if process_index >= 0 else [-1, *self._run.fds]
            wire, questions, stacks, status, *arena = fds
            place = ProcessPlace(
                process_index=process_index,
                program=program,
                streams=streams,
                wire=socket.socket(fileno=wire),
                questions=socket.socket(fileno=questions),
                stacks=stacks,
                status=status,
                memory=self._run.memory,
                lifelines=self._run.lifelines,
                channels=channels,
                arena=arena[0] if arena else -1,
                **{**self._run.body, **own},
            )
            code = child.run(place)
        except BaseException:  # noqa: BLE001 - nothing may return into the fork server's loop
            traceback.print_exc()
        finally:
            os._exit(code)

    def _signal(self, process_indices: list[int], number: int) -> None:
        for pid, process_index in self._process_indices.items():
            if process_index in process_indices:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _end(self, grace_s: float) -> None:
        """Give the processes a moment to exit, then kill their groups and what they left; answer when all are gone."""
        deadline = time.monotonic() + grace_s
        while self._process_indices and (left := deadline - time.monotonic()) > 0:
            select.select([self._wakeup], [], [], left)
            self._drain_wakeup()
            self._reap()
        for pid in self._process_indices:
            os.killpg(pid, signal.SIGKILL)
        while self._process_indices or kill_children():
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
        """Tell of workers that ended, and kill their groups, whose numbers are safe while the leaders are unreaped.

        What they left in sessions of its own was adopted: it lives until the run's end, and is only reaped here.
        """
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                process_index = self._process_indices.get(ended.si_pid)
                if process_index is None:
                    os.waitpid(ended.si_pid, 0)
                    continue
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(ended.si_pid, signal.SIGKILL)
                _, status = os.waitpid(ended.si_pid, 0)
                del self._process_indices[ended.si_pid]
                exit_code = os.waitstatus_to_exitcode(status)
                self._wire.send({"type": "exited", "process_index": process_index, "status": exit_code})


def kill_children() -> bool:
    """Kill the children, adopted ones included; whether there were any. Theirs are adopted next time.

    A zombie counts as well until it is reaped: its other threads may live and have children of their own, and what it
    left may have been adopted after this had passed it by.
    """
    found = [pid for pid in _children() if not _settles(pid)]
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(found)


def _settles(pid: int) -> bool:
    """Whether it waits for the run's ranks to be gone, to settle their files: it ends by itself then."""
    try:
        return merge.__name__.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _children() -> list[int]:
    own, found = os.getpid(), []
    for entry in os.scandir("/proc"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if entry.name.isdigit():
                parent = Path(entry.path, "stat").read_text().rpartition(")")[2].split()[1]
                found += [int(entry.name)] if int(parent) == own else []
    return found
