"""Processes are killed at each place of a run, and several of them; all pairs of place and victim: test_faults_simulated.py."""

from collections.abc import Callable
from typing import Any

import pytest
from fault_harness import PLACES, Patient, Strike, Trial, as_ever, at_place, lost, survive, task

import manyhands as mh
from manyhands.recording.run import Run

slow = pytest.mark.slow
PAIRS = [  # every place once: of one worker, then of another one
    ("joined", 1, "exchange", 0),
    ("first collective", 1, "epoch's last step", 0),
    ("started", 0, "epoch's last commit", 1),
    ("join", 1, "epoch told", 0),
    ("first step", 0, "outcome", 1),
    ("first commit", 1, "last epoch told", 0),
    ("compute", 0, "test", 1),
    ("commit", 1, "delivery", 0),
    ("save", 1, "gathered", 0),
    ("validation", 1, "last step", 0),
    ("validated", 0, "last commit", 1),
    ("validation told", 0, "last save", 1),
    ("epoch", 1, "last save", 0),
    ("in a save", 1, "last commit", 0),
    ("synced", 0, "last step", 1),
]
CASES = [
    pytest.param(*pair, n % 2 == 1, marks=slow if n else (), id=f"{pair[0]}-{pair[2]}") for n, pair in enumerate(PAIRS)
]


@pytest.mark.parametrize(("first", "one", "then", "other", "replaced"), CASES)
def test_killed(first: str, one: int, then: str, other: int, replaced: bool, trial: Trial, one_worker: Run) -> None:
    assert {*PLACES, "delivery"} == {pair[i] for pair in PAIRS for i in (0, 2)}
    faults = at_place(first, one), Strike(other, "exit") if then == "delivery" else at_place(then, other)
    run = trial.struck(*faults, survive=survive(replaced))
    assert lost(run) == [(one, "death"), (other, "death")]
    as_ever(run, trial, one_worker)


@slow
def test_two_at_once(trial: Trial, one_worker: Run) -> None:
    faults = "kill=0@step:4:exchange,kill=1@step:4:exchange"
    run = trial.struck(faults)
    assert [cause for _, cause in lost(run)] == ["death", "death"]
    as_ever(run, trial, one_worker)


@slow
@pytest.mark.parametrize(("place", "worker_id"), [("model", 1), ("bring", 0)])
def test_a_replacement_or_its_source_is_killed(place: str, worker_id: int, trial: Trial, one_worker: Run) -> None:
    fault, strike = "kill=1@step:2", Strike(worker_id, place, process=2 if worker_id else 1)
    run = trial.struck(fault, strike, of=task(loss=Patient()))
    assert lost(run) == [(1, "death"), (worker_id, "death")]
    as_ever(run, trial, one_worker)


def test_the_only_worker_is_lost(trial: Trial) -> None:
    with pytest.raises(mh.WorkerFailed, match="no worker is left that has the model's state") as caught:
        trial.train("kill=0@step:4", workers=1)
    assert "was killed by signal 9" in str(caught.value)


def test_without_survive_a_kill_ends_the_run(trial: Trial) -> None:
    with pytest.raises(mh.WorkerFailed, match="worker 1 .* was killed by signal 9") as caught:
        trial.train("kill=1@step:4", survive=None)
    assert (caught.value.rank, caught.value.phase, caught.value.step) == (1, "compute", 4)
    assert (trial.seen.faults, trial.seen.ends) == (["kill=1@step:4"], ["failed"])


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
        train("allreduce", "kill=0@step:2,kill=2@step:0:join")
        train("downpour:bound=0", "kill=1@step:1:exchange")
        after = left()
        print(before == after or (before, after))
"""


@slow
def test_no_process_descriptor_or_file_is_left(script: Callable[..., Any]) -> None:
    import sys

    code, out, errors = script(LEAVES_NOTHING.format(path=sys.path)).end(90)
    assert (code, out.splitlines()[-1:]) == (0, ["True"]), out + errors
