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
        estimate = sketch([own]).distance(sketch([other]))
        assert estimate is not None
        errors.append(estimate / float((own - other).norm() / other.norm()) - 1)
    found = torch.tensor(errors)
    expected = 1 / math.sqrt(2 * BUCKETS)
    assert float(found.std()) == pytest.approx(expected, rel=0.15)  # its own error is 1 / sqrt(600) = 4 %
    assert abs(float(found.mean())) < 4 * expected / math.sqrt(len(errors))


def test_a_difference_in_few_weights_is_estimated_as_well() -> None:
    """One weight is in one bucket: exact. Of many the large ones may meet."""
    own = torch.randn(100_000, generator=torch.Generator().manual_seed(1))
    other = own.clone()
    other[77_777] += 0.5
    estimate = sketch([own]).distance(sketch([other]))
    assert estimate == pytest.approx(float((own - other).norm() / other.norm()), rel=1e-6)


def test_a_difference_of_the_same_sign_everywhere_is_not_overestimated() -> None:
    own = torch.randn(20_000, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    assert sketch([own + 1]).distance(sketch([own])) == pytest.approx(math.sqrt(20_000) / float(own.norm()), rel=0.15)


def test_small_differences_are_seen_beside_large_weights() -> None:
    own = torch.randn(50_000, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    other = own * (1 + 1e-9)
    assert sketch([own]).distance(sketch([other])) == pytest.approx(1e-9, rel=0.15)


def test_equal_weights_have_equal_sketches_however_they_are_cut() -> None:
    weights = [torch.randn(700, 500), torch.randn(3)]
    again = [weights[0].clone(), weights[1].clone()]
    assert sketch(weights).distance(sketch(again)) == 0
    assert sketch(weights).norm == pytest.approx(math.sqrt(sum(float(w.double().square().sum()) for w in weights)))
    assert sketch([torch.zeros(4)]).distance(sketch([torch.zeros(4)])) is None


def test_a_sketch_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    sketch([torch.ones(10)])
    assert torch.equal(before, torch.get_rng_state())


def test_what_is_told_is_taken_out_whole() -> None:
    one = sketch([torch.randn(100)])
    metrics = {f"validation_{name}": float(value) for name, (value, _) in as_metrics(one).items()}  # type: ignore[misc]
    metrics["validation_loss"] = 0.5
    back = taken(metrics, "validation_")
    assert back is not None
    assert metrics == {"validation_loss": 0.5}
    assert torch.equal(back.buckets, one.buckets)
    assert back.norm == one.norm
    assert taken(metrics, "validation_") is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_a_fingerprint_is_of_the_bits(dtype: torch.dtype) -> None:
    weights = [torch.randn(30, 7).to(dtype), torch.randn(5).to(dtype)]
    before = fingerprint(weights)
    assert fingerprint([weights[0].t().contiguous().t(), weights[1]]) == before  # however it lies in memory
    weights[1][3] *= 1.01
    assert fingerprint(weights) != before
    assert fingerprint(weights[::-1]) != fingerprint(weights)
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


def test_frozen_weights_are_not_told_and_ensembles_tell_nothing() -> None:
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    with torch.no_grad():
        metrics = Probe(evaluate)(model, torch.ones(3, 2))
    back = taken({name: float(value[0]) for name, value in metrics.items()}, "")  # type: ignore[index]
    assert back is not None
    assert back.distance(sketch([model.weight])) == 0
    assert list(Probe(evaluate)(AveragedOutputs([model]), torch.ones(3, 2))) == ["loss"]


def test_a_task_is_probed_without_an_evaluate_too_and_goes_to_other_processes() -> None:
    task = mh.Task(model=nn.Linear(2, 1), loss=_loss, optimizer=_optimizer, train_data=torch.ones(4, 2))
    metrics = probed(task).metrics(task.model, torch.ones(4, 2))  # type: ignore[arg-type]
    assert len(metrics) == 1 + BUCKETS + 1
    assert isinstance(pickle.loads(pickle.dumps(Probe(evaluate))), Probe)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).mean()  # type: ignore[no-any-return]
