"""What each worker of a training run executes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from manyhands.errors import PeerLost, Unsupported
from manyhands.parallel.mesh import mesh_alone, mesh_of, mesh_of_blocks
from manyhands.training.epochs import AsyncEpochs, LockstepEpochs
from manyhands.training.joining import join
from manyhands.training.loop import Loop, Regroup
from manyhands.training.plan import Outcome, WorkerPlan
from manyhands.worker import Worker

_NO_MEMORY = "can't allocate memory"  # what torch's allocator says, in a RuntimeError


def work(plan: WorkerPlan, worker: Worker) -> Outcome | None:
    """Train on this worker; a collective of all workers of the run.

    None on ranks that nobody asks (all but the first, unless every rank is a driver of its own), and where rank 0 found
    the run finished.
    """
    if worker.generation and not worker.elastic:
        raise Unsupported(
            f"worker {worker.rank} was restarted, and a restarted worker cannot join a running training: use kill or "
            "pause in faults"
        )
    if worker.shares_process:
        plan = plan.copy_for_thread()
    worker.driver.progress("start", 0)
    if plan.every_rank_returns and any(worker.group.all_gather_json(plan.finished)):
        return None
    if plan.model_parallel is not None:
        make_mesh = mesh_alone if worker.elastic else mesh_of
        worker.mesh = make_mesh(worker, plan.model_parallel.workers)
    elif plan.strategy.blocks_of(worker.size):
        worker.mesh = mesh_of_blocks(worker)
    with _memory_named():
        loop = make_loop(plan, worker)
        try:
            if worker.elastic:
                return _survive(loop)
            outcome = _train(loop)
            return outcome if worker.rank == 0 or plan.every_rank_returns else None
        finally:
            loop.train_feed.close()
            loop.replica.executor.close()
            ends = worker.mesh.model.size > 1 and not (worker.shares_process or plan.every_rank_returns)
            if not ends:  # else this process, which held a part of the model, has not the memory for a copy of it
                loop.replica.detach()


@contextmanager
def _memory_named() -> Iterator[None]:
    """An error for lack of memory says what helps."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        known = any(note.startswith("manyhands: ") for note in getattr(error, "__notes__", ()))
        if not known and (isinstance(error, MemoryError | torch.OutOfMemoryError) or _NO_MEMORY in str(error)):
            error.add_note(
                "manyhands: this worker has too little memory for what it holds of the model and its training. `manyhands plan TASK -n WORKERS "
                "--memory-per-worker SIZE` says which plan fits, such as --model-parallel stages=2; a smaller micro_batch_size helps, too"
            )
        raise


def _train(loop: Loop) -> Outcome:
    join(loop)
    loop.run()
    return loop.outcome()


def _survive(loop: Loop) -> Outcome | None:
    """Train in one generation after the other, until the driver has the result.

    The first member of the last generation delivers it. The others wait: should the first be lost before, the next
    generation begins with them, and its first member delivers.
    """
    worker, lost = loop.worker, None
    while worker.join(loop.blank, lost):
        lost = None
        worker.driver.progress("join", loop.replica.step)
        try:
            outcome = _train(loop)
            worker.driver.progress("deliver", loop.replica.step)
            if worker.rank == 0:
                return outcome
        except PeerLost as error:
            lost = error.rank if error.rank >= 0 else None
        except Regroup:
            pass
        loop.leave()
        if worker.server is not None:
            worker.server.deactivate()  # nobody waits at the gate for one who waits for the next generation
        loop.flush()  # what is committed is reported before the next generation begins
    loop.saver.wait()
    return None


def work_as_dict(plan: WorkerPlan, worker: Worker) -> dict[str, Any] | None:
    """The fields of what `work` returns: an object of a class does not travel from another host."""
    outcome = work(plan, worker)
    return None if outcome is None else vars(outcome)


def make_loop(plan: WorkerPlan, worker: Worker) -> Loop:
    """The loop of this worker, with the strategy's way through an epoch."""
    leasing = plan.strategy.leasing()
    return Loop(plan, worker, LockstepEpochs if leasing is None else partial(AsyncEpochs, leasing=leasing))
