"""Comparisons on real workers: a planted delay is found, and what only processes have is there."""

import os
from statistics import median

import pytest
import torch
from comparable import ROWS, SLEEP_S, Broken, Slowed, tiny

from manyhands.engines.local.engine import Local
from manyhands.evidence.compare.compare import compare
from manyhands.evidence.compare.comparison import Comparison

pytestmark = pytest.mark.timeout(300)  # solo with all cores waits for them where the machine has other work

SAME, SLOW, BROKEN = "local-sgd:period=100 on 2", "slowed:period=100 on 2", "broken on 2"


@pytest.fixture(scope="module")
def found(apart: Local) -> Comparison:
    """Two that differ by a sleep, one like solo, one with a server, one that fails."""
    strategies = ["local-sgd:period=100", Slowed(period=100), "allreduce", "downpour", Broken()]
    return compare(tiny(), strategies=strategies, engine=apart, validations=2, threads_per_worker=1)


@pytest.mark.slow
def test_a_strategy_that_sleeps_is_slower_by_what_it_sleeps(found: Comparison) -> None:
    """Of each tick the same is slept: what it takes longer is that, within 30 %."""
    steps = {name: median(trial.seconds / trial.ticks for trial in found.of(name)) for name in (SAME, SLOW)}
    assert steps[SLOW] - steps[SAME] == pytest.approx(SLEEP_S, rel=0.3)
    assert all(trial.ticks == ROWS // 12 for name in (SAME, SLOW) for trial in found.of(name))


@pytest.mark.slow
def test_allreduce_ends_where_solo_does(found: Comparison) -> None:
    for trial in found.of("allreduce on 2"):
        assert trial.distance is not None
        assert trial.distance < 1e-5
        assert trial.agreement == 1.0


@pytest.mark.slow
def test_what_is_measured_of_processes(found: Comparison) -> None:
    assert found.machine["engine"] == "local"
    for variant in found.variants:
        for trial in found.of(variant.name):
            assert len(trial.memory) == len(trial.timing) == variant.workers
            assert min(trial.memory) > 10_000_000
            assert trial.seconds == pytest.approx(sum(sum(one.values()) for one in trial.timing) / variant.workers)
            assert trial.launch_seconds > trial.seconds > trial.curve[0].seconds > 0
            assert trial.rows == ROWS
    assert all(sum(trial.staleness.values()) == 40 for trial in found.of("downpour on 2"))
    names = [variant.name for variant in found.variants if variant.solo]
    cores = sorted({1, int(found.machine["cores"])})
    assert names == [f"solo, {count} thread{'' if count == 1 else 's'}" for count in cores]


@pytest.mark.slow
def test_a_failing_strategy_ends_nobody_else(found: Comparison) -> None:
    assert [trial.repeat for trial in found.trials if trial.variant == BROKEN] == [0]
    assert "it broke" in found.failure(BROKEN)
    assert all(len(found.of(variant.name)) == 3 for variant in found.variants if variant.name != BROKEN)


@pytest.mark.slow
def test_solo_trains_in_a_process_of_its_own(apart: Local) -> None:
    own = os.getpid()

    def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if model.training and os.getpid() == own:
            raise RuntimeError("trained in the driver")
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    task = tiny(loss=loss, evaluate=None, max_steps=5)
    comparison = compare(task, strategies=["allreduce"], engine=apart, repeats=1, validations=1, threads_per_worker=1)
    assert not any(trial.failure for trial in comparison.trials)
