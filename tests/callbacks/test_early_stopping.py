"""When validation gets no better."""

import math
from typing import Any

import pytest

from manyhands.callbacks import EarlyStopping
from manyhands.errors import BadInput
from manyhands.events import Event


def answers(stopping: EarlyStopping, *values: float) -> list[str | None]:
    return [
        stopping.on_validation(Event(type="validation", values={"metrics": {stopping.metric: value}}))
        for value in values
    ]


def test_it_stops_after_so_many_validations_in_a_row_without_improvement() -> None:
    cases: list[tuple[dict[str, Any], list[float], int | None]] = [  # options, values, which of them stops
        ({"patience": 2}, [1.0, 1.0, 0.9, 0.95, 0.92], 4),
        ({"patience": 2}, [math.nan, 1.0, math.nan, math.nan], 3),
        ({"patience": 1, "min_delta": 0.25}, [1.0, 0.7], None),
        ({"patience": 1, "min_delta": 0.25}, [1.0, 0.75], 1),
        ({"patience": 1, "metric": "validation_accuracy"}, [0.5, 0.6, 0.6], 2),
        ({"patience": 1, "metric": "validation_F1_macro"}, [0.5, 0.6, 0.6], 2),
        ({"patience": 1, "metric": "anything", "mode": "max"}, [0.5, 0.6, 0.6], 2),
    ]
    for options, values, stop in cases:
        wanted = ["stop" if number == stop else None for number in range(len(values))]
        assert answers(EarlyStopping(**options), *values) == wanted, options


def test_a_new_launch_has_its_patience_anew() -> None:
    stopping = EarlyStopping(patience=1)
    assert answers(stopping, 1.0) == [None]
    stopping.on_start(Event(type="start"))
    assert answers(stopping, 2.0) == [None]


def test_what_cannot_be_is_named() -> None:
    for options in ({"patience": 0}, {"min_delta": -1.0}, {"min_delta": math.nan}, {"mode": "up"}):
        with pytest.raises(BadInput, match=f"EarlyStopping: {next(iter(options))} must be"):
            EarlyStopping(**options)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="name 'beauty' .* give mode="):
        EarlyStopping(metric="beauty")
    event = Event(type="validation", values={"metrics": {"validation_loss": 1.0, "validation_f1": 0.5}})
    with pytest.raises(BadInput, match="watches 'accuracy', and validation reports validation_loss, validation_f1"):
        EarlyStopping(metric="accuracy").on_validation(event)
