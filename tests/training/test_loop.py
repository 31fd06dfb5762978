"""The one worker loop, whatever the strategy."""

from __future__ import annotations

import pytest
import torch
from test_strategy_suite import STRATEGIES

import manyhands as mh
import plain
from slow_cases import slow_after

VALIDATION = plain.rows(23, seed=2)


def evaluated(model: torch.nn.Module) -> float:
    with torch.no_grad():
        return float(plain.cross_entropy(model, VALIDATION))


@pytest.mark.parametrize(("validate_every", "epochs", "rows"), slow_after(1, [(1, 1, 27), (1, 2, 41), (5, 1, 41)]))
@pytest.mark.parametrize(
    "strategy", [spec for spec in STRATEGIES if spec != "hogwild"]
)  # no engine shares memory in a process
def test_the_newest_metrics_are_those_of_what_the_run_returns(
    strategy: str, validate_every: int, epochs: int, rows: int
) -> None:
    """Also where the last tick was validated, here the seventh, and closing the open round moved the answer after that."""
    for workers in STRATEGIES[strategy]:
        run = mh.train(
            plain.task(train_data=plain.rows(rows), validation_data=VALIDATION, batch_size=4, epochs=epochs),
            strategy=strategy,
            engine="sim",
            workers=workers,
            validate_every=validate_every,
        )
        assert run.metrics["validation_loss"] == pytest.approx(evaluated(run.model), abs=1e-12)
