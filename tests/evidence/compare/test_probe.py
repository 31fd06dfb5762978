"""Sketches of models at each validation, and the last look at a model: its metrics and predictions."""

import math
import pickle
from typing import Any

import pytest
import torch
from comparable import tiny
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh
from manyhands.evidence.compare.final_evaluation import CLASSES, NUMBERS, OUTPUTS, FinalPredictions, evaluate_final
from manyhands.evidence.compare.probe import BUCKETS, Probe, fingerprint, probed, sketch, taken
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


def test_sketches_and_fingerprints_are_of_the_weights_alone() -> None:
    weights = [torch.randn(700, 500), torch.randn(3)]
    before = torch.get_rng_state()
    found = sketch(weights)
    assert torch.equal(before, torch.get_rng_state())
    assert found.distance(sketch([weight.clone() for weight in weights])) == 0
    assert found.norm == pytest.approx(math.sqrt(sum(float(w.double().square().sum()) for w in weights)))
    assert sketch([torch.zeros(4)]).distance(sketch([torch.zeros(4)])) is None
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


def test_it_is_told_once_for_each_set_of_weights_that_train() -> None:
    model, probe = nn.Linear(2, 1), Probe(evaluate)
    batch = torch.ones(3, 2)
    counts = [len(probe(model, batch)) for _ in range(3)]
    assert counts == [1 + BUCKETS + 1, 1, 1]
    with torch.no_grad():
        model.weight[0, 0] += 1e-3
    assert [len(probe(model, batch)) for _ in range(2)] == [1 + BUCKETS + 1, 1]
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    with torch.no_grad():
        metrics = Probe(evaluate)(model, torch.ones(3, 2))
    back = taken({name: float(value[0]) for name, value in metrics.items()}, "")  # type: ignore[index]
    assert back.distance(sketch([model.weight])) == 0
    assert list(Probe(evaluate)(AveragedOutputs([model]), torch.ones(3, 2))) == ["loss"]
    bare = tiny(evaluate=None)
    metrics = probed(bare).metrics(nn.Linear(4, 2), (torch.ones(4, 4), torch.zeros(4, dtype=torch.int64)))
    assert len(metrics) == 1 + BUCKETS + 1
    assert isinstance(pickle.loads(pickle.dumps(Probe(evaluate))), Probe)


CPU = torch.device("cpu")


class Fixed(nn.Module):
    """Gives each row its own input; notes how many rows it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.rows = 0

    def forward(self, x: Tensor) -> Tensor:
        self.rows += len(x)
        return x * self.scale


def task(**fields: Any) -> mh.Task:
    return mh.Task.supervised(
        **{"model": Fixed, "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1), **fields}
    )


def classes(rows: int, right: int) -> tuple[Tensor, Tensor]:
    """Outputs of `rows` rows of 3 classes, of which the first `right` are right."""
    targets = torch.arange(rows) % 3
    output = torch.where(torch.arange(rows) < right, targets, (targets + 1) % 3)
    return nn.functional.one_hot(output, 3).float() * 9, targets


def test_metrics_and_classes_of_all_rows_in_their_order_the_same_each_time() -> None:
    data = classes(600, 450)
    final = evaluate_final(task(train_data=data), Fixed(), data, CPU)
    assert final.metrics["accuracy"] == pytest.approx(0.75)
    assert final.predictions.of == CLASSES
    assert torch.equal(final.predictions.values, data[0].argmax(1))
    model, data = Fixed().train(), classes(2000, 256)
    final = evaluate_final(task(train_data=data), model, data, CPU, rows=257)
    assert (model.rows, model.training) == (512, False)  # whole batches of 256, and no more
    assert final.metrics["accuracy"] == pytest.approx(0.5)
    data = DataLoader(TensorDataset(*classes(100, 50)), batch_size=10, shuffle=True)
    before = torch.get_rng_state()
    first, second = (evaluate_final(task(train_data=data), Fixed(), data, CPU, rows=30) for _ in range(2))
    assert torch.equal(first.predictions.values, second.predictions.values)
    assert torch.equal(before, torch.get_rng_state())
    positions = torch.randn(20, 6, 5), torch.randint(5, (20, 6))  # a language model: [rows, positions, classes]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    own = task(train_data=positions).with_fields(loss=loss, evaluate=None)
    final = evaluate_final(own, Fixed(), positions, CPU)
    assert torch.equal(final.predictions.values, positions[0].argmax(2).reshape(-1))
    maps = torch.randn(4, 3, 2, 2), torch.randint(3, (4, 2, 2))  # a segmentation: [rows, classes, height, width]
    final = evaluate_final(task(train_data=maps), Fixed(), maps, CPU)
    assert torch.equal(final.predictions.values, maps[0].argmax(1).reshape(-1))


class Many(Fixed):
    """Outputs as a library's model gives them."""

    def forward(self, x: Tensor) -> Any:
        return {"loss": x.mean(), "hidden": (super().forward(x),)}


def squares(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch["x"])["hidden"][0] - batch["y"]).square().mean()


def test_outputs_that_are_no_classes_are_kept_as_they_are() -> None:
    data = {"x": torch.randn(10, 2), "y": torch.randn(10, 2)}
    own = task(train_data=data).with_fields(model=Many, loss=squares, evaluate=None)
    final = evaluate_final(own, Many(), data, CPU)
    assert final.predictions.of == OUTPUTS
    assert torch.equal(final.predictions.values, data["x"].reshape(-1))
    assert list(final.metrics) == ["loss"]
    one_number = torch.randn(10, 1), torch.arange(10)  # is no class
    own = task(train_data=one_number, criterion=nn.PoissonNLLLoss()).with_fields(
        loss=lambda model, batch: (model(batch[0])[:, 0] - batch[1]).square().mean(), evaluate=None
    )
    final = evaluate_final(own, Fixed(), one_number, CPU)
    assert final.predictions.of == OUTPUTS
    assert torch.equal(final.predictions.values, one_number[0].reshape(-1))


def test_so_many_numbers_are_kept_and_no_more_and_none_of_outputs_without_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Whole(Fixed):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).mean()

    own = task(train_data=torch.randn(10, 2)).with_fields(loss=lambda model, batch: model(batch), evaluate=None)
    assert evaluate_final(own, Whole(), torch.randn(10, 2), CPU).predictions is None
    assert NUMBERS > 1000
    monkeypatch.setattr("manyhands.evidence.compare.final_evaluation.NUMBERS", 700)
    model, data = Fixed(), (torch.randn(2000, 1), torch.zeros(2000, 1))
    own = task(train_data=data, criterion=nn.functional.mse_loss)
    final = evaluate_final(own, model, data, CPU)
    assert torch.equal(final.predictions.values, data[0][:700, 0])
    assert model.rows == 2000
    assert not model._forward_hooks


def test_agreement() -> None:
    for of, own, other, expected in (
        (CLASSES, [1, 2, 3, 4], [1, 2, 3, 0], 0.75),
        (OUTPUTS, [3.0, 4.0], [3.0, 4.0], 1.0),
        (OUTPUTS, [3.0, 4.0], [3.0, 3.0], 1 - 1 / 18**0.5),
        (OUTPUTS, [-3.0, -4.0], [3.0, 4.0], 0.0),
        (OUTPUTS, [0.0, 0.0], [0.0, 0.0], 1.0),
        (OUTPUTS, [1.0, 0.0], [0.0, 0.0], 0.0),
        (CLASSES, [1], [1, 2], None),
    ):
        found = FinalPredictions(of, torch.tensor(own)).agreement(FinalPredictions(of, torch.tensor(other)))
        assert found == (None if expected is None else pytest.approx(expected)), (of, own, other)
    assert FinalPredictions(CLASSES, torch.ones(2)).agreement(FinalPredictions(OUTPUTS, torch.ones(2))) is None
