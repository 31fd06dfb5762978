"""What `calibrate` refuses, before any process starts; seconds of leases and requests."""

import inspect
from typing import Any

import pytest
import torch

import manyhands as mh
from manyhands.cli import evidence
from manyhands.errors import BadInput, UnknownName, Unsupported
from manyhands.evidence.calibrate.calibrate import STRATEGIES, calibrated, lease_and_request
from manyhands.evidence.calibrate.observe import TickTime


def task(**fields: Any) -> mh.Task:
    data = torch.zeros(64, 2), torch.zeros(64, dtype=torch.int64)
    known = {
        "model": lambda: torch.nn.Linear(2, 2),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        "train_data": data,
        "batch_size": 8,
    }
    return mh.Task.supervised(**{**known, **fields})


def test_what_cannot_be_is_refused(nothing_starts: None) -> None:
    for fields, options, error, words in (
        *(({}, {"workers": workers}, BadInput, "at least 2 workers") for workers in (1, 0, True, 2.0)),
        ({}, {"engine": "sim"}, Unsupported, "engine sim cannot do that: use engine local"),
        ({}, {"engine": "hosts:listen=127.0.0.1"}, Unsupported, "engine hosts cannot do that: use engine local"),
        ({}, {"strategies": ["solo"]}, Unsupported, "strategy solo runs on one worker"),
        ({}, {"strategies": ["allredduce"]}, UnknownName, "allreduce"),
        ({}, {"steps": 3}, BadInput, "steps must be a whole number of at least 16, not 3"),
        ({"batch_size": 3}, {"workers": 4}, BadInput, "leaves some of the 4 workers without a row"),
    ):
        with pytest.raises(error, match=words):
            calibrated(task(**fields), **options)
    default = inspect.signature(evidence.calibrate).parameters["strategies"].default
    assert default == ",".join(STRATEGIES)  # the command's


def test_what_a_served_tick_takes_longer_is_its_leases_and_its_two_requests() -> None:
    served, alone = TickTime(5.0, 0.75, leased=True), TickTime(3.0, 0.25, leased=False)
    assert lease_and_request(served, alone, 3.5) == (0.5, 0.5)
    assert lease_and_request(served, alone, 4.75) == (0.25, 0.0)
    assert lease_and_request(served, alone, 6.0) == (0.0, 0.0)  # a quicker run than that which was simulated
    assert lease_and_request(TickTime(5.0, 0.75, leased=False), alone, 3.5) == (0.0, 0.75)  # a stream has no leases
