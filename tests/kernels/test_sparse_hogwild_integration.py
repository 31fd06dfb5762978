"""HOGWILD! on sparse rows: real processes that write one table without locks."""

import numpy as np

import manyhands as mh
from manyhands.data.csr import Csr

ROWS, FEATURES = 64, 20  # of each worker


def disjoint(seed=0):
    """Rows of worker 0 with the features 0 to 19, then rows of worker 1 with 20 to 39: partition=fixed deals them so."""
    random = np.random.default_rng(seed)
    keys = np.sort(np.stack([random.choice(FEATURES, 4, replace=False) for _ in range(2 * ROWS)]), 1)
    keys[ROWS:] += FEATURES
    return Csr(
        np.arange(2 * ROWS + 1) * 4,
        keys.ravel(),
        random.normal(size=keys.size),
        random.integers(0, 2, 2 * ROWS),
        features=2 * FEATURES,
    )


def trained(rows, strategy, workers):
    kernel = mh.kernels.Linear.of(rows, loss="hinge", ridge=0.1, bias=False, merge_every=3)
    run = mh.train(
        mh.Task(kernel=kernel, rate=0.3, train_data=rows, batch_size_per_worker=8, epochs=3, shuffle=False),
        strategy=strategy,
        engine="local",
        workers=workers,
        threads_per_worker=1,
        partition="fixed" if workers > 1 else "none",
    )
    return run.model.tables()["weights"][:, 0]


def test_rows_without_common_features_give_the_bits_of_serial_runs():
    rows = disjoint()
    both = trained(rows, "hogwild", 2)
    for worker in range(2):
        own = slice(worker * FEATURES, (worker + 1) * FEATURES)
        alone = trained(rows[worker * ROWS : (worker + 1) * ROWS], "solo", 1)
        assert np.array_equal(both[own], alone[own])
        assert alone[own].any()
        assert not np.delete(alone, np.arange(2 * FEATURES)[own]).any()
