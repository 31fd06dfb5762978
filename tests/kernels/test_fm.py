"""kernels/fm.py: factorization machines, against NumPy and by hand."""

import math

import numpy as np
import pytest
from products import conforms

from manyhands import kernels
from manyhands.data.csr import Csr
from manyhands.errors import BadInput, UnknownName
from refusals import refused

FEATURES = 30


def pairs(rows, squared=False):
    """Rows of two to five features."""
    random = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(random.integers(2, 6, rows))])
    keys = np.concatenate([np.sort(random.choice(FEATURES, n, replace=False)) for n in np.diff(offsets)])
    targets = random.normal(size=rows) if squared else random.choice([-1, 1], rows)
    return Csr(offsets, keys, np.ones(offsets[-1]), targets, features=FEATURES + 1)


def kernel(**options):
    return kernels.FM(**{"features": FEATURES + 1, "dtype": "float64", "ridge": 0.01, "k": 3, **options})


def test_conformance():
    from manyhands.kernels.fm import reference_step

    for options, squared in (
        ({}, False),
        ({"loss": "squared", "k": 8}, True),
        ({"normalize": False, "ridge": 0.0, "k": 1}, False),
    ):
        rows = pairs(12, squared=squared).take([0, 5, 3, 11, 5])
        conforms(kernel=kernel(**options), batch=rows, reference=reference_step)


def test_a_step_by_hand():
    """Two features with the values 3 and 4, scaled to 0.6 and 0.8, and one number a vector."""
    made = kernels.FM(features=3, k=1, loss="squared", ridge=0.1, dtype="float64")
    rows = Csr([0, 2], [0, 2], [3.0, 4.0], [1.0], features=3)
    tables = made.module(0).tables()
    tables["weights"][:, 0], tables["vectors"][:, 0], tables["bias"][0, 0] = [0.5, 9, 0.25], [2.0, 9, -1.0], 0.3
    measured = made.measure(tables, made.prepare(rows, 0))
    loss = made.step(tables, made.prepare(rows, 0), 0.5)

    phi = 0.3 + 0.5 * 0.6 + 0.25 * 0.8 + 2.0 * -1.0 * 0.6 * 0.8
    error = phi - 1.0
    weight = error * 0.6 + 0.1 * 0.5
    vector = error * 0.6 * 0.8 * -1.0 + 0.1 * 2.0
    assert loss == pytest.approx(error**2 / 2)
    assert measured == {"loss": (pytest.approx(loss), 1), "squared_error": (pytest.approx(2 * loss), 1)}
    assert tables["weights"][0, 0] == pytest.approx(0.5 - 0.5 * weight / math.sqrt(1 + weight**2))
    assert tables["vectors"][0, 0] == pytest.approx(2.0 - 0.5 * vector / math.sqrt(1 + vector**2))
    assert tables["sums"][0] == pytest.approx([1 + weight**2, 1 + vector**2])
    assert tables["bias"][0, 0] == pytest.approx(0.3 - 0.5 * error / math.sqrt(1 + error**2))
    assert (tables["weights"][1, 0], tables["vectors"][1, 0]) == (9, 9)


def test_accuracy_is_the_share_of_rows_on_their_side_of_0():
    rows = Csr([0, 1, 2, 3], [0, 0, 0], [1.0] * 3, [1, 0, 1], features=1)
    made = kernels.FM.of(rows, dtype="float64")
    tables = made.module(0).tables()
    tables["bias"][:] = 0.3
    loss = (2 * math.log1p(math.exp(-0.3)) + math.log1p(math.exp(0.3))) / 3
    wanted = {"loss": (pytest.approx(loss), 3), "accuracy": (pytest.approx(2 / 3), 3)}
    assert made.measure(tables, made.prepare(rows, 0)) == wanted


def test_what_is_refused():
    refused("sparse rows", kernel().prepare, {"x": np.ones(3)}, 0)
    refused("has 2 features, and its rows have 31", kernel(features=2).prepare, pairs(3), 0)
    refused("targets must be 0 and 1", kernel().prepare, pairs(3, squared=True), 0)
    kernel(loss="squared").prepare(pairs(3, squared=True), 0)
    for options, why in [
        ({"k": 0}, "k must be"),
        ({"loss": "hinge"}, "choose one of logistic, squared"),
        ({"ridge": -1.0}, "ridge must be"),
        ({"spread": 0}, "spread must be"),
    ]:
        refused(why, lambda options: kernel(**options), options, kind=(BadInput, UnknownName))
