"""Runs whose server shards have copies: a shard's primary, its backup or both are killed at each place of a run."""

from __future__ import annotations

import signal
from typing import Any, ClassVar

import numbered_rows
import pytest
import torch
from fault_harness import Trial, equal, fired, task
from torch import Tensor, nn

import manyhands as mh
from manyhands.engines.driver.elastic_driver import ElasticDriver
from manyhands.events import Event
from manyhands.recording.run import Run

STEP = 4


class Killer(mh.Callback):
    """Kills copies of shard 0 at a place of the run, as soon as there are two of them; once, or every so many steps."""

    def __init__(self, roles: tuple[str, ...], place: str, every: int = 0, alone: bool = False) -> None:
        """alone: the shard has no copy."""
        self.roles, self.place, self.every, self.alone = roles, place, every, alone
        self.driver: Any = None
        self.changes: list[str] = []
        self.killed: list[str] = []
        self._last = -1

    def _reach(self, place: str, step: int = 0) -> None:
        copies = self.driver.copies
        again = self.every and step >= self._last + self.every
        if place != self.place or (self.killed and not again):
            return
        if not self.alone and copies.copy_of(0, "backup") is None:
            return
        self._last = step
        found = [(role, copies.copy_of(0, role)) for role in self.roles]
        for role, process_index in found:
            self.driver._signal(process_index, signal.SIGKILL)
            self.killed.append(role)

    def on_start(self, event: Event) -> None:
        self._reach("start")

    def on_step(self, event: Event) -> None:
        if event.tick >= STEP:
            self._reach("step", event.tick)

    def on_validation(self, event: Event) -> None:
        self._reach("validation")

    def on_epoch(self, event: Event) -> None:
        self._reach("epoch")

    def on_notice(self, event: Event) -> None:
        if event.type == "checkpoint":
            self._reach("checkpoint")
        if event.type == "change":
            self.changes.append(event.values["message"])


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver of a run tells its killers that it is it."""
    plain = ElasticDriver.__post_init__

    def begin(driver: ElasticDriver) -> None:
        plain(driver)
        for killer in Killers.there:
            killer.driver = driver

    monkeypatch.setattr(ElasticDriver, "__post_init__", begin)


class Killers:
    there: ClassVar[list[Killer]] = []


def struck(trial: Trial, killer: Killer | None, of: mh.Task | None = None, **options: Any) -> Run:
    Killers.there = [] if killer is None else [killer]
    callbacks = [] if killer is None else [killer]
    given: dict[str, Any] = {
        "workers": 2,
        "survive": "copies=2",
        "callbacks": callbacks,
        "strategy": "downpour:bound=0",
    }
    return trial.train(of=of, **{**given, **options})


@pytest.fixture(scope="session")
def undisturbed(own_local: Any) -> dict[str, Run]:
    return {}


def fault_free(undisturbed: dict[str, Run], trial: Trial, strategy: str) -> Run:
    if strategy not in undisturbed:
        undisturbed[strategy] = struck(trial, None, strategy=strategy)
    return undisturbed[strategy]


@pytest.mark.parametrize(
    ("role", "place", "strategy"),
    [
        ("primary", "step", "downpour:bound=0"),
        pytest.param("backup", "step", "downpour:bound=0", marks=pytest.mark.slow),
        *(
            pytest.param(role, place, "downpour:bound=0", marks=pytest.mark.slow)
            for role in ("primary", "backup")
            for place in ("start", "validation", "checkpoint", "epoch")
        ),
        pytest.param("primary", "step", "quorum", marks=pytest.mark.slow),
        pytest.param("primary", "step", "eamsgd:bound=0", marks=pytest.mark.slow),
        pytest.param("primary", "step", "downpour:bound=0,rule=adam", marks=pytest.mark.slow),
    ],
)
def test_in_step_the_result_is_that_of_a_run_without_faults(
    role: str, place: str, strategy: str, trial: Trial, undisturbed: dict[str, Run]
) -> None:
    wanted = fault_free(undisturbed, trial, strategy)
    killer = Killer((role,), place)
    run = struck(trial, killer, strategy=strategy, run_dir=trial.run_dir)
    assert killer.killed == [role]
    assert any("server shard 0 has one copy" in message for message in killer.changes)
    equal(run, wanted, tolerance=0.0)
    assert run.rows["total"] == wanted.rows["total"]
    assert [(row["tick"], row["rows"]) for row in run.history] == [(row["tick"], row["rows"]) for row in wanted.history]


class Counting(nn.Module):
    """A weight for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(240, dtype=torch.float64))


def count_rows(model: nn.Module, batch: Any) -> Tensor:
    """A step of rate 1 adds 1/k to the weights of a slice's k rows."""
    rows = batch[0].flatten().long()
    return -model.counts[rows].mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "role"),
    [
        ("downpour", "primary"),
        pytest.param("downpour", "backup", marks=pytest.mark.slow),
        pytest.param("downpour:bound=2", "primary", marks=pytest.mark.slow),
        pytest.param("downpour:push_every=3,pull_every=3", "primary", marks=pytest.mark.slow),
    ],
)
def test_at_their_own_pace_every_row_counts_once_though_copies_are_killed(
    strategy: str, role: str, trial: Trial
) -> None:
    """Parameters outlive the process that served them: each has a replica (ps-lite#68 asks for one)."""
    rows = torch.arange(240, dtype=torch.float64).reshape(-1, 1)
    counting = task(
        train_data=(rows, torch.zeros(240)),
        validation_data=None,
        test_data=None,
        model=Counting,
        loss=count_rows,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
        schedule=None,
        batch_size=4,
        epochs=4,
    )
    killer = Killer((role,), "step", every=40)
    run = struck(trial, killer, counting, strategy=strategy)
    assert len(killer.killed) >= 2
    counted = run.model.state_dict()["counts"] * 2  # of two workers' slices of two rows
    assert torch.allclose(counted, torch.full((240,), 4.0, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.slow
def test_both_copies_lost_end_the_run_which_goes_on_from_its_checkpoint(
    trial: Trial, undisturbed: dict[str, Run]
) -> None:
    killer = Killer(("primary", "backup"), "step")
    with pytest.raises(mh.WorkerFailed, match=r"No copy of server shard 0 is left.*--resume"):
        struck(trial, killer, run_dir=trial.run_dir, checkpoint_every=2)
    assert killer.killed == ["primary", "backup"]
    resumed = struck(trial, None, run_dir=trial.run_dir, checkpoint_every=2, resume=True)
    equal(resumed, fault_free(undisturbed, trial, "downpour:bound=0"), tolerance=1e-12)


BATCH, ROWS = 12, 12 * 13


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        "downpour",
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in (
                "downpour:bound=2",
                "downpour:push_every=3,pull_every=3",
                "downpour:bound=0",
                "downpour:bound=0,push_every=3,pull_every=3",
                "quorum",
            )
        ),
    ],
)
def test_workers_and_primaries_are_lost_in_one_run_and_every_row_counts_once(strategy: str, trial: Trial) -> None:
    """The primary again and again, whenever there are two copies, and a worker between two of its steps."""
    killer, fault = Killer(("primary",), "step", every=3), "kill=1@step:4"
    of = numbered_rows.task(ROWS, BATCH, epochs=1)
    options = {"survive": "max_losses=3,copies=2", "workers": 3, "faults": fault, "strategy": strategy}
    run = struck(trial, killer, of, **options)
    assert killer.killed[:1] == ["primary"]
    fired(run, fault)
    numbered_rows.trained_once(run, BATCH, (4, 6, 8, 12))


@pytest.mark.slow
def test_a_shard_without_a_copy_is_lost_and_the_run_starts_again(trial: Trial) -> None:
    """A worker's loss is survived; what the shard alone knew comes from the newest checkpoint."""
    fault = "kill=1@step:2"
    of = numbered_rows.task(ROWS, BATCH, epochs=1)
    killer = Killer(("primary",), "checkpoint", alone=True)
    options = {"survive": "max_losses=3,max_restarts=1", "workers": 3, "faults": fault}
    run = struck(trial, killer, of, strategy="downpour", run_dir=trial.run_dir, checkpoint_every=5, **options)
    assert killer.killed == ["primary"]
    fired(run, fault)
    (restart,) = run.restarts
    assert restart["step"] in (5, 10)  # that of step 5 is dropped where worker 1 was lost before its part was written
    numbered_rows.trained_once(run, BATCH, (4, 6, 12))
