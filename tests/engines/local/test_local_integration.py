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

from manyhands.engines.base import LaunchSpec, Observer
from manyhands.engines.local.engine import Local
from manyhands.errors import BadInput, ManyhandsError, PeerLost, Preempted, UnknownName, Unsupported, WorkerFailed
from manyhands.events import Event
from manyhands.worker import Worker, current
from open_files import open_files


def two(**options: Any) -> LaunchSpec:
    return LaunchSpec(**{"workers": 2, "timeout_s": 30.0, **options})


def fails(local: Local, program: Callable[[Worker], Any], plan: LaunchSpec | None = None) -> WorkerFailed:
    with pytest.raises(WorkerFailed) as caught:
        local.launch(program, plan or two())
    return caught.value


def forever() -> None:
    threading.Event().wait(60)


def test_values_in_rank_order_and_a_group_that_works(local: Local) -> None:
    def program(worker: Worker) -> Any:
        assert current() is worker
        tensor = torch.full((3,), float(worker.rank))
        total = worker.group.mean_(tensor, weight=worker.rank + 1.0)
        return worker.rank, worker.size, worker.local_rank, tensor, total.weight, worker.device.type

    values = local.launch(program, two(workers=3, device="cpu"))
    assert [value[:3] for value in values] == [(rank, 3, rank) for rank in range(3)]
    for *_, tensor, weight, device in values:
        assert torch.allclose(tensor, torch.full((3,), (2 * 1 + 3 * 2) / 6))
        assert (weight, device) == (6.0, "cpu")


def test_what_is_loaded_is_there_for_all_workers_and_their_collections_leave_it_out(local: Local) -> None:
    def program(worker: Worker) -> tuple[bool, int]:
        return "manyhands.training.worker_main" in sys.modules, gc.get_freeze_count()

    for is_loaded, frozen in local.launch(program, two()):
        assert is_loaded
        assert frozen > 100_000  # objects of torch's modules


@pytest.mark.slow
def test_a_launch_of_its_own_leaves_no_process_and_no_descriptor(script: Any) -> None:
    """CASE 28; and the script needs no guard, and lambdas will do."""
    run = script("""
        import os
        from manyhands.engines.base import LaunchSpec
        from manyhands.engines.local.engine import Local
        before = len(os.listdir("/proc/self/fd"))
        print(Local().launch(lambda worker: worker.rank * 10, LaunchSpec(workers=2)))
        print(len(os.listdir("/proc/self/fd")) - before)
        os.kill(os.getpid(), 19)  # SIGSTOP: let the test look
    """)
    assert run.line() == "[0, 10]"
    assert run.line() == "0"
    assert run.processes() == [run.process.pid]


def test_threads_and_environment(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_TEST_VALUE", "now")
    monkeypatch.setattr(sys, "argv", ["prog", "--its-own"])

    def program(worker: Worker) -> Any:
        return torch.get_num_threads(), worker.threads, os.environ["MANYHANDS_TEST_VALUE"], sys.argv, os.getcwd()

    values = local.launch(program, two(threads_per_worker=3))
    assert values == [(3, 3, "now", ["prog", "--its-own"], os.getcwd())] * 2


def test_workers_do_not_draw_the_same_random_numbers(local: Local) -> None:
    def program(worker: Worker) -> Any:
        import random

        import numpy

        return random.random(), numpy.random.rand()

    (a, b), (c, d) = local.launch(program, two())
    assert a != c
    assert b != d


def test_data_is_shared_and_private(local: Local) -> None:
    data = torch.zeros(1 << 20)

    def program(worker: Worker) -> float:
        data[worker.rank] = 1.0
        worker.group.barrier()
        return float(data.sum())

    assert local.launch(program, two()) == [1.0, 1.0]
    assert data.sum() == 0


class Recorder(Observer):
    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.threads: set[int] = set()
        self.reason = ""

    def event(self, event: Event) -> None:
        self.threads.add(threading.get_ident())
        self.seen.append((event.rank, event.type, event.step, event.values))

    def answer(self, event: Event) -> dict[str, Any]:
        self.event(event)
        return {"doubled": 2 * event.step}

    def stopping(self) -> str:
        return self.reason


def test_events_arrive_in_order_before_the_answer(local: Local) -> None:
    recorder = Recorder()

    def program(worker: Worker) -> Any:
        for step in range(50):
            worker.emit("step", step=step, loss=float("inf"))
        answer = worker.ask("lease", step=50)
        worker.emit("end", step=51)
        return answer

    assert local.launch(program, two(observer=recorder)) == [{"doubled": 100}] * 2
    for rank in (0, 1):
        assert [step for r, _, step, _ in recorder.seen if r == rank] == list(range(52))
    assert (0, "step", 3, {"loss": float("inf")}) in recorder.seen
    assert recorder.threads == {threading.get_ident()}


def test_an_event_that_is_no_json_raises_where_it_was_emitted(local: Local) -> None:
    error = fails(local, lambda worker: worker.emit("step", loss=torch.ones(1)))
    assert "not JSON serializable" in str(error)


def test_workers_hear_that_they_should_stop(local: Local) -> None:
    recorder = Recorder()
    recorder.reason = "preempted"

    def program(worker: Worker) -> str:
        wait_until(worker.driver.should_stop)
        return worker.driver.should_stop()

    assert local.launch(program, two(observer=recorder)) == ["preempted"] * 2


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


@pytest.mark.parametrize("kind", [BadInput, UnknownName, Unsupported, Preempted])
def test_our_own_errors_come_as_they_were(local: Local, kind: type[ManyhandsError]) -> None:
    def program(worker: Worker) -> None:
        raise kind("batch_size must be at least 2, not 1")

    with pytest.raises(kind) as caught:
        local.launch(program, two())
    assert type(caught.value) is kind
    assert str(caught.value) == "batch_size must be at least 2, not 1"


def test_the_cause_is_told_not_the_peers_that_it_took_along(local: Local) -> None:
    def program(worker: Worker) -> None:
        worker.group.barrier()
        if worker.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        worker.group.barrier()

    error = fails(local, program, two(workers=3))
    assert error.rank == 1
    assert "killed by signal 9 (SIGKILL" in str(error)


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
    def program(worker: Worker) -> None:
        sys.exit(code)

    error = fails(local, program)
    assert f"called sys.exit({code!r})" in str(error)
    assert error.exit_code == (3 if code == 3 else 1)


def test_sys_exit_zero_is_a_return(local: Local) -> None:
    assert local.launch(lambda worker: sys.exit(0), two()) == [None, None]


def test_os_exit_without_a_value_is_a_failure(local: Local) -> None:
    assert "exit code 0 before it returned" in str(fails(local, lambda worker: os._exit(0)))


def test_a_value_that_cannot_be_sent(local: Local) -> None:
    with pytest.raises(BadInput, match="the value that worker . returned is a lock, which cannot be sent"):
        local.launch(lambda worker: threading.Lock(), two())


def test_a_program_that_cannot_be_sent(local: Local) -> None:
    lock = threading.Lock()
    with pytest.raises(BadInput, match="the program holds lock, a lock, which cannot be sent"):
        local.launch(lambda worker: lock, two())


def test_a_hang_shows_the_table_and_every_stack(local: Local) -> None:
    """The culprit holds the interpreter's lock: no thread of its own could tell where it is."""
    recorder = Recorder()

    def program(worker: Worker) -> None:
        worker.driver.progress("exchange" if worker.rank == 0 else "compute", 7)
        worker.ask("there")
        if worker.rank == 1:
            ctypes.PyDLL(None).sleep(60)
        forever()

    began = time.monotonic()
    error = fails(local, program, two(timeout_s=2.5, observer=recorder))
    assert time.monotonic() - began < 10
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


@pytest.mark.slow
def test_a_stopped_process_is_a_hang(local: Local) -> None:
    def program(worker: Worker) -> None:
        worker.driver.progress("compute", 1)
        worker.ask("there")
        if worker.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        worker.driver.progress("exchange", 1)
        forever()

    error = fails(local, program, two(timeout_s=2.5))
    assert error.rank == 1
    assert "the process does not answer" in error.detail


def test_children_of_workers_end_with_the_run(local: Local) -> None:
    """CASE 28: also those of a worker that dies; and they hold no line of the worker's open."""
    recorder = Recorder()

    def program(worker: Worker) -> None:
        child = multiprocessing.get_context("fork").Process(target=forever, daemon=True)
        child.start()
        worker.ask("child", pid=child.pid)
        worker.group.barrier()
        if worker.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        forever()

    fails(local, program, two(observer=recorder))
    children = [values["pid"] for *_, values in recorder.seen]
    assert len(children) == 2
    wait_until(lambda: not any(_alive(pid) for pid in children), timeout_s=2.5)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_no_descriptor_is_left_whatever_the_end(local: Local) -> None:
    local.launch(lambda worker: worker.rank, two())
    before = open_files()
    fails(local, lambda worker: 1 / 0)
    fails(local, lambda worker: os._exit(1))
    with pytest.raises(BadInput):
        local.launch(lambda worker: threading.Lock(), two())
    local.launch(lambda worker: torch.ones(100_000), two())
    assert open_files() <= before


def test_an_observer_that_raises_ends_the_run(local: Local) -> None:
    class Bad(Observer):
        def event(self, event: Event) -> None:
            raise RuntimeError("a callback's own mistake")

    def program(worker: Worker) -> None:
        worker.emit("step")
        forever()

    with pytest.raises(RuntimeError, match="a callback's own mistake"):
        local.launch(program, two(observer=Bad()))
    assert local.launch(lambda worker: worker.rank, two()) == [0, 1]


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
        print(sum(Local().launch(lambda worker: worker.rank, LaunchSpec(workers=40))))
        print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    """)
    assert run.end() == (0, "780\n64\n", "")


@pytest.mark.parametrize(("workers", "message"), [(0, "at least 1, not 0"), (-3, "at least 1, not -3")])
def test_too_few_workers(workers: int, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Local().launch(lambda worker: None, LaunchSpec(workers=workers))


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
