"""Engine `sim` loses workers as processes are lost: the bits follow from the seed and from who was a member when."""

from collections.abc import Callable
from typing import Any

import pytest
from fault_harness import Trial, equal, lost, recorded_once, survive, task

import plain

ONE, TWO = "kill=2@step:4", "kill=0@step:0,kill=2@step:5"
CASES = [
    ("allreduce", TWO),
    ("allreduce:overlap=true", ONE),
    ("local-sgd:period=2", ONE),
    ("gossip:graph=random,weights=push-sum,period=2", ONE),
    ("diloco:period=4,streaming=2,overlap=0", TWO),
    ("diloco:period=3,compress=topk:0.3", TWO),
    ("stream", TWO),
]


def of_rows() -> Any:
    """A generator, which can be read once."""
    yield from zip(*plain.rows(100), strict=True)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "faults"), CASES)
def test_the_same_bits_as_simulated(strategy: str, faults: str, trial: Trial, simulated: Callable[[], Trial]) -> None:
    runs, trials, given = [], (trial, simulated()), {"strategy": strategy}
    if strategy == "stream":
        given = {"of": task(train_data=of_rows, schedule=None)}
    for one in trials:
        runs.append(run := one.struck(faults, survive=survive(False), **given))
        recorded_once(run, one)
    equal(*runs, tolerance=0.0)
    assert lost(runs[0]) == lost(runs[1])
