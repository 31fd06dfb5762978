"""The line of advice of real runs: sensible on processes, and its prediction comes true on the simulator."""

import re

import pytest
from measured_runs import reads_well

import manyhands as mh
from manyhands.recording.run import Run

CLUSTER = "sim:network='bandwidth={}Mbit',compute='row=1e-3'"  # 8 rows a worker and step: 8 ms


def simulated(strategy: str, engine: str, steps: int = 24) -> Run:
    """A run whose costs count as those of a machine that was measured."""
    run = mh.train("digits", strategy=strategy, engine=engine, workers=4, max_steps=steps)
    assert run.advice().kind == "assumed"
    run.info["simulated"]["profile"] = "measured.json"
    return run


@pytest.mark.slow
def test_the_predicted_speed_comes_true() -> None:
    run = simulated("allreduce", CLUSTER.format(600))
    advice = run.advice()
    assert advice.kind == "exchange-bound"
    strategy = re.search(r"--strategy (local-sgd:period=\S+)", advice.text)[1]
    rarer = simulated(strategy, CLUSTER.format(600))
    assert rarer.advice().kind == "fine"
    assert rarer.timing["exchange"] <= 0.1 * sum(rarer.timing.values())
    faster = sum(run.timing.values()) / sum(rarer.timing.values())
    assert faster == pytest.approx(advice.numbers["speedup"], rel=0.02)
    slow = simulated("allreduce", CLUSTER.format(10), steps=12).advice()  # wants a longer period, which an epoch ends
    assert slow.numbers["period"] == 41  # steps of an epoch of 1,297 rows
    assert "diloco:period=41" in slow.text


def test_rows_that_backups_drop_are_seen() -> None:
    run = simulated("quorum:backups=1", "sim:compute='row=1e-3,3=9x'", steps=8)
    advice = run.advice()
    assert advice.kind == "unused-rows"
    assert advice.wins == run.rows["unused"] / run.rows["total"]


def test_a_real_run_of_digits() -> None:
    for workers, steps, likely in (
        (1, 4, {"too-few-steps"}),
        (2, 12, {"too-short", "threads", "stragglers", "exchange-bound", "fine", "input-bound"}),
    ):
        run = mh.train("digits", workers=workers, max_steps=steps)
        advice = run.advice()
        assert advice.kind in likely
        reads_well(advice.text)
        assert run.summary().splitlines()[-1] == f"Advice: {advice.text}"
