"""How far apart two runs are, and the batches that a proof takes."""

import math

import planted
import pytest
import torch
from torch.utils.data import DataLoader

from manyhands.evidence.check.check import even_batches, uneven_batches
from manyhands.evidence.check.copies import TrialConfig
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


def test_the_tasks_own_batch_size_or_less_where_rows_are_few() -> None:
    even = even_batches(planted.task(epochs=3, max_steps=9), workers=2, steps=4)
    assert (even.batch_size, even.steps, even.total_steps) == (12, 4, 9)
    large = even_batches(planted.task(batch_size=64), workers=2, steps=4)
    assert (large.batch_size, large.total_steps) == (13, 4)
    assert even_batches(planted.task(train_data=planted.rows(3)), workers=2, steps=4).batch_size == 2
    own = planted.task(batch_size=None, train_data=DataLoader(planted.Pairs(), 7))
    assert even_batches(own, workers=2, steps=4).batch_size is None


def test_batches_that_do_not_divide_and_a_single_row() -> None:
    config = TrialConfig(steps=4, batch_size=12)
    for workers, one_row, batch_size, rows in (
        (2, True, 11, 23),
        (2, False, 11, None),
        (3, True, 11, 23),
        (11, True, 13, 27),
    ):
        found = uneven_batches(planted.task(), workers, config, lambda one_row=one_row: one_row)
        assert (found.batch_size, found.rows) == (batch_size, rows), (workers, one_row)
        assert found.batch_size % workers
    batches = [list(range(i, i + 7)) for i in range(0, 35, 7)]  # data with batches of its own is left as it is
    own = planted.task(batch_size=None, train_data=DataLoader(planted.Pairs(), batch_sampler=batches))
    assert uneven_batches(own, 2, TrialConfig(steps=4, batch_size=None), lambda: True) is None
