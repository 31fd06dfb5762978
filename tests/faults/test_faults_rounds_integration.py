"""A process is lost between rounds, while fragments have rounds of their own, with compression, and while all read a stream:
each row is in its round once. All pairs of place and victim: test_faults_simulated.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_harness import ROWS, Strike, Trial, equal, lost, recorded_once, reference, survive, task
from numbered_rows import (
    ON_THEIR_WAY,
    ROUNDS,
    STREAMING,
    counted,
    each_in_a_round,
    each_in_a_round_of_its_fragment,
    in_fragments,
    in_order,
)
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

import manyhands as mh
import plain

slow = pytest.mark.slow
LOCAL_SGD, DILOCO = ROUNDS
EXTRA = [Strike(1, "compute", call=6), Strike(0, "extra", call=2)]


@pytest.mark.parametrize(
    ("strategy", "befalls", "replaced"),
    [(LOCAL_SGD, ["kill=0@step:7:exchange"], False), pytest.param(LOCAL_SGD, EXTRA, True, marks=slow)],
)
def test_a_lost_workers_rows_are_in_the_same_round(
    strategy: str, befalls: list[str | Strike], replaced: bool, trial: Trial
) -> None:
    given = {"of": in_order(6, 11), "strategy": strategy, "survive": survive(replaced)}
    run = trial.struck(*befalls, **given)
    assert len(run.losses) == len(befalls)
    each_in_a_round(run, trial.run_dir)


@slow
@pytest.mark.parametrize(
    ("strategy", "befalls", "replaced"),
    [
        (STREAMING, EXTRA, True),
        (ON_THEIR_WAY, ["kill=1@step:4"], False),  # the mean under way is gone, what each worker had put into it is not
    ],
)
def test_a_row_is_once_in_a_round_of_each_fragment(
    strategy: str, befalls: list[str | Strike], replaced: bool, trial: Trial
) -> None:
    given = {"of": in_fragments(), "strategy": strategy, "survive": survive(replaced), "check_replicas_every": 1}
    run = trial.struck(*befalls, **given)
    if strategy == STREAMING:
        each_in_a_round_of_its_fragment(run, trial.run_dir)
    counted(run, 12)
    assert float(run.model.of.detach().min()) > 0


# -- compression: what a lost worker has yet to send goes with it, and nobody else's does ----------------------------------


def test_what_a_lost_worker_has_yet_to_send_is_reported(simulated: Callable[[], Trial]) -> None:
    """A step of each row's own: with nothing compressed any more, what another has left out enters the next step."""
    trial = simulated()
    given = {"of": in_order(6, 11), "strategy": "allreduce:compress=topk:0.02", "workers": 2}
    run = trial.train("kill=1@step:5", survive=survive(False), **given)
    missing, [loss] = 1 / 6 - run.model.of.detach(), run.losses
    # each row adds 1 / 6: of the gradients of the lost worker, half of what it left out is missing, and of the other nothing
    assert loss["left_out"] > 0
    assert torch.all(missing > -1e-9)
    assert float(missing.norm()) == pytest.approx(loss["left_out"] / 2, abs=1e-9)
    assert [f"of norm {loss['left_out']:.3g}" in message for message in trial.seen.changes] == [True]


# -- streams: each reads all of it and keeps what may be needed again ------------------------------------------------------


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
        yield from torch.arange(66)

    def readings(self) -> list[int]:
        """By process."""
        return sorted(file.read_text().count("read") for file in self._folder.iterdir())


@slow
def test_a_stream_is_read_once_by_each_process(trial: Trial) -> None:
    data, fault = Numbers(trial.folder / "readings"), "kill=0@step:6"
    given = {"of": in_order(6, 11, train_data=data, order=None), "strategy": DILOCO, "survive": survive(True)}
    run = trial.struck(fault, **given)
    each_in_a_round(run, trial.run_dir)
    assert len(data.readings()) in (3, 4)
    assert set(data.readings()) == {1}


class Rows(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(*plain.rows(ROWS), strict=True)


@slow
@pytest.mark.parametrize("kind", ["with a process", pytest.param("loader with a process", marks=pytest.mark.nightly)])
def test_streams_that_processes_read(kind: str, trial: Trial) -> None:
    fields: dict[str, Any] = {"train_data": Rows(), "loader_processes": 1}
    if kind == "loader with a process":
        fields = {"train_data": DataLoader(Rows(), batch_size=39, num_workers=1)}
    fault = "kill=1@step:4:exchange"
    of = task(schedule=None, **fields)
    run = trial.struck(fault, of=of, survive=survive(False))
    equal(run, reference(task(schedule=None, train_data=Rows())))
    recorded_once(run, trial)
    assert lost(run) == [(1, "death")]


def test_a_stream_at_their_own_pace_is_refused() -> None:
    """Each worker reads rows of its own there."""
    with pytest.raises(
        mh.Unsupported, match="downpour go at their own pace, and of a stream each reads rows of its own"
    ):
        mh.train(
            task(train_data=Rows(), schedule=None),
            workers=3,
            engine="local",
            strategy="downpour",
            survive="max_losses=1",
        )
