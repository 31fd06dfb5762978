"""Stages of a model on the workers of Spark's barrier stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import manyhands as mh

pytestmark = pytest.mark.slow


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("workers", [2, 4])
def test_stages_train_as_on_engine_local(workers: int) -> None:
    fields: dict[str, Any] = {"workers": workers, "model_parallel": "stages=2", "max_steps": 20}
    found, expected = (mh.train("digits", engine=engine, **fields) for engine in ("spark", "local"))
    assert len(found.info["stages"]) == 2
    torch.testing.assert_close(found.parameters, expected.parameters, rtol=0, atol=1e-6)
    assert found.metrics == pytest.approx(expected.metrics, abs=1e-5)
    assert found.rows["total"] == expected.rows["total"]
