"""How far apart two runs are."""

import math

import pytest
import torch

from manyhands.evidence.check.trials import SMALL, Trace, largest_difference, step_differences

BOUNDS = [(0, 2), (2, 4)]
NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("a", "b", "far", "whose"),
    [
        ([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0], 0.0, None),
        ([1.0, 2.0, 3.0, 4.0], [1.0, 2.2, 3.0, 4.2], 0.1, 0),  # 0.2 of 2, and 0.2 of 4
        ([1e-9, 0.0, 0.0, 1.0], [2e-9, 0.0, 0.0, 1.0], 1e-9 / SMALL, 0),  # small ones by a share of the largest
        ([0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1e-30, 0.0], INF, 1),
        ([NAN, 1.0, INF, -INF], [NAN, 1.0, INF, -INF], 0.0, None),
        ([1.0, 1.0, 1.0, 1.0], [1.0, 1.0, NAN, 1.0], INF, 1),
    ],
)
def test_vectors(a: list[float], b: list[float], far: float, whose: int | None) -> None:
    found, name = largest_difference(*(torch.tensor(vector, dtype=torch.float64) for vector in (a, b)), BOUNDS, SMALL)
    assert found == pytest.approx(far)
    assert name == whose


def test_parameters_are_measured_by_the_largest_of_all() -> None:
    a, b = (torch.tensor(vector, dtype=torch.float64) for vector in ([1e-9, 0.0, 0.0, 2.0], [2e-9, 0.0, 0.0, 2.0]))
    assert largest_difference(a, b, BOUNDS, 1.0) == (pytest.approx(5e-10), 0)


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
