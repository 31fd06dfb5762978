import json

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from manyhands.data.spool import SpoolColumn
from manyhands.errors import BadInput
from manyhands.spark.predictions import MetricSums, _concatenated, predictions_of
from manyhands.spark.weighted_loss import WeightedLoss, WeightedMetrics


def test_a_row_of_weight_three_is_three_rows() -> None:
    model = nn.Linear(2, 3)
    x, y, repeated = torch.randn(4, 2), torch.tensor([0, 2, 1, 1]), torch.tensor([0, 1, 1, 1, 3])
    batch = (x, y, torch.tensor([1.0, 3.0, 0.0, 1.0]))
    mean, weight = WeightedLoss(F.cross_entropy)(model, batch)
    assert weight == 5
    assert torch.allclose(mean, F.cross_entropy(model(x[repeated]), y[repeated]))
    accuracy, of = WeightedMetrics(F.cross_entropy)(model, batch)["accuracy"]
    assert of == 5
    assert accuracy.item() == pytest.approx((model(x[repeated]).argmax(1) == y[repeated]).float().mean().item())


def test_rows_without_weight_alone() -> None:
    """They are not measured in the executors, either."""
    model = nn.Linear(2, 3)
    batch = (torch.randn(2, 2), torch.tensor([0, 2]), torch.zeros(2))
    mean, weight = WeightedLoss(F.cross_entropy)(model, batch)
    mean.backward()
    assert (mean.item(), weight.item()) == (0.0, 0.0)
    assert model.weight.grad is not None
    assert not model.weight.grad.any()
    assert [float(value) for value in WeightedMetrics(F.cross_entropy)(model, batch)["accuracy"]] == [0.0, 0.0]
    kinds = (("features", "x", "float32"), ("label", "y", "int64"), ("weight", "w", "float32"))
    columns = tuple(SpoolColumn(name, (source,), dtype) for name, source, dtype in kinds)
    measure = MetricSums(nn.Linear(2, 3), WeightedMetrics(F.cross_entropy), columns)
    rows = pa.record_batch({"x": [[1.0, 2.0]] * 2, "y": pa.array([0, 1], pa.int32()), "w": [0.0, 0.0]})
    (found,) = measure(iter([rows]))
    assert json.loads(found.column(0)[0].as_py()) == {"means": {}, "sums": {}}


def test_arrays_in_arrays_are_one_array() -> None:
    import pandas as pd

    nested = pd.Series([np.array([np.arange(3.0), np.arange(3.0) + i], dtype=object) for i in range(2)])
    found = _concatenated([nested], "float32")
    assert found.tolist() == [[[0, 1, 2], [0, 1, 2]], [[0, 1, 2], [1, 2, 3]]]


def test_a_criterion_without_reduction() -> None:
    with pytest.raises(BadInput, match="takes reduction='none'"):
        WeightedLoss(lambda a, b: (a - b).mean())(nn.Identity(), (torch.ones(1), torch.ones(1), torch.ones(1)))


def test_what_a_prediction_is() -> None:
    for outputs, output, expected in (
        ([[1.0, 5.0], [3.0, 2.0]], "class", [1, 0]),
        ([[0.5], [-0.5]], "class", [1, 0]),
        ([0.5, -0.5], "class", [1, 0]),
        ([[0.5], [-0.5]], "value", [0.5, -0.5]),
        ([0.5, -0.5], "array", [[0.5], [-0.5]]),
    ):
        assert predictions_of(torch.tensor(outputs), output).tolist() == expected, (outputs, output)
    with pytest.raises(BadInput, match="2 numbers a row: give output='array'"):
        predictions_of(torch.ones(3, 2), "value")
