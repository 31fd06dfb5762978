"""How far apart two runs are, the batches that a proof takes, which kind of mean a loss is, and when two rows are equal."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import planted
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from manyhands.evidence.check.check import even_batches, uneven_batches
from manyhands.evidence.check.copies import TrialConfig
from manyhands.evidence.check.losses import COUPLED, MEAN, OTHER_WEIGHT, SUM, aggregation_of
from manyhands.evidence.check.rows import equal_values
from manyhands.evidence.check.trials import SMALL, Trace, largest_difference, step_differences

BOUNDS = [(0, 2), (2, 4)]
NAN, INF = math.nan, math.inf


def test_vectors() -> None:
    for a, b, far, whose in (
        ([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0], 0.0, None),
        ([1.0, 2.0, 3.0, 4.0], [1.0, 2.2, 3.0, 4.2], 0.1, 0),  # 0.2 of 2, and 0.2 of 4
        ([1e-9, 0.0, 0.0, 1.0], [2e-9, 0.0, 0.0, 1.0], 1e-9 / SMALL, 0),  # small ones by a share of the largest
        ([0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1e-30, 0.0], INF, 1),
        ([NAN, 1.0, INF, -INF], [NAN, 1.0, INF, -INF], 0.0, None),
        ([1.0, 1.0, 1.0, 1.0], [1.0, 1.0, NAN, 1.0], INF, 1),
    ):
        both = (torch.tensor(vector, dtype=torch.float64) for vector in (a, b))
        found, name = largest_difference(*both, BOUNDS, SMALL)
        assert found == pytest.approx(far), (a, b)
        assert name == whose, (a, b)
    a, b = (torch.tensor(vector, dtype=torch.float64) for vector in ([1e-9, 0.0, 0.0, 2.0], [2e-9, 0.0, 0.0, 2.0]))
    assert largest_difference(a, b, BOUNDS, 1.0) == (pytest.approx(5e-10), 0)  # parameters: by the largest of all


def trace(
    losses: list[float], weights: list[float], gradients: list[list[float]], parameters: list[list[float]]
) -> Trace:
    return Trace(
        names=["a", "b"],
        bounds=BOUNDS,
        rows=[int(weight) for weight in weights],
        losses=losses,
        weights=weights,
        gradients=[torch.tensor(g, dtype=torch.float64) for g in gradients],
        parameters=[torch.tensor(p, dtype=torch.float64) for p in parameters],
    )


def test_steps_compare_the_mean_loss_the_first_gradient_and_all_parameters() -> None:
    ones, moved = [1.0] * 4, [1.0, 1.0, 1.0, 1.5]
    solo = trace([2.5, 3.0], [4.0, 1.0], [ones, ones], [ones, ones])
    first = trace([2.0, 0.0], [2.0, 0.0], [ones, ones], [ones, ones])
    second = trace([3.0, 3.0], [2.0, 1.0], [], [ones, moved])
    one, two = step_differences(solo, [first, second])
    assert (one.step, one.rows, one.largest, one.worst) == (1, 4, 0.0, "")
    assert (two.rows, two.loss, two.gradient, two.parameters, two.worst) == (1, 0.0, 0.0, 0.5, "b")
    (only,) = step_differences(solo, [first, trace([3.5], [2.0], [], [ones])])
    assert only.loss == pytest.approx(0.25 / 2.75)


def test_which_batches_a_proof_takes() -> None:
    even = even_batches(planted.task(epochs=3, max_steps=9), workers=2, steps=4)
    assert (even.batch_size, even.steps, even.total_steps) == (12, 4, 9)
    large = even_batches(planted.task(batch_size=64), workers=2, steps=4)
    assert (large.batch_size, large.total_steps) == (13, 4)
    assert even_batches(planted.task(train_data=planted.rows(3)), workers=2, steps=4).batch_size == 2
    own = planted.task(batch_size=None, train_data=DataLoader(planted.Pairs(), 7))
    assert even_batches(own, workers=2, steps=4).batch_size is None
    config = TrialConfig(steps=4, batch_size=12)
    cases = (2, True, 11, 23), (2, False, 11, None), (3, True, 11, 23), (11, True, 13, 27)
    for workers, one_row, batch_size, rows in cases:
        found = uneven_batches(planted.task(), workers, config, lambda one_row=one_row: one_row)
        assert (found.batch_size, found.rows) == (batch_size, rows), (workers, one_row)
        assert found.batch_size % workers
    batches = [list(range(i, i + 7)) for i in range(0, 35, 7)]  # data with batches of its own is left as it is
    own = planted.task(batch_size=None, train_data=DataLoader(planted.Pairs(), batch_sampler=batches))
    assert uneven_batches(own, 2, TrialConfig(steps=4, batch_size=None), lambda: True) is None


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


ROWS = torch.tensor([3.0, 1.0, 4.0, 1.5, 9.0, 2.5, 6.0, 5.0, 0.5, 8.0, 7.0], dtype=torch.float64)
COUNTS = torch.arange(1, 12, dtype=torch.float64)
DATA = {"x": ROWS, "n": COUNTS}


def weighted(batch: Any) -> Tensor:
    return (batch["x"] * batch["n"]).sum() / batch["n"].sum()


LAWS: dict[str, tuple[str, Callable[[Any], tuple[Any, Any]]]] = {
    "a mean over rows": (MEAN, lambda b: (b["x"].mean(), len(b["x"]))),
    "a mean and a penalty": (MEAN, lambda b: (b["x"].mean() + 3, len(b["x"]))),
    "a weighted mean that says so": (MEAN, lambda b: (weighted(b), b["n"].sum())),
    "a sum": (SUM, lambda b: (b["x"].sum(), len(b["x"]))),
    "a sum over a fixed number": (SUM, lambda b: (b["x"].sum() / 32, len(b["x"]))),
    "a sum and a penalty": (SUM, lambda b: (b["x"].sum() + 3, len(b["x"]))),
    "a sum where the mean belongs": (SUM, lambda b: (b["x"].sum(), len(b["x"]) * 1.0)),
    "a weighted mean that does not say so": (OTHER_WEIGHT, lambda b: (weighted(b), len(b["x"]))),
    "a mean that says one": (OTHER_WEIGHT, lambda b: (b["x"].mean(), 1)),
    "a deviation": (COUPLED, lambda b: (b["x"].std(correction=0), len(b["x"]))),
    "a maximum": (COUPLED, lambda b: (b["x"].max() * b["x"].mean(), len(b["x"]))),
}


def test_the_law_of_each() -> None:
    for name, (kind, measure) in LAWS.items():
        for least in (1, 2):
            law = aggregation_of(lambda b, of=measure: tuple(float(part) for part in of(b)), DATA, 1e-9, least)
            assert law.kind == kind, name
            assert (law.off > 1e-3) == (kind != MEAN), name
            assert law.constant == (name == "a sum and a penalty"), name


def test_two_rows_tell_a_mean_from_a_sum_and_equal_parts_say_nothing_of_weights() -> None:
    def kind(reduced: Callable[[Tensor], Tensor], rows: Tensor) -> str:
        return aggregation_of(lambda b: (float(reduced(b["x"])), len(b["x"])), {"x": rows}, 1e-9).kind

    two, same = ROWS[:2], torch.ones(8, dtype=torch.float64)
    assert [kind(reduced, two) for reduced in (torch.mean, torch.sum)] == [MEAN, SUM]
    assert kind(lambda x: x.std(correction=0), two) == COUPLED
    assert kind(torch.sum, ROWS[:1]) == MEAN
    assert [kind(reduced, same) for reduced in (torch.mean, torch.sum)] == [MEAN, SUM]
