"""Programs that train on several workers without `prepare`."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import plain
from manyhands.comm.solo import SoloGroup
from manyhands.own_loop.first_step_checks import warning_if_unprepared
from manyhands.own_loop.session import Session
from manyhands.worker import Worker


def warned(worker: Worker, steps: int = 5, prepared: Any = None, sent: int = 0) -> list[str]:
    model = plain.mlp()
    optimizer = plain.OPTIMIZERS["sgd"](model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with warning_if_unprepared(worker):
            worker.prepared = prepared
            if sent:
                worker.group.ledger.add("mean", sent)
            for _ in range(steps):
                plain.cross_entropy(model, plain.rows(4)).backward()
                optimizer.step()
        optimizer.step()  # outside, nobody looks
    return [str(one.message) for one in told]


def test_a_program_that_never_prepares_is_named_once() -> None:
    (message,) = warned(Worker(size=2, group=SoloGroup()))
    assert "2 workers took 3 optimizer steps without exchanging anything" in message
    assert "mh.prepare(model, optimizer, loader)" in message


@pytest.mark.parametrize(
    "options",
    [{"steps": 2}, {"prepared": Session(Worker())}, {"sent": 8}],
    ids=["few steps", "the worker was asked for", "something was sent"],
)
def test_others_are_not(options: dict[str, Any]) -> None:
    assert not warned(Worker(size=2, group=SoloGroup()), **options)


def test_one_worker_and_other_ranks_say_nothing() -> None:
    assert not warned(Worker(size=1))
    assert not warned(Worker(size=2, rank=1, group=SoloGroup()))


def test_a_program_of_torch_distributed_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert not warned(Worker(size=2, group=SoloGroup()))
