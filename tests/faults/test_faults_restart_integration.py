"""A run that cannot go on starts again from its newest checkpoint: one history, each row once, the result of a run without
faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fault_harness import (
    GLOBAL_ROWS,
    Strike,
    Trial,
    equal,
    fired,
    raise_memory_error,
    raise_value_error,
    reference,
    task,
)

import manyhands as mh
from manyhands.checkpoint import launch_lock
from manyhands.events import Event
from manyhands.recording import event_log
from manyhands.recording.run import Run

slow = pytest.mark.slow
STEP = "before backward"


def once_in_the_end(run: Run, run_dir: Path) -> None:
    """Each step counts once, with the rows of its global batch; the last launch wrote the checkpoints."""
    steps = [(tick, rows) for tick, rows in enumerate(GLOBAL_ROWS)]
    assert run.rows["total"] == sum(GLOBAL_ROWS)
    assert [(row["tick"], row["rows"]) for row in run.history] == steps
    assert [(row["tick"], row["rows"]) for row in mh.read_history(run_dir)] == steps
    assert [row["step"] for row in run.history] == list(range(1, 1 + len(steps)))
    claim = launch_lock.claim_in(run_dir)
    assert claim is not None
    assert claim.number == 1 + len(run.restarts)


def restarted_from(run: Run) -> list[tuple[int, str]]:
    return [(one["step"], one["cause"]) for one in run.restarts]


class Patience(mh.Callback):
    """Counts validations, and remembers that in checkpoints."""

    def __init__(self) -> None:
        self.starts, self.seen, self.ends = 0, 0, list[str]()

    def on_start(self, event: Event) -> None:
        self.starts += 1

    def on_validation(self, event: Event) -> None:
        self.seen += 1

    def on_end(self, event: Event) -> None:
        self.ends.append(event.type)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


@pytest.mark.parametrize(
    ("survive", "step"),
    [
        ("max_restarts=1", 7),  # workers are as without survive
        pytest.param("max_restarts=1,replace=false", 7, marks=slow),  # members may change, and none may be lost
        pytest.param("max_restarts=1", 1, marks=slow),  # there is no checkpoint yet
    ],
)
def test_a_loss_is_a_restart(survive: str, step: int, trial: Trial, one_worker: Run) -> None:
    """Epochs, validations and callbacks are those of one run (Ray resumed at epoch 1: ray#46814)."""
    counts, fault = Patience(), f"kill=1@step:{step}"
    run = trial.train(faults=fault, survive=survive, run_dir=trial.run_dir, callbacks=[trial.seen, counts])
    fired(run, fault)
    (start, cause), *others = restarted_from(run)
    assert (cause, others) == ("death", [])
    # where members may change, the newest checkpoint is written beside training, and is dropped with the lost worker
    assert start in ([step // 3 * 3] if survive == "max_restarts=1" else [step // 3 * 3, step // 3 * 3 - 3])
    assert (run.losses, run.generations) == ([], 2)
    equal(run, one_worker)
    once_in_the_end(run, trial.run_dir)
    assert trial.seen.epochs == [*range(1, 1 + step // 3), *range(1 + start // 3, 4)]
    assert trial.seen.ends == ["end"]
    assert (counts.starts, counts.seen, counts.ends) == (1, 3, ["end"])
    assert 0 < run.goodput["goodput"] < 1
    events = list(event_log.read(trial.run_dir / event_log.FILE))
    restart = [event for event in events if event.type == "change"]
    assert [(event.values["kind"], event.step) for event in restart] == [("restart", start)]
    assert [event.values["launch"] for event in events if event.type == "start"] == [1, 2]


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [
        pytest.param("ensemble", 2, marks=slow),
        pytest.param("solo", 1, marks=slow),
        pytest.param("local-sgd:period=end", 2, marks=slow),
        pytest.param("downpour", 2, marks=slow),
        pytest.param("hogwild", 2, marks=slow),
    ],
)
def test_a_strategy_that_cannot_lose_a_worker_starts_again(strategy: str, workers: int, trial: Trial) -> None:
    fault = f"kill={workers - 1}@step:4"
    given: dict[str, Any] = {"strategy": strategy, "workers": workers}
    of = task(epochs=4, batch_size=20)
    run = trial.train(faults=fault, survive="max_restarts=1", of=of, run_dir=trial.run_dir, **given)
    fired(run, fault)
    assert len(run.restarts) == 1
    assert run.rows["total"] == 4 * 100
    if strategy not in ("downpour", "hogwild"):  # they follow the order of what happens
        other = mh.train(of, engine=trial.local, **given)
        equal(run, other)


@pytest.mark.slow
def test_losses_beyond_the_budget_are_a_restart(trial: Trial, one_worker: Run) -> None:
    """The members' losses are survived in place as long as max_losses allows it; a further one starts the run again, in
    the generation after the last, with the same budget."""
    faults = ["kill=2@step:4", "kill=1@step:7:exchange"]
    run = trial.train(
        faults=",".join(faults), survive="max_losses=1,max_restarts=1,replace=false", run_dir=trial.run_dir
    )
    fired(run, *faults)
    assert [(one["worker_id"], one["step"]) for one in run.losses] == [(2, 4)]
    assert restarted_from(run) in ([(6, "death")], [(3, "death")], [(0, "death")])  # what was whole of the checkpoints
    assert run.generations == 3
    equal(run, one_worker)
    once_in_the_end(run, trial.run_dir)
    generations = [event.generation for event in event_log.read(trial.run_dir / event_log.FILE)]
    assert max(generations) == 2


@slow
def test_the_last_worker_is_lost(trial: Trial, one_worker: Run) -> None:
    """Nobody has the model's state any more, whatever max_losses is; its cause is that of the first loss."""
    run = trial.train(faults="kill=0@step:4", survive="max_losses=any,max_restarts=1", workers=1, run_dir=trial.run_dir)
    assert restarted_from(run) in ([(3, "death")], [(0, "death")])  # whether the checkpoint of step 3 was whole by then
    equal(run, one_worker)
    once_in_the_end(run, trial.run_dir)


@slow
def test_too_few_workers_for_too_long(trial: Trial, one_worker: Run) -> None:
    survive = "max_losses=any,min_workers=3,replace=false,wait_s=0.3,max_restarts=1"
    run = trial.train(faults="kill=1@step:4", survive=survive, run_dir=trial.run_dir)
    assert [one["step"] for one in run.restarts] in ([3], [0])  # or its checkpoint was dropped with the worker
    assert "none joined within 0.3 s" in run.restarts[0]["message"]
    equal(run, one_worker)
    once_in_the_end(run, trial.run_dir)


@pytest.mark.parametrize(("act", "cause"), [(raise_memory_error, "memory"), (raise_value_error, "error")])
@slow
def test_an_exception_is_a_restart_once(act: Any, cause: str, trial: Trial, one_worker: Run) -> None:
    strike = Strike(1, STEP, act=act, call=5)
    run = trial.train(strike, survive="max_restarts=3", run_dir=trial.run_dir)
    fired(run, strike)
    assert restarted_from(run) == [(3, cause)]
    equal(run, one_worker)
    once_in_the_end(run, trial.run_dir)


def always_odd(model: Any, batch: Any) -> Any:
    raise ValueError("these rows are odd")


@slow
def test_the_programs_own_error_ends_the_run_by_its_second_time(trial: Trial) -> None:
    """With its traceback, however many restarts are left."""
    with pytest.raises(mh.WorkerFailed) as caught:
        trial.train(of=task(loss=always_odd), survive="max_restarts=9", run_dir=trial.run_dir)
    assert "ValueError at test_faults_restart_integration.py:" in str(caught.value)
    assert 'raise ValueError("these rows are odd")' in caught.value.detail
    claim = launch_lock.claim_in(trial.run_dir)
    assert claim is not None
    assert claim.number == 2


@slow
def test_no_more_restarts_than_asked_for(trial: Trial) -> None:
    faults = "kill=1@step:4,kill=2@step:5"
    with pytest.raises(mh.WorkerFailed, match="max_restarts is 1"):
        trial.train(faults=faults, survive="max_restarts=1", run_dir=trial.run_dir)
    assert sorted(trial.seen.faults) == sorted(faults.split(","))
    run = trial.train(run_dir=trial.run_dir, resume=True, survive=None)
    equal(run, reference())
    once_in_the_end_of_launches = launch_lock.claim_in(trial.run_dir)
    assert once_in_the_end_of_launches is not None
    assert once_in_the_end_of_launches.number == 3


def test_restarts_need_a_run_directory(trial: Trial) -> None:
    with pytest.raises(mh.BadInput, match="run_dir") as caught:
        trial.train(survive="max_restarts=1")
    assert caught.value.exit_code == 2
    assert trial.seen.order == []


@slow
def test_a_simulated_run_starts_again(tmp_path: Path, one_worker: Run) -> None:
    given: dict[str, Any] = {"engine": "sim:faults=kill=1@step:5", "workers": 3, "run_dir": tmp_path / "run"}
    run = mh.train(task(), survive="max_restarts=1", **given)
    assert restarted_from(run) == [(3, "death")]
    equal(run, one_worker)
    once_in_the_end(run, tmp_path / "run")


@slow
def test_two_workers_go_on_as_one(trial: Trial) -> None:
    """`-n 1:2`, which torchrun's elastic agent did not survive (pytorch#182221)."""
    fault = "kill=0@step:4:exchange"
    survive = "min_workers=1,max_workers=2,max_losses=any,replace=false"
    run = trial.train(faults=fault, survive=survive, workers=2, run_dir=trial.run_dir)
    fired(run, fault)
    assert (len(run.losses), run.generations, run.restarts) == (1, 2, [])
    equal(run, reference())
    once_in_the_end(run, trial.run_dir)
