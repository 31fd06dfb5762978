"""Mini-batch k-means: the rule by hand, the reference, and how centres begin. That it learns: test_dense_kernels_integration.py."""

from typing import Any

import numpy as np
import pytest
import torch
from products import conforms

from manyhands import kernels
from refusals import refused


def test_it_is_a_kernel() -> None:
    """With one batch, with small ones, and with one cluster."""
    from manyhands.kernels.kmeans import reference_step

    points = np.random.default_rng(0).normal(size=(23, 3))
    for options in (
        {"initial": points[:4]},
        {"initial": points[:2] + 0.1, "minibatch": 5},
        {"initial": np.ones((1, 3)), "minibatch": 1},
    ):
        kernel, batch = kernels.KMeans(dtype="float64", **options), torch.from_numpy(points)
        conforms(kernel=kernel, batch=batch, reference=reference_step, rate=1.0)


def test_two_centres_by_hand() -> None:
    """Centres at 0 and 10. Of the rows 1, 3, 8, 5.1 the first two go to 0, the others to 10, also when it has moved."""
    kernel = kernels.KMeans(initial=np.array([[0.0], [10.0]]), dtype="float64")
    rows = kernel.module(0).tables()
    batch = kernel.prepare(np.array([[1.0], [3.0], [8.0], [5.1]]), 0)
    assert kernel.measure(rows, batch)["loss"] == (pytest.approx((1 + 9 + 4 + 4.9**2) / 4), 4)
    assert kernel.step(rows, batch, 1.0) == pytest.approx(1 + 9 + 4 + 4.9**2)
    assert rows["centres"].ravel() == pytest.approx([2, 6.55]), "means of the rows"
    assert rows["counts"].ravel().tolist() == [2, 2]
    kernel.step(rows, kernel.prepare({"points": np.array([[5.0]])}, 0), 0.5)
    assert rows["centres"].ravel() == pytest.approx([2, 6.55 + 0.5 / 3 * (5 - 6.55)])


def planted(random: np.random.Generator) -> tuple[Any, Any]:
    centres = np.stack(np.meshgrid([-10, 0, 10], [-10, 0, 10]), -1).reshape(-1, 2).astype(float)
    of = random.integers(9, size=5000)
    return centres, (centres[of] + random.normal(size=(5000, 2))).astype(np.float32)


def test_how_centres_begin() -> None:
    from manyhands.kernels.kmeans import plus_plus, sampled

    centres, points = planted(np.random.default_rng(0))
    begun = plus_plus(points, 9, 0)
    assert {tuple(row) for row in begun} <= {tuple(row) for row in points}
    assert len(set(np.linalg.norm(begun[:, None] - centres, axis=2).argmin(1))) >= 8
    assert np.array_equal(begun, plus_plus(torch.from_numpy(points), 9, 0))
    assert not np.array_equal(begun, plus_plus(points, 9, 1))
    nearest = np.linalg.norm(points[:100, None] - begun, axis=2).argmin(1)
    assert np.array_equal(kernels.KMeans(initial=begun).module(0).nearest(points[:100]), nearest)
    drawn = sampled(points, 5000, 0)
    assert np.array_equal(np.sort(drawn, 0), np.sort(points, 0)), "all rows, none twice"
    assert plus_plus(np.ones((5, 2)), 3, 0).tolist() == [[1, 1]] * 3
    for begin in (sampled, plus_plus):
        refused("from 1 to the number of rows, 5,000, not 5001", begin, points, 5001, 0)
        refused("takes an array", begin, np.zeros(4), 1, 0)


def test_kernels_that_begin_otherwise_are_others() -> None:
    one, other = (kernels.KMeans(initial=np.full((300, 50), fill)) for fill in (0.0, 1.0))
    assert one != other
    assert repr(one) != repr(other)
    assert one == kernels.KMeans(initial=np.zeros((300, 50)))
    assert len({one, other}) == 2


def test_bad_input() -> None:
    for initial in (np.zeros(3), np.zeros((0, 2)), np.array([["a"]]), [[np.nan]]):
        refused("initial must be", lambda initial: kernels.KMeans(initial=initial), initial)
    refused("minibatch must be", lambda: kernels.KMeans(initial=np.zeros((1, 1)), minibatch=0))
    kernel = kernels.KMeans(initial=np.zeros((4, 3)))
    for batch in (torch.zeros(4, 2), torch.zeros(4, 3, 1), {"points": torch.zeros(4)}):
        refused(r"\[rows, ", kernel.prepare, batch, 0)
    refused("no field points; it has x", kernel.prepare, {"x": torch.zeros(4, 3)}, 0)
