"""How far each variant ends from the optimum, and time to a target by workers: least squares, in closed form."""

from typing import Any

import pytest
import torch
from synthetic import comparison as synthetic
from torch import Tensor, nn
from torch.nn import functional as F

import manyhands as mh
from manyhands.engines.sim.engine import Sim
from manyhands.errors import BadInput
from manyhands.evidence.compare import charts, figures
from manyhands.evidence.compare.compare import compare
from manyhands.evidence.compare.comparison import Comparison
from manyhands.evidence.compare.optimum import optimum_of
from manyhands.evidence.compare.table import columns
from manyhands.evidence.compare.text import text

ROWS, RATE, EPOCHS, ROW_S = 60, 0.1, 12, 1e-3


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(ROWS, 3, generator=generator, dtype=torch.float64)
    return x, x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64) + 0.3 * torch.randn(
        ROWS, 1, generator=generator, dtype=torch.float64
    )


def linear() -> nn.Module:
    return nn.Linear(3, 1).double()


def least_squares(**fields: Any) -> mh.Task:
    given: dict[str, Any] = {
        "model": linear,
        "loss": lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=RATE),
        "train_data": data(),
        "validation_data": data(),
        "batch_size": ROWS,
        "epochs": EPOCHS,
        "optimum": "convex",
    }
    return mh.Task(**(given | fields))


def design() -> Tensor:
    """[ROWS, 4] with a column of ones for the bias."""
    x, _ = data()
    return torch.cat([x, torch.ones(ROWS, 1, dtype=torch.float64)], 1)


def closed_form() -> Tensor:
    return torch.linalg.lstsq(design(), data()[1]).solution.reshape(-1)


def test_l_bfgs_finds_the_closed_form_and_an_optimum_may_be_declared() -> None:
    found = optimum_of(least_squares())
    assert (found.parameters - closed_form()).abs().max() < 1e-8
    residual = design() @ closed_form() - data()[1].reshape(-1)
    assert found.loss == pytest.approx(float(residual.square().mean()), abs=1e-12)
    assert found.excess(found.parameters) == 0
    for batch_size in (7, 60):  # rows are weighted whatever the batches
        dataset = torch.utils.data.TensorDataset(*data())
        loader = torch.utils.data.DataLoader(dataset, batch_size=batch_size, shuffle=True)
        batched = optimum_of(least_squares(train_data=loader, batch_size=None))
        assert (batched.parameters - closed_form()).abs().max() < 1e-8, batch_size
    rows = tuple(column.float() for column in data())
    single = optimum_of(least_squares(model=lambda: nn.Linear(3, 1), train_data=rows, validation_data=rows))
    assert (single.parameters - closed_form()).abs().max() < 1e-6
    given = closed_form()  # whose last bit is another one where its memory lies elsewhere
    declared = optimum_of(least_squares(optimum={"weight": given[None, :3], "bias": given[3:]}))
    assert torch.equal(declared.parameters, given)
    assert declared.how == "declared by the task"
    assert optimum_of(least_squares(optimum=None)) is None


@pytest.fixture(scope="module")
def found() -> Comparison:
    """Gradient descent over all rows, on 2 and 4 simulated workers whose messages take no time."""
    engine = Sim(compute=f"row={ROW_S}", network="latency=0,bandwidth=1e18")
    options: dict[str, Any] = {"target": "validation_loss<=0.4", "validations": EPOCHS, "repeats": 1}
    return compare(least_squares(), strategies=["allreduce"], workers=(2, 4), engine=engine, **options)


def test_each_variant_is_where_gradient_descent_is(found: Comparison) -> None:
    """x_k - x* = (I - rate·H)^k (x_0 - x*), H = 2 A'A / n."""
    hessian = 2 * design().T @ design() / ROWS
    for variant in found.variants:
        for trial in found.of(variant.name):
            torch.manual_seed(trial.seed)
            start = torch.cat([p.detach().reshape(-1) for p in linear().parameters()])
            away = torch.linalg.matrix_power(torch.eye(4).double() - RATE * hessian, EPOCHS) @ (start - closed_form())
            assert trial.optimum_distance == pytest.approx(float(away.norm() / closed_form().norm()), abs=1e-8)
            assert trial.excess_loss == pytest.approx(float(away @ hessian @ away) / 2, abs=1e-8)


def test_time_to_target_falls_with_workers_as_nothing_else_takes_time(found: Comparison) -> None:
    for workers in (2, 4):
        for trial in found.of(f"allreduce on {workers}"):
            assert trial.target_seconds == pytest.approx(trial.target_rows * ROW_S / workers, rel=1e-8)
    lines = {line.name: line for line in figures.time_to_target(found).data}
    assert set(lines) == {"ideal", "allreduce"}
    ideal = dict(zip(lines["ideal"].x, lines["ideal"].y, strict=True))
    for workers, seconds in zip((2, 4), lines["allreduce"].y, strict=True):
        assert seconds == pytest.approx(ideal[workers], rel=1e-8)
    assert "≤ 0.4 soonest" in charts.time_to_target(found)
    for changes, drawn in (({"workers": (2, 4)}, True), ({"workers": (4,)}, False), ({"target": None}, False)):
        assert (figures.time_to_target(synthetic(**changes)) is not None) == drawn, changes


def test_it_stands_in_the_table_and_the_text(found: Comparison) -> None:
    labels = [(column.group, column.label) for column in columns(found)]
    assert {("Against the optimum", "distance"), ("Against the optimum", "excess loss")} <= set(labels)
    assert "Optimum: L-BFGS over 60 rows" in text(found, 200)
    again = Comparison.from_json(found.to_json())
    assert again.trials[0].optimum_distance == found.trials[0].optimum_distance
    assert again.optimum == found.optimum
    assert not any(column.group == "Against the optimum" for column in columns(synthetic()))


def test_what_is_no_optimum_is_refused() -> None:
    def absolute(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]) - batch[1]).abs().mean()

    for optimum in ("concave", 3, [1.0]):
        with pytest.raises(BadInput, match='optimum must be .*or "convex"'):
            least_squares(optimum=optimum)
    with pytest.raises(BadInput, match=r"must have the model's trainable parameters.*it has"):
        optimum_of(least_squares(optimum={"weight": torch.zeros(3)}))
    with pytest.raises(BadInput, match='says optimum="convex", and L-BFGS ended with a gradient of'):
        optimum_of(least_squares(loss=absolute))
