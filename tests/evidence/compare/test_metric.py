"""Which metric judges, which target is meant, and on which rows trials validate."""

import pytest
import torch

import manyhands as mh
from manyhands.errors import BadInput
from manyhands.evidence.compare import metric
from manyhands.evidence.compare.comparison import Target


@pytest.mark.parametrize(
    ("text", "name", "value", "higher"),
    [
        ("test_accuracy=0.97", "test_accuracy", 0.97, True),
        ("test_loss=1.8", "test_loss", 1.8, False),
        ("test_loss<=1.8", "test_loss", 1.8, False),
        (" validation_reward >= -3e2 ", "validation_reward", -300.0, True),
        ("validation_reward≤9", "validation_reward", 9.0, False),
    ],
)
def test_targets(text: str, name: str, value: float, higher: bool) -> None:
    assert metric.target_of(text) == Target(metric=name, value=value, higher=higher)


@pytest.mark.parametrize(
    "text", ["", "test_accuracy", "test_accuracy=", "=3", "a=b", "test_accuracy=nan", "a==3", "a<3", "test_loss<=inf"]
)
def test_what_is_no_target(text: str) -> None:
    with pytest.raises(BadInput, match="target must be METRIC=VALUE"):
        metric.target_of(text)


def test_a_name_that_does_not_say_which_way_is_better_needs_a_sign() -> None:
    with pytest.raises(BadInput, match='write "test_reward>=0.9" or "test_reward<=0.9"'):
        metric.target_of("test_reward=0.9")
    with pytest.raises(BadInput, match="train_loss is not measured while a trial runs"):
        metric.target_of("train_loss<=0.9")


def task(validation: bool, test: bool) -> mh.Task:
    rows = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)
    return mh.Task.supervised(
        model=lambda: torch.nn.Linear(2, 2),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        train_data=rows,
        validation_data=rows if validation else None,
        test_data=rows if test else None,
    )


@pytest.mark.parametrize(
    ("validation", "test", "target", "expected"),
    [
        (True, True, None, True),
        (True, False, None, False),
        (False, True, None, True),
        (False, False, None, False),
        (True, True, "validation_loss=1", False),
        (True, True, "test_loss=1", True),
    ],
)
def test_trials_validate_on_the_rows_of_the_metric(
    validation: bool, test: bool, target: str | None, expected: bool
) -> None:
    assert metric.on_test(task(validation, test), metric.target_of(target)) is expected


def test_a_target_needs_its_rows() -> None:
    metric.check_data(task(True, False), metric.target_of("validation_loss=1"))
    with pytest.raises(BadInput, match="needs test_data, and the task has none"):
        metric.check_data(task(True, False), metric.target_of("test_loss=1"))
    with pytest.raises(BadInput, match="needs validation_data"):
        metric.check_data(task(False, True), metric.target_of("validation_loss=1"))


def test_swapped_rows_come_with_swapped_names() -> None:
    one = task(True, False)
    assert metric.swapped(one).test_data is one.validation_data
    assert metric.swapped(one).validation_data is None
    assert metric.renamed({"validation_loss": 1.0, "test_loss": 2.0, "train_loss": 3.0}) == {
        "test_loss": 1.0,
        "validation_loss": 2.0,
        "train_loss": 3.0,
    }


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["validation_accuracy", "test_loss", "test_accuracy", "train_loss"], ("test_accuracy", True)),
        (["validation_accuracy", "test_f1", "test_loss"], ("test_loss", False)),
        (["validation_accuracy", "test_reward", "test_f1"], ("test_f1", True)),
        (["validation_loss", "train_accuracy"], ("validation_loss", False)),
        (["train_reward", "train_loss"], ("train_loss", False)),
    ],
)
def test_the_default_metric(names: list[str], expected: tuple[str, bool]) -> None:
    assert metric.metric_of(names, None) == expected


def test_names_that_say_nothing_are_refused_with_what_to_give() -> None:
    with pytest.raises(BadInput, match='--target "test_reward>=0.9"'):
        metric.metric_of(["test_reward", "train_reward"], None)
    with pytest.raises(BadInput, match="returns no metrics"):
        metric.metric_of([], None)


def test_a_target_decides_and_must_be_measured() -> None:
    target = metric.target_of("test_reward>=0.9")
    assert metric.metric_of(["test_reward", "test_loss"], target) == ("test_reward", True)
    with pytest.raises(BadInput, match="no metric 'test_reward': the task measures test_loss, train_loss"):
        metric.metric_of(["test_loss", "train_loss"], target)
