"""sparse/sparsity.py: HOGWILD!'s numbers of sparse rows."""

import numpy as np
import pytest

from manyhands import kernels
from manyhands.data.corpus import Corpus
from manyhands.data.csr import Csr


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """numba takes a second to import."""
    global Sparsity, sparsity
    from manyhands.sparse.sparsity import Sparsity, sparsity


def rows_of(lists, features):
    offsets = np.concatenate([[0], np.cumsum([len(keys) for keys in lists])])
    keys = np.array([key for keys in lists for key in sorted(keys)], np.int64)
    return Csr(offsets, keys, np.ones(len(keys)), np.ones(len(lists)), features=features)


def brute_force(lists):
    n = len(lists)
    degrees = [sum(feature in keys for keys in lists) for feature in set().union(*lists)]
    met = [sum(bool(keys & other) for other in lists) for keys in lists]
    return Sparsity(max(map(len, lists)), max(degrees) / n, max(met) / n, max(met) / n)


def test_by_hand():
    rows = rows_of([{0, 1}, {1}, {2, 3, 4}, {4}, {5}, {1, 5}], 9)
    # feature 1 stands in 3 of 6 rows; {1, 5} meets {0, 1}, {1}, {5} and itself
    assert sparsity(rows) == Sparsity(omega=3, delta=3 / 6, rho=4 / 6, rho_at_most=4 / 6)


def test_against_brute_force():
    for seed in range(15):
        random = np.random.default_rng(seed)
        features = int(random.integers(3, 60))
        shares = 1 / np.arange(1, features + 1) ** random.choice([0, 1, 2])
        counts, p = random.integers(0, min(6, features + 1), 80), shares / shares.sum()
        draw = [set(random.choice(features, count, replace=False, p=p).tolist()) for count in counts]
        rows = rows_of(draw, features)
        assert sparsity(rows) == brute_force(draw), seed
        some = random.permutation(80)[:33]
        assert sparsity(rows.take(some)) == brute_force([draw[i] for i in some]), seed
    assert sparsity(rows_of([set(), set()], 3)) == Sparsity(0, 0.0, 0.0, 0.0)


def test_out_of_time_rho_lies_between_two_bounds(monkeypatch):
    random = np.random.default_rng(1)
    draw = [set(random.choice(50, 3, replace=False).tolist()) for _ in range(200)]
    monkeypatch.setattr("manyhands.sparse.sparsity._VISITS_AT_ONCE", 1)  # one row, and time is over
    found, exact = sparsity(rows_of(draw, 50), seconds=0), brute_force(draw)
    assert (found.omega, found.delta) == (exact.omega, exact.delta)
    assert found.rho <= exact.rho <= found.rho_at_most
    assert not found.is_exact
    assert sparsity(rows_of(draw, 50)).is_exact


def test_what_kernels_touch():
    """Of sparse rows their features, of pairs both keys; of a text nothing is said."""
    rows = Csr([0, 2, 3], [0, 1, 3], [1.0] * 3, [1, -1], fields=[0, 1, 1], features=4, field_count=2)
    for kernel in (kernels.Linear(features=4), kernels.FM(features=4), kernels.FFM(features=4, fields=2)):
        assert kernel.touched(rows) is rows, kernel
    edges = {"nodes": np.array([0, 1]), "others": np.array([1, 2]), "weights": np.ones(2)}
    found = kernels.Cuts(known=[0, -1, 1]).touched(edges)
    assert (found.keys.tolist(), found.features, len(found)) == ([0, 1, 1, 2], 3, 2)  # nodes are of one table
    ratings = {"users": np.array([0, 1]), "items": np.array([1, 1]), "ratings": np.ones(2)}
    found = kernels.Factors(users=2, items=2).touched(ratings)
    assert (found.keys.tolist(), found.features) == ([0, 3, 1, 3], 4)
    assert sparsity(found).delta == 1.0
    corpus = Corpus.of_lines(["a b", "b c"], min_count=1)
    assert kernels.SkipGram(vocabulary=corpus.vocabulary).touched(corpus) is None
