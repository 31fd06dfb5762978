"""Runs whose server shards have copies: a shard's primary, its backup or both are killed or stopped at each place of a run."""

import signal
from collections.abc import Callable
from typing import Any

import pytest
from fault_harness import Trial, equal, fired
from numbered_rows import in_order, trained_once

import manyhands as mh
from manyhands.engines.driver.elastic_driver import ElasticDriver
from manyhands.events import Event
from manyhands.recording.run import Run

slow = pytest.mark.slow
STEP = 4
IN_STEP = "downpour:bound=0"


class Killer(mh.Callback):
    """Kills copies of shard 0 at a place of the run, as soon as there are two of them; once, or every so many steps.

    alone: the shard has no copy. stops: SIGSTOP instead.
    """

    def __init__(
        self, roles: tuple[str, ...], place: str, every: int = 0, alone: bool = False, stops: bool = False
    ) -> None:
        self.roles, self.place, self.every, self.alone = roles, place, every, alone
        self.number = signal.SIGSTOP if stops else signal.SIGKILL
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
            self.driver._signal(process_index, self.number)
            self.killed.append(role)

    def on_start(self, event: Event) -> None:
        self._reach("start")

    def on_step(self, event: Event) -> None:
        if event.tick >= STEP:
            self._reach("step", event.tick)

    def on_notice(self, event: Event) -> None:
        if event.type == "checkpoint":
            self._reach("checkpoint")
        if event.type == "change":
            self.changes.append(event.values["message"])


Struck = Callable[..., Run]


@pytest.fixture
def struck(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> Struck:
    """A run whose driver tells the killer that it is it: a shard's process has neither steps nor phases."""
    plain, killers = ElasticDriver.__post_init__, list[Killer]()

    def begin(driver: ElasticDriver) -> None:
        plain(driver)
        for killer in killers:
            killer.driver = driver

    monkeypatch.setattr(ElasticDriver, "__post_init__", begin)

    def run(killer: Killer | None, *faults: str, **options: Any) -> Run:
        killers[:] = [] if killer is None else [killer]
        given = {"workers": 2, "survive": "copies=2", "callbacks": list(killers), "strategy": IN_STEP}
        return trial.train(*faults, **{**given, **options})

    return run


@pytest.mark.parametrize(
    ("role", "place", "strategy", "stops"),
    [
        ("primary", "step", IN_STEP, False),
        pytest.param("backup", "start", "quorum", False, marks=slow),
        pytest.param("primary", "checkpoint", "downpour:bound=0,rule=adam", False, marks=slow),
        pytest.param("primary", "step", IN_STEP, True, marks=slow),
    ],
)
def test_in_step_the_result_is_that_of_a_run_without_faults(
    role: str, place: str, strategy: str, stops: bool, struck: Struck, trial: Trial, simulated: Callable[[], Trial]
) -> None:
    killer, servers = Killer((role,), place, stops=stops), 1 + stops
    survive = "copies=2,silence_s=2" if stops else "copies=2"
    run = struck(killer, strategy=strategy, run_dir=trial.run_dir, servers=servers, survive=survive)
    wanted = simulated().train(strategy=strategy, workers=2, servers=servers, survive=None)
    assert killer.killed == [role]
    for words in ("server shard 0 has one copy", *(["sent no heartbeat for"] if stops else [])):
        assert any(words in message for message in killer.changes), words
    equal(run, wanted, tolerance=0.0)
    assert run.rows["total"] == wanted.rows["total"]
    assert [(row["tick"], row["rows"]) for row in run.history] == [(row["tick"], row["rows"]) for row in wanted.history]


@slow
def test_both_copies_lost_end_the_run_which_goes_on_from_its_checkpoint(struck: Struck, trial: Trial) -> None:
    killer, given = Killer(("primary", "backup"), "step"), {"run_dir": trial.run_dir, "checkpoint_every": 2}
    with pytest.raises(mh.WorkerFailed, match=r"No copy of server shard 0 is left.*--resume"):
        struck(killer, **given)
    assert killer.killed == ["primary", "backup"]
    equal(struck(None, resume=True, **given), struck(None), tolerance=1e-12)


@slow
def test_workers_and_primaries_are_lost_in_one_run_and_every_row_counts_once(struck: Struck) -> None:
    """The primary again and again, whenever there are two copies, and a worker between two of its steps."""
    killer, fault = Killer(("primary",), "step", every=3), "kill=1@step:4"
    given = {"survive": "max_losses=3,copies=2", "workers": 3, "strategy": "downpour:push_every=3,pull_every=3"}
    run = struck(killer, fault, of=in_order(12, 13, order=None), **given)
    assert killer.killed[:1] == ["primary"]
    fired(run, fault)
    trained_once(run, 12, (4, 6, 8, 12))


@slow
def test_a_shard_without_a_copy_is_lost_and_the_run_starts_again(struck: Struck, trial: Trial) -> None:
    """A worker's loss is survived; what the shard alone knew comes from the newest checkpoint."""
    killer, fault = Killer(("primary",), "checkpoint", alone=True), "kill=1@step:2"
    given = {"survive": "max_losses=3,max_restarts=1", "workers": 3, "strategy": "downpour", "checkpoint_every": 5}
    run = struck(killer, fault, of=in_order(12, 13, order=None), run_dir=trial.run_dir, **given)
    assert killer.killed == ["primary"]
    fired(run, fault)
    (restart,) = run.restarts
    assert restart["step"] in (5, 10)  # that of step 5 is dropped where worker 1 was lost before its part was written
    trained_once(run, 12, (4, 6, 12))
