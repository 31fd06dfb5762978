"""Several workers are lost, replacements too, more than the run may lose, or the only one."""

from __future__ import annotations

import pytest
from fault_harness import GLOBAL_ROWS, Patient, Strike, Trial, equal, faulty, fired, recorded_once, task

import manyhands as mh
from manyhands.recording.run import Run


def lost(run: Run) -> list[tuple[int, str]]:
    return [(one["worker_id"], one["cause"]) for one in run.losses]


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [
        "kill=1@step:4:exchange,kill=2@step:4:exchange",
        pytest.param("kill=0@step:4:exchange,kill=1@step:4:exchange", marks=pytest.mark.slow),
        pytest.param("kill=0@step:4:commit,kill=1@step:4:exchange", marks=pytest.mark.slow),
        pytest.param("kill=0@step:4:commit,kill=2@step:4:commit", marks=pytest.mark.slow),
        pytest.param("kill=0@step:0:join,kill=2@step:0:join", marks=pytest.mark.slow),
        pytest.param("kill=0@step:3:save,kill=2@step:3:save", marks=pytest.mark.slow),
    ],
)
def test_two_at_once(faults: str, trial: Trial, one_worker: Run) -> None:
    run = trial.train(faults=faults, run_dir=trial.run_dir)
    fired(run, *faults.split(","))
    assert sorted(cause for _, cause in lost(run)) == ["death", "death"]
    equal(run, one_worker)
    recorded_once(run, trial.seen, trial.run_dir, GLOBAL_ROWS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "worker_id"),
    [
        pytest.param("start", 1, marks=pytest.mark.slow),
        pytest.param("before join", 1, marks=pytest.mark.slow),
        ("before bring", 1),
        pytest.param("after bring", 1, marks=pytest.mark.slow),
        pytest.param("after join", 1, marks=pytest.mark.slow),
        ("before bring", 0),  # it gives its state to the replacement
        pytest.param("after bring", 0, marks=pytest.mark.slow),
    ],
)
def test_a_replacement_or_its_source_is_killed(place: str, worker_id: int, trial: Trial, one_worker: Run) -> None:
    fault, strike = "kill=1@step:2", Strike(worker_id, place, process=2 if worker_id else 1)
    run = trial.train(strike, faults=fault, of=task(loss=Patient()), run_dir=trial.run_dir)
    fired(run, fault, strike)
    assert lost(run) == [(1, "death"), (worker_id, "death")]
    equal(run, one_worker)
    recorded_once(run, trial.seen, trial.run_dir, GLOBAL_ROWS)


def test_a_replacement_joins(trial: Trial, one_worker: Run) -> None:
    run = trial.train(faults="kill=0@step:1:exchange", of=task(loss=Patient(rests_s=0.4)), run_dir=trial.run_dir)
    fired(run, "kill=0@step:1:exchange")
    assert run.generations == 3  # three, two, three workers
    assert any("worker 0 is back: 3 of 3 workers from step" in message for message in trial.seen.changes)
    equal(run, one_worker)
    recorded_once(run, trial.seen, trial.run_dir, GLOBAL_ROWS)
    assert run.rows["repeated"] == 39  # of the step that was under way; the replacement came between two


@pytest.mark.slow
def test_from_three_to_one(trial: Trial, one_worker: Run) -> None:
    faults = ["kill=1@step:2", "kill=0@step:5:exchange"]
    run = trial.train(faults=",".join(faults), survive="max_losses=2,replace=false", run_dir=trial.run_dir)
    fired(run, *faults)
    assert lost(run) == [(1, "death"), (0, "death")]
    assert [one["step"] for one in run.losses] == [2, 5]
    assert run.generations == 3
    equal(run, one_worker)
    recorded_once(run, trial.seen, trial.run_dir, GLOBAL_ROWS)
    assert run.rows["repeated"] == 22 + 22
    order = trial.seen.order  # callbacks get steps as they are made, with fewer reports of each
    assert order.index("step 7") < len(order) - 1 - order[::-1].index("epoch")


@pytest.mark.slow
def test_one_that_never_came_is_not_waited_for_in_the_history(trial: Trial, one_worker: Run) -> None:
    """Callbacks get steps as they are made, not all of them at the end."""
    fault = "kill=1@step:0:join"
    run = trial.train(faults=fault, survive="max_losses=1,replace=false", run_dir=trial.run_dir)
    fired(run, fault)
    assert trial.seen.order.index("step 2") < len(trial.seen.order) - 1 - trial.seen.order[::-1].index("epoch")
    equal(run, one_worker)


def test_more_than_it_may_lose(trial: Trial) -> None:
    with pytest.raises(mh.WorkerFailed) as caught:
        trial.train(
            faults="kill=1@step:2,kill=2@step:4:exchange", survive="max_losses=1,replace=false", run_dir=trial.run_dir
        )
    message = str(caught.value)
    assert "worker 2 on" in message
    assert "lost (was killed by signal 9) during exchange of step 4" in message
    assert "loss 2, and max_losses is 1, the first was worker 1 (its process ended)" in message
    assert trial.seen.faults == ["kill=1@step:2", "kill=2@step:4:exchange"]
    assert trial.seen.ends == ["failed"]


@pytest.mark.slow
def test_none_may_be_lost(trial: Trial) -> None:
    with pytest.raises(mh.WorkerFailed, match="worker 1 on .* was killed by signal 9.*loss 1, and max_losses is 0"):
        trial.train(faults="kill=1@step:2", survive="max_losses=0")
    assert trial.seen.faults == ["kill=1@step:2"]


@pytest.mark.slow
def test_fewer_than_it_needs(trial: Trial) -> None:
    with pytest.raises(mh.WorkerFailed, match="1 worker is left, min_workers is 2, none joined within 0.5 s"):
        trial.train(
            faults="kill=1@step:2,kill=2@step:4",
            survive="max_losses=any,min_workers=2,replace=false,wait_s=0.5",
        )
    assert trial.seen.faults == ["kill=1@step:2", "kill=2@step:4"]


def test_the_only_worker(trial: Trial) -> None:
    with pytest.raises(mh.WorkerFailed, match="no worker is left that has the model's state") as caught:
        trial.train(faults="kill=0@step:4", workers=1)
    assert "was killed by signal 9" in str(caught.value)
    assert trial.seen.faults == ["kill=0@step:4"]


@pytest.mark.slow
def test_the_only_worker_before_it_began(trial: Trial, one_worker: Run) -> None:
    """Another takes its place, since nothing is lost."""
    run = trial.train(faults="kill=0@step:0:join", workers=1, run_dir=trial.run_dir)
    fired(run, "kill=0@step:0:join")
    equal(run, one_worker)
    recorded_once(run, trial.seen, trial.run_dir, GLOBAL_ROWS)


@pytest.mark.slow
def test_one_that_never_begins_is_left_out(trial: Trial, one_worker: Run) -> None:
    strikes = [Strike(2, "start", process=number) for number in (1, 2, 3)]
    third = trial.folder / "marks" / f"{strikes[-1]}-1"
    slow = Patient(until=lambda worker: third.exists(), rests_s=0.4)
    run = trial.train(*strikes, of=task(loss=slow), survive="max_losses=any", run_dir=trial.run_dir)
    fired(run, *strikes)
    assert lost(run) == [(2, "death")] * 3
    assert any("worker 2 was lost 3 times before its first step" in message for message in trial.seen.changes)
    equal(run, one_worker)


def test_without_survive_a_kill_ends_the_run(trial: Trial) -> None:
    with pytest.raises(mh.WorkerFailed, match="worker 1 .* was killed by signal 9") as caught:
        mh.train(task(), engine=faulty(trial.local, "kill=1@step:4"), workers=3, callbacks=[trial.seen])
    assert (caught.value.rank, caught.value.phase, caught.value.step) == (1, "compute", 4)
    assert trial.seen.faults == ["kill=1@step:4"]
    assert trial.seen.ends == ["failed"]


@pytest.mark.slow
def test_nothing_befalls_it(trial: Trial) -> None:
    """Bit for bit as without `survive`."""
    run = trial.train(run_dir=trial.run_dir)
    bare = mh.train(task(), engine=trial.local, workers=3)
    equal(run, bare, tolerance=0.0)
    assert (run.losses, run.generations) == ([], 1)
    recorded_once(run, trial.seen, trial.run_dir, GLOBAL_ROWS)
