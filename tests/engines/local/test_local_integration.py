"""Engine `local` beyond the conformance suite: what workers find, how they fail, and what is left of them."""

from __future__ import annotations

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
            "place": (worker.local_rank, worker.device.type, os.getcwd()),
            "caller's": (os.environ["MANYHANDS_TEST_VALUE"], sys.argv),
            "own data": float(data.sum()),
            "is loaded": "manyhands.training.worker_main" in sys.modules,
            "frozen": gc.get_freeze_count() > 100_000,  # objects of torch's modules, which collections leave out
            "drawn": (random.random(), numpy.random.rand()),
        }

    first, second = local.launch(program, two(threads_per_worker=3, device="cpu"))
    assert all(a != b for a, b in zip(first.pop("drawn"), second.pop("drawn"), strict=True))
    for rank, found in enumerate((first, second)):
        assert found == {
            "threads": (3, 3),
            "place": (rank, "cpu", os.getcwd()),
            "caller's": ("now", ["prog", "--its-own"]),
            "own data": 1.0,
            "is loaded": True,
            "frozen": True,
        }
    assert data.sum() == 0


def test_a_worker_that_finishes_first_leaves_its_peers_at_work(local: Local) -> None:
    assert local.launch(one_leaves, LaunchSpec(workers=3, timeout_s=30)) == [0.0, 1.0, 5.0]


@pytest.mark.slow
def test_a_launch_of_its_own_leaves_no_process_and_no_descriptor_whatever_the_end(script: Any) -> None:
    """CASE 28; and the script needs no guard, and lambdas will do."""
    run = script("""
        import os, threading
        import torch
        from manyhands.engines.base import LaunchSpec
        from manyhands.engines.local.engine import Local
        from manyhands.errors import BadInput, WorkerFailed
        from manyhands.testing.engine_suite import ENGINE_SUITE

        two, before = LaunchSpec(workers=2), len(os.listdir("/proc/self/fd"))
        print(Local().launch(lambda worker: worker.rank * 10, two))
        with Local() as local:
            ENGINE_SUITE["nothing_left"](local)
            for program in (lambda w: os._exit(1), lambda w: threading.Lock(), lambda w: torch.ones(99999)):
                try:
                    local.launch(program, two)
                except (BadInput, WorkerFailed) as error:
                    print(type(error).__name__)
        print(len(os.listdir("/proc/self/fd")) - before)
        os.kill(os.getpid(), 19)  # SIGSTOP: let the test look
    """)
    assert [run.line() for _ in range(4)] == ["[0, 10]", "WorkerFailed", "BadInput", "0"]
    assert run.processes() == [run.process.pid]


class Recorder(Observer):
    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def event(self, event: Event) -> None:
        self.seen.append((event.rank, event.type, event.step, event.values))

    def answer(self, event: Event) -> dict[str, Any]:
        self.event(event)
        return {}


@pytest.mark.slow
def test_a_slow_observer_is_no_hang(local: Local) -> None:
    class Slow(Observer):
        def event(self, event: Event) -> None:
            time.sleep(1.5)

    def program(worker: Worker) -> int:
        worker.emit("step")
        return worker.ask("lease") or worker.rank

    assert local.launch(program, two(timeout_s=2.5, observer=Slow())) == [0, 1]


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


def test_our_own_errors_come_as_they_were(local: Local) -> None:
    def program(worker: Worker) -> None:
        raise Preempted("resume it")

    with pytest.raises(Preempted) as caught:
        local.launch(program, two())
    assert (type(caught.value), str(caught.value)) == (Preempted, "resume it")


def test_the_cause_is_told_not_the_peers_that_it_took_along(local: Local) -> None:
    """CASE 28: children of workers end with the run, also those of one that dies; they hold no line of the worker's open."""
    recorder = Recorder()

    def program(worker: Worker) -> None:
        child = multiprocessing.get_context("fork").Process(target=forever, daemon=True)
        child.start()
        worker.ask("child", pid=child.pid)
        worker.group.barrier()
        if worker.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        worker.group.barrier()

    error = fails(local, program, two(observer=recorder))
    assert error.rank == 1
    assert "killed by signal 9 (SIGKILL" in str(error)
    children = [values["pid"] for *_, values in recorder.seen]
    assert len(children) == 2
    wait_until(lambda: not any(map(lives, children)))


def test_a_lost_peer_without_a_cause_is_told(local: Local) -> None:
    def program(worker: Worker) -> None:
        raise PeerLost(1, "here", "mean", 3, 0.5)

    assert "waited 0.5 s" in str(fails(local, program))


def test_a_crash_shows_the_python_stack(local: Local) -> None:
    def program(worker: Worker) -> None:
        if worker.rank == 1:
            ctypes.string_at(0)
        forever()

    error = fails(local, program)
    assert "killed by signal 11 (SIGSEGV)" in str(error)
    assert "in program" in error.detail
    assert "heartbeat" not in error.detail


@pytest.mark.parametrize("code", [3, "a text"])
def test_sys_exit_is_a_failure(local: Local, code: Any) -> None:
    error = fails(local, lambda worker: sys.exit(code) if worker.rank else sys.exit(0))
    assert error.rank == 1  # with 0 it is a return
    assert f"called sys.exit({code!r})" in str(error)
    assert error.exit_code == (3 if code == 3 else 1)


def test_os_exit_without_a_value_is_a_failure(local: Local) -> None:
    assert "exit code 0 before it returned" in str(fails(local, lambda worker: os._exit(0)))


def test_what_cannot_be_sent(local: Local) -> None:
    lock = threading.Lock()
    with pytest.raises(BadInput, match="the program holds lock, a lock, which cannot be sent"):
        local.launch(lambda worker: lock, two())
    with pytest.raises(BadInput, match="the value that worker . returned is a lock, which cannot be sent"):
        local.launch(lambda worker: threading.Lock(), two())


def test_a_hang_shows_the_table_and_every_stack(local: Local) -> None:
    """The culprit holds the interpreter's lock: no thread of its own could tell where it is."""

    def program(worker: Worker) -> None:
        worker.driver.progress("exchange" if worker.rank == 0 else "compute", 7)
        worker.ask("there")
        if worker.rank == 1:
            ctypes.PyDLL(None).sleep(60)
        forever()

    error = fails(local, program, two(timeout_s=2.5, observer=Recorder()))
    assert (error.rank, error.phase, error.step) == (1, "compute", 7)
    assert [[cell.strip() for cell in row.split("|")][:3] for row in error.detail.splitlines()[:3]] == [
        ["rank", "last step", "phase"],
        ["0", "7", "exchange"],
        ["1", "7", "compute"],
    ]
    first, second = error.detail.split("worker 1:")
    assert "in forever" in first
    assert "in program" in second
    assert "in forever" not in second


def test_an_observer_that_raises_ends_the_run(local: Local) -> None:
    class Bad(Observer):
        def event(self, event: Event) -> None:
            raise RuntimeError("a callback's own mistake")

    def program(worker: Worker) -> None:
        worker.emit("step")
        forever()

    with pytest.raises(RuntimeError, match="a callback's own mistake"):
        local.launch(program, two(observer=Bad()))


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


@pytest.mark.slow
def test_many_workers_at_a_low_limit_of_descriptors(script: Any) -> None:
    run = script("""
        import resource
        from manyhands.engines.base import LaunchSpec
        from manyhands.engines.local.engine import Local
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        print(sum(Local().launch(lambda worker: worker.rank, LaunchSpec(workers=20))))
        print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    """)
    assert run.end() == (0, "190\n64\n", "")


@pytest.mark.slow
def test_one_worker_is_here_or_apart_and_computes_the_same(local: Local) -> None:
    def program(worker: Worker) -> Any:
        value = torch.full((3,), 2.0)
        total = worker.group.mean_(value, weight=3.0)
        return os.getpid(), worker.size, value.tolist(), total.weight, torch.get_num_threads()

    plan = LaunchSpec(workers=1, timeout_s=30.0, threads_per_worker=1)
    ((here, *seen),) = local.launch(program, plan)
    with Local(apart=True) as apart:
        ((there, *seen_there),) = apart.launch(program, plan)
    assert (here == os.getpid(), there == os.getpid()) == (True, False)
    assert seen == seen_there == [1, [2.0] * 3, 3.0, 1]
