"""`Task(batches="whole")`: losses in which rows meet, batch normalization and metrics are one process's; what it cannot be."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import manyhands as mh
from manyhands.errors import Unsupported
from manyhands.task import Summed
from refusals import refused


def encoder() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 4)).double()


def contrast(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Each row is told from all others of the batch."""
    one, other = (F.normalize(model(batch["x"] + shift), dim=1) for shift in (0.0, 0.1))
    return F.cross_entropy(one @ other.T / 0.2, torch.arange(len(one)))


def measures(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    sums = torch.stack([model(batch["x"]).sum(), torch.tensor(1.0, dtype=torch.float64)])
    count = Summed(sums, lambda total: {"sum": total[0], "batches": total[1]})
    return {"loss": contrast(model, batch), "rows": (float(len(batch["x"])), 1), "sums": count}


def task(**fields: Any) -> mh.Task:
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(62, 6, generator=draws, dtype=torch.float64)
    how: dict[str, Any] = {
        "model": encoder,
        "loss": contrast,
        "evaluate": measures,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), 0.1),
        "train_data": {"x": x},
        "validation_data": {"x": x[:37]},
        "batches": "whole",
        "batch_size": 12,
        "epochs": 2,
    }
    return mh.Task(**how | fields)


@pytest.mark.parametrize(("workers", "strategy"), [(3, "allreduce"), (2, "allreduce:overlap=true")])
@pytest.mark.slow
def test_several_workers_are_one(workers: int, strategy: str, local: mh.Local) -> None:
    """The last batches, of two rows and of one, have fewer than there are workers."""
    expected = mh.train(task(), workers=1)
    run = mh.train(task(), workers=workers, strategy=strategy, engine=local)
    for name, value in expected.model.state_dict().items():
        torch.testing.assert_close(run.model.state_dict()[name], value, rtol=1e-9, atol=1e-11)
    assert run.metrics == pytest.approx(expected.metrics, rel=1e-9)
    assert run.metrics["validation_batches"] == 4
    assert [epoch["loss"] for epoch in run.history] == pytest.approx([epoch["loss"] for epoch in expected.history])
    assert run.rows["total"] == expected.rows["total"] == 124


@pytest.mark.slow
def test_a_resumed_run_draws_the_same_noise(tmp_path: Any, local: mh.Local) -> None:
    def noisy() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.3), nn.Linear(12, 4)).double()

    how: dict[str, Any] = {"workers": 2, "engine": local}
    whole = mh.train(task(model=noisy, epochs=3), **how)
    mh.train(task(model=noisy, epochs=1), run_dir=tmp_path / "run", **how)
    run = mh.train(task(model=noisy, epochs=3), run_dir=tmp_path / "run", resume=True, **how)
    assert torch.equal(run.parameters, whole.parameters)


@pytest.mark.slow
def test_check_proves_it(local: mh.Local) -> None:
    found = mh.check(task(evaluate=None, validation_data=None), workers=2, steps=3, engine=local)
    assert found.findings == ()
    assert max(proof.largest for proof in found.proofs) < 1e-10


def test_what_cannot_be() -> None:
    for fields, options, words in (
        ({}, {"strategy": "downpour"}, "each worker's model is its own between exchanges"),
        ({}, {"engine": "sim"}, "use engine local"),
        ({"micro_batch_size": 2}, {}, "with micro_batch_size a step has several losses"),
        ({}, {"model_parallel": "stages=2"}, "with model_parallel a model has stages in several workers"),
        ({}, {"partition": "fixed"}, "each worker has rows of its own"),
        ({}, {"survive": "max_losses=1"}, "ends with any of them"),
        ({"batches": "slices", "sync_batch_norm": True}, {"strategy": "local-sgd"}, "do not make each step together"),
        ({"batches": "slices", "sync_batch_norm": True}, {"engine": "sim"}, "wait for others within a backward"),
    ):
        refused(words, lambda f, o: mh.train(task(**f), **{"workers": 2, **o}), fields, options, kind=Unsupported)
    for fields, words in (({"batches": "some"}, "must be whole or slices"), ({"sync_batch_norm": 1}, "True or False")):
        refused(words, lambda f: task(**f), fields)
