"""A calibration on real workers, and an estimate for as many: the real steps lie within its bars."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhands.engines.local.engine import Local
from manyhands.evidence.calibrate.calibrate import calibrated
from manyhands.evidence.estimate.estimate import estimate
from manyhands.evidence.estimate.table import text
from manyhands.tasks.digits_task import digits

SLACK = 1.3
"""The bars are as wide as calibration was off; that simulation and this one are of other steps with other jitter."""


@pytest.mark.slow
def test_the_real_step_lies_within_the_bars(local: Local, tmp_path: Path) -> None:
    task, path = digits(), tmp_path / "here.json"
    found = calibrated(task, workers=2, strategies=["allreduce", "local-sgd:period=4"], quick=True, engine=local)
    found.profile.save(path)
    estimates = estimate(task, profile=path, workers=[2], strategies=[one.strategy for one in found.predictions])
    for predicted, one in zip(found.predictions, estimates.estimates, strict=True):
        assert one.bars is not None
        assert one.step is not None
        assert one.step.low is not None
        assert one.step.high is not None
        assert (one.strategy, one.bars.tried) == (predicted.strategy, True)
        assert one.step.low / SLACK < predicted.real_s < one.step.high * SLACK
    assert "2 workers, 32 rows a step" in text(estimates)
