"""Which parameters are kept."""

import torch

import plain
from manyhands.comm.solo import SoloGroup
from manyhands.replica.evaluation import higher_is_better
from manyhands.replica.replica import Replica
from manyhands.training.best_model import BestModel, BestModelPolicy
from refusals import refused

AT = {"epoch": 1, "step": 10}


def best(text: str, metric: str, values: list[float]) -> float:
    best_model = BestModel(BestModelPolicy.parse(text))
    for value in values:
        best_model.offer({metric: value}, torch.tensor([value]), {}, AT)
    assert best_model.parameters is not None
    assert best_model.newest == {metric: values[-1]} or values[-1] != values[-1]
    return float(best_model.parameters)


def test_the_direction_follows_the_metric() -> None:
    for text, metric, value in [
        ("best:validation_loss", "validation_loss", 1.0),
        ("best:validation_accuracy", "validation_accuracy", 3.0),
        ("best:max:validation_loss", "validation_loss", 3.0),
        ("best:min:validation_accuracy", "validation_accuracy", 1.0),
        ("best:validation_bits_per_character", "validation_bits_per_character", 1.0),
    ]:
        assert best(text, metric, [2.0, 3.0, 1.0, 2.5]) == value, text
    assert best("best:min:x", "x", [float("nan"), 2.0, float("nan")]) == 2.0


def test_last_keeps_nothing_and_anything_else_is_refused() -> None:
    best_model = BestModel(BestModelPolicy.parse("last"))
    assert not best_model.offer({"x": 1.0}, torch.zeros(1), {}, AT)
    assert best_model.parameters is None
    for text in ("best", "best:", "first", "best:up:x", ""):
        refused("keep must be", BestModelPolicy.parse, text)
    refused("write best:max:beauty or best:min:beauty", BestModelPolicy.parse, "best:beauty")


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


def test_the_words_of_a_name_say_which_way_is_better() -> None:
    for names, higher in (
        (("validation_f1_macro", "validation_mAP", "mIoU", "top1", "log_likelihood"), True),
        (("validation_bits_per_character", "VALIDATION_LOSS", "rmse"), False),
        (("neg_log_likelihood", "accuracy_loss", "mapping", "beauty"), None),
    ):
        for name in names:
            assert higher_is_better(name) is higher, name
