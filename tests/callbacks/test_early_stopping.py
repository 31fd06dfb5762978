"""When validation gets no better."""

import math

import pytest

from manyhands.callbacks import EarlyStopping
from manyhands.errors import BadInput
from manyhands.events import Event


def answers(stopping: EarlyStopping, *values: float) -> list[str | None]:
    return [
        stopping.on_validation(Event(type="validation", values={"metrics": {stopping.metric: value}}))
        for value in values
    ]


def test_it_stops_at_the_patience_th_validation_in_a_row_without_improvement() -> None:
    assert answers(EarlyStopping(patience=2), 1.0, 1.0, 0.9, 0.95, 0.92) == [None, None, None, None, "stop"]


def test_min_delta_is_what_better_must_exceed() -> None:
    assert answers(EarlyStopping(patience=1, min_delta=0.25), 1.0, 0.7) == [None, None]
    assert answers(EarlyStopping(patience=1, min_delta=0.25), 1.0, 0.75) == [None, "stop"]


@pytest.mark.parametrize(("metric", "mode"), [("validation_accuracy", "auto"), ("anything", "max")])
def test_of_an_accuracy_more_is_better(metric: str, mode: str) -> None:
    stopping = EarlyStopping(metric=metric, patience=1, mode=mode)  # type: ignore[arg-type]
    assert answers(stopping, 0.5, 0.6, 0.6) == [None, None, "stop"]


def test_nan_is_never_better() -> None:
    assert answers(EarlyStopping(patience=2), math.nan, 1.0, math.nan, math.nan) == [None, None, None, "stop"]


def test_a_new_launch_has_its_patience_anew() -> None:
    stopping = EarlyStopping(patience=1)
    assert answers(stopping, 1.0) == [None]
    stopping.on_start(Event(type="start"))
    assert answers(stopping, 2.0) == [None]


def test_a_metric_that_does_not_come_is_an_error_that_lists_those_that_do() -> None:
    event = Event(type="validation", values={"metrics": {"validation_loss": 1.0, "validation_f1": 0.5}})
    with pytest.raises(BadInput, match="watches 'accuracy', and validation reports validation_loss, validation_f1"):
        EarlyStopping(metric="accuracy").on_validation(event)


@pytest.mark.parametrize("options", [{"patience": 0}, {"min_delta": -1.0}, {"min_delta": math.nan}, {"mode": "up"}])
def test_options_that_cannot_be(options: dict[str, object]) -> None:
    with pytest.raises(BadInput, match=f"EarlyStopping: {next(iter(options))} must be"):
        EarlyStopping(**options)  # type: ignore[arg-type]


def test_a_metric_of_unknown_direction_needs_a_mode() -> None:
    with pytest.raises(BadInput, match="name 'beauty' .* give mode="):
        EarlyStopping(metric="beauty")
    assert answers(EarlyStopping(metric="beauty", mode="max", patience=1), 1.0, 2.0, 2.0) == [None, None, "stop"]
    assert answers(EarlyStopping(metric="validation_F1_macro", patience=1), 0.5, 0.6, 0.6) == [None, None, "stop"]
