"""Sketches: their estimate is as good as said, and they come once a validation."""

import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.evidence.compare.probe import BUCKETS, Probe, as_metrics, fingerprint, probed, sketch, taken
from manyhands.replica.evaluation import AveragedOutputs


def test_the_estimated_distance_has_the_error_that_is_said() -> None:
    """300 pairs of vectors of 4000 weights: estimates scatter by 1 / sqrt(2 · 512) = 3.1 %, without a bias."""
    generator = torch.Generator().manual_seed(0)
    errors = []
    for _ in range(300):
        own, other = torch.randn(2, 4000, generator=generator, dtype=torch.float64)
        errors.append(sketch([own]).distance(sketch([other])) / float((own - other).norm() / other.norm()) - 1)
    found = torch.tensor(errors)
    expected = 1 / math.sqrt(2 * BUCKETS)
    assert float(found.std()) == pytest.approx(expected, rel=0.15)  # its own error is 1 / sqrt(600) = 4 %
    assert abs(float(found.mean())) < 4 * expected / math.sqrt(len(errors))


def test_differences_of_few_weights_of_one_sign_and_small_ones_are_estimated_as_well() -> None:
    def apart(own: torch.Tensor, other: torch.Tensor) -> float | None:
        return sketch([own]).distance(sketch([other]))

    def drawn(n: int) -> torch.Tensor:
        return torch.randn(n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    own, one = drawn(100_000), drawn(20_000)
    other = own.clone()
    other[77_777] += 0.5  # in one bucket: exact
    assert apart(own, other) == pytest.approx(float((own - other).norm() / other.norm()), rel=1e-6)
    assert apart(one + 1, one) == pytest.approx(math.sqrt(20_000) / float(one.norm()), rel=0.15)
    assert apart(own, own * (1 + 1e-9)) == pytest.approx(1e-9, rel=0.15)


def test_equal_weights_have_equal_sketches_however_they_are_cut_and_no_random_number_is_drawn() -> None:
    weights = [torch.randn(700, 500), torch.randn(3)]
    before = torch.get_rng_state()
    found = sketch(weights)
    assert torch.equal(before, torch.get_rng_state())
    assert found.distance(sketch([weight.clone() for weight in weights])) == 0
    assert found.norm == pytest.approx(math.sqrt(sum(float(w.double().square().sum()) for w in weights)))
    assert sketch([torch.zeros(4)]).distance(sketch([torch.zeros(4)])) is None


def test_what_is_told_is_taken_out_whole() -> None:
    one = sketch([torch.randn(100)])
    metrics = {f"validation_{name}": float(value) for name, (value, _) in as_metrics(one).items()}  # type: ignore[misc]
    metrics["validation_loss"] = 0.5
    back = taken(metrics, "validation_")
    assert metrics == {"validation_loss": 0.5}
    assert torch.equal(back.buckets, one.buckets)
    assert back.norm == one.norm
    assert taken(metrics, "validation_") is None


def test_a_fingerprint_is_of_the_bits() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64):
        weights = [torch.randn(30, 7).to(dtype), torch.randn(5).to(dtype)]
        before = fingerprint(weights)
        assert fingerprint([weights[0].t().contiguous().t(), weights[1]]) == before  # however it lies in memory
        weights[1][3] *= 1.01
        assert fingerprint(weights) != before, dtype
        assert fingerprint(weights[::-1]) != fingerprint(weights), dtype
    assert fingerprint([torch.tensor([math.nan])]) == fingerprint([torch.tensor([math.nan])])


def evaluate(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {"loss": (model(batch).sum(), 3)}


def test_it_is_told_once_for_each_set_of_weights() -> None:
    model, probe = nn.Linear(2, 1), Probe(evaluate)
    batch = torch.ones(3, 2)
    counts = [len(probe(model, batch)) for _ in range(3)]
    assert counts == [1 + BUCKETS + 1, 1, 1]
    with torch.no_grad():
        model.weight[0, 0] += 1e-3
    assert [len(probe(model, batch)) for _ in range(2)] == [1 + BUCKETS + 1, 1]


def test_frozen_weights_are_not_told_nor_those_of_ensembles_and_a_task_needs_no_evaluate() -> None:
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    with torch.no_grad():
        metrics = Probe(evaluate)(model, torch.ones(3, 2))
    back = taken({name: float(value[0]) for name, value in metrics.items()}, "")  # type: ignore[index]
    assert back.distance(sketch([model.weight])) == 0
    assert list(Probe(evaluate)(AveragedOutputs([model]), torch.ones(3, 2))) == ["loss"]
    task = mh.Task(model=nn.Linear(2, 1), loss=_loss, optimizer=_optimizer, train_data=torch.ones(4, 2))
    metrics = probed(task).metrics(task.model, torch.ones(4, 2))  # type: ignore[arg-type]
    assert len(metrics) == 1 + BUCKETS + 1
    assert isinstance(pickle.loads(pickle.dumps(Probe(evaluate))), Probe)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).mean()  # type: ignore[no-any-return]
