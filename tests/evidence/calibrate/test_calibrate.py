"""What `calibrate` refuses, before any process starts."""

import inspect
from typing import Any

import pytest
import torch

import manyhands as mh
from manyhands.cli import evidence
from manyhands.errors import BadInput, UnknownName, Unsupported
from manyhands.evidence.calibrate.calibrate import STRATEGIES, calibrated, lease_and_request
from manyhands.evidence.calibrate.observe import TickTime

pytestmark = pytest.mark.usefixtures("nothing_starts")


def task(**fields: Any) -> mh.Task:
    data = torch.zeros(64, 2), torch.zeros(64, dtype=torch.int64)
    known = {
        "model": lambda: torch.nn.Linear(2, 2),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        "train_data": data,
        "batch_size": 8,
    }
    return mh.Task.supervised(**{**known, **fields})


@pytest.mark.parametrize("workers", [1, 0, True, 2.0])
def test_one_worker_has_nothing_between_workers(workers: Any) -> None:
    with pytest.raises(BadInput, match="at least 2 workers"):
        calibrated(task(), workers=workers)


@pytest.mark.parametrize("engine", ["sim", "hosts:listen=127.0.0.1"])
def test_engines_elsewhere_are_refused(engine: str) -> None:
    with pytest.raises(Unsupported, match=f"engine {engine.partition(':')[0]} cannot do that: use engine local"):
        calibrated(task(), engine=engine)


def test_a_strategy_that_these_workers_cannot_run_is_refused() -> None:
    with pytest.raises(Unsupported, match="strategy solo runs on one worker"):
        calibrated(task(), strategies=["solo"])
    with pytest.raises(UnknownName, match="allreduce"):
        calibrated(task(), strategies=["allredduce"])


def test_too_few_steps_and_too_small_a_batch_are_refused() -> None:
    with pytest.raises(BadInput, match="steps must be a whole number of at least 16, not 3"):
        calibrated(task(), steps=3)
    with pytest.raises(BadInput, match="leaves some of the 4 workers without a row"):
        calibrated(task(batch_size=3), workers=4)


def test_the_command_tries_the_strategies_that_the_function_does() -> None:
    default = inspect.signature(evidence.calibrate).parameters["strategies"].default
    assert default == ",".join(STRATEGIES)


def test_what_a_served_tick_takes_longer_is_its_leases_and_its_two_requests() -> None:
    served, alone = TickTime(5.0, 0.75, leased=True), TickTime(3.0, 0.25, leased=False)
    assert lease_and_request(served, alone, 3.5) == (0.5, 0.5)
    assert lease_and_request(served, alone, 4.75) == (0.25, 0.0)
    assert lease_and_request(served, alone, 6.0) == (0.0, 0.0)  # a quicker run than that which was simulated
    assert lease_and_request(TickTime(5.0, 0.75, leased=False), alone, 3.5) == (0.0, 0.75)  # a stream has no leases
