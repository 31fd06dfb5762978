"""Which kind of mean something is, by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from manyhands.evidence.check.losses import COUPLED, MEAN, OTHER_WEIGHT, SUM, aggregation_of

ROWS = torch.tensor([3.0, 1.0, 4.0, 1.5, 9.0, 2.5, 6.0, 5.0, 0.5, 8.0, 7.0], dtype=torch.float64)
COUNTS = torch.arange(1, 12, dtype=torch.float64)
DATA = {"x": ROWS, "n": COUNTS}


def weighted(batch: Any) -> Tensor:
    return (batch["x"] * batch["n"]).sum() / batch["n"].sum()


LAWS: dict[str, tuple[str, Callable[[Any], tuple[Any, Any]]]] = {
    "a mean over rows": (MEAN, lambda b: (b["x"].mean(), len(b["x"]))),
    "a mean and a penalty": (MEAN, lambda b: (b["x"].mean() + 3, len(b["x"]))),
    "a weighted mean that says so": (MEAN, lambda b: (weighted(b), b["n"].sum())),
    "a sum": (SUM, lambda b: (b["x"].sum(), len(b["x"]))),
    "a sum over a fixed number": (SUM, lambda b: (b["x"].sum() / 32, len(b["x"]))),
    "a sum and a penalty": (SUM, lambda b: (b["x"].sum() + 3, len(b["x"]))),
    "a sum where the mean belongs": (SUM, lambda b: (b["x"].sum(), len(b["x"]) * 1.0)),
    "a weighted mean that does not say so": (OTHER_WEIGHT, lambda b: (weighted(b), len(b["x"]))),
    "a mean that says one": (OTHER_WEIGHT, lambda b: (b["x"].mean(), 1)),
    "a deviation": (COUPLED, lambda b: (b["x"].std(correction=0), len(b["x"]))),
    "a maximum": (COUPLED, lambda b: (b["x"].max() * b["x"].mean(), len(b["x"]))),
}


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("least", [1, 2])
def test_the_law_of(name: str, least: int) -> None:
    kind, measure = LAWS[name]
    aggregation = aggregation_of(lambda b: tuple(float(part) for part in measure(b)), DATA, 1e-9, least)  # type: ignore[arg-type,return-value]
    assert aggregation.kind == kind
    assert (aggregation.off > 1e-3) == (kind != MEAN)
    assert aggregation.constant == (name == "a sum and a penalty")


def test_two_rows_tell_a_mean_from_a_sum() -> None:
    two = {"x": ROWS[:2]}
    assert aggregation_of(lambda b: (float(b["x"].mean()), len(b["x"])), two, 1e-9).kind == MEAN
    assert aggregation_of(lambda b: (float(b["x"].sum()), len(b["x"])), two, 1e-9).kind == SUM
    assert aggregation_of(lambda b: (float(b["x"].std(correction=0)), len(b["x"])), two, 1e-9).kind == COUPLED
    assert aggregation_of(lambda b: (float(b["x"].sum()), len(b["x"])), {"x": ROWS[:1]}, 1e-9).kind == MEAN


def test_equal_parts_say_nothing_of_weights() -> None:
    same = {"x": torch.ones(8, dtype=torch.float64)}
    assert aggregation_of(lambda b: (float(b["x"].mean()), len(b["x"])), same, 1e-9).kind == MEAN
    assert aggregation_of(lambda b: (float(b["x"].sum()), len(b["x"])), same, 1e-9).kind == SUM
