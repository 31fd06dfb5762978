"""Models of the Spark tests: in a module, so that a saved one can be made again."""

from typing import Any

import torch
from torch import nn

import manyhands as mh


def line() -> nn.Module:
    return nn.Linear(2, 1, bias=False)


class Classes(nn.Module):
    """Logits of `classes` classes from `inputs` numbers."""

    def __init__(self, inputs: int, classes: int = 2, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, classes)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(x)
        return logits


def loose(path: str):  # type: ignore[no-untyped-def]  # says nothing of what it returns
    raise AssertionError(path)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.2)


def slope(spark: Any) -> mh.Task:
    """64 rows of y = 2x + 1 in a DataFrame, and one linear unit that learns it."""
    table = spark.range(64).selectExpr("array(id / 64) as x", "id / 32 + 1 as y")
    return mh.Task(
        model=_unit,
        loss=_squares,
        optimizer=_sgd,
        train_data=mh.spark.frame(table, features="x", label="y"),
        batch_size=16,
        epochs=60,
    )


def _unit() -> nn.Module:
    return nn.Linear(1, 1)


def _squares(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    loss: torch.Tensor = ((model(x) - y[:, None]) ** 2).mean()
    return loss


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)
