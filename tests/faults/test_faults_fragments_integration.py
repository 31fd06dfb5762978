"""A worker is lost while fragments of the parameters have rounds of their own, or while all workers step together at first.

The model has one number for each row, and the order of rows is such that each slice has as many rows of each fragment.
With rate 1 and whole outer steps, a worker whose slices of n rows had R of the S rows of a fragment's window moves R / 2
of that fragment's numbers by R / (S·n) each.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numbered_rows
import pytest
import torch
from fault_harness import Strike, Trial, fired, lose_peer, task
from test_faults_rounds_integration import PERIOD, check_counts
from test_faults_rounds_integration import task as rows_in_order

import manyhands as mh
from manyhands.recording import event_log
from manyhands.recording.run import Run
from manyhands.strategies.streaming import Schedule

BATCH, TICKS, FRAGMENTS = 12, 8, 2
ROWS = BATCH * TICKS
HALF = ROWS // 2  # the first fragment's numbers; both are whole pieces of 128 bytes
STREAMING = f"diloco:period=4,outer_rate=1,outer_momentum=0,streaming={FRAGMENTS},overlap=0"
ON_THEIR_WAY = f"diloco:period=4,streaming={FRAGMENTS},overlap=1"
slow = pytest.mark.slow


def order(epoch: int) -> list[int]:
    """One row of each fragment in turn."""
    return [number // 2 + HALF * (number % 2) for number in range(ROWS)]


def numbers(**fields: object) -> mh.Task:
    return numbered_rows.task(ROWS, BATCH, **{"epochs": 1, "order": order, **fields})


def memberships(run_dir: Path, workers: int = 3) -> dict[int, int]:
    """By global batch, how many workers go on from there."""
    found = {0: workers}
    for event in event_log.read(run_dir / event_log.FILE):
        if event.type == "membership":
            found[event.tick] = event.values["workers"]
    return found


def check_fragments(run: Run, run_dir: Path, period: int = 4) -> None:
    """Each row is in one round of each fragment, once."""
    assert run.rows["total"] == ROWS
    assert [(row["tick"], row["rows"]) for row in run.history] == [(tick, BATCH) for tick in range(TICKS)]
    schedule = Schedule(period=period, fragments=FRAGMENTS, overlap=0, mixing=0.0, rate=1.0, momentum=0.0)
    members = memberships(run_dir)
    moved = run.model.of.detach()[order(0)].view(TICKS, BATCH // 2, FRAGMENTS)
    for fragment in range(FRAGMENTS):
        edges = {*members, TICKS}
        for begin, end in pairwise(sorted({*members, TICKS})):  # all fragments are synced where members change
            edges |= {begin + tick for tick in range(1, end - begin) if schedule.due(tick) == fragment}
        for first, until in pairwise(sorted(edges)):
            slice_rows = BATCH // members[max(tick for tick in members if tick <= first)]
            had = moved[first:until, :, fragment].flatten() * slice_rows * (until - first) * BATCH  # R
            counts = Counter(round(float(value)) for value in had)
            assert torch.allclose(had, had.round(), rtol=0, atol=1e-9), (fragment, first, until, counts)
            assert all(rows > 0 and 2 * found % rows == 0 for rows, found in counts.items()), (fragment, first, counts)


FAULTS = {
    "compute": "kill=1@step:5",
    "exchange": "kill=0@step:5:exchange",
    "first step": "kill=2@step:0",
    "both fragments' window": "kill=1@step:3",
    "epoch's last step": "kill=1@step:7:exchange",
}


@pytest.mark.parametrize("replaced", [pytest.param(True, marks=slow), False])
@pytest.mark.parametrize("when", [pytest.param(one, marks=() if one == "compute" else slow) for one in FAULTS])
def test_a_row_is_once_in_a_round_of_each_fragment(when: str, replaced: bool, trial: Trial) -> None:
    fault = FAULTS[when]
    survive = f"max_losses=3,replace={str(replaced).lower()}"
    run = trial.train(of=numbers(), faults=fault, strategy=STREAMING, survive=survive, run_dir=trial.run_dir)
    fired(run, fault)
    assert [one["worker_id"] for one in run.losses] == [int(fault[5])]
    check_fragments(run, trial.run_dir)


@slow
def test_what_was_sent_weighs_as_much_when_it_is_sent_again(trial: Trial) -> None:
    """Three slices are dealt to two: who trained more of the window counts more."""
    fault, strategy = "kill=1@step:3:exchange", STREAMING.replace("period=4", "period=3")
    survive = "max_losses=1,replace=false"
    run = trial.train(of=numbers(), faults=fault, strategy=strategy, survive=survive, run_dir=trial.run_dir)
    fired(run, fault)
    check_fragments(run, trial.run_dir, period=3)


PLACES = {
    "with a fragment's result": [Strike(1, "before complete", call=2)],
    "when all have it": [Strike(0, "in complete", call=2)],
    "as all fragments are synced": [Strike(1, "before complete", call=5)],
    "when all have all fragments": [Strike(1, "in complete", call=5)],
    "with another's rows": [Strike(1, "before backward", call=6), Strike(0, "before step_extra", call=2)],
    "after another's rows": [Strike(1, "before backward", call=6), Strike(0, "before complete", call=3)],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "when", [pytest.param(one, marks=() if one == "with another's rows" else slow) for one in PLACES]
)
def test_a_worker_is_lost_while_fragments_are_synced(when: str, trial: Trial) -> None:
    run = trial.train(*PLACES[when], of=numbers(), strategy=STREAMING, run_dir=trial.run_dir)
    fired(run, *PLACES[when])
    assert len(run.losses) == len(PLACES[when])
    check_fragments(run, trial.run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [[1], pytest.param([0, 2], marks=slow)])
@pytest.mark.parametrize("call", [2, pytest.param(5, marks=slow)])
def test_a_fragment_that_one_has_synced_is_synced_by_all(workers: list[int], call: int, trial: Trial) -> None:
    """Nobody is lost, but these find a connection broken when the others go on with the result."""
    strikes = [Strike(worker_id, "in complete", lose_peer, call=call) for worker_id in workers]
    run = trial.train(*strikes, of=numbers(), strategy=STREAMING, run_dir=trial.run_dir)
    fired(run, *strikes)
    assert run.losses == []
    assert run.rows["repeated"] == 0
    check_fragments(run, trial.run_dir)


ON_ITS_WAY: dict[str, str | Strike] = {
    "as one is sent": "kill=1@step:1:exchange",
    "while one is on its way": "kill=1@step:4",
    "with its result": Strike(0, "before complete"),
    "when all have its result": Strike(0, "in complete", call=2),
    "at the epoch's end": "kill=0@step:7",
}


@pytest.mark.slow
@pytest.mark.parametrize("replaced", [pytest.param(True, marks=slow), False])
@pytest.mark.parametrize(
    "when", [pytest.param(one, marks=() if one == "while one is on its way" else slow) for one in ON_ITS_WAY]
)
def test_fragments_on_their_way_are_sent_again(when: str, replaced: bool, trial: Trial) -> None:
    """The mean under way is gone, what each worker had put into it is not: all rows are in the answer."""
    fault = ON_ITS_WAY[when]
    strikes, faults = ([], fault) if isinstance(fault, str) else ([fault], "")
    survive = f"max_losses=1,replace={str(replaced).lower()}"
    given = {"strategy": ON_THEIR_WAY, "survive": survive, "run_dir": trial.run_dir, "check_replicas_every": 1}
    run = trial.train(*strikes, of=numbers(), faults=faults, **given)
    fired(run, fault)
    assert run.rows["total"] == ROWS
    assert [(row["tick"], row["rows"]) for row in run.history] == [(tick, BATCH) for tick in range(TICKS)]
    assert float(run.model.of.detach().min()) > 0


WARMUP = f"local-sgd:period={PERIOD},warmup=5"


@pytest.mark.parametrize("replaced", [pytest.param(True, marks=slow), False])
@pytest.mark.parametrize(
    "faults",
    [
        "kill=1@step:3:exchange",
        *(
            pytest.param(one, marks=slow)
            for one in ("kill=0@step:0", "kill=0@step:2:commit", "kill=1@step:4", "kill=1@step:5", "kill=0@step:6")
        ),
    ],
)
def test_a_worker_is_lost_in_the_warmup_or_after_it(faults: str, replaced: bool, trial: Trial) -> None:
    """A step that all have made together is in no window: its rows are not dealt again."""
    survive = f"max_losses=2,replace={str(replaced).lower()}"
    run = trial.train(of=rows_in_order(), faults=faults, strategy=WARMUP, survive=survive, run_dir=trial.run_dir)
    fired(run, faults)
    check_counts(run, trial.run_dir)


@pytest.mark.parametrize("place", [pytest.param("before complete", marks=slow), "in complete"])
def test_in_the_warmup_a_step_that_one_has_made_is_made_by_all(place: str, trial: Trial) -> None:
    strike = Strike(1, place, lose_peer, call=3)
    run = trial.train(strike, of=rows_in_order(), strategy=WARMUP, run_dir=trial.run_dir)
    fired(run, strike)
    check_counts(run, trial.run_dir)


@pytest.mark.parametrize(
    "strategy",
    [
        f"diloco:period=4,streaming={FRAGMENTS},overlap=0",
        pytest.param("local-sgd:period=2,warmup=5", marks=slow),
        pytest.param("diloco:period=3,compress=topk:0.3", marks=slow),
        pytest.param("allreduce:compress=onebit", marks=slow),
    ],
)
def test_the_same_bits_as_simulated(strategy: str, trial: Trial) -> None:
    faults, survive = "kill=0@step:0,kill=2@step:5", "max_losses=3,replace=false"
    run = trial.train(faults=faults, strategy=strategy, survive=survive)
    fired(run, *faults.split(","))
    engine = f"sim:compute=step=100ms,faults='{faults},notice=10ms'"
    simulated = mh.train(task(), engine=engine, workers=3, strategy=strategy, survive=survive)
    states = run.model.state_dict(), simulated.model.state_dict()
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name
