"""Server strategies that compute while they exchange: what they are alone, what is based on what, and how long a step is."""

import itertools
from pathlib import Path
from typing import Any

import pytest

import manyhands as mh
import plain
from manyhands.engines.base import Engine
from manyhands.engines.local.engine import Local
from manyhands.engines.sim.engine import Sim
from manyhands.errors import Unsupported
from manyhands.recording import event_log

OVERLAPPING = (
    "downpour:overlap=true",
    "agn:window=1,overlap=true",
    "dynsgd:overlap=true",
    "easgd:period=1,overlap=true",
)


def train(strategy: str, engine: Engine | str, workers: int, batch_size: int = 12, **options: Any) -> mh.Run:
    return mh.train(task(batch_size), strategy=strategy, engine=engine, workers=workers, **options)


def task(batch_size: int = 12) -> mh.Task:
    return plain.task(train_data=plain.rows(60), optimizer=plain.OPTIMIZERS["sgd"], batch_size=batch_size)


def test_one_worker_is_sequential_sgd() -> None:
    """Its own updates are all that moves the center, however late it sees them there."""
    expected = train("solo", "auto", 1).parameters
    for strategy in [*OVERLAPPING[:3], "downpour:push_every=2,pull_every=3,overlap=true"]:
        assert (train(strategy, "sim", 1).parameters - expected).abs().max() < 1e-12, strategy


def times_of(strategy: str, compute_s: float, folder: Path) -> list[float]:
    """When worker 1 made each step of the first epoch but the first three; 20 ms of latency."""
    engine = Sim(network="latency=20ms", compute=f"step={compute_s},row=0")
    train(strategy, engine, 2, run_dir=folder, batch_size=4)
    steps = [event for event in event_log.read(folder / event_log.FILE) if event.type == "step" and event.rank == 1]
    return [event.time_s for event in steps if event.values["epoch"] == 0][3:-1]


def test_a_step_takes_the_longer_of_computing_and_one_round_trip(tmp_path: Path) -> None:
    """40 ms of a push and the pull that follows it; without overlap it waits for both."""
    for strategy in OVERLAPPING:
        for compute_s, step_s in ((0.016, 0.040), (0.060, 0.060)):
            times = times_of(strategy, compute_s, tmp_path / f"{strategy[:4]}{compute_s}")
            assert len(times) > 8
            assert [b - a for a, b in itertools.pairwise(times)] == pytest.approx([step_s] * (len(times) - 1)), strategy
    times = times_of("downpour", 0.016, tmp_path / "run")
    assert times[5] - times[4] == pytest.approx(0.096)


@pytest.mark.parametrize(
    ("strategy", "engine"), [("agn:window=1,overlap=true", "sim"), ("easgd:period=1,overlap=true", "local")]
)
def test_a_run_is_replayed_bit_for_bit(strategy: str, engine: str, local: Local, tmp_path: Path) -> None:
    place = local if engine == "local" else Sim(network="latency=2ms,bandwidth=1Mbit", compute="jitter=lognormal:0.5")
    run = train(strategy, place, 3, run_dir=tmp_path / "run", servers=2)
    assert run.rows["total"] == 120
    replayed = mh.replay(tmp_path / "run", task=task())
    assert replayed.identical, replayed


def test_staleness_counts_what_really_passed() -> None:
    """Two workers of about one speed. A push comes 40 ms after the pull of its gradient's center where it waits, in which the
    other has made one version at most, and 80 ms after it with overlap, in which it has made two."""
    engine = Sim(network="latency=20ms", compute="step=1ms,row=0,1=1.5x")
    waits, overlaps = (train(f"dynsgd{more}", engine, 2, batch_size=2) for more in ("", ":overlap=true"))
    assert max(waits.staleness) == 1
    assert max(overlaps.staleness, key=overlaps.staleness.__getitem__) == 2


def test_what_cannot_be() -> None:

    for survive in ("max_losses=1", "copies=2"):
        with pytest.raises(Unsupported, match="with overlap=true nobody knows"):
            train("downpour:overlap=true", "local", 2, survive=survive)
