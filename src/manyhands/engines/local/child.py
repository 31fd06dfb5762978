"""What workers and shards have in common: what they inherit, how they start, how they report an error."""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from manyhands.engines.local.heartbeat import ProcessDriverClient
from manyhands.engines.local.messages import ControlSocket
from manyhands.engines.local.status_page import Status
from manyhands.errors import ManyhandsError, PeerLost
from manyhands.signals import note_sigterm

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class ProcessPlace:
    """Everything that a process of a run inherits. The descriptors are its own from now on."""

    process_index: int  # a worker's rank, or -1 - s for server shard s
    process_indices: Sequence[int]  # of this host
    size: int  # workers of the run, on all hosts
    path: list[str]  # sys.path, and so on: the driver as it is at the launch, the fork server may be older
    argv: list[str]
    folder: str
    environment: dict[str, str]
    program: int  # what `ship` wrote; a shard has none (-1)
    streams: Sequence[int]  # standard output and error, where the driver has them
    wire: socket.socket  # to the driver: heartbeats and events
    questions: socket.socket  # to the driver: what waits for an answer
    stacks: int  # a file for Python stacks
    status: int  # a page for phase and step
    memory: Sequence[int]  # shared by this host's workers
    lifelines: Sequence[tuple[int, int]]  # a pipe per worker of this host: (read end, write end)
    channels: Mapping[
        int, int
    ]  # a worker's sockets to the shards of this host, by shard; a shard's to the workers, by rank
    threads: int
    device: str
    timeout_s: float
    server: dict[str, Any] | None  # the fields of a ServerSpec
    servers: int  # shards of it, on all hosts
    scratch: str = ""  # a folder for what multiprocessing makes files for; whoever outlives this process removes it
    network: dict[str, Any] | None = None  # how the workers of several hosts find each other

    @property
    def workers_here(self) -> list[int]:
        return [process_index for process_index in self.process_indices if process_index >= 0]


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, however that happens."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def last_resort_s(place: ProcessPlace) -> float:
    """How long peers wait for each other. The driver decides earlier: it shows every stack, and sees compilers."""
    return 20 * place.timeout_s + 600


def open_driver_client(place: ProcessPlace) -> ProcessDriverClient:
    """The connection to the driver, with its heartbeats."""
    driver = ProcessDriverClient(
        ControlSocket(place.wire),
        ControlSocket(place.questions),
        2 * place.timeout_s,
        Status(place.status),
        process_index=place.process_index,
    )
    os.close(place.status)
    driver.start()
    return driver


def become_the_callers(place: ProcessPlace) -> None:
    for number, fd in enumerate(place.streams, start=1):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(place.environment)
    sys.path[:] = place.path
    sys.argv[:] = place.argv
    os.chdir(place.folder)
    if place.scratch:
        multiprocessing.current_process()._config["tempdir"] = place.scratch  # type: ignore[attr-defined]


def prepare_process(stacks: int, threads: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _leave_preemption_to_the_driver()
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]


def _leave_preemption_to_the_driver() -> None:
    """A scheduler sends SIGTERM to every process: the driver answers it, and the others live on to save their state."""
    note_sigterm()
    os.register_at_fork(
        after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL)
    )  # a loader's process obeys it


def report(error: BaseException, driver: ProcessDriverClient, below: str) -> dict[str, Any]:
    """An error as JSON: exceptions of any class can be reported, whether or not they can be pickled.

    below: the file of the engine's whose frames are left out of the traceback.
    """
    phase, step = driver.where()
    return {
        "type": "error",
        "rank": driver.process_index,
        "phase": phase,
        "step": step,
        "message": _text(error),
        "detail": "".join(traceback.format_exception(type(error), error, _without(error.__traceback__, below))),
        "error": type(error).__name__,
        "family": next((c.__name__ for c in type(error).__mro__ if c.__module__ == ManyhandsError.__module__), ""),
        "exit_code": error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1,
        "secondary": isinstance(error, PeerLost),
    }


def _without(trace: TracebackType | None, file: str) -> TracebackType | None:
    """The traceback without that file's outermost frames: the program's own remain."""
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == file:
        trace = trace.tb_next
    return trace


def _text(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r})"
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a user's own __str__ may be broken; the traceback still goes along
        return "(its message cannot be shown)"


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
