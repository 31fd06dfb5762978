"""When two reads of the same data are equal."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from manyhands.evidence.check.rows import equal_values


@dataclass
class Row:
    x: Any


def test_equal_values() -> None:
    for a, b, same in (
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), True),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), False),
        (torch.tensor([1.0]), torch.tensor([[1.0]]), False),
        (np.array([1.0, np.nan]), np.array([1.0, np.nan]), True),
        (np.array(["a", "b"], dtype=object), np.array(["a", "b"], dtype=object), True),
        ({"x": [1, "a", None]}, {"x": [1, "a", None]}, True),
        ({"x": 1}, {"y": 1}, False),
        ((1, 2), [1, 2], False),
        (Row(torch.ones(2)), Row(torch.ones(2)), True),
        (Row(torch.ones(2)), Row(torch.zeros(2)), False),
        (float("nan"), float("nan"), True),
        ([1], [1, 2], False),
        (slice(1), slice(1), True),
        (slice(1), slice(2), False),
    ):
        assert equal_values(a, b) == same, (a, b)
