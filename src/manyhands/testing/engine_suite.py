"""The conformance suite of engines: the guarantees of `Engine.launch`, as checks for any implementation.

    for name, check in ENGINE_SUITE.items():
        check(engine)                    # or check(engine, workers=1)

A check raises CheckFailed. The suite is for engines that start their workers: one whose `spmd` is true would have
to be called by every worker, and is refused. `nothing_left` reads /proc, and needs Linux.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from typing_extensions import override

from manyhands.data.row_pieces import RowPiece
from manyhands.engines.base import Engine, LaunchSpec, Observer
from manyhands.errors import BadInput, UnknownName, Unsupported, WorkerFailed
from manyhands.events import Event
from manyhands.testing.group_suite import GROUP_SUITE, CheckFailed, checks_of, expect
from manyhands.worker import Worker, current

T = TypeVar("T")

WORKERS = 2
DEADLINE_S = 30.0
EVENTS = 50
GROUP_CHECKS = ("place", "sums", "gather", "broadcast", "barrier", "total_zero")  # the quick ones of GROUP_SUITE


class EngineCheck(Protocol):
    """One check of an engine, with `workers` workers."""

    def __call__(self, engine: Engine, workers: int = WORKERS) -> None: ...


def _launch(engine: Engine, workers: int, program: Callable[[Worker], T], observer: Observer | None = None) -> list[T]:
    if engine.capabilities.spmd:
        problem = "every worker would have to run the suite: test an engine in place with a script"
        raise Unsupported(f"engine {engine.name}: {problem}")
    options: dict[str, Any] = {"timeout_s": DEADLINE_S, "threads_per_worker": 1, "device": "cpu"}
    return engine.launch(program, LaunchSpec(workers=workers, observer=observer or Observer(), **options))


def check_values(engine: Engine, workers: int = WORKERS) -> None:
    """`launch` returns the program's values in rank order, of any type; the program's closure is sent along."""
    offset = torch.arange(3)
    values = _launch(engine, workers, lambda worker: (worker.rank, offset + worker.rank, None))
    got = [(rank, sums.tolist(), nothing) for rank, sums, nothing in values]
    wanted = [(rank, [rank, rank + 1, rank + 2], None) for rank in range(workers)]
    expect(got == wanted, f"expected the values {wanted} in rank order, got {got}")


def check_worker(engine: Engine, workers: int = WORKERS) -> None:
    """Every field of the Worker is set, it is the process's current one, and its threads are torch's."""

    def program(worker: Worker) -> dict[str, Any]:
        start = worker.clock()
        return {
            "place": (worker.rank, worker.size, worker.group.rank, worker.group.size),
            "is current": current() is worker,
            "host is named": bool(worker.host),
            "device, generation, server": (str(worker.device), worker.generation, worker.server),
            "threads": (worker.threads, torch.get_num_threads()),
            "local rank is there": 0 <= worker.local_rank <= worker.rank,
            "clock goes on": worker.clock() >= start,
        }

    for rank, got in enumerate(_launch(engine, workers, program)):
        wanted = {"place": (rank, workers) * 2, "threads": (1, 1), "device, generation, server": ("cpu", 0, None)}
        for fact, value in got.items():
            right = wanted.get(fact, True)
            expect(value == right, f"the Worker of rank {rank}: {fact}: expected {right}, got {value}")
    expect(current() is None, "after the launch the driver still counts as a worker")


def check_group(engine: Engine, workers: int = WORKERS) -> None:
    """The workers' group passes the quick checks of `GROUP_SUITE`."""

    def program(worker: Worker) -> None:
        try:
            for name in GROUP_CHECKS:
                GROUP_SUITE[name](worker.group)
        except CheckFailed as error:
            raise BadInput(str(error)) from error  # which every engine must raise unchanged

    try:
        _launch(engine, workers, program)
    except BadInput as error:
        raise CheckFailed(f"the group of {workers} workers: {error}") from error


def check_groups_of_some(engine: Engine, workers: int = WORKERS) -> None:
    """A process can be in several groups at once; one group's messages and end are not another's.

    An engine may raise Unsupported for groups of some workers. At least three workers, or one.
    """
    workers = workers if workers == 1 else max(3, workers)

    def program(worker: Worker) -> None:
        rank, everybody = worker.rank, range(worker.size)
        split = [everybody[rank % 2 :: 2], everybody[:-1] if rank < worker.size - 1 else everybody[-1:], everybody]
        groups = [worker.make_group(ranks) for ranks in split]
        try:
            for ranks, group in zip(split, groups, strict=True):
                expect(
                    [group.rank, group.size] == [ranks.index(rank), len(ranks)],
                    f"the group of {list(ranks)}: is {group.rank} of {group.size}",
                )
                for name in GROUP_CHECKS:
                    GROUP_SUITE[name](group)
            groups[0].close()
            for group in (groups[1], groups[2], worker.group):
                GROUP_SUITE["sums"](group)
        except CheckFailed as error:
            raise BadInput(str(error)) from error  # which every engine must raise unchanged
        finally:
            for group in groups:
                group.close()

    try:
        _launch(engine, workers, program)
    except Unsupported:
        return
    except BadInput as error:
        raise CheckFailed(f"groups of some of {workers} workers: {error}") from error


def check_bad_input(engine: Engine, workers: int = WORKERS) -> None:
    """A worker's BadInput, or a subclass, is raised by `launch` while the other workers wait for that worker."""

    for kind in (BadInput, UnknownName):

        def program(worker: Worker, kind: type[BadInput] = kind) -> None:
            if worker.rank == worker.size - 1:
                raise kind("give another batch_size")
            worker.group.barrier()

        try:
            _launch(engine, workers, program)
        except BadInput as error:
            right = type(error) is kind and "give another batch_size" in str(error)
            expect(right, f"expected {kind.__name__} with its own words, got {type(error).__name__}: {error}")
        else:
            raise CheckFailed(f"a worker raised {kind.__name__}, and launch returned")


def _fails(worker: Worker) -> None:
    worker.driver.progress("compute", 7)
    if worker.rank == worker.size - 1:
        raise KeyError("weights of the check")
    worker.group.barrier()


def check_failure(engine: Engine, workers: int = WORKERS) -> None:
    """Another exception becomes WorkerFailed with rank, host, phase, step and traceback. (CASE 21)

    The next launch works.
    """
    try:
        _launch(engine, workers, _fails)
    except WorkerFailed as error:
        got = {"rank": error.rank, "phase": error.phase, "step": error.step, "error": error.error}
        wanted = {"rank": workers - 1, "phase": "compute", "step": 7, "error": "KeyError"}
        expect(got == wanted, f"WorkerFailed: expected {wanted}, got {got}")
        expect(bool(error.host), "WorkerFailed names no host")
        traced = all(word in error.detail for word in ("Traceback", "_fails", "weights of the check"))
        expect(traced and error.detail in str(error), f"WorkerFailed has not the worker's traceback: {error}")
    else:
        raise CheckFailed("a worker raised KeyError, and launch returned")
    check_values(engine, workers)


class _RecordingObserver(Observer):
    """Keeps the events; requests a stop after `stop_after` of them."""

    def __init__(self, stop_after: float = math.inf) -> None:
        self.events: list[Event] = []
        self.threads: set[int] = set()
        self._stop_after = stop_after

    @override
    def event(self, event: Event) -> None:
        self.events.append(event)
        self.threads.add(threading.get_ident())

    @override
    def answer(self, event: Event) -> dict[str, Any]:
        self.event(event)
        return {"doubled": 2 * event.step}

    @override
    def stopping(self) -> str:
        self.threads.add(threading.get_ident())
        return "enough" if len(self.events) >= self._stop_after else ""


def check_rows(engine: Engine, workers: int = WORKERS) -> None:
    """Rows that workers deliver reach the observer, each once, with the worker that they are of; who is told to wait goes on
    when there is room."""
    observer = _Rows(workers)
    data = bytes(range(256)) * 1000

    def program(worker: Worker) -> None:
        for part in range(3):
            worker.driver.deliver(RowPiece(rank=worker.rank, number=worker.rank, part=part, rows=1, data=data))
        worker.driver.deliver(RowPiece(rank=worker.rank, number=workers + worker.rank, parts=workers))

    _launch(engine, workers, program, observer)
    wanted = [(rank, rank, part, data, 0) for rank in range(workers) for part in range(3)]
    wanted += [(rank, workers + rank, 0, b"", workers) for rank in range(workers)]
    got = sorted((one.rank, one.number, one.part, bytes(one.data), one.parts) for one in observer.came)
    expect(got == sorted(wanted), f"expected {len(wanted)} pieces of rows, each once; got {len(got)}: {got!s:.300}")


class _Rows(Observer):
    """Keeps the pieces; workers wait after their first one until each has delivered one."""

    def __init__(self, workers: int) -> None:
        self.came: list[RowPiece] = []
        self._workers = workers

    @override
    def take_rows(self, piece: RowPiece) -> None:
        self.came.append(piece)

    @override
    def must_wait(self, piece: RowPiece) -> bool:
        return len({one.rank for one in self.came}) < self._workers


def check_events(engine: Engine, workers: int = WORKERS) -> None:
    """Each worker's events reach the observer in order, in the launching thread; `ask` returns its answer."""
    observer = _RecordingObserver()

    def program(worker: Worker) -> dict[str, Any]:
        for step in range(EVENTS):
            worker.emit("step", step=step, tick=step + 1, loss=float("inf"))
        answer = worker.ask("epoch", step=EVENTS)
        worker.emit("end", step=EVENTS + 1)
        return answer

    answers = _launch(engine, workers, program, observer)
    expect(answers == [{"doubled": 2 * EVENTS}] * workers, f"expected the answer {2 * EVENTS}, got {answers}")
    for rank in range(workers):
        mine = [event for event in observer.events if event.rank == rank]
        steps, wanted = [event.step for event in mine], list(range(EVENTS + 2))
        expect(steps == wanted, f"events of rank {rank} arrived as {steps}, expected the order of sending")
        last = mine[EVENTS - 1]
        right = (last.type, last.tick, last.values, mine[-1].type) == ("step", EVENTS, {"loss": float("inf")}, "end")
        expect(right, f"an event of rank {rank} arrived changed: {last}")
    _expect_own_thread(observer)


def check_stopping(engine: Engine, workers: int = WORKERS) -> None:
    """The reason from `stopping()` reaches every worker's `should_stop()`, which returns "" before, within seconds."""
    observer = _RecordingObserver(stop_after=workers)

    def program(worker: Worker) -> tuple[str, str]:
        before = worker.driver.should_stop()
        worker.group.barrier()  # no event is sent before all have called should_stop()
        worker.emit("step")
        deadline = time.monotonic() + DEADLINE_S / 3
        while not (reason := worker.driver.should_stop()) and time.monotonic() < deadline:
            time.sleep(0.005)
            worker.driver.computed(1)  # in simulated time the other workers then run
        return before, reason

    got = _launch(engine, workers, program, observer)
    expect(got == [("", "enough")] * workers, f"before and after the stop, expected ('', 'enough'), got {got}")
    _expect_own_thread(observer)


def _expect_own_thread(observer: _RecordingObserver) -> None:
    expect(observer.threads == {threading.get_ident()}, "the observer was called from another thread than launch was")


def check_nothing_left(engine: Engine, workers: int = WORKERS) -> None:
    """A launch that returns and one that fails leave no process and no descriptor behind. (CASE 28)

    The first launch does not count: an engine may keep processes warm.
    """
    _launch(engine, workers, lambda worker: worker.group.barrier())
    processes, descriptors = _descendants(), _descriptors()
    check_failure(engine, workers)
    for what, left in (("processes", _descendants() - processes), ("descriptors", _descriptors() - descriptors)):
        expect(not left, f"{what} {sorted(left)} are left after a launch that failed and one that returned")


def _descriptors() -> set[int]:
    listed = os.listdir("/proc/self/fd")  # includes the listing's own, which is closed by now
    return {int(fd) for fd in listed if os.path.lexists(f"/proc/self/fd/{fd}")}


def _descendants() -> set[int]:
    """All descendants of this process, zombies included."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found, count = {os.getpid()}, 0
    while len(found) > count:
        count = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found - {os.getpid()}


ENGINE_SUITE: dict[str, EngineCheck] = checks_of(globals())
"""All checks by name, in the order in which they are written above."""
