"""Whole trainings of a tiny model under schedules of what goes wrong: each keeps its promises, or ends with an error that names the reason."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sim_chaos import checked
from torch import Tensor, nn

import manyhands as mh
from manyhands.data.leases import Lease, Leases
from manyhands.engines.sim.simulation import Simulation
from manyhands.errors import ManyhandsError, PeerLost, WorkerFailed
from manyhands.server.gate import Gate
from manyhands.strategies import strategy_of
from manyhands.worker import current

SYNCHRONOUS = (
    "allreduce",
    "local-sgd:period=2",
    "downpour:bound=0",
    "quorum",
    "easgd:via=group",
    "diloco:period=2",
    "gossip",
)
ASYNCHRONOUS = ("downpour", "downpour:bound=1", "dynsgd:window=2,bound=2", "easgd:period=2,bound=0", "easgd", "quorum:backups=1",
                "gossip:graph=pairs", "diloco:period=2,via=server")  # fmt: skip
ROWS, EPOCHS, BATCH = 29, 2, 4
SCHEDULES = 60
SLACK_S = 20.0  # beyond what the schedule itself takes


@dataclass(frozen=True)
class TrainingSchedule:
    """A training, and what happens to it."""

    strategy: str = "allreduce"
    workers: int = 3
    servers: int = 1
    compute: str = "row=0.1"
    network: str = ""
    faults: str = ""
    seed: int = 0

    @property
    def engine(self) -> str:
        return f"sim:compute='{self.compute}',network='{self.network}',faults='{self.faults}',seed={self.seed}"


class Cubic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor([0.5, -1.0, 1.5], dtype=torch.float64))


def _rows() -> Tensor:
    return torch.randn(ROWS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Watch:
    """Sees every gradient of all workers, in the order in which they begin."""

    def __init__(self, schedule: TrainingSchedule) -> None:
        self.bound = getattr(strategy_of(schedule.strategy), "bound", None)
        self.workers = schedule.workers
        self.started = [0] * schedule.workers
        self.slices = EPOCHS * -(-ROWS // BATCH) * schedule.workers

    def loss(self, model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        worker = current()
        assert worker is not None
        self._check_bound(worker.rank)
        self.started[worker.rank] += 1
        return ((batch[0] - model.x) ** 2).sum(dim=1).mean() / 4

    def _check_bound(self, rank: int) -> None:
        """Who has finished c ticks begins another only when the slowest has finished c - bound; not at the end, where some have none left."""
        if not self.bound or self._near_the_end():
            return
        done = self.started[rank]
        assert done - self.bound <= min(self.started), (
            f"worker {rank} begins tick {done} with {self.started} begun by all"
        )

    def _near_the_end(self) -> bool:
        """An epoch's slices are handed out, or as good as: whoever finds none left waits for the others."""
        epoch = self.slices // EPOCHS
        return sum(self.started) % epoch >= epoch - self.workers - 2 or sum(self.started) >= epoch


def train(schedule: TrainingSchedule, watch: Watch | None = None) -> mh.Run:
    return mh.train(
        strategy=schedule.strategy, engine=schedule.engine, workers=schedule.workers, servers=schedule.servers,
        threads_per_worker=1, model=Cubic, loss=(watch or Watch(schedule)).loss, train_data=(_rows(),),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1), batch_size=BATCH, epochs=EPOCHS,
    )  # fmt: skip


@cache
def undisturbed(strategy: str, workers: int) -> Tensor:
    return train(TrainingSchedule(strategy=strategy, workers=workers)).parameters


def check_training(schedule: TrainingSchedule) -> None:
    """What each schedule must keep."""
    try:
        run = train(schedule, Watch(schedule))
    except (WorkerFailed, PeerLost) as error:
        check_error(schedule, error)
        return
    assert run.rows["total"] == EPOCHS * ROWS
    assert sum(run.rows["workers"]) == EPOCHS * ROWS
    assert run.rows["unused"] == 0 or "backups" in schedule.strategy
    assert run.parameters.isfinite().all()
    assert run.seconds <= SLACK_S + longest(schedule)
    if schedule.strategy in SYNCHRONOUS:
        assert torch.equal(run.parameters, undisturbed(schedule.strategy, schedule.workers))


def check_error(schedule: TrainingSchedule, error: WorkerFailed | PeerLost) -> None:
    """It names one that was to die."""
    killed = re.findall(r"kill=(\w+)@", schedule.faults)
    if isinstance(error, WorkerFailed):
        assert str(error.rank) in killed, f"worker {error.rank} was not to die: {error}"
        lost_at = re.search(r"as faults= asks for.*declared lost at ([\d.]+) s", str(error))
        assert lost_at is not None, f"it died of something else: {error}"
        assert float(lost_at[1]) <= SLACK_S + longest(schedule), f"nobody heard of it in time: {error}"
    else:
        assert any(name in str(error).replace(" ", "") for name in killed if name.startswith("shard")), (
            f"who is lost? {error}"
        )


def longest(schedule: TrainingSchedule) -> float:
    """Seconds that one worker alone would take, and all that stands still."""
    alone = EPOCHS * ROWS * 0.1 * max([1.0, *(float(x) for x in re.findall(r"=([\d.]+)x", schedule.compute))]) * 4
    return alone + sum(float(x) for x in re.findall(r"\+([\d.]+)", schedule.faults))


# -- what is searched ------------------------------------------------------------------------------------------------

_MOMENTS = st.sampled_from(["step:0", "step:1", "step:3", "step:5", "0.05s", "0.5s", "1.2s", "3s"])
_TIMES = st.sampled_from(["0.05s", "0.3s", "0.9s", "2.5s"])


@st.composite
def _schedules(draw: st.DrawFn) -> TrainingSchedule:
    workers, servers = draw(st.integers(2, 4)), draw(st.integers(1, 2))
    strategy = draw(st.sampled_from(SYNCHRONOUS + ASYNCHRONOUS))
    spec = strategy_of(strategy).server()
    servers = 1 if spec is not None and spec.one_shard else servers
    shards = 0 if spec is None else servers
    faults = []
    for _ in range(draw(st.integers(0, 3))):
        what = draw(st.sampled_from(["pause", "pause", "pause", "kill"]))
        faults.append(f"{what}={draw(st.integers(0, workers - 1))}@{draw(_MOMENTS)}{'+0.7' if what == 'pause' else ''}")
    if shards and draw(st.booleans()):
        what = draw(st.sampled_from(["pause", "restart", "restart", "kill"]))
        faults.append(
            f"{what}=shard{draw(st.integers(0, shards - 1))}@{draw(_TIMES)}{'' if what == 'kill' else '+0.6'}"
        )
    if shards and draw(st.booleans()):
        probability = draw(st.sampled_from(["0.05", "0.2"]))
        faults += [
            f"drop={probability}",
            f"duplicate={probability}",
            f"delay={probability}:0.05",
            f"reorder={probability}",
            "retry=0.1",
        ]
    slow = draw(st.sampled_from(["", f",{workers - 1}=5x", ",0=3x"]))
    return TrainingSchedule(
        strategy=strategy,
        workers=workers,
        servers=servers,
        compute=f"row=0.1,jitter={draw(st.sampled_from(['none', 'exponential']))}{slow}",
        network=draw(st.sampled_from(["", "latency=10ms,bandwidth=1e5"])),
        faults=",".join(faults),
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.slow
@settings(
    max_examples=SCHEDULES, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
@given(_schedules())
def test_trainings_keep_their_promises_under_any_schedule(schedule: TrainingSchedule) -> None:
    checked(check_training, schedule)


def test_a_failure_says_how_to_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(schedule: TrainingSchedule, watch: Any = None) -> mh.Run:
        raise PeerLost(0, "host0", "barrier", 0, 0.0, "is gone")

    monkeypatch.setitem(globals(), "train", fails)
    schedule = TrainingSchedule(strategy="downpour:bound=1", faults="kill=1@step:3")
    with pytest.raises(AssertionError) as raised:
        checked(check_training, schedule)
    (line,) = raised.value.__notes__
    with pytest.raises(AssertionError, match="who is lost"):
        eval(line.removeprefix("repeat with: "))


def planted_gate(monkeypatch: pytest.MonkeyPatch) -> TrainingSchedule:
    monkeypatch.setattr(Gate, "_may_go", lambda gate, worker, slowest: True)
    return TrainingSchedule(strategy="downpour:bound=1", compute="row=0.1,2=5x")


def planted_loss(monkeypatch: pytest.MonkeyPatch) -> TrainingSchedule:
    """One slice is handed out to nobody."""
    original = Leases._next

    def loses(leases: Leases, rank: int) -> Any:
        answer = original(leases, rank)
        return original(leases, rank) if isinstance(answer, Lease) and answer.handed == 3 else answer

    monkeypatch.setattr(Leases, "_next", loses)
    return TrainingSchedule(strategy="downpour")


def planted_silence(monkeypatch: pytest.MonkeyPatch) -> TrainingSchedule:
    """Nobody says that a worker has died."""
    monkeypatch.setattr(Simulation, "_ended", lambda simulation, program: None)
    return TrainingSchedule(strategy="local-sgd:period=2", faults="kill=1@step:2")


@pytest.mark.parametrize("plant", [planted_gate, planted_loss, planted_silence])
def test_a_planted_bug_is_found(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = plant(monkeypatch)
    with pytest.raises((AssertionError, ManyhandsError)):
        check_training(schedule)
