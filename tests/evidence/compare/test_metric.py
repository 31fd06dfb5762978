"""Which metric judges, which target is meant, and on which rows trials validate."""

import pytest
import torch

import manyhands as mh
from manyhands.errors import BadInput
from manyhands.evidence.compare import metric
from manyhands.evidence.compare.comparison import Target


def test_targets() -> None:
    for text, name, value, higher in (
        ("test_accuracy=0.97", "test_accuracy", 0.97, True),
        ("test_loss=1.8", "test_loss", 1.8, False),
        ("test_loss<=1.8", "test_loss", 1.8, False),
        (" validation_reward >= -3e2 ", "validation_reward", -300.0, True),
        ("validation_reward≤9", "validation_reward", 9.0, False),
    ):
        assert metric.target_of(text) == Target(metric=name, value=value, higher=higher), text
    wrong = ("", "test_accuracy", "test_accuracy=", "=3", "a=b", "test_accuracy=nan", "a==3", "a<3", "test_loss<=inf")
    for text, message in (
        *((text, "target must be METRIC=VALUE") for text in wrong),
        ("test_reward=0.9", 'write "test_reward>=0.9" or "test_reward<=0.9"'),
        ("train_loss<=0.9", "train_loss is not measured while a trial runs"),
    ):
        with pytest.raises(BadInput, match=message):
            metric.target_of(text)


def task(validation: bool, test: bool) -> mh.Task:
    rows = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)
    return mh.Task.supervised(
        model=lambda: torch.nn.Linear(2, 2),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        train_data=rows,
        validation_data=rows if validation else None,
        test_data=rows if test else None,
    )


def test_trials_validate_on_the_rows_of_the_metric() -> None:
    for validation, test, target, expected in (
        (True, True, None, True),
        (True, False, None, False),
        (False, True, None, True),
        (False, False, None, False),
        (True, True, "validation_loss=1", False),
        (True, True, "test_loss=1", True),
    ):
        found = metric.on_test(task(validation, test), metric.target_of(target))
        assert found is expected, (validation, test, target)
    metric.check_data(task(True, False), metric.target_of("validation_loss=1"))
    with pytest.raises(BadInput, match="needs test_data, and the task has none"):
        metric.check_data(task(True, False), metric.target_of("test_loss=1"))
    with pytest.raises(BadInput, match="needs validation_data"):
        metric.check_data(task(False, True), metric.target_of("validation_loss=1"))
    one = task(True, False)
    assert metric.swapped(one).test_data is one.validation_data
    assert metric.swapped(one).validation_data is None
    renamed = metric.renamed({"validation_loss": 1.0, "test_loss": 2.0, "train_loss": 3.0})
    assert renamed == {"test_loss": 1.0, "validation_loss": 2.0, "train_loss": 3.0}


def test_the_metric_is_the_targets_or_the_one_whose_name_says_most() -> None:
    for names, expected in (
        (["validation_accuracy", "test_loss", "test_accuracy", "train_loss"], ("test_accuracy", True)),
        (["validation_accuracy", "test_f1", "test_loss"], ("test_loss", False)),
        (["validation_accuracy", "test_reward", "test_f1"], ("test_f1", True)),
        (["validation_loss", "train_accuracy"], ("validation_loss", False)),
        (["train_reward", "train_loss"], ("train_loss", False)),
    ):
        assert metric.metric_of(names, None) == expected, names
    target = metric.target_of("test_reward>=0.9")
    assert metric.metric_of(["test_reward", "test_loss"], target) == ("test_reward", True)
    for names, given, message in (
        (["test_reward", "train_reward"], None, '--target "test_reward>=0.9"'),
        ([], None, "returns no metrics"),
        (["test_loss", "train_loss"], target, "no metric 'test_reward': the task measures test_loss, train_loss"),
    ):
        with pytest.raises(BadInput, match=message):
            metric.metric_of(names, given)
