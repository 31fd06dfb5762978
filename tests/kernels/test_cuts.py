"""Kernel Cuts: the rule worked by hand, projections, and what is refused."""

from typing import Any

import numpy as np
import pytest
from products import conforms

from manyhands import kernels
from refusals import refused


def edges(n: int = 30, nodes: int = 12) -> dict[str, Any]:
    random = np.random.default_rng(0)
    u = random.integers(0, nodes - 2, n)
    return {"nodes": u, "others": (u + random.integers(1, nodes - 2, n)) % nodes, "weights": random.random(n)}


def test_conformance() -> None:
    from manyhands.kernels.cuts import reference_step

    for classes in (2, 5):
        kernel = kernels.Cuts(known=[0, 1, *[-1] * 10], classes=classes, dtype="float64")
        conforms(kernel=kernel, batch=edges(), reference=reference_step, rate=0.03)


def test_a_step_by_hand() -> None:
    """x_0 = (1, 0) is known, x_1 = (1/2, 1/2) moves by rate · weight toward it: (.5 + .1, .5 - .1)."""
    kernel = kernels.Cuts(known=[0, -1], dtype="float64")
    rows = kernel.module(0).tables()
    batch = kernel.prepare({"nodes": np.array([0]), "others": np.array([1]), "weights": np.array([2.0])}, 0)
    assert kernel.step(rows, batch, 0.05) == pytest.approx(2.0 * (0.5 + 0.5))
    assert rows["points"].tolist() == [[1, 0], [pytest.approx(0.6), pytest.approx(0.4)]]
    assert kernel.measure(rows, batch) == {"loss": (pytest.approx(2.0 * (0.4 + 0.4)), 1), "cut": (0, 2)}
    for _ in range(9):
        kernel.step(rows, batch, 0.05)
    assert rows["points"][1].tolist() == pytest.approx([1, 0])  # and no further
    rows["points"][1] = [0.2, 0.8]
    assert kernel.measure(rows, batch)["cut"] == (1, 2)


def test_a_projection_is_the_nearest_point_of_the_simplex() -> None:
    from manyhands.kernels.cuts import project

    points = np.array([[0.2, 0.3, 0.5], [2.0, 0.0, 0.0], [0.6, 0.6, -3.0], [0.0, 0.0, 0.0]])
    for row in range(4):
        project(points, row, 3, np.empty(3))
    assert points.tolist() == [
        pytest.approx([0.2, 0.3, 0.5]),
        pytest.approx([1, 0, 0]),
        pytest.approx([0.5, 0.5, 0]),
        pytest.approx([1 / 3] * 3),
    ]


def test_what_cannot_be_is_refused() -> None:
    for fields, words in [
        ({"known": [0, 2]}, "class"),
        ({"known": []}, "class"),
        ({"known": [0], "classes": 1}, "classes"),
    ]:
        refused(words, lambda fields: kernels.Cuts(**fields), fields)
