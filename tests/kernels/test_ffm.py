"""kernels/ffm.py: field-aware factorization machines, against NumPy and by hand."""

import math

import numpy as np
import pytest
from products import conforms

from manyhands import kernels
from manyhands.data.csr import Csr
from refusals import refused

FIELDS, PER_FIELD = 5, 6


def clicks(rows, missing=0.0, repeated=0.0):
    """Rows with one feature a field, some fields missing, some twice."""
    random = np.random.default_rng(0)
    offsets, keys, fields = [0], [], []
    for _ in range(rows):
        chosen = [f for f in range(FIELDS) if random.random() >= missing]
        chosen += [f for f in chosen if random.random() < repeated]
        keys += [f * PER_FIELD + random.integers(PER_FIELD) for f in chosen]
        fields += chosen
        offsets.append(len(keys))
    values, targets = random.uniform(0.5, 2, len(keys)), random.integers(0, 2, rows)
    return Csr(offsets, keys, values, targets, fields=fields, features=FIELDS * PER_FIELD + 1, field_count=FIELDS)


def kernel(**options):
    return kernels.FFM(
        **{"features": FIELDS * PER_FIELD + 1, "fields": FIELDS, "dtype": "float64", "ridge": 0.01, **options}
    )


def test_conformance():
    """With one feature a field, with fields that are missing, and that stand twice; and without normalization."""
    from manyhands.kernels.ffm import reference_step

    for options, shape in (
        ({}, {}),
        ({"k": 3}, {"missing": 0.4}),
        ({}, {"missing": 0.2, "repeated": 0.4}),
        ({"normalize": False, "k": 8, "ridge": 0.0}, {"missing": 0.2}),
    ):
        rows = clicks(12, **shape).take([0, 5, 3, 11, 5])
        conforms(kernel=kernel(**options), batch=rows, reference=reference_step)


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_a_step_by_hand(order):
    """Two features, of the fields 0 and 1, with the values 1 and 2, and one number a vector."""
    made = kernels.FFM(features=2, fields=2, k=1, ridge=0.1, dtype="float64")
    values = np.array([1.0, 2.0])
    rows = Csr(
        [0, 2], np.array([0, 1])[order], values[order], [0], fields=np.array([0, 1])[order], features=2, field_count=2
    )
    tables = {"vectors": np.array([[7.0, 0.5], [0.25, 9.0]]), "sums": np.ones((2, 2))}
    measured = made.measure(tables, made.prepare(rows, 0))
    loss = made.step(tables, made.prepare(rows, 0), 0.2)

    r, y = 1 / 5, -1.0
    phi = r * 0.5 * 0.25 * 1.0 * 2.0  # feature 0's vector for field 1, and feature 1's for field 0
    kappa = -y / (1 + math.exp(y * phi))
    slope_0 = 0.1 * 0.5 + kappa * r * 2.0 * 0.25
    slope_1 = 0.1 * 0.25 + kappa * r * 2.0 * 0.5
    assert loss == pytest.approx(math.log(1 + math.exp(-y * phi)))
    assert measured == {"loss": (pytest.approx(loss), 1), "accuracy": (0.0, 1)}
    assert tables["sums"] == pytest.approx(np.array([[1, 1 + slope_0**2], [1 + slope_1**2, 1]]))
    moved_0 = 0.5 - 0.2 * slope_0 / math.sqrt(1 + slope_0**2)
    moved_1 = 0.25 - 0.2 * slope_1 / math.sqrt(1 + slope_1**2)
    assert tables["vectors"] == pytest.approx(np.array([[7, moved_0], [moved_1, 9]]))


def test_vectors_begin_between_0_and_a_share_of_k():
    tables = kernels.FFM(features=200, fields=3, k=4).module(0).tables()
    assert 0 <= tables["vectors"].min() < 0.01
    assert 0.49 < tables["vectors"].max() < 0.5
    assert (tables["sums"] == 1).all()


def test_what_is_refused():
    refused("rows with fields: .*Csr.libffm", kernel().prepare, Csr([0, 1], [0], [1.0], [1], features=3), 0)
    refused("rows with fields", kernel().prepare, {"x": np.ones(3)}, 0)
    refused("has 4 fields, and its rows have 5", kernel(fields=4).prepare, clicks(3), 0)
    refused("has 30 features, and its rows have 31", kernel(features=30).prepare, clicks(3), 0)
    three = Csr([0, 1], [0], [1.0], [3], fields=[0], features=3, field_count=1)
    refused("targets must be 0 and 1", kernel().prepare, three, 0)
    for name, value in (("k", 0), ("fields", 0), ("ridge", -1.0)):
        refused(f"{name} must be", lambda name, value: kernel(**{name: value}), name, value)
