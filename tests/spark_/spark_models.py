"""Models of the Spark tests: in a module, so that a saved one can be made again."""

from __future__ import annotations

import torch
from torch import nn


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


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.2)
