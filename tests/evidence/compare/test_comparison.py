"""What was found, to JSON and back."""

import json
import math
from pathlib import Path

import pytest
from by_numbers import found

from manyhands.errors import BadInput
from manyhands.evidence.compare.comparison import Comparison, Point, Target
from manyhands.evidence.compare.report import load

AIM = Target(metric="test_accuracy", value=0.97, higher=True)


def one(**changes: object) -> Comparison:
    made = found(
        {"solo, 1 thread": [50.0] * 3, "solo, 2 threads": [100.0] * 3, "downpour on 2": [150.0, 160.0, 170.0], "gossip on 2": [1.0, 1.0, None]},
        {},
        {"solo, 1 thread": [2.0] * 3, "solo, 2 threads": [1.0] * 3, "downpour on 2": [None] * 3, "gossip on 2": [1.0, None, None]},
        failures={"gossip on 2": "it broke"},
        target=AIM,
        shapes=((2, 3), (3,)),
    )  # fmt: skip
    curve = (Point(rows=10, seconds=0.5, metrics={"test_accuracy": math.inf}, distance=0.25),)
    trials = tuple(trial.__class__(**{**vars(trial), "curve": curve}) for trial in made.trials)
    return made.__class__(**{**vars(made), "trials": trials, **changes})


def test_a_comparison_comes_back_as_it_was_from_a_file_too(tmp_path: Path) -> None:
    made = one()
    text = made.to_json()
    assert "\n" not in text
    back = Comparison.from_json(text)
    assert (back.trials, back.variants, back.differences) == (made.trials, made.variants, made.differences)
    assert back.differences["downpour on 2"][2].middle == math.inf
    assert [advice.text for advice in back.advice] == [advice.text for advice in made.advice]
    assert back.to_json() == text
    assert (back.target, back.shapes, back.verdict) == (AIM, ((2, 3), (3,)), made.verdict)
    (tmp_path / "report.json").write_text(one().to_json())
    assert load(tmp_path).to_json() == load(tmp_path / "report.json").to_json() == one().to_json()


def test_what_no_comparison_wrote_is_refused() -> None:
    json.loads(one().to_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    for text in ("", "{}", "[]", '{"format": 99}', '{"format": 1}', '{"format": 1, "shapes": 3}'):
        with pytest.raises(BadInput, match="not the report.json of a comparison"):
            Comparison.from_json(text)
    with pytest.raises(BadInput, match="another version of manyhands wrote it"):
        Comparison.from_json(json.dumps({**json.loads(one().to_json()), "surprise": 1}))


def test_what_is_asked_of_it() -> None:
    made = one()
    assert made.variant("downpour on 2").workers == 2
    assert [trial.repeat for trial in made.of("gossip on 2")] == [0, 1]
    assert made.failure("gossip on 2") == "it broke"
    assert made.failure("downpour on 2") == ""
    assert "gossip on 2" not in made.differences
    assert "solo, 2 threads" not in made.differences
    difference = made.difference("downpour on 2", "target_seconds")
    assert (difference.outcome, difference.different) == ("worse", True)
    assert made.difference("downpour on 2", "no_such") is None
    assert made.of("downpour on 2")[0].worker_seconds == pytest.approx(2 * 1000 / 150)
