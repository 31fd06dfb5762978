"""What compare() refuses, before any process starts."""

from typing import Any

import pytest
import torch

import manyhands as mh
from manyhands.engines.torchrun.engine import Torchrun
from manyhands.errors import BadInput, UnknownName, Unsupported
from manyhands.evidence.compare.compare import compare

pytestmark = pytest.mark.usefixtures("nothing_starts")


def task(**fields: Any) -> mh.Task:
    data = torch.zeros(64, 2), torch.zeros(64, dtype=torch.int64)
    known = {
        "model": lambda: torch.nn.Linear(2, 2),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        "train_data": data,
        "test_data": data,
        "batch_size": 4,
    }
    return mh.Task.supervised(**{**known, **fields})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": ()}, "workers must be at least one number"),
        ({"workers": (0,)}, "workers must be a whole number of at least 1, not 0"),
        ({"workers": 2}, "workers must be several numbers"),
        ({"workers": "12"}, "workers must be several numbers"),
        ({"repeats": 0}, "repeats must be a whole number"),
        ({"validations": 2.5}, "validations must be a whole number"),
        ({"time_margin": -0.1}, "time_margin must be a share"),
        ({"metric_margin": float("nan")}, "metric_margin must be a share"),
        ({"target": "accuracy"}, "target must be METRIC=VALUE"),
        ({"target": "validation_loss=1"}, "needs validation_data"),
        ({"threads_per_worker": 0}, "threads_per_worker must be a whole number"),
        ({"servers": 0}, "servers must be a whole number"),
        ({"timeout_s": 0}, "timeout_s must be a positive number"),
        ({"strategies": ["solo"], "engine": "sim"}, "nothing to compare solo with"),
        ({"strategies": [3]}, "strategy must be a Strategy or a string"),
        ({"epochs": 0}, "epochs must be a whole number"),
    ],
)
def test_wrong_values_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        compare(task(), **options)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UnknownName, match="no strategy 'allredduce'"):
        compare(task(), strategies=["allredduce"])
    with pytest.raises(UnknownName, match="no device"):
        compare(task(), device="tpu")
    with pytest.raises(UnknownName, match="a task has no field 'epoch'"):
        compare(task(), epoch=3)


def test_all_variants_that_cannot_be_are_in_one_message() -> None:
    with pytest.raises(
        BadInput, match=r"hogwild on 2: .*one machine.* hogwild on 5: .* allreduce on 5: .*without a row"
    ):
        compare(task(), strategies=["hogwild", "allreduce"], workers=(2, 5), engine="sim")


def test_workers_that_a_launcher_started_are_refused() -> None:
    with pytest.raises(Unsupported, match="outside of manyhands run and torchrun"):
        compare(task(), engine=Torchrun())
