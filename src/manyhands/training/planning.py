"""`plan()`: which way to put a model on workers, from measurements of its units on this machine."""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import nn

from manyhands import rng
from manyhands.comm.solo import SoloGroup
from manyhands.comm.stage_channel import StageChannel
from manyhands.data.batch import rows_of
from manyhands.engines.base import LaunchSpec
from manyhands.engines.cores import usable_cores
from manyhands.engines.local.engine import Local
from manyhands.engines.torch_settings import WithSettings
from manyhands.parallel.mesh import piece_bytes
from manyhands.parallel.planner.linear_cost import LinearCost
from manyhands.parallel.planner.profile import ModelProfile, message_line, profile_units
from manyhands.parallel.planner.search import MachineCosts
from manyhands.parallel.planner.timing import Cores
from manyhands.replica.executor import AutogradExecutor
from manyhands.replica.flat_vector import nbytes, tensors_in
from manyhands.replica.replica import Replica
from manyhands.strategies.base import Strategy
from manyhands.training.config import TrainConfig
from manyhands.training.plan import WorkerPlan, first_rows
from manyhands.worker import Worker

_SMALL = 1 << 14  # numbers of a model for which a strategy says what it keeps
_NBYTES = (1 << 14, 1 << 22)  # of the vectors whose exchange is timed


def measure(config: TrainConfig, threads: int | None) -> tuple[MachineCosts, ModelProfile, ModelProfile]:
    """Measure the task's model on workers of engine local, as many as compute at once; last as one process does that has
    all cores."""
    cores = usable_cores()
    each = threads or max(1, cores // config.count)
    at_once = min(config.count, max(2, cores // each))
    work = partial(_measure, WorkerPlan(task=config.task, strategy=config.strategy, partition=config.partition), cores)
    with Local() as engine:
        found = engine.launch(
            WithSettings.of_here(work), LaunchSpec(workers=at_once, threads_per_worker=each, device="cpu")
        )[0]
    profile, alone, all_cores = (ModelProfile.of(found[name]) for name in ("together", "alone", "all_cores"))
    together = min(at_once, max(1, cores // each))
    machine = MachineCosts(
        workers=config.count,
        rows=found["rows"],
        cores=Cores(count=cores / each, together=together, alone=alone.seconds / profile.seconds),
        base=profile.base,
        message=LinearCost(**found["message"]),
        exchange=LinearCost(**found["exchange"]),
        period=_period(config.strategy),
        vectors=found["vectors"],
        micro_batch_size=config.task.micro_batch_size,
    )
    return machine, profile, all_cores


def _measure(plan: WorkerPlan, cores: int, worker: Worker) -> dict[str, Any]:
    rng.seed_all(plan.task.seed, 0)
    batch = first_rows(plan, worker, (0, 1))
    worker.group.barrier()
    found: dict[str, Any] = {"rows": rows_of(batch)}
    if worker.size > 1:
        pair = worker.make_group([0, 1])
        if worker.rank < 2:
            channel = StageChannel(pair, piece_bytes(0))
            found["message"] = asdict(message_line(channel, first=worker.rank == 0))
            channel.close()
    found |= _exchange(plan.strategy, worker)
    found["together"] = asdict(profile_units(plan.task, batch, worker.group))
    if worker.rank == 0:
        threads = torch.get_num_threads()
        found["alone"] = asdict(profile_units(plan.task, batch, SoloGroup()))
        torch.set_num_threads(cores)
        found["all_cores"] = asdict(profile_units(plan.task, batch, SoloGroup()))
        torch.set_num_threads(threads)
    worker.group.barrier()
    return found


def _exchange(strategy: Strategy, worker: Worker) -> dict[str, Any]:
    """What the strategy keeps of a model, in vectors as long as its parameters, and seconds of an exchange by bytes."""
    model = nn.Linear(_SMALL, 1, bias=False)
    executor = AutogradExecutor(model, lambda model: torch.optim.SGD(model.parameters(), lr=0.1), loss=None)
    replica = Replica(executor, group=worker.group)
    state = strategy.start(replica, worker)
    own = [*replica.parameters.parts, *replica.gradients.parts]
    vectors = nbytes(tensors_in(state), without=own) / nbytes(replica.parameters.parts)
    vector = worker.group.allocate(max(_NBYTES) // 4, torch.float32)

    def once(size: int) -> float:
        worker.group.barrier()
        began = time.perf_counter()
        worker.group.mean_(vector[: size // 4])
        return time.perf_counter() - began

    exchange = LinearCost.of_medians(_NBYTES, once)
    replica.detach()
    return {"vectors": vectors, "exchange": asdict(exchange)}


def _period(strategy: Strategy) -> int:
    """The steps from one exchange to the next."""
    found = getattr(strategy, strategy.traits.period.split(",")[0], 1) if strategy.traits.period else 1
    return found if isinstance(found, int) else 1 << 30
