"""The parts of a comparison's loop that need no trial; a repeat's trials beside solo's, against values by hand."""

from pathlib import Path

import pytest
import torch

import manyhands as mh
from manyhands.engines.local.engine import Local
from manyhands.evidence.compare.comparison import Point, Trial
from manyhands.evidence.compare.final_evaluation import CLASSES, FinalPredictions
from manyhands.evidence.compare.probe import sketch
from manyhands.evidence.compare.repeats import (
    TrialPace,
    compared_with_solo,
    cosine,
    distance,
    machine,
    processor,
    validate_every,
)
from manyhands.evidence.compare.trial import FinishedTrial

START = torch.zeros(2)


def task(**fields: object) -> mh.Task:
    return mh.Task(
        model=torch.nn.Linear(1, 1),
        loss=lambda model, batch: model(batch).mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        train_data=torch.zeros(4, 1),
        **fields,  # type: ignore[arg-type]
    )


def test_about_so_many_points_a_trial() -> None:
    for fields, ticks, validations, expected in (
        ({}, 100, 20, 5),
        ({"epochs": 3}, 41, 20, 6),
        ({"epochs": 12}, 41, 20, 25),
        ({}, 5, 20, 1),
        ({"epochs": 20}, 41, 20, "epoch"),
        ({"epochs": 39}, 41, 20, "epoch"),
        ({"epochs": 40}, 41, 20, 82),  # at every other epoch's end
        ({"epochs": 40, "max_steps": 100}, 41, 20, 5),
        ({"max_steps": 3}, 41, 20, 1),
        ({"epochs": 3}, None, 20, "epoch"),  # a stream
        ({"epochs": 3}, 41, 1, 123),
    ):
        assert validate_every(task(**fields), ticks, validations) == expected, (fields, ticks, validations)


def test_the_time_left_is_told_from_the_trials_before() -> None:
    pace = TrialPace()
    pace.left = ["solo", "gossip on 2"] * 2
    assert pace.line("solo", "repeat 1 of 2") == "trial 1 of 4: solo, repeat 1 of 2"
    pace.done("solo", 10.0)
    assert pace.line("gossip on 2", "repeat 1 of 2") == "trial 2 of 4: gossip on 2, repeat 1 of 2; about 30 s left"
    pace.done("gossip on 2", 40.0)
    assert pace.line("gossip on 2", "repeat 2 of 2") == "trial 3 of 4: gossip on 2, repeat 2 of 2; about 50 s left"
    pace.left = ["gossip on 2"] * 5  # solo's are left out
    assert pace.line("gossip on 2", "repeat 2 of 2").startswith("trial 3 of 7: ")
    assert pace.line("gossip on 2", "repeat 2 of 2").endswith("about 3.33 min left")


def test_the_machine_says_what_it_is(tmp_path: Path) -> None:
    known = machine(Local(), "cpu")
    assert {"host", "cores", "versions", "command", "processor", "engine", "device", "when"} <= set(known)
    assert known["processor"]
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some Chip: 3 GHz\nprocessor\t: 1\nmodel name\t: Some Chip\n")
    assert processor(cpuinfo) == "Some Chip: 3 GHz"
    assert processor(tmp_path / "nothing")


def finished(
    name: str, parameters: list[float] | None, *rows: int, output: tuple[int, ...] = (1, 2), failure: str = ""
) -> FinishedTrial:
    weights = torch.tensor(parameters if parameters else [0.0, 0.0])
    curve = tuple(Point(rows=n, seconds=1.0, metrics={}) for n in rows)
    return FinishedTrial(
        trial=Trial(variant=name, repeat=0, seed=0, failure=failure, curve=curve),
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
    assert (own.distance, own.cosine) == pytest.approx((4 / 3, 3 / 5))
    assert (own.agreement, own.agreement_of) == (0.5, CLASSES)
    assert [point.distance for point in own.curve] == [pytest.approx(4 / 3), None]  # solo has no point at 20 rows
    assert (solo.distance, solo.cosine, solo.agreement) == (0.0, 1.0, 1.0)
    assert [point.distance for point in solo.curve] == [0.0, 0.0]
    assert (ensemble.distance, ensemble.cosine, ensemble.agreement) == (None, None, 1.0)
    assert failed == repeat[3].trial
    mute = FinishedTrial(trial=Trial(variant="a on 2", repeat=0, seed=0), parameters=torch.ones(2))
    own, _ = compared_with_solo([mute, finished("solo", [1.0, 1.0])], "solo", START)
    assert (own.agreement, own.agreement_of, own.distance) == (None, "", 0.0)
