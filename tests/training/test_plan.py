"""What each worker is told, and what is its own where several share a process."""

from dataclasses import FrozenInstanceError

import pytest
import torch
from torch import nn

import plain
from manyhands.strategies.allreduce import AllReduce
from manyhands.training.plan import WorkerPlan


def plan(model: object) -> WorkerPlan:
    return WorkerPlan(task=plain.task(model=model, loader_processes=2), strategy=AllReduce())


class Loss(nn.Module):
    def forward(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch).mean()
        return loss


def test_workers_of_one_process_have_models_and_losses_of_their_own_and_one_policy() -> None:
    shared = plan(nn.Linear(1, 1))
    shared = WorkerPlan(task=shared.task.with_fields(loss=Loss(), evaluate=Loss()), strategy=AllReduce())
    own, other = shared.copy_for_thread(), shared.copy_for_thread()
    with torch.no_grad():
        own.task.model.weight.fill_(7.0)  # type: ignore[union-attr]
    for model in (other.task.model, shared.task.model):
        assert model.weight.item() != 7.0  # type: ignore[union-attr]
    assert own.task.loss is not shared.task.loss
    assert own.task.evaluate is not shared.task.evaluate
    assert own.keep is other.keep
    with pytest.raises(FrozenInstanceError):
        own.keep.metric = "validation_loss"  # type: ignore[misc]


def test_a_function_may_give_the_same_model_each_time_and_no_processes_load_rows() -> None:
    given = nn.Linear(1, 1)
    own = plan(lambda: given).copy_for_thread()
    made = own.task.model()
    assert made is not given
    assert torch.equal(made.weight, given.weight)
    assert own.task.loader_processes == 0
