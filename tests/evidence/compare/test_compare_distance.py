"""A repeat's trials beside solo's, against values that a hand can calculate."""

import math

import pytest
import torch

from manyhands.evidence.compare.comparison import Point, Trial
from manyhands.evidence.compare.final_evaluation import CLASSES, FinalPredictions
from manyhands.evidence.compare.probe import sketch
from manyhands.evidence.compare.repeats import compared_with_solo, cosine, distance
from manyhands.evidence.compare.trial import FinishedTrial

START = torch.zeros(2)


def finished(
    name: str, parameters: list[float] | None, *rows: int, output: tuple[int, ...] = (1, 2), failure: str = ""
) -> FinishedTrial:
    weights = torch.tensor(parameters if parameters else [0.0, 0.0])
    return FinishedTrial(
        trial=Trial(
            variant=name,
            repeat=0,
            seed=0,
            failure=failure,
            curve=tuple(Point(rows=n, seconds=1.0, metrics={}) for n in rows),
        ),
        parameters=None if parameters is None else weights,
        predictions=FinalPredictions(CLASSES, torch.tensor(output)),
        sketches={n: sketch([weights]) for n in rows},
    )


def test_distance_and_cosine_by_hand() -> None:
    own, solo = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 0.0])
    assert distance(own, solo) == pytest.approx(4 / 3)
    assert distance(solo, solo) == 0
    assert distance(own, torch.zeros(2)) is None
    assert cosine(own, solo, START) == pytest.approx(3 / 5)
    assert cosine(own, own, START) == 1.0
    assert cosine(own, -own, START) == -1.0
    assert cosine(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0]), torch.tensor([1.0, 1.0])) == pytest.approx(0.0)
    assert cosine(START, solo, START) is None


def test_every_trial_is_set_beside_the_references() -> None:
    repeat = [
        finished("gossip on 2", [3.0, 4.0], 10, 20, output=(1, 5)),
        finished("solo", [3.0, 0.0], 10, 30),
        finished("ensemble on 2", None, output=(1, 2)),
        finished("easgd on 2", [9.0, 9.0], 10, failure="it broke"),
    ]
    own, solo, ensemble, failed = compared_with_solo(repeat, "solo", START)
    assert (own.distance, own.cosine, own.agreement, own.agreement_of) == (
        pytest.approx(4 / 3),
        pytest.approx(3 / 5),
        0.5,
        CLASSES,
    )
    assert [point.distance for point in own.curve] == [pytest.approx(4 / 3), None]  # solo has no point at 20 rows
    assert (solo.distance, solo.cosine, solo.agreement) == (0.0, 1.0, 1.0)
    assert [point.distance for point in solo.curve] == [0.0, 0.0]
    assert (ensemble.distance, ensemble.cosine, ensemble.agreement) == (None, None, 1.0)
    assert failed == repeat[3].trial


def test_a_trial_that_predicts_nothing_agrees_with_nobody() -> None:
    mute = FinishedTrial(trial=Trial(variant="a on 2", repeat=0, seed=0), parameters=torch.ones(2))
    own, _ = compared_with_solo([mute, finished("solo", [1.0, 1.0])], "solo", START)
    assert (own.agreement, own.agreement_of, own.distance) == (None, "", 0.0)
    assert not math.isnan(own.distance or 0.0)
