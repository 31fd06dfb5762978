"""A task of milliseconds, and strategies with a known fault, for tests of comparisons."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from typing_extensions import override

import manyhands as mh
from manyhands.replica.replica import Replica
from manyhands.strategies.base import State
from manyhands.worker import Worker

ROWS = 240


def tiny(**fields: Any) -> mh.Task:
    """240 rows of 4 numbers, told apart by their sum; 20 steps an epoch."""
    x = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0))
    rows = x, (x.sum(1) > 0).long()
    known = {
        "name": "tiny",
        "model": lambda: nn.Linear(4, 2),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        "train_data": rows,
        "validation_data": tuple(column[:30] for column in rows),
        "test_data": tuple(column[:50] for column in rows),
        "batch_size": 12,
    }
    return mh.Task.supervised(**{**known, **fields})


@dataclass(frozen=True, kw_only=True)
class Broken(mh.AllReduce):
    """AllReduce that raises in its sixth step."""

    name: ClassVar[str] = "broken"

    @override
    def exchange(self, replica: Replica, worker: Worker, state: State) -> bool:
        if replica.step == 5:
            raise RuntimeError("it broke\nand this is the second line")
        return super().exchange(replica, worker, state)


@dataclass(frozen=True, kw_only=True)
class Diverging(mh.AllReduce):
    """AllReduce whose parameters are not finite at the end."""

    name: ClassVar[str] = "diverging"

    @override
    def finish(self, replica: Replica, worker: Worker, state: State) -> None:
        super().finish(replica, worker, state)
        replica.parameters.fill_(float("nan"))
