"""kernels/linear.py: logistic regression and the sparse SVM, against NumPy and by hand."""

import math

import numpy as np
import pytest
from products import conforms

from manyhands import kernels
from manyhands.data.csr import Csr
from manyhands.errors import BadInput, UnknownName
from refusals import refused


def drawn(rows=400, features=60):
    """Rows of 3 to 9 features."""
    random = np.random.default_rng(0)
    counts = random.integers(3, 10, rows)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    keys = np.concatenate([np.sort(random.choice(features - 5, count, replace=False)) for count in counts])
    return Csr(offsets, keys, random.normal(size=len(keys)), random.choice([-1, 1], rows), features=features)


def test_conformance():
    from manyhands.kernels.linear import reference_step

    some, hinge = drawn(40), {"loss": "hinge", "dtype": "float64"}
    for kernel in (
        kernels.Linear(features=60, dtype="float64"),
        kernels.Linear(features=60, **hinge),
        kernels.Linear(features=60, bias=False, dtype="float64"),
        kernels.Linear.of(some, ridge=0.3, **hinge),
        kernels.Linear.of(some, ridge=0.1, merge_every=1, dtype="float64"),
    ):
        conforms(kernel=kernel, batch=some.take([0, 3, 1, 17, 5, 39, 4, 4]), reference=reference_step, rate=0.5)


def one_row(target):
    return Csr([0, 2], [0, 2], [0.5, -2.0], [target], features=3)


def stepped(kernel, rows, weights, rate):
    tables = {"weights": np.array(weights, np.float64)[:, None]} | ({"bias": np.zeros((1, 1))} if kernel.bias else {})
    return kernel.step(tables, kernel.prepare(rows, 0), rate), tables


def test_a_logistic_step_by_hand():
    loss, tables = stepped(kernels.Linear(features=3, dtype="float64"), one_row(0), [1.0, 9.0, 0.25], rate=0.1)
    output = 1.0 * 0.5 - 0.25 * 2.0  # 0: the sigmoid is a half
    assert output == 0
    assert loss == pytest.approx(math.log(2))
    assert tables["weights"][:, 0] == pytest.approx([1 - 0.1 * 0.5 * 0.5, 9.0, 0.25 + 0.1 * 0.5 * 2.0])
    assert tables["bias"][0, 0] == pytest.approx(-0.05)


def test_a_hinge_step_by_hand():
    kernel = kernels.Linear(features=3, loss="hinge", dtype="float64")
    loss, tables = stepped(kernel, one_row(1), [1.0, 9.0, 0.0], rate=0.1)  # the output is 0.5, inside the margin
    before = {"weights": np.array([[1.0], [9.0], [0.0]]), "bias": np.zeros((1, 1))}
    for target, loss_of_it in ((1, 0.5), (-1, 1.5)):
        measured = kernel.measure(before, kernel.prepare(one_row(target), 0))
        assert measured == {"loss": (pytest.approx(loss_of_it), 1), "accuracy": (float(target > 0), 1)}
    assert loss == pytest.approx(0.5)
    assert tables["weights"][:, 0] == pytest.approx([1.05, 9.0, -0.2])
    loss, tables = stepped(kernel, one_row(1), [4.0, 9.0, 0.0], rate=0.1)  # the output is 2: right, and far enough
    assert loss == 0
    assert tables["weights"][:, 0].tolist() == [4.0, 9.0, 0.0]


def test_each_row_carries_its_share_of_the_ridge():
    """Equation 4 of HOGWILD!: over all rows the decay of a weight sums to 2 · ridge · w, however many rows have it."""
    rows = Csr([0, 2, 3, 4], [0, 1, 0, 0], [0.0] * 4, [1, 1, 1], features=3)  # values of 0: the data moves nothing
    assert rows.degrees().tolist() == [3, 1, 0]
    kernel = kernels.Linear.of(rows, loss="hinge", ridge=0.5, bias=False, dtype="float64")
    rate = 0.01
    _, tables = stepped(kernel, rows, [1.0, 1.0, 1.0], rate)
    share = 2 * 0.5 * rate
    assert tables["weights"][:, 0] == pytest.approx([(1 - share / 3) ** 3, 1 - share, 1.0])


def test_merging_changes_no_bit_of_one_worker():
    from manyhands.kernels.linear import _merge

    rows = drawn(100)
    for loss, dtype in (("logistic", "float32"), ("hinge", "float64")):
        found = []
        for every in (1, 7, None):
            kernel = kernels.Linear.of(rows, loss=loss, ridge=0.01, dtype=dtype, merge_every=every)
            tables = kernel.module(0).tables()
            for _ in range(2):
                kernel.step(tables, kernel.prepare(rows, 0), 0.3)
            found.append((tables["weights"].tobytes(), tables["bias"].tobytes()))
        assert len(set(found)) == 1, (loss, dtype)
    shared, own, before = np.array([1.0, 5.0, 2.0]), np.array([1.5, 2.0, 2.0]), np.array([1.0, 1.0, 2.0])
    _merge(shared, own, before, 2)  # adds to what others wrote
    assert shared.tolist() == own.tolist() == before.tolist() == [1.5, 6.0, 2.0]


def test_what_is_refused():
    kernel = kernels.Linear(features=3)
    for offsets, keys, targets, why in [
        ([0, 1], [0], [2.0], "row 0 .* has 2"),
        ([0, 1], [0], [0.5], "has 0.5"),
        ([0, 1, 1], [0], [0, -1], "rows with 0 and rows with -1"),
    ]:
        refused(why, kernel.prepare, Csr(offsets, keys, [1.0], targets, features=3), 0)
    kernel.prepare(Csr([0, 1, 1], [0], [1.0], [1, -1], features=3), 0)
    refused("sparse rows", kernel.prepare, {"x": np.zeros(3)}, 0)
    refused("has 2 features, and its rows have 3", kernels.Linear(features=2).prepare, one_row(1), 0)
    for options, why in [
        ({"features": 0}, "features must be"),
        ({"loss": "squared"}, "choose one of logistic, hinge"),
        ({"ridge": -1.0}, "ridge must be"),
        ({"ridge": 0.1}, "ridge needs the number of rows"),
        ({"ridge": 0.1, "degrees": np.ones(2)}, "ridge needs the number of rows"),
        ({"merge_every": 0}, "merge_every must be"),
    ]:
        refused(
            why, lambda options: kernels.Linear(**{"features": 3, **options}), options, kind=(BadInput, UnknownName)
        )
