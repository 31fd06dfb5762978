"""What two readings have in common, and which batches a proof takes."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import planted
import pytest
import torch
from torch.utils.data import DataLoader

from manyhands.evidence.check import sizes
from manyhands.evidence.check.reading import alike
from manyhands.evidence.check.trial_config import TrialConfig


@dataclass
class Row:
    x: Any


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
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
    ],
)
def test_alike(a: Any, b: Any, same: bool) -> None:
    assert alike(a, b) == same


def test_the_tasks_own_batch_size_or_less_where_rows_are_few() -> None:
    even = sizes.even(planted.task(epochs=3, max_steps=9), workers=2, steps=4)
    assert (even.batch_size, even.steps, even.total_steps) == (12, 4, 9)
    assert sizes.even(planted.task(batch_size=64), workers=2, steps=4).batch_size == 13
    assert sizes.even(planted.task(batch_size=64), workers=2, steps=4).total_steps == 4
    assert sizes.even(planted.task(train_data=planted.rows(3)), workers=2, steps=4).batch_size == 2
    own = planted.task(batch_size=None, train_data=DataLoader(planted.Pairs(), 7))
    assert sizes.even(own, workers=2, steps=4).batch_size is None


@pytest.mark.parametrize(
    ("workers", "one_row", "batch_size", "rows"),
    [(2, True, 11, 23), (2, False, 11, None), (3, True, 11, 23), (11, True, 13, 27)],
)
def test_batches_that_do_not_divide_and_a_single_row(
    workers: int, one_row: bool, batch_size: int, rows: int | None
) -> None:
    task = planted.task()
    found = sizes.uneven(task, workers, TrialConfig(steps=4, batch_size=12), lambda: one_row)
    assert found is not None
    assert (found.batch_size, found.rows) == (batch_size, rows)
    assert found.batch_size % workers


def test_data_with_batches_of_its_own_is_left_as_it_is() -> None:
    batches = [list(range(i, i + 7)) for i in range(0, 35, 7)]
    own = planted.task(batch_size=None, train_data=DataLoader(planted.Pairs(), batch_sampler=batches))
    assert sizes.uneven(own, 2, TrialConfig(steps=4, batch_size=None), lambda: True) is None
