"""Which parameters are kept."""

from __future__ import annotations

import pytest
import torch

import plain
from manyhands.comm.solo import SoloGroup
from manyhands.errors import BadInput
from manyhands.replica.evaluation import higher_is_better
from manyhands.replica.replica import Replica
from manyhands.training.best_model import BestModel, BestModelPolicy

AT = {"epoch": 1, "step": 10}


def best(text: str, metric: str, values: list[float]) -> float:
    best_model = BestModel(BestModelPolicy.parse(text))
    for value in values:
        best_model.offer({metric: value}, torch.tensor([value]), {}, AT)
    assert best_model.parameters is not None
    assert best_model.newest == {metric: values[-1]} or values[-1] != values[-1]
    return float(best_model.parameters)


@pytest.mark.parametrize(
    ("text", "metric", "value"),
    [
        ("best:validation_loss", "validation_loss", 1.0),
        ("best:validation_accuracy", "validation_accuracy", 3.0),
        ("best:max:validation_loss", "validation_loss", 3.0),
        ("best:min:validation_accuracy", "validation_accuracy", 1.0),
        ("best:validation_bits_per_character", "validation_bits_per_character", 1.0),
    ],
)
def test_the_direction_follows_the_metric(text: str, metric: str, value: float) -> None:
    assert best(text, metric, [2.0, 3.0, 1.0, 2.5]) == value


def test_nan_is_never_best() -> None:
    assert best("best:min:x", "x", [float("nan"), 2.0, float("nan")]) == 2.0


def test_last_keeps_nothing() -> None:
    best_model = BestModel(BestModelPolicy.parse("last"))
    assert not best_model.offer({"x": 1.0}, torch.zeros(1), {}, AT)
    assert best_model.parameters is None


@pytest.mark.parametrize("text", ["best", "best:", "first", "best:up:x", ""])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="keep must be"):
        BestModelPolicy.parse(text)


def test_a_checkpoint_brings_the_best_back() -> None:
    replica = Replica.of(plain.mlp(), plain.OPTIMIZERS["sgd"], group=SoloGroup())
    best_model = BestModel(BestModelPolicy.parse("best:min:x"))
    best_model.offer({"x": 1.0}, replica.parameters, {"b": torch.ones(2)}, {"epoch": 3, "step": 40})
    tensors, values = best_model.capture(replica)
    again = BestModel(BestModelPolicy.parse("best:min:x"))
    again.restore(replica, tensors, values)
    assert again.parameters is not None
    assert again.parameters.equal(replica.parameters)
    assert torch.equal(again.buffers["b"], torch.ones(2))
    assert again.metrics == {"x": 1.0}
    assert not again.offer({"x": 1.0}, replica.parameters, {}, AT)
    assert again.at == {"epoch": 3, "step": 40}


@pytest.mark.parametrize(
    ("metric", "higher"),
    [
        ("validation_f1_macro", True),
        ("validation_mAP", True),
        ("mIoU", True),
        ("top1", True),
        ("log_likelihood", True),
        ("validation_bits_per_character", False),
        ("VALIDATION_LOSS", False),
        ("rmse", False),
        ("neg_log_likelihood", None),
        ("accuracy_loss", None),
        ("mapping", None),
        ("beauty", None),
    ],
)
def test_the_words_of_a_name_say_which_way_is_better(metric: str, higher: bool | None) -> None:
    assert higher_is_better(metric) is higher


def test_a_name_that_does_not_say_is_asked_about() -> None:
    with pytest.raises(BadInput, match="write best:max:beauty or best:min:beauty"):
        BestModelPolicy.parse("best:beauty")
