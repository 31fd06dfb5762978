"""One schema, valid JSON whatever the numbers."""

import json
import math

import pytest

from manyhands.events import Event, from_json, to_json


def test_an_event_comes_back_equal() -> None:
    event = Event(
        type="step", time_s=1.5, rank=3, tick=7, step=6, values={"loss": 0.25, "round": True, "metrics": {"a": 1}}
    )
    assert Event.from_json(event.to_json()) == event
    assert Event.from_json(event.to_json().encode()) == event


def test_numbers_that_json_has_not_are_strings_in_it() -> None:
    for number, name in ((math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")):
        text = to_json({"a": [number, 1.0], "b": {"c": number}})
        strict = json.loads(text, parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))
        assert strict == {"a": [name, 1.0], "b": {"c": name}}
        for back in (from_json(text), from_json(text.encode())):
            assert repr(back) == repr({"a": [number, 1.0], "b": {"c": number}})


def test_what_json_cannot_hold_is_an_error_and_not_a_guess() -> None:
    with pytest.raises(TypeError):
        to_json({"a": object()})
