"""Comparisons on real workers: what only processes have is there."""

import os
from typing import Any

import pytest
from comparable import ROWS, Broken, tiny
from torch import Tensor, nn

from manyhands.engines.local.engine import Local
from manyhands.evidence.compare.compare import compare

BROKEN = "broken on 2"


@pytest.mark.slow
@pytest.mark.timeout(300)  # solo with all cores waits for them where the machine has other work
def test_what_is_measured_of_processes(apart: Local) -> None:
    """One like solo, one with a server, one that fails; solo has a process of its own."""
    driver = os.getpid()

    def trained_elsewhere(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if model.training and os.getpid() == driver:
            raise RuntimeError("trained in the driver")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    strategies: list[Any] = ["allreduce", "downpour", Broken()]
    options: dict[str, Any] = {"engine": apart, "validations": 2, "threads_per_worker": 1, "repeats": 1}
    found = compare(tiny(loss=trained_elsewhere), strategies=strategies, **options)
    assert found.machine["engine"] == "local"
    cores = sorted({1, int(found.machine["cores"])})
    assert [one.name for one in found.variants if one.solo] == [f"solo, {n} thread{'s' * (n > 1)}" for n in cores]
    for variant in found.variants:
        if variant.name == BROKEN:
            assert "it broke" in found.failure(BROKEN)
            continue
        (trial,) = found.of(variant.name)
        assert len(trial.memory) == len(trial.timing) == variant.workers
        assert min(trial.memory) > 10_000_000
        assert trial.seconds == pytest.approx(sum(sum(one.values()) for one in trial.timing) / variant.workers)
        assert trial.launch_seconds > trial.seconds > trial.curve[0].seconds > 0
        assert (trial.rows, trial.ticks) == (ROWS, ROWS // 12)
    assert sum(found.of("downpour on 2")[0].staleness.values()) == 40
    (same,) = found.of("allreduce on 2")
    assert (same.distance < 1e-5, same.agreement) == (True, 1.0)
