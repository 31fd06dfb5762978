"""benchmarks/local_sgd_speedup.py and its page: the data, the tables, and the claim on a small problem."""

import importlib
import json
from typing import Any

import numpy as np
import pytest
import torch

from pages import ROOT


@pytest.fixture(scope="module")
def script() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("local_sgd_speedup")


def test_the_tables_of_the_page_are_those_of_the_data(script: Any) -> None:
    found = json.loads(script.DATA.read_text())
    between = script.PAGE.read_text().partition(script.BEGIN)[2].partition(script.END)[0]
    assert between.strip() == script.tables(found["results"])
    assert found["spec"] == vars(script.Spec())
    grid = script.Grid()
    assert len(found["results"]) == len(grid.batch_sizes) * (1 + len(grid.periods) * (len(grid.workers) - 1))
    assert script.PLOT.is_file()


def test_costs_of_an_average_are_the_simulated_networks(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for network, cost in (
        ("workers_per_host=all,local_latency=12.5us", "an average costs 25 gradients"),
        ("latency=25us,collective=ring", "an average costs 2(K - 1)·25 gradients"),
    ):
        monkeypatch.setattr(script, "ENGINE", f"sim:compute='row=1us',network='{network}'")
        hit = script.run(script.QUICK, script.Point(workers=4, period=2, batch_size=4, rate=1.0, seed=1), 200)
        assert hit.steps >= 10
        exchange = script.COSTS[cost](4)
        more = 1e6 * hit.seconds - (4 + exchange / 2) * hit.steps
        assert 0 <= more <= 2 * exchange, network  # control bits are exchanged alone after the first step


def test_a_run_is_local_sgd_as_a_plain_loop_does_it(script: Any) -> None:
    """The same draws, in float64: the target is reached at the same average."""
    workers, period, batch_size, rate, most = 2, 4, 4, 1.0, 1000
    point = script.Point(workers=workers, period=period, batch_size=batch_size, rate=rate, seed=1)
    data = script.problem(script.QUICK)
    a, rows = data.a.double().numpy(), len(data.a)
    draws = np.random.default_rng(1).integers(0, rows, (most, workers, batch_size))
    w, means, weights, step, gap = np.zeros((workers, a.shape[1])), np.zeros((a.shape[1], 3)), np.zeros(3), 0, 1.0
    while gap > script.TARGET:
        batch = a[draws[step]]  # [workers, batch_size, D]
        slope = 1 / (1 + np.exp(np.einsum("kbd,kd->kb", batch, w)))
        w += rate * (np.einsum("kb,kbd->kd", slope, batch) / batch_size - w / rows)
        step += 1
        if step % period == 0:
            w[:] = w.mean(0)
            weights += (weight := float(step) ** np.arange(3))
            means += (w[0][:, None] - means) * weight / weights
            points = np.concatenate([w[0][:, None], means], axis=1)
            gap = float(data.gap(torch.from_numpy(points)).min())
    assert script.run(script.QUICK, point, most).steps == pytest.approx(step, rel=0.02)
