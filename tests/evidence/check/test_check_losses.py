"""Which kind of mean something is, by hand."""

from collections.abc import Callable
from typing import Any

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


def test_the_law_of_each() -> None:
    for name, (kind, measure) in LAWS.items():
        for least in (1, 2):
            law = aggregation_of(lambda b, of=measure: tuple(float(part) for part in of(b)), DATA, 1e-9, least)
            assert law.kind == kind, name
            assert (law.off > 1e-3) == (kind != MEAN), name
            assert law.constant == (name == "a sum and a penalty"), name


def test_two_rows_tell_a_mean_from_a_sum_and_equal_parts_say_nothing_of_weights() -> None:
    def kind(reduced: Callable[[Tensor], Tensor], rows: Tensor) -> str:
        return aggregation_of(lambda b: (float(reduced(b["x"])), len(b["x"])), {"x": rows}, 1e-9).kind

    two, same = ROWS[:2], torch.ones(8, dtype=torch.float64)
    assert [kind(reduced, two) for reduced in (torch.mean, torch.sum)] == [MEAN, SUM]
    assert kind(lambda x: x.std(correction=0), two) == COUPLED
    assert kind(torch.sum, ROWS[:1]) == MEAN
    assert [kind(reduced, same) for reduced in (torch.mean, torch.sum)] == [MEAN, SUM]
