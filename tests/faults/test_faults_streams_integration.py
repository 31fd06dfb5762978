"""A worker is lost while all read a stream: each reads it whole and keeps what may be needed again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_harness import (
    GLOBAL_ROWS,
    ROWS,
    Patient,
    Strike,
    Trial,
    equal,
    fired,
    recorded_once,
    reference,
    task,
)
from test_faults_rounds_integration import ROWS as NUMBERS
from test_faults_rounds_integration import STRATEGIES, check_counts
from test_faults_rounds_integration import task as rows_in_order
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

import manyhands as mh
import plain

slow = pytest.mark.slow


class Numbers(IterableDataset[Tensor]):
    """Row numbers; it says in a folder how often it was read. Who takes shards sees others."""

    num_shards = 8

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()

    def shard(self, num_shards: int, index: int) -> Numbers:
        raise AssertionError("shards are read by all")

    def __iter__(self) -> Iterator[Tensor]:
        with (self._folder / str(os.getpid())).open("a") as file:
            file.write("read ")
        yield from torch.arange(NUMBERS)

    def readings(self) -> list[int]:
        """By process."""
        return sorted(file.read_text().count("read") for file in self._folder.iterdir())


class Rows(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(*plain.rows(ROWS), strict=True)


def of_rows() -> Iterator[tuple[Tensor, Tensor]]:
    """A generator, which can be read once."""
    yield from zip(*plain.rows(ROWS), strict=True)


def streamed(**fields: Any) -> mh.Task:
    return task(**{"train_data": of_rows, "schedule": None, **fields})


PHASES = {
    "compute": "kill=1@step:4",
    "exchange": "kill=0@step:4:exchange",
    "commit": "kill=1@step:4:commit",
    "first step": "kill=0@step:0",
    "epoch's last step": "kill=0@step:5:exchange",
}


@pytest.mark.parametrize("replaced", [pytest.param(True, marks=slow), False])
@pytest.mark.parametrize("when", [pytest.param(one, marks=() if one == "exchange" else slow) for one in PHASES])
def test_allreduce_equals_one_worker(when: str, replaced: bool, trial: Trial) -> None:
    fault = PHASES[when]
    loss = Patient(call=6) if replaced else plain.cross_entropy
    survive = f"max_losses=1,replace={str(replaced).lower()}"
    run = trial.train(of=streamed(loss=loss), faults=fault, survive=survive, run_dir=trial.run_dir)
    fired(run, fault)
    equal(run, reference(streamed()))
    recorded_once(run, trial.seen, trial.run_dir, GLOBAL_ROWS)


@pytest.mark.slow
def test_a_step_is_made_again_from_the_rows_that_are_kept(trial: Trial) -> None:
    """The others have read the stream once, and none its shards."""
    data = Numbers(trial.folder / "readings")
    fault = "kill=1@step:4:exchange"
    run = trial.train(
        of=rows_in_order(train_data=data, order=None),
        faults=fault,
        survive="max_losses=1,replace=false",
        run_dir=trial.run_dir,
    )
    fired(run, fault)
    assert data.readings() == [1, 1, 1]
    check_counts(run, trial.run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("replaced", [pytest.param(True, marks=slow), False])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=["local-sgd", "diloco"])
@pytest.mark.parametrize(
    "fault",
    [
        "kill=1@step:6",
        *(pytest.param(one, marks=slow) for one in ("kill=0@step:7:exchange", "kill=2@step:0", "kill=1@step:10")),
    ],
)
def test_a_lost_workers_rows_are_in_the_same_round(fault: str, strategy: str, replaced: bool, trial: Trial) -> None:
    data = Numbers(trial.folder / "readings")
    survive = f"max_losses=1,replace={str(replaced).lower()}"
    run = trial.train(
        of=rows_in_order(train_data=data, order=None),
        faults=fault,
        strategy=strategy,
        survive=survive,
        run_dir=trial.run_dir,
    )
    fired(run, fault)
    check_counts(run, trial.run_dir)
    assert set(data.readings()) == {1}


@slow
@pytest.mark.parametrize("strategy", STRATEGIES, ids=["local-sgd", "diloco"])
@pytest.mark.parametrize(
    "strikes",
    [
        [Strike(1, "before complete", call=3)],
        [Strike(1, "in complete", call=3)],
        [Strike(1, "before backward", call=7), Strike(0, "before step_extra", call=2)],
    ],
    ids=["with the epoch's result", "when all have the epoch's result", "with another's rows"],
)
def test_a_worker_is_lost_while_a_round_is_closed(strikes: list[Strike], strategy: str, trial: Trial) -> None:
    data = Numbers(trial.folder / "readings")
    run = trial.train(*strikes, of=rows_in_order(train_data=data, order=None), strategy=strategy, run_dir=trial.run_dir)
    fired(run, *strikes)
    check_counts(run, trial.run_dir)


@pytest.mark.slow
@pytest.mark.parametrize(
    "data",
    [
        DataLoader(Rows(), batch_size=39),
        pytest.param(DataLoader(Rows(), batch_size=39, num_workers=1), marks=slow),
        pytest.param(Rows(), marks=slow),
    ],
    ids=["loader", "loader with a process", "with a process"],
)
def test_streams_of_every_kind(data: Any, trial: Trial) -> None:
    fault = "kill=1@step:4:exchange"
    own = {} if isinstance(data, DataLoader) else {"loader_processes": 1}
    of = streamed(train_data=data, **own)
    run = trial.train(of=of, faults=fault, survive="max_losses=1,replace=false", run_dir=trial.run_dir)
    fired(run, fault)
    equal(run, reference(streamed()))
    recorded_once(run, trial.seen, trial.run_dir, GLOBAL_ROWS)


@pytest.mark.parametrize("strategy", ["allreduce", pytest.param("local-sgd:period=2", marks=slow)])
def test_the_same_bits_as_simulated(strategy: str, trial: Trial) -> None:
    faults, survive = "kill=0@step:1,kill=2@step:5", "max_losses=3,replace=false"
    run = trial.train(of=streamed(), faults=faults, strategy=strategy, survive=survive)
    fired(run, *faults.split(","))
    engine = f"sim:compute=step=100ms,faults='{faults},notice=10ms'"
    simulated = mh.train(streamed(), engine=engine, workers=3, strategy=strategy, survive=survive)
    states = run.model.state_dict(), simulated.model.state_dict()
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name


def test_own_pace_is_refused() -> None:
    """Each worker reads rows of its own there."""
    of = streamed(train_data=Rows())
    with pytest.raises(
        mh.Unsupported, match="downpour go at their own pace, and of a stream each reads rows of its own"
    ):
        mh.train(of, workers=3, engine="local", strategy="downpour", survive="max_losses=1")
