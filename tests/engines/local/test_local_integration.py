"""Engine `local` beyond the conformance suite: what workers find, how they fail, and what is left of them."""

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from driver_script import wait_until
from heard import Heard
from joined_run import lives, one_leaves

from manyhands.engines.base import LaunchSpec, Observer
from manyhands.engines.local.engine import Local
from manyhands.errors import BadInput, PeerLost, Preempted, WorkerFailed
from manyhands.events import Event
from manyhands.worker import Worker


def two(**options: Any) -> LaunchSpec:
    return LaunchSpec(**{"workers": 2, "timeout_s": 30.0, **options})


def fails(local: Local, program: Callable[[Worker], Any], plan: LaunchSpec | None = None) -> WorkerFailed:
    with pytest.raises(WorkerFailed) as caught:
        local.launch(program, plan or two())
    return caught.value


def forever() -> None:
    threading.Event().wait(60)


def test_what_workers_find(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's environment and data, modules that are loaded already, random numbers of their own."""
    monkeypatch.setenv("MANYHANDS_TEST_VALUE", "now")
    monkeypatch.setattr(sys, "argv", ["prog", "--its-own"])
    data = torch.zeros(1 << 20)

    def program(worker: Worker) -> dict[str, Any]:
        import random

        import numpy

        data[worker.rank] = 1.0
        worker.group.barrier()
        return {
            "threads": (torch.get_num_threads(), worker.threads),
            "caller's": (os.environ["MANYHANDS_TEST_VALUE"], sys.argv, os.getcwd()),
            "own data": float(data.sum()),
            "is loaded": "manyhands.training.worker_main" in sys.modules,
            "frozen": gc.get_freeze_count() > 100_000,  # objects of torch's modules, which collections leave out
            "drawn": (random.random(), numpy.random.rand()),
        }

    first, second = local.launch(program, two(threads_per_worker=3))
    assert all(a != b for a, b in zip(first.pop("drawn"), second.pop("drawn"), strict=True))
    callers = ("now", ["prog", "--its-own"], os.getcwd())
    wanted = {"threads": (3, 3), "caller's": callers, "own data": 1.0, "is loaded": True, "frozen": True}
    assert first == second == wanted
    assert data.sum() == 0


def test_a_worker_that_finishes_first_leaves_its_peers_at_work(local: Local) -> None:
    assert local.launch(one_leaves, LaunchSpec(workers=3, timeout_s=30)) == [0.0, 1.0, 5.0]


@pytest.mark.slow
def test_a_slow_observer_is_no_hang_and_one_that_raises_ends_the_run(local: Local) -> None:
    class Slow(Observer):
        def event(self, event: Event) -> None:
            time.sleep(1.5)
            if event.type == "last":
                raise RuntimeError("a callback's own mistake")

    def program(worker: Worker, *types: str) -> int:
        for type in types:
            worker.emit(type)
        return worker.ask("lease") or worker.rank

    plan = two(timeout_s=2.5, observer=Slow())
    assert local.launch(lambda worker: program(worker, "step"), plan) == [0, 1]
    with pytest.raises(RuntimeError, match="a callback's own mistake"):
        local.launch(lambda worker: program(worker, "last"), plan)


class Odd(Exception):
    """Cannot be pickled, and its constructor wants more than a message."""

    def __init__(self, number: int, lock: Any) -> None:
        super().__init__(f"odd number {number}")
        self.lock = lock


def test_an_exception_carries_its_traceback_rank_phase_and_step(local: Local) -> None:
    """CASE 21."""

    def program(worker: Worker) -> None:
        worker.driver.progress("compute", 12)
        if worker.rank == 1:
            raise Odd(3, threading.Lock())
        worker.group.barrier()

    error = fails(local, program)
    assert (error.rank, error.phase, error.step, error.error) == (1, "compute", 12, "Odd")
    assert "failed in phase compute at step 12: Odd: odd number 3" in str(error)
    assert "raise Odd(3, threading.Lock())" in error.detail
    assert "child.py" not in error.detail


def test_our_own_errors_come_as_they_were_and_a_lost_peer_without_a_cause_is_told(local: Local) -> None:
    def program(error: Exception) -> None:
        raise error

    with pytest.raises(Preempted) as caught:
        local.launch(lambda worker: program(Preempted("resume it")), two())
    assert (type(caught.value), str(caught.value)) == (Preempted, "resume it")
    assert "waited 0.5 s" in str(fails(local, lambda worker: program(PeerLost(1, "here", "mean", 3, 0.5))))


def test_the_cause_is_told_not_the_peers_that_it_took_along(local: Local) -> None:
    """CASE 28: children of workers end with the run, also those of one that dies; they hold no line of the worker's open."""
    heard = Heard()

    def program(worker: Worker) -> None:
        child = multiprocessing.get_context("fork").Process(target=forever, daemon=True)
        child.start()
        worker.ask("child", pid=child.pid)
        worker.group.barrier()
        if worker.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        worker.group.barrier()

    error = fails(local, program, two(observer=heard))
    assert error.rank == 1
    assert "killed by signal 9 (SIGKILL" in str(error)
    children = [event.values["pid"] for event in heard.asked]
    assert len(children) == 2
    wait_until(lambda: not any(map(lives, children)))


def test_a_crash_shows_the_python_stack(local: Local) -> None:
    def program(worker: Worker) -> None:
        if worker.rank == 1:
            ctypes.string_at(0)
        forever()

    error = fails(local, program)
    assert "killed by signal 11 (SIGSEGV)" in str(error)
    assert "in program" in error.detail
    assert "heartbeat" not in error.detail


def test_an_exit_is_a_failure(local: Local) -> None:
    for code in (3, "a text"):
        error = fails(local, lambda worker, code=code: sys.exit(code if worker.rank else 0))  # type: ignore[misc]
        assert error.rank == 1  # with 0 it is a return
        assert f"called sys.exit({code!r})" in str(error)
        assert error.exit_code == (3 if code == 3 else 1)
    assert "exit code 0 before it returned" in str(fails(local, lambda worker: os._exit(0)))


def test_what_cannot_be_sent(local: Local) -> None:
    lock = threading.Lock()
    with pytest.raises(BadInput, match="the program holds lock, a lock, which cannot be sent"):
        local.launch(lambda worker: lock, two())
    with pytest.raises(BadInput, match="the value that worker . returned is a lock, which cannot be sent"):
        local.launch(lambda worker: threading.Lock(), two())


def test_a_hang_shows_every_stack(local: Local) -> None:
    """The culprit holds the interpreter's lock: no thread of its own could tell where it is."""

    def program(worker: Worker) -> None:
        worker.driver.progress("exchange" if worker.rank == 0 else "compute", 7)
        worker.ask("there")
        if worker.rank == 1:
            ctypes.PyDLL(None).sleep(60)
        forever()

    error = fails(local, program, two(timeout_s=2.5, observer=Heard()))
    assert (error.rank, error.phase, error.step) == (1, "compute", 7)
    first, second = error.detail.split("worker 1:")
    assert "in forever" in first
    assert "in program" in second
    assert "in forever" not in second
    assert not any(word in error.detail for word in ("heartbeat.py", "child.py", "fork_server.py", "Extension modules"))


@pytest.mark.slow
def test_two_threads_may_launch_at_once(local: Local) -> None:
    """CASE 23."""
    values: dict[int, Any] = {}

    def launch(base: int) -> None:
        values[base] = local.launch(lambda worker: worker.group.all_gather_json(base + worker.rank), two())

    threads = [threading.Thread(target=launch, args=(base,)) for base in (10, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert values == {base: [[base, base + 1]] * 2 for base in (10, 20)}


def test_one_worker_is_here_or_apart_and_computes_the_same() -> None:
    def program(worker: Worker) -> Any:
        value = torch.full((3,), 2.0)
        total = worker.group.mean_(value, weight=3.0)
        return os.getpid(), worker.size, value.tolist(), total.weight, torch.get_num_threads()

    plan = LaunchSpec(workers=1, timeout_s=30.0, threads_per_worker=1)
    engines = Local(), Local(apart=True)
    ((here, *seen),), ((there, *seen_there),) = (engine.launch(program, plan) for engine in engines)
    assert (here == os.getpid(), there == os.getpid()) == (True, False)
    assert seen == seen_there == [1, [2.0] * 3, 3.0, 1]
