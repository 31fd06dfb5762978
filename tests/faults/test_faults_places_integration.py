"""Processes are killed at each place of a run, and several of them; all pairs of place and victim: test_faults_simulated.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fault_harness import (
    OF_THE_FIRST,
    PLACES,
    Patient,
    Strike,
    Trial,
    as_ever,
    at_place,
    equal,
    fired,
    lost,
    survive,
    task,
)

import manyhands as mh
from manyhands.recording.run import Run

slow = pytest.mark.slow
FAST = ("exchange", "commit")
CASES = [
    pytest.param(
        when, number % 2 * (when not in OF_THE_FIRST), number // 2 % 2 == 0, marks=() if when in FAST else slow
    )
    for number, when in enumerate([*PLACES, "delivery"])
]


@pytest.mark.parametrize(("when", "worker_id", "replaced"), CASES)
def test_killed(when: str, worker_id: int, replaced: bool, trial: Trial, one_worker: Run) -> None:
    fault = at_place(when, worker_id) if when != "delivery" else Strike(0, "exit")
    run = trial.train(fault, run_dir=trial.run_dir, survive=survive(replaced))
    fired(run, fault)
    assert lost(run) == [(worker_id if when != "delivery" else 0, "death")]
    as_ever(run, trial, one_worker)


@slow
@pytest.mark.parametrize(
    "faults", ["kill=0@step:4:exchange,kill=1@step:4:exchange", "kill=0@step:3:save,kill=2@step:3:save"]
)
def test_two_at_once(faults: str, trial: Trial, one_worker: Run) -> None:
    run = trial.train(faults, run_dir=trial.run_dir)
    fired(run, faults)
    assert [cause for _, cause in lost(run)] == ["death", "death"]
    as_ever(run, trial, one_worker)


@slow
@pytest.mark.parametrize(("place", "worker_id"), [("model", 1), ("bring", 1), ("bring", 0)])
def test_a_replacement_or_its_source_is_killed(place: str, worker_id: int, trial: Trial, one_worker: Run) -> None:
    fault, strike = "kill=1@step:2", Strike(worker_id, place, process=2 if worker_id else 1)
    run = trial.train(fault, strike, of=task(loss=Patient()), run_dir=trial.run_dir)
    fired(run, fault, strike)
    assert lost(run) == [(1, "death"), (worker_id, "death")]
    as_ever(run, trial, one_worker)


@slow
def test_a_replacement_joins(trial: Trial, one_worker: Run) -> None:
    fault = "kill=0@step:1:exchange"
    run = trial.train(fault, of=task(loss=Patient(rests_s=0.4)), run_dir=trial.run_dir)
    fired(run, fault)
    assert run.generations == 3  # three, two, three workers
    assert any("worker 0 is back: 3 of 3 workers from step" in message for message in trial.seen.changes)
    as_ever(run, trial, one_worker)
    assert run.rows["repeated"] == 39  # of the step that was under way; the replacement came between two


@slow
def test_losses_that_end_the_run(trial: Trial) -> None:
    faults = ["kill=1@step:2", "kill=2@step:4:exchange"]
    with pytest.raises(mh.WorkerFailed) as caught:
        trial.train(*faults, survive=survive(False, 1), run_dir=trial.run_dir)
    for word in (
        "worker 2 on",
        "lost (was killed by signal 9) during exchange of step 4",
        "loss 2, and max_losses is 1, the first was worker 1 (its process ended)",
    ):
        assert word in str(caught.value)
    assert (trial.seen.faults, trial.seen.ends) == (faults, ["failed"])


def test_the_only_worker_is_lost(trial: Trial) -> None:
    with pytest.raises(mh.WorkerFailed, match="no worker is left that has the model's state") as caught:
        trial.train("kill=0@step:4", workers=1)
    assert "was killed by signal 9" in str(caught.value)


def test_without_survive_a_kill_ends_the_run(trial: Trial) -> None:
    with pytest.raises(mh.WorkerFailed, match="worker 1 .* was killed by signal 9") as caught:
        trial.train("kill=1@step:4", survive=None)
    assert (caught.value.rank, caught.value.phase, caught.value.step) == (1, "compute", 4)
    assert (trial.seen.faults, trial.seen.ends) == (["kill=1@step:4"], ["failed"])


@slow
def test_nothing_befalls_it(trial: Trial, one_worker: Run) -> None:
    """Bit for bit as without `survive`, in step at a server, too."""
    for strategy in ("allreduce", "downpour:bound=0", "quorum"):
        again = Trial(trial.folder / strategy.replace(":", "-"))
        run = again.train(run_dir=again.run_dir, strategy=strategy)
        equal(run, again.train(strategy=strategy, survive=None, callbacks=[]), tolerance=0.0)
        assert (run.losses, run.generations) == ([], 1)
        if strategy == "allreduce":
            as_ever(run, again, one_worker)


LEAVES_NOTHING = """
    import gc, os, sys, tempfile
    from pathlib import Path

    sys.path[:0] = {path!r}
    import manyhands as mh, plain
    from manyhands.engines.local.engine import Local

    tempfile.tempdir = os.environ["TMPDIR"] = os.getcwd()

    def left():
        gc.collect()
        parents = {{}}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    parents[entry.name] = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                except (FileNotFoundError, ProcessLookupError):
                    pass
        found = {{str(os.getpid())}}
        for _ in range(5):
            found |= {{child for child, parent in parents.items() if parent in found}}
        return len(found), sorted(os.listdir("/proc/self/fd")), sorted(p.name for p in Path(".").glob("m*h*-*"))

    with Local() as engine:
        def train(strategy, faults):
            own = Local(faults=faults)
            object.__setattr__(own, "_slot", engine._slot)
            survive = "max_losses=3,copies=2" if ":" in strategy else "max_losses=3"
            mh.train(plain.task(epochs=1), engine=own, workers=3, survive=survive, strategy=strategy)

        train("downpour:bound=0", "")  # a first launch loads and opens things
        before = left()
        for strategy in ("allreduce", "downpour:bound=0"):
            for faults in ("kill=1@step:1:exchange", "kill=0@step:2,kill=2@step:0:join"):
                train(strategy, faults)
        after = left()
        print(before == after or (before, after))
"""


@slow
def test_no_process_descriptor_or_file_is_left(script: Callable[..., Any]) -> None:
    import sys

    code, out, errors = script(LEAVES_NOTHING.format(path=sys.path)).end(90)
    assert (code, out.splitlines()[-1:]) == (0, ["True"]), out + errors
