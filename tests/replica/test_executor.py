"""Executors of the tests' own: half of a replica, and copies. Whole trainings with them: tests/training/test_task_executor.py."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from executors import Half
from manyhands.comm.threads import ThreadGroup
from manyhands.replica.executor import Allocate, AutogradExecutor
from manyhands.replica.replica import Replica
from manyhands.testing.threads import together
from manyhands.worker import Worker

D = 6
STARTS = torch.linspace(-1, 2, D, dtype=torch.float64)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def test_two_threads_hold_a_replica_in_halves() -> None:
    """Norms and dot products are of the whole; a gradient that is not finite in one half is left out by both."""

    def program(worker: Worker) -> tuple[bool, int]:
        replica = Replica(Half(worker.group, STARTS.tolist(), adamw), group=Worker().mesh.data, nonfinite="skip")
        assert not replica.shards[0].slices["w"].whole
        assert replica.norm(replica.parameters) == pytest.approx(float(STARTS.norm()))
        ones = replica.zeros().fill_(1.0)
        ones.parts[0][D // 2 :] = 0  # the padding
        assert replica.dot(replica.parameters, ones) == pytest.approx(float(STARTS.sum()))
        batch = torch.zeros(1, D, dtype=torch.float64)
        batch[0, 0] = float("inf")  # of the first half's columns
        replica.begin_tick()
        replica.backward(batch)
        return replica.apply(), replica.step

    assert together(2, program) == [(False, 0), (False, 0)]


class Shares(AutogradExecutor):
    """Both members hold all of `shared`, which counts at the first, and a parameter of their own."""

    def __init__(self, members: ThreadGroup) -> None:
        def make() -> nn.Module:
            model = nn.Module()
            model.shared = nn.Parameter(torch.tensor([3.0, 4.0]))
            model.register_parameter(f"own{members.rank}", nn.Parameter(torch.full((2,), 1.0 + members.rank)))
            return model

        super().__init__(make, adamw, loss=lambda model, batch: model.shared.sum(), members=members)

    def build(self, allocate: Allocate) -> None:
        super().build(allocate)
        if self.members.rank:
            self.shards[0].slices["shared"] = replace(self.shards[0].slices["shared"], counted=False)


def test_a_parameter_that_both_members_hold_counts_once_in_norms_and_dot_products() -> None:
    def program(worker: Worker) -> tuple[float, float]:
        replica = Replica(Shares(worker.group), group=Worker().mesh.data)
        ones = replica.zeros().fill_(1.0)
        return replica.norm(replica.parameters) ** 2, replica.dot(replica.parameters, ones)

    assert together(2, program) == [(pytest.approx(25 + 2 + 8), 7 + 2 + 4)] * 2
