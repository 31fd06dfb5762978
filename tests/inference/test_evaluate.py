"""Metrics of N workers are those of one, and of a formula over all rows."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import manyhands as mh
import plain
from manyhands.errors import BadInput, Unsupported
from manyhands.task import Summed
from refusals import refused

ROWS, BATCH = 203, 16
X, Y = plain.rows(ROWS)
BINARY = (Y > 0).long()


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return plain.mlp()


def score() -> nn.Module:
    return nn.Sequential(model(), nn.Linear(3, 1, bias=False).double(), nn.Flatten(0), nn.Sigmoid())


def metrics(module: nn.Module, batch: Any) -> dict[str, Any]:
    """A mean over rows, a weighted one, one that some batches lack, and a sum with a result of its own."""
    out = module(batch[0])
    rows, weights = F.cross_entropy(out, batch[1], reduction="none"), batch[0][:, 0].exp()
    found: dict[str, Any] = {
        "loss": rows.mean(),
        "weighted": ((rows * weights).sum() / weights.sum(), weights.sum()),
        "rmse": Summed(torch.stack([rows.square().sum(), torch.tensor(float(len(rows)))]), root),
    }
    chosen = batch[0][:, 1] > 1.5
    return found | ({"chosen": (rows[chosen].mean(), int(chosen.sum()))} if chosen.any() else {})


def root(sums: Tensor) -> dict[str, float]:
    return {"rmse": float((sums[0] / sums[1]).sqrt())}


def test_means_are_of_all_rows() -> None:
    with torch.no_grad():
        rows = F.cross_entropy(model()(X), Y, reduction="none")
    weights = X[:, 0].exp()
    means = {
        "loss": rows.mean(),
        "weighted": (rows * weights).sum() / weights.sum(),
        "rmse": rows.square().mean().sqrt(),
        "chosen": rows[X[:, 1] > 1.5].mean(),
    }
    wanted = {name: float(value) for name, value in means.items()}
    for workers in (1, 2, 3, 5):
        found = mh.evaluate(model(), (X, Y), metrics=metrics, workers=workers, engine="sim", batch_size=BATCH)
        assert found == pytest.approx(wanted, rel=1e-12), workers


def test_what_is_no_mean_is_found_of_all_rows_in_order() -> None:
    def of_all(rows: tuple[Tensor, Tensor]) -> dict[str, Any]:
        outputs, targets = rows
        assert torch.equal(targets, Y)
        return {"median": outputs[:, 0].median(), "rows": len(outputs)}

    with torch.no_grad():
        median = torch.cat([model()(batch) for batch in X.split(BATCH)])[:, 0].median()
    for workers in (1, 2, 4):
        found = mh.evaluate(model(), (X, Y), of_all=of_all, workers=workers, engine="sim", batch_size=BATCH)
        assert found == {"median": float(median), "rows": ROWS}
    both = mh.evaluate(
        *(model(), (X, Y)),
        metrics=metrics,
        function=lambda m, b: m(b[0]).argmax(1),
        of_all=lambda rows: {"classes": len(rows.unique())},
        workers=2,
        engine="sim",
    )
    assert set(both) == {"loss", "weighted", "rmse", "chosen", "classes"}


@pytest.fixture(scope="module")
def torchmetrics() -> Any:
    return pytest.importorskip("torchmetrics")


@pytest.mark.slow
def test_states_of_torchmetrics_are_merged(torchmetrics: Any) -> None:
    """Sums, lists of rows, bins, the largest, and moments, which are merged by a rule of their own; of workers without rows, too."""
    binary = torchmetrics.classification

    def targets(module: nn.Module, batch: Any) -> Any:
        return module(batch[0]).float(), batch[1]

    def inputs(module: nn.Module, batch: Any) -> Any:
        return module(batch[0]).float(), batch[0][:, 0].float()

    def alone(module: nn.Module, batch: Any) -> Any:
        return (module(batch[0]).float(),)

    for make, outputs in (
        (binary.BinaryF1Score, targets),
        (binary.BinaryAUROC, targets),
        (lambda: binary.BinaryAUROC(thresholds=20), targets),
        (torchmetrics.PearsonCorrCoef, inputs),
        (torchmetrics.MaxMetric, alone),
    ):
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torchmetrics: what it keeps takes memory
            torch.manual_seed(3)
            module = score()
            options: dict[str, Any] = {"function": outputs, "engine": "sim", "batch_size": BATCH}
            for workers, rows in ((1, ROWS), (2, ROWS), (3, ROWS), (3, 2 * BATCH)):
                metric, data = make(), (X[:rows], BINARY[:rows])
                with torch.no_grad():
                    metric.update(*outputs(module, data))
                found = mh.evaluate(module, data, metrics={"found": make()}, workers=workers, **options)
                assert found["found"] == pytest.approx(float(metric.compute()), rel=1e-5), (metric, workers, rows)


@pytest.mark.slow
def test_collections_metrics_of_several_numbers_and_what_cannot_be_merged(torchmetrics: Any) -> None:
    each = torchmetrics.classification.MulticlassAccuracy(3, average=None)
    all_rows = torchmetrics.Accuracy("multiclass", num_classes=3)
    both = torchmetrics.MetricCollection({"each": each, "all": all_rows})
    found = mh.evaluate(model(), (X, Y), metrics=both, workers=2, engine="sim", batch_size=BATCH)
    right = model()(X).argmax(1) == Y
    wanted = {"all": right.double().mean()} | {f"each_{i}": right[i == Y].double().mean() for i in range(3)}
    assert found == pytest.approx({name: float(value) for name, value in wanted.items()})
    one = mh.evaluate(model(), (X, Y), metrics=torchmetrics.Accuracy("multiclass", num_classes=3))
    assert one == {"MulticlassAccuracy": pytest.approx(found["all"])}

    class Averaged(torchmetrics.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("value", torch.zeros(()), dist_reduce_fx="mean")

        def update(self, outputs: Tensor, targets: Tensor) -> None: ...

        def compute(self) -> Tensor:
            return self.value

    with pytest.raises(Unsupported, match=r"metric 'a' \(Averaged\) averages its state 'value' over processes"):
        mh.evaluate(model(), (X, Y), metrics={"a": Averaged()})
    with pytest.raises(BadInput, match="a tuple of tensors"):
        mh.evaluate(model(), (X, Y), metrics=torchmetrics.MeanMetric(), function=lambda m, b: 3)


def test_a_runs_and_a_kernels_own_metrics(tmp_path: Path) -> None:
    run = mh.train("digits:epochs=1", max_steps=5, run_dir=tmp_path / "run")
    wanted = {name.removeprefix("test_"): value for name, value in run.metrics.items() if name.startswith("test_")}
    for given in (run, tmp_path / "run"):
        for workers in (1, 2):
            assert mh.evaluate(given, workers=workers, engine="sim") == pytest.approx(wanted, rel=1e-6)
    pytest.importorskip("numba")
    generator = torch.Generator().manual_seed(1)
    users, items = torch.randint(0, 10, (60,), generator=generator), torch.randint(0, 8, (60,), generator=generator)
    data = {"users": users.numpy(), "items": items.numpy(), "ratings": torch.rand(60, generator=generator).numpy()}
    task = mh.Task(
        kernel=mh.kernels.Factors(users=10, items=8, rank=2), rate=0.1, train_data=data, test_data=data, batch_size=16
    )
    run = mh.train(task, strategy="solo")
    wanted = {name.removeprefix("test_"): value for name, value in run.metrics.items() if name.startswith("test_")}
    for workers in (1, 2):
        assert mh.evaluate(run, task=task, workers=workers, engine="sim") == pytest.approx(wanted, rel=1e-9)


def test_what_cannot_be_is_named() -> None:
    data = X, Y
    for words, given, options in (
        ("needs data", (), {}),
        ("needs metrics=", (data,), {}),
        ("metrics must be a function", (data,), {"metrics": 3}),
        ("must be one number", (data,), {"metrics": lambda m, b: {"a": m(b[0])}}),
        (r"of_all\(rows\) must return", (data,), {"of_all": lambda rows: 3}),
        ("need batches that are pairs", (X,), {"of_all": lambda rows: {}}),
    ):
        refused(words, partial(mh.evaluate, model(), *given, **options))
