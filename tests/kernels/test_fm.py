"""kernels/fm.py: factorization machines, against NumPy and by hand."""

import math

import numpy as np
import pytest
from products import conforms

import manyhands as mh
from manyhands import kernels
from manyhands.data.csr import Csr
from manyhands.errors import BadInput, UnknownName
from refusals import refused

FEATURES = 30


def pairs(rows, seed=0, squared=False):
    """Rows of two to five features, whose targets planted vectors decide."""
    random = np.random.default_rng(seed)
    planted = np.random.default_rng(5).normal(size=(FEATURES, 2))
    offsets = np.concatenate([[0], np.cumsum(random.integers(2, 6, rows))])
    keys = [np.sort(random.choice(FEATURES, n, replace=False)) for n in np.diff(offsets)]
    scores = np.array([(planted[mine].sum(0) ** 2 - (planted[mine] ** 2).sum(0)).sum() / len(mine) for mine in keys])
    targets = scores if squared else np.where(scores + 0.3 * random.logistic(size=rows) > 0, 1, -1)
    return Csr(offsets, np.concatenate(keys), np.ones(offsets[-1]), targets, features=FEATURES + 1)


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
    loss = made.step(tables, made.prepare(rows, 0), 0.5)

    phi = 0.3 + 0.5 * 0.6 + 0.25 * 0.8 + 2.0 * -1.0 * 0.6 * 0.8
    error = phi - 1.0
    weight = error * 0.6 + 0.1 * 0.5
    vector = error * 0.6 * 0.8 * -1.0 + 0.1 * 2.0
    assert loss == pytest.approx(error**2 / 2)
    assert tables["weights"][0, 0] == pytest.approx(0.5 - 0.5 * weight / math.sqrt(1 + weight**2))
    assert tables["vectors"][0, 0] == pytest.approx(2.0 - 0.5 * vector / math.sqrt(1 + vector**2))
    assert tables["sums"][0] == pytest.approx([1 + weight**2, 1 + vector**2])
    assert tables["bias"][0, 0] == pytest.approx(0.3 - 0.5 * error / math.sqrt(1 + error**2))
    assert (tables["weights"][1, 0], tables["vectors"][1, 0]) == (9, 9)


@pytest.mark.parametrize("loss", ["logistic", "squared"])
def test_it_finds_planted_pairs(loss):
    rows = pairs(3000, squared=loss == "squared")
    task = mh.Task(
        kernel=kernels.FM.of(rows, loss=loss, k=4),
        rate=0.3,
        train_data=rows.take(range(2500)),
        validation_data=rows.take(range(2500, 3000)),
        batch_size=500,
        epochs=10,
    )
    metrics = mh.train(task, strategy="solo", workers=1).metrics
    if loss == "squared":
        assert metrics["validation_squared_error"] < 0.1 * np.var(rows.targets)
        assert metrics["validation_squared_error"] == pytest.approx(2 * metrics["validation_loss"])
    else:
        assert metrics["validation_accuracy"] > 0.8


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
