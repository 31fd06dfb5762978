"""A run of one worker, in the calling process: a breakpoint works, nothing is sent anywhere."""

from __future__ import annotations

import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from manyhands.comm.solo import SoloGroup
from manyhands.engines.base import LaunchSpec
from manyhands.engines.cores import threads_per_worker
from manyhands.engines.in_process import InProcessDriverClient
from manyhands.errors import BadInput, ManyhandsError, WorkerFailed
from manyhands.worker import Worker, current, set_current

T = TypeVar("T")


def run_here(program: Callable[[Worker], T], spec: LaunchSpec) -> T:
    """The program's value. Errors as `Engine.launch` says; the original one is the cause."""
    driver = InProcessDriverClient(spec.observer)
    worker = Worker(
        host=socket.gethostname(),
        device=pick_device(spec.device, 0),
        group=SoloGroup(),
        driver=driver,
        threads=threads_in_callers_process(1, spec.threads_per_worker),
    )
    with as_current(worker), _served(worker, spec):
        return run_as(worker, program, driver)


@contextmanager
def _served(worker: Worker, spec: LaunchSpec) -> Iterator[None]:
    """Within, the worker has the server that the spec wants, in this very process."""
    if spec.server is None:
        yield
        return
    from manyhands.server.in_process import InProcessServers

    servers = InProcessServers(spec.server, workers=1, shards=spec.shards, timeout_s=spec.timeout_s)
    (worker.server,) = servers.clients
    try:
        yield
    finally:
        worker.server.close()


def run_as(worker: Worker, program: Callable[[Worker], T], driver: InProcessDriverClient) -> T:
    """Run the program; manyhands' own errors and the observer's pass, any other becomes `WorkerFailed`."""
    try:
        return program(worker)
    except ManyhandsError:
        raise
    except Exception as error:
        if error is driver.observers_error:
            raise
        raise WorkerFailed(
            f"worker {worker.rank} on {worker.host} failed in phase {driver.phase} at step {driver.step}: {type(error).__name__}: {error}",
            rank=worker.rank,
            host=worker.host,
            phase=driver.phase,
            step=driver.step,
            detail="".join(traceback.format_exception(error)),
            error=type(error).__name__,
        ) from error


@contextmanager
def as_current(worker: Worker) -> Iterator[None]:
    """Within, this process is that worker, with its number of threads; afterwards what it was."""
    before = current()
    set_current(worker)
    try:
        with running_threads(worker.threads):
            yield
    finally:
        set_current(before)


def threads_in_callers_process(workers_here: int, wanted: int | None) -> int:
    """As wanted; else, for a host's only worker, the process's own number, so that results equal a plain loop's."""
    return wanted or (torch.get_num_threads() if workers_here == 1 else threads_per_worker(workers_here))


@contextmanager
def running_threads(count: int) -> Iterator[None]:
    """Within, torch computes with so many threads; afterwards with as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def pick_device(wanted: str, local_rank: int) -> torch.device:
    """`auto`, `cuda`: this worker's own GPU where there are any (shared in turn if there are too few), else the CPU."""
    if wanted not in ("auto", "cuda"):
        return torch.device(wanted)
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    if wanted == "cuda":
        raise BadInput("device cuda was asked for, and torch sees no GPU here: give device auto or cpu")
    return torch.device("cpu")
