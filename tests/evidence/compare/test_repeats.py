"""The parts of a comparison's loop that need no trial."""

from pathlib import Path

import pytest
import torch

import manyhands as mh
from manyhands.engines.local.engine import Local
from manyhands.evidence.compare.repeats import TrialPace, machine, processor, validate_every


def task(**fields: object) -> mh.Task:
    return mh.Task(
        model=torch.nn.Linear(1, 1),
        loss=lambda model, batch: model(batch).mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        train_data=torch.zeros(4, 1),
        **fields,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("fields", "ticks", "validations", "expected"),
    [
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
    ],
)
def test_about_so_many_points_a_trial(
    fields: dict[str, int], ticks: int | None, validations: int, expected: str | int
) -> None:
    assert validate_every(task(**fields), ticks, validations) == expected


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
