"""Replicas of several stages whose workers are threads of the test."""

import copy
from collections.abc import Callable
from typing import TypeVar

from torch import nn

import manyhands as mh
from manyhands.parallel.mesh import mesh_of
from manyhands.parallel.spec import ModelParallel
from manyhands.strategies import strategy_of
from manyhands.testing.threads import together
from manyhands.training.loop import Loop
from manyhands.training.plan import WorkerPlan
from manyhands.training.worker_main import make_loop
from manyhands.worker import Worker

T = TypeVar("T")


def in_stages(
    task: mh.Task,
    model: nn.Module,
    plan: str,
    program: Callable[[Loop], T],
    workers: int = 0,
    strategy: str = "allreduce",
) -> list[T]:
    """`program` on the loop of each worker, before its first step. Workers are threads; the task's model is a copy of
    this one."""
    spec = ModelParallel.of(plan)
    assert spec is not None

    def run(worker: Worker) -> T:
        worker.mesh = mesh_of(worker, spec.stages)
        own = task.with_fields(model=copy.deepcopy(model))
        loop = make_loop(WorkerPlan(task=own, strategy=strategy_of(strategy), model_parallel=spec), worker)
        try:
            return program(loop)
        finally:
            loop.train_feed.close()

    return together(workers or spec.stages, run)
