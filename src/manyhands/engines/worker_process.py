"""What runs in a worker's process, right after the fork server forked it."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from manyhands.comm.group import Group
from manyhands.comm.shared_memory import SharedMemoryGroup
from manyhands.comm.solo import SoloGroup
from manyhands.engines.alone import pick_device
from manyhands.engines.control import Wire
from manyhands.engines.heartbeat import DriverLine
from manyhands.engines.shipping import ship, unship
from manyhands.engines.status import Status
from manyhands.errors import ManyhandsError, PeerLost
from manyhands.worker import Worker, set_current

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class Place:
    """Everything that a worker inherits. The descriptors are its own from now on."""

    rank: int
    size: int
    path: list[str]  # sys.path, and so on: the driver as it is at the launch, the fork server may be older
    argv: list[str]
    folder: str
    environment: dict[str, str]
    program: int  # what `ship` wrote
    streams: Sequence[int]  # standard output and error, where the driver has them
    line: socket.socket  # to the driver
    stacks: int  # a file for Python stacks
    status: int  # a page for phase and step
    memory: Sequence[int]  # the group's shared memory
    lifelines: Sequence[tuple[int, int]]  # a pipe per worker: (read end, write end)
    threads: int
    device: str
    timeout_s: float


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, however that happens."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def run(place: Place) -> int:
    """Run the program; the exit code. Its value, or its error, went to the driver."""
    line = DriverLine(Wire(place.line), 2 * place.timeout_s, Status(place.status))
    os.close(place.status)
    line.start()
    try:
        _become_the_callers(place)
        _prepare_process(place)
        worker = _worker(place, line)
        program = unship(place.program, mapped=True)
        os.close(place.program)
        message, fds = _value(program, worker)
        atexit._run_exitfuncs()
        _flush()
        line.last(message, fds)
    except BaseException as error:  # noqa: BLE001 - the end of the process: whatever it is, the driver must hear of it
        _flush()
        line.last(_report(error, place.rank, line))
        return 1
    return 0


def _become_the_callers(place: Place) -> None:
    for number, fd in enumerate(place.streams, start=1):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(place.environment)
    sys.path[:] = place.path
    sys.argv[:] = place.argv
    os.chdir(place.folder)


def _prepare_process(place: Place) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _leave_preemption_to_the_driver()
    faulthandler.enable(place.stacks)
    faulthandler.register(signal.SIGUSR1, place.stacks, all_threads=True)
    torch.set_num_threads(place.threads)
    torch.set_num_interop_threads(1)
    _reseed()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]


def _leave_preemption_to_the_driver() -> None:
    """A scheduler sends SIGTERM to every process: the driver answers it, and the workers live on to save their state."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.register_at_fork(
        after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL)
    )  # a loader's process obeys it


def _reseed() -> None:
    """All workers were forked from one process: without this they would draw the same numbers. (`random` does it by itself.)"""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def _worker(place: Place, line: DriverLine) -> Worker:
    host = socket.gethostname()
    worker = Worker(
        rank=place.rank,
        size=place.size,
        host=host,
        device=pick_device(place.device, place.rank),
        group=_group(place, host),
        coordinator=line,
        threads=place.threads,
        local_rank=place.rank,
    )
    if worker.device.type == "cuda":
        torch.cuda.set_device(worker.device)  # what a script calls "cuda" is this worker's own
    set_current(worker)
    return worker


def _group(place: Place, host: str) -> Group:
    if place.size == 1:
        return SoloGroup()
    # The driver judges: its error shows every worker's stack, and it knows who compiles. Peers' own deadline is the last resort.
    timeout_s = 20 * place.timeout_s + 600
    return SharedMemoryGroup(
        place.rank, place.size, place.memory, lifelines=place.lifelines, hosts=[host] * place.size, timeout_s=timeout_s
    )


def _value(program: Any, worker: Worker) -> tuple[dict[str, Any], tuple[int, ...]]:
    try:
        value = program(worker)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
        value = None
    return {"type": "value"}, (ship(value, f"the value that worker {worker.rank} returned"),)


def _report(error: BaseException, rank: int, line: DriverLine) -> dict[str, Any]:
    """An error as JSON: exceptions of any class can be told, whether or not they can be pickled."""
    phase, step = line.where()
    return {
        "type": "error",
        "rank": rank,
        "phase": phase,
        "step": step,
        "message": _text(error),
        "detail": "".join(traceback.format_exception(type(error), error, _below_here(error.__traceback__))),
        "error": type(error).__name__,
        "family": next((c.__name__ for c in type(error).__mro__ if c.__module__ == ManyhandsError.__module__), ""),
        "exit_code": error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1,
        "secondary": isinstance(error, PeerLost),
    }


def _below_here(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without this module's frames: the program's own remain."""
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _text(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r})"
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a user's own __str__ may be broken; the traceback still goes along
        return "(its message cannot be shown)"


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
